"""How a model ranks as more and more of its entity entries are set to zero."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import RequestError
from dualkg.evaluation.report import Metrics, evaluate
from dualkg.models.base import Model
from dualkg.models.rescal import RESCAL
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.checkpoint import load_tensors, smallest_integer
from dualkg.training.run import Run, load_run


def sparsity(tables: Iterable[Tensor], threshold: float) -> float:
    """The paper's s_λ: the share of all entries whose magnitude is below `threshold`."""
    tables = list(tables)
    return sum(int((table.abs() < threshold).sum()) for table in tables) / num_entries(tables)


def find_thresholds(tables: Iterable[Tensor], shares: Sequence[float]) -> list[float]:
    """The λ of each share wanted, one for all tables together.

    With N entries and k = ⌊share · N⌋, λ is the magnitude that k others precede in order. So exactly k entries lie
    below it; fewer where entries of the same magnitude as λ are among the k, which no threshold can tell apart.
    """
    tables = list(tables)
    # A share is meant as it is written: 0.07 of 100 is 7, though 0.07 * 100 is a little more and 0.29 * 100 less.
    places = [int(Fraction(str(float(check_share(share)))) * num_entries(tables)) for share in shares]
    magnitudes = np.concatenate([table.detach().abs().cpu().numpy().ravel() for table in tables])
    magnitudes.partition(sorted(set(places)))
    return [float(magnitudes[place]) for place in places]


def check_share(share: float) -> float:
    """The share, where it is one; at 1 nothing would be left."""
    if not 0 <= share < 1:
        raise RequestError(f"A share of zeros is at least 0 and below 1; {share:g} came. For 70 %, say 0.7.")
    return share


def num_entries(tables: Iterable[Tensor]) -> int:
    return sum(table.numel() for table in tables)


ROUNDS = 100
ENOUGH = 1e-4  # a round that takes away less of the error than this share is the last


def rotated(model: Model, *, share: float) -> RESCAL:
    """The model in axes in which a share of its entity entries can become zero at the least cost."""
    check_share(share)
    if not isinstance(model, RESCAL):
        raise RequestError(
            f"Only the axes of RESCAL can be rotated without changing a score; those of {type(model).__name__} are tied "
            f"to its relations. Leave the turning out."
        )
    copy = deepcopy(model)
    copy.rotate_(find_axes(model.entities.detach(), share))
    return copy


@torch.no_grad()
def find_axes(table: Tensor, share: float) -> Tensor:
    """Orthogonal axes Q `(dim, dim)` with a small ‖X Q − S‖, where S is X Q without its smallest entries.

    In turns: the best S of a Q are its largest entries, and the best Q of an S the polar factor of Xᵀ S (the orthogonal
    Procrustes problem). Neither makes the error larger. The principal axes are where it begins.
    """
    numbers = table.double()
    axes: Tensor = torch.linalg.eigh(numbers.T @ numbers).eigenvectors
    last = float("inf")
    for _ in range(ROUNDS):
        image = numbers @ axes
        kept = without_smallest(image, share)
        error = float((image - kept).square().sum())
        if not error < last * (1 - ENOUGH):
            break
        last = error
        left, _, right = torch.linalg.svd(numbers.T @ kept)
        axes = left @ right
    return axes.to(table.dtype)


def without_smallest(numbers: Tensor, share: float) -> Tensor:
    """The same entries with a share of them, the smallest, set to zero."""
    num_zeros = int(share * numbers.numel())
    if not num_zeros:
        return numbers
    threshold = numbers.abs().flatten().kthvalue(num_zeros).values
    return numbers.masked_fill(numbers.abs() <= threshold, 0.0)


ModelT = TypeVar("ModelT", bound=Model)


def entity_tables(model: Model) -> dict[str, nn.Parameter]:
    """The tables of entities, by the names they are saved under: one, or CP's two."""
    used = (model.embedding.head_table, model.embedding.tail_table)
    found = {name: table for name, table in model.named_parameters() if any(table is one for one in used)}
    if not all(any(one is table for table in found.values()) for one in used):
        raise RequestError(
            f"Sparsity is that of entity tables, and {type(model.embedding).__name__} computes its entity vectors from "
            f"other parameters. Take a model whose head_table and tail_table are parameters."
        )
    return found


@torch.no_grad()
def sparsified(model: ModelT, threshold: float) -> ModelT:
    """The same model with every entity entry below the threshold set to zero; relations stay as they are."""
    copy = deepcopy(model)
    for table in entity_tables(copy).values():
        table.masked_fill_(table.abs() < threshold, 0.0)
    return copy


