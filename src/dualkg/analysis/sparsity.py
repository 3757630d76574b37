"""Sparsity of entity embeddings: setting small entries to zero, storage sizes, and MRR against
sparsity (Figure 3).
"""

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Split
from dualkg.errors import RequestError
from dualkg.evaluation.report import Metrics, evaluate
from dualkg.files import check_new_folder, locked
from dualkg.models.base import Model
from dualkg.models.matrix import RESCAL
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.checkpoint import load_tensors, smallest_integer
from dualkg.training.ensemble import load_run
from dualkg.training.run import Run


def find_thresholds(tables: Iterable[Tensor], shares: Sequence[float]) -> list[float]:
    """The threshold λ of the paper's λ-sparsity for each target share of zeros, over all tables
    together.

    With N entries and k = ⌊share · N⌋, exactly k entries lie below λ, or fewer where magnitudes
    equal to λ tie.
    """
    magnitudes = np.concatenate([table.detach().abs().cpu().numpy().ravel() for table in tables])
    # A share is taken as written: 0.29 of 100 is 29, although 0.29 * 100 is a little less in
    # binary.
    indices = [int(Fraction(str(float(check_share(share)))) * len(magnitudes)) for share in shares]
    magnitudes.partition(sorted(set(indices)))
    return [float(magnitudes[index]) for index in indices]


def check_share(share: float) -> float:
    """Return the share if it is valid: at least 0 and below 1."""
    if not 0 <= share < 1:
        raise RequestError(
            f"A share of zeros must be at least 0 and below 1; it is {share:g}. 70 % is written "
            "0.7."
        )
    return share


MAX_ROUNDS = 100
TOLERANCE = 1e-4  # stop when a round reduces the error by less than this share


def rotated(model: Model, *, share: float) -> RESCAL:
    """RESCAL in rotated axes, in which setting a share of its entity entries to zero costs least;
    same scores.
    """
    check_share(share)
    if not isinstance(model, RESCAL):
        raise RequestError(
            "Only RESCAL can be rotated without changing its scores; the axes of "
            f"{type(model).__name__} are tied to its relations. Leave the rotation out."
        )
    copy = deepcopy(model)
    copy.rotate_(find_axes(model.entities.detach(), share))
    return copy


@torch.no_grad()
def find_axes(table: Tensor, share: float) -> Tensor:
    """Orthogonal axes Q `(dim, dim)` with a small ‖X Q − S‖, where S is X Q without its smallest
    entries.

    Alternates, from the principal axes: the best S for a Q keeps its largest entries, and the best
    Q for an S is the polar factor of Xᵀ S (orthogonal Procrustes). Neither step increases the
    error.
    """
    numbers = table.double()
    axes: Tensor = torch.linalg.eigh(numbers.T @ numbers).eigenvectors
    last = float("inf")
    for _ in range(MAX_ROUNDS):
        image = numbers @ axes
        kept = without_smallest(image, share)
        error = float((image - kept).square().sum())
        if not error < last * (1 - TOLERANCE):
            break
        last = error
        left, _, right = torch.linalg.svd(numbers.T @ kept)
        axes = left @ right
    return axes.to(table.dtype)


def without_smallest(numbers: Tensor, share: float) -> Tensor:
    """Set the smallest share of the entries to zero."""
    num_zeros = int(share * numbers.numel())
    if not num_zeros:
        return numbers
    threshold = numbers.abs().flatten().kthvalue(num_zeros).values
    return numbers.masked_fill(numbers.abs() <= threshold, 0.0)


ModelT = TypeVar("ModelT", bound=Model)


def entity_tables(model: Model) -> dict[str, nn.Parameter]:
    """The entity tables by parameter name: one, or two for CP."""
    used = {id(table) for table in (model.embedding.head_table, model.embedding.tail_table)}
    found = {name: table for name, table in model.named_parameters() if id(table) in used}
    if len(found) < len(used):
        raise RequestError(
            f"Sparsity is defined for entity tables, and {type(model.embedding).__name__} "
            "computes its entity vectors from other parameters. Use a model whose head_table and "
            "tail_table are parameters."
        )
    return found


@torch.no_grad()
def sparsified(model: ModelT, threshold: float) -> ModelT:
    """A copy of the model with every entity entry below the threshold set to zero."""
    copy = deepcopy(model)
    for table in entity_tables(copy).values():
        table.masked_fill_(table.abs() < threshold, 0.0)
    return copy