def sparsify(
    path: str | Path,
    *,
    share: float,
    turn: bool = False,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Run:
    """Make a new run of a finished one: a share of its entity entries set to zero, evaluated again, kept as CSR.

    With `turn`, RESCAL is first written in axes in which that costs least.
    """
    check_share(share)
    folder = Path(path).resolve()
    target = folder.with_name(f"{folder.name}-sparse-{share:g}") if out is None else Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"{target} exists already. Name a new folder with --out.")
    run = load_run(path)
    model = run.model.to(choose_device(device))
    model = rotated(model, share=share) if turn else model
    tables = entity_tables(model)
    [threshold] = find_thresholds(tables.values(), [share])
    model = sparsified(model, threshold)
    about = {
        "source": str(path),
        "wanted_share": share,
        "share": share_of_zeros(model),
        "threshold": threshold,
        "rotated": turn,
        "tables": list(tables),
    }
    sparse = Run(model, run.graph, run.recipe, run.history, evaluate_held_out(model, run.graph), sparsity=about)
    sparse.save(target)
    return sparse


def share_of_zeros(model: Model) -> float:
    """The share of all entity entries that are exactly zero."""
    tables = entity_tables(model).values()
    return 1 - sum(num_nonzero(table) for table in tables) / num_entries(tables)


def num_nonzero(table: Tensor) -> int:
    return int(table.count_nonzero())


Form = Literal["dense", "CSR", "CSC"]
FORMS: tuple[Form, ...] = ("dense", "CSR", "CSC")


@dataclass(frozen=True)
class Size:
    """What some tables take in one form, and how much less that is than dense: 0.4 is 40 % less, below 0 is more."""

    numbers: int
    bytes: int
    numbers_saved: float
    bytes_saved: float


@dataclass(frozen=True)
class Storage:
    """Sizes by form, of the entity tables and of the whole model, whose other tables are dense in every form.

    `on_disk` has the bytes of the same two in a file of weights, the second with the file's header.
    """

    share: float
    entity_tables: dict[Form, Size]
    whole_model: dict[Form, Size]
    on_disk: dict[str, int] | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def storage_of(model: Model, *, weights: Path | None = None) -> Storage:
    """Count a model in each form, and its file of weights where one is named."""
    tables = entity_tables(model)
    others = [table for name, table in model.state_dict().items() if name not in tables]
    return Storage(
        share=share_of_zeros(model),
        entity_tables=_sizes(tables.values(), dense=()),
        whole_model=_sizes(tables.values(), dense=others),
        on_disk=bytes_on_disk(weights, tables) if weights else None,
    )


def bytes_on_disk(weights: Path, tables: Collection[str]) -> dict[str, int]:
    """What a file of weights spends on some tables, whether they are dense in it or not, and on everything."""
    groups, _ = load_tensors(weights)
    kept = (array for group in groups.values() for name, array in group.items() if name.split("/")[0] in tables)
    return {"entity_tables": sum(array.nbytes for array in kept), "whole_model": weights.stat().st_size}


def count_numbers(table: Tensor, form: Form) -> int:
    """The paper's count: 2a + n + 1 for a non-zero entries in n rows (CSR) or columns (CSC)."""
    if form == "dense":
        return table.numel()
    lines, _ = _lines(table, form)
    return 2 * num_nonzero(table) + lines + 1


def count_bytes(table: Tensor, form: Form) -> int:
    """The same arrays in bytes, indices as the narrowest integers that hold them."""
    if form == "dense":
        return table.nbytes
    lines, across = _lines(table, form)
    num_values = num_nonzero(table)
    index, start = (smallest_integer(largest).itemsize for largest in (across - 1, num_values))
    return num_values * (table.itemsize + index) + (lines + 1) * start


def _lines(table: Tensor, form: Form) -> tuple[int, int]:
    """How many rows or columns are stored one after the other, and how long each is."""
    rows, columns = table.shape
    return (rows, columns) if form == "CSR" else (columns, rows)


def _sizes(tables: Collection[Tensor], *, dense: Collection[Tensor]) -> dict[Form, Size]:
    fixed = [sum(count(table, "dense") for table in dense) for count in (count_numbers, count_bytes)]
    counts = {
        form: [
            extra + sum(count(table, form) for table in tables)
            for extra, count in zip(fixed, (count_numbers, count_bytes), strict=True)
        ]
        for form in FORMS
    }
    whole = counts["dense"]
    return {
        form: Size(numbers, size, 1 - numbers / whole[0], 1 - size / whole[1])
        for form, (numbers, size) in counts.items()
    }


SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class CurvePoint:
    """One share: the one wanted, the share of zeros there is, its threshold, what the model takes and how it ranks."""

    wanted_share: float
    share: float
    threshold: float
    storage: Storage
    metrics: Metrics

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": self.metrics.as_dict()}


def sparsity_curve(
    model: Model,
    graph: Graph,
    *,
    shares: Sequence[float] = SHARES,
    split: Split = "test",
) -> list[CurvePoint]:
    """MRR against sparsity: one point a share, in the order given; the model stays as it is."""
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to rank.")
    known = KnownAnswers.of(graph)
    points = []
    for share, threshold in zip(shares, find_thresholds(entity_tables(model).values(), shares), strict=True):
        sparse = sparsified(model, threshold)
        report = evaluate(sparse, graph, split=split, known=known)
        points.append(CurvePoint(share, share_of_zeros(sparse), threshold, storage_of(sparse), report.metrics))
    return points