def sparsify(
    path: str | Path,
    *,
    share: float,
    rotate: bool = False,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Run:
    """Save a copy of a run with a share of entity entries set to zero; `rotate` picks the axes
    where it costs least.
    """
    check_share(share)
    folder = Path(path).resolve()
    target = folder.with_name(f"{folder.name}-sparse-{share:g}") if out is None else Path(out)
    with locked(target):
        check_new_folder(target)
        run = load_run(path)
        model = run.model.to(choose_device(device))
        model = rotated(model, share=share) if rotate else model
        tables = entity_tables(model)
        [threshold] = find_thresholds(tables.values(), [share])
        model = sparsified(model, threshold)
        about = {
            "source": str(path),
            "target_share": share,
            "share": share_of_zeros(model),
            "threshold": threshold,
        }
        about |= {"rotated": rotate, "tables": list(tables)}
        sparse = Run(
            model,
            run.graph,
            run.recipe,
            run.history,
            evaluate_held_out(model, run.graph),
            sparsity=about,
        )
        sparse.save(target)
    return sparse


def share_of_zeros(model: Model) -> float:
    """The share of entity entries that are exactly zero."""
    tables = entity_tables(model).values()
    return 1 - sum(int(table.count_nonzero()) for table in tables) / sum(
        table.numel() for table in tables
    )


Layout = Literal["dense", "CSR", "CSC"]


@dataclass(frozen=True)
class Size:
    """Size of some tables in one layout, and the share saved against dense: 0.4 is 40 % less, below
    0 is more.
    """

    numbers: int
    bytes: int
    numbers_saved: float
    bytes_saved: float


@dataclass(frozen=True)
class Storage:
    """Sizes by layout of the entity tables and of the model, whose other tables are dense; bytes in
    a weights file.
    """

    share: float
    entity_tables: dict[Layout, Size]
    whole_model: dict[Layout, Size]
    on_disk: dict[str, int] | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def storage_of(model: Model, *, weights: Path | None = None) -> Storage:
    """Compute the size of a model in each layout, and of its weights file if one is given."""
    tables = entity_tables(model)
    on_disk = None
    others = [table for name, table in model.state_dict().items() if name not in tables]
    if weights:
        stored = [pair for group in load_tensors(weights)[0].values() for pair in group.items()]
        size = sum(array.nbytes for name, array in stored if name.split("/")[0] in tables)
        on_disk = {"entity_tables": size, "whole_model": weights.stat().st_size}
    sizes = _sizes(tables.values(), dense=()), _sizes(tables.values(), dense=others)
    return Storage(share_of_zeros(model), *sizes, on_disk)


def count(table: Tensor, layout: Layout) -> tuple[int, int]:
    """The paper's count of numbers, 2a + n + 1 for a non-zero entries in n rows (CSR) or columns
    (CSC), and bytes.

    Indices are stored as the narrowest integers that hold them.
    """
    if layout == "dense":
        return table.numel(), table.nbytes
    rows, columns = table.shape
    lines, across = (rows, columns) if layout == "CSR" else (columns, rows)
    num_values = int(table.count_nonzero())
    index, start = (smallest_integer(largest).itemsize for largest in (across - 1, num_values))
    return 2 * num_values + lines + 1, num_values * (table.itemsize + index) + (lines + 1) * start


def _sizes(tables: Collection[Tensor], *, dense: Collection[Tensor]) -> dict[Layout, Size]:
    """The sizes of tables in each layout, together with tables that are always dense."""
    totals = {}
    for layout in get_args(Layout):
        counts = [count(table, layout) for table in tables] + [
            count(table, "dense") for table in dense
        ]
        totals[layout] = sum(numbers for numbers, _ in counts), sum(size for _, size in counts)
    all_numbers, all_bytes = totals["dense"]
    return {
        layout: Size(numbers, size, 1 - numbers / all_numbers, 1 - size / all_bytes)
        for layout, (numbers, size) in totals.items()
    }


SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class CurvePoint:
    """One point of a sparsity curve: target and actual share of zeros, threshold, storage and
    metrics.
    """

    target_share: float
    share: float
    threshold: float
    storage: Storage
    metrics: Metrics

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": self.metrics.as_dict()}


def sparsity_curve(
    model: Model, graph: Graph, *, shares: Sequence[float] = SHARES, split: Split = "test"
) -> list[CurvePoint]:
    """MRR against sparsity: one point per share, in the given order; the model is not changed."""
    if not len(graph.split(split)):
        raise RequestError(f"{graph.name} has no {split} triples to evaluate on.")
    known = KnownAnswers.of(graph)
    points = []
    for share, threshold in zip(
        shares, find_thresholds(entity_tables(model).values(), shares), strict=True
    ):
        sparse = sparsified(model, threshold)
        report = evaluate(sparse, graph, split=split, known=known)
        points.append(
            CurvePoint(share, share_of_zeros(sparse), threshold, storage_of(sparse), report.metrics)
        )
    return points
