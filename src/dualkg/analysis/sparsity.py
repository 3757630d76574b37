"""Sparsity of entity embeddings: zeros for small entries, storage sizes, and MRR (Figure 3)."""

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
from dualkg.errors import InvalidValue, RequestError
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.report import evaluate
from dualkg.files import check_new_folder, locked
from dualkg.models.base import Model
from dualkg.models.matrix import RESCAL
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.checkpoint import load_tensors, smallest_integer
from dualkg.training.ensemble import load_trained_run
from dualkg.training.run import TrainedRun

ModelT = TypeVar("ModelT", bound=Model)

# -- thresholds ----------------------------------------------------------------


def find_thresholds(tables: Iterable[Tensor], shares: Sequence[float]) -> list[float]:
    """The thresholds λ of the paper's λ-sparsity, one for each target share of zeros.

    A threshold is over all tables together. With N entries and k = ⌊share · N⌋, exactly k entries
    lie below λ, or fewer where magnitudes equal to λ tie.
    """
    magnitudes = np.concatenate([table.detach().abs().cpu().numpy().ravel() for table in tables])
    indices = []
    for share in shares:
        check_share(share)
        # A share is taken as written: 0.29 of 100 is 29, although 0.29 * 100 is a little less in
        # binary.
        exact_share = Fraction(str(float(share)))
        indices.append(int(exact_share * len(magnitudes)))

    magnitudes.partition(sorted(set(indices)))
    return [float(magnitudes[index]) for index in indices]


def check_share(share: float) -> None:
    """Refuse a share of zeros that is below 0, or 1 or more."""
    if not 0 <= share < 1:
        raise InvalidValue(
            "share",
            expected="a share of zeros, at least 0 and below 1",
            found=share,
            advice="70 % is written 0.7.",
        )


# -- rotated axes --------------------------------------------------------------

MAX_ROUNDS = 100
TOLERANCE = 1e-4  # the smallest relative decrease of the error that is worth another round


def rotated(model: Model, *, share: float) -> RESCAL:
    """RESCAL in axes in which setting a share of its entity entries to zero costs least.

    Its scores stay the same.
    """
    check_share(share)
    if not isinstance(model, RESCAL):
        raise RequestError(
            f"{type(model).__name__} cannot be rotated without changing its scores: its axes are "
            "tied to its relations. Rotate a RESCAL model, or leave the rotation out."
        )
    copy = deepcopy(model)
    copy.rotate_(find_axes(model.head_table.detach(), share))
    return copy


@torch.no_grad()
def find_axes(table: Tensor, share: float) -> Tensor:
    """Orthogonal axes Q `(dim, dim)` with a small ‖X Q − S‖.

    X is the table, and S is X Q without its smallest entries. Alternates, from the principal axes:
    the best S for a Q keeps its largest entries, and the best Q for an S is the polar factor of
    Xᵀ S (orthogonal Procrustes). Neither step increases the error.
    """
    vectors = table.double()
    axes: Tensor = torch.linalg.eigh(vectors.T @ vectors).eigenvectors
    last_error = float("inf")
    for _ in range(MAX_ROUNDS):
        coordinates = vectors @ axes
        sparse = without_smallest(coordinates, share)
        error = float((coordinates - sparse).square().sum())
        if not error < last_error * (1 - TOLERANCE):
            break
        last_error = error
        left, _, right = torch.linalg.svd(vectors.T @ sparse)
        axes = left @ right
    return axes.to(table.dtype)


def without_smallest(entries: Tensor, share: float) -> Tensor:
    """The entries with the smallest share of them set to zero."""
    num_zeros = int(share * entries.numel())
    if not num_zeros:
        return entries
    threshold = entries.abs().flatten().kthvalue(num_zeros).values
    return entries.masked_fill(entries.abs() <= threshold, 0.0)


# -- sparse models and runs ----------------------------------------------------


def entity_tables(model: Model) -> dict[str, nn.Parameter]:
    """The entity tables by parameter name: one, or two for CP."""
    embedding = model.embedding
    table_ids = {id(embedding.head_table), id(embedding.tail_table)}
    tables = {name: table for name, table in model.named_parameters() if id(table) in table_ids}
    if len(tables) < len(table_ids):
        raise RequestError(
            f"Sparsity is defined for entity tables, and {type(embedding).__name__} computes its "
            "entity vectors from other parameters. Use a model whose head_table and tail_table "
            "are parameters."
        )
    return tables


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
) -> TrainedRun:
    """Save a copy of a run with a share of its entity entries set to zero.

    `rotate` first rotates a RESCAL model to the axes in which this costs least.
    """
    check_share(share)
    folder = Path(path).resolve()
    target = folder.with_name(f"{folder.name}-sparse-{share:g}") if out is None else Path(out)
    with locked(target):
        check_new_folder(target)
        run = load_trained_run(path)
        model = run.model.to(choose_device(device))
        if rotate:
            model = rotated(model, share=share)
        tables = entity_tables(model)
        [threshold] = find_thresholds(tables.values(), [share])
        sparse_model = sparsified(model, threshold)

        sparsity = {
            "source": str(path),
            "made_from": run.identity,
            "target_share": share,
            "share": share_of_zeros(sparse_model),
            "threshold": threshold,
            "rotated": rotate,
            "tables": list(tables),
        }
        reports = evaluate_held_out(sparse_model, run.graph)
        sparse_run = TrainedRun(
            sparse_model, run.graph, run.recipe, run.history, reports, sparsity=sparsity
        )
        sparse_run.save(target)
    return sparse_run


def share_of_zeros(model: Model) -> float:
    """The share of entity entries that are exactly zero."""
    tables = entity_tables(model).values()
    num_nonzero = sum(int(table.count_nonzero()) for table in tables)
    num_entries = sum(table.numel() for table in tables)
    return 1 - num_nonzero / num_entries


# -- storage -------------------------------------------------------------------

Layout = Literal["dense", "CSR", "CSC"]


@dataclass(frozen=True)
class Size:
    """The size of some tables in one layout, and the share that it saves compared to dense.

    A saved share of 0.4 is 40 % less; a negative share is more.
    """

    numbers: int
    bytes: int
    numbers_saved: float
    bytes_saved: float


@dataclass(frozen=True)
class Storage:
    """Sizes by layout of the entity tables and of the model, whose other tables are dense.

    `on_disk` has the bytes in a weights file.
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
    dense_tables = [table for name, table in model.state_dict().items() if name not in tables]
    return Storage(
        share=share_of_zeros(model),
        entity_tables=_sizes(tables.values(), dense=()),
        whole_model=_sizes(tables.values(), dense=dense_tables),
        on_disk=_sizes_on_disk(weights, set(tables)) if weights else None,
    )


def _sizes_on_disk(weights: Path, tables: Collection[str]) -> dict[str, int]:
    groups, *_ = load_tensors(weights)
    num_bytes = 0
    for group in groups.values():
        for name, array in group.items():
            # The arrays of a sparse table are named after it: `entities/values`.
            if name.split("/")[0] in tables:
                num_bytes += array.nbytes
    return {"entity_tables": num_bytes, "whole_model": weights.stat().st_size}


def count(table: Tensor, layout: Layout) -> tuple[int, int]:
    """The paper's count of numbers, and bytes.

    For a non-zero entries in n rows (CSR) or columns (CSC) it is 2a + n + 1. Indices are stored as
    the narrowest integers that hold them.
    """
    if layout == "dense":
        return table.numel(), table.nbytes

    # The lines of a table are its rows for CSR, and its columns for CSC.
    num_lines, line_length = table.shape if layout == "CSR" else table.T.shape
    num_values = int(table.count_nonzero())
    index_bytes = smallest_integer(line_length - 1).itemsize
    start_bytes = smallest_integer(num_values).itemsize
    numbers = 2 * num_values + num_lines + 1
    num_bytes = num_values * (table.itemsize + index_bytes) + (num_lines + 1) * start_bytes
    return numbers, num_bytes


def _sizes(tables: Collection[Tensor], *, dense: Collection[Tensor]) -> dict[Layout, Size]:
    """The sizes of tables in each layout, together with tables that are always dense."""
    totals: dict[Layout, tuple[int, int]] = {}
    for layout in get_args(Layout):
        counts = [count(table, layout) for table in tables]
        counts += [count(table, "dense") for table in dense]
        numbers = sum(table_numbers for table_numbers, _ in counts)
        num_bytes = sum(table_bytes for _, table_bytes in counts)
        totals[layout] = (numbers, num_bytes)

    dense_numbers, dense_bytes = totals["dense"]
    sizes: dict[Layout, Size] = {}
    for layout, (numbers, num_bytes) in totals.items():
        sizes[layout] = Size(
            numbers, num_bytes, 1 - numbers / dense_numbers, 1 - num_bytes / dense_bytes
        )
    return sizes


# -- MRR against sparsity ------------------------------------------------------

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class CurvePoint:
    """One point of a sparsity curve; `share` is the actual share of zeros."""

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
    thresholds = find_thresholds(entity_tables(model).values(), shares)
    known = KnownAnswers.of(graph)
    points = []
    for share, threshold in zip(shares, thresholds, strict=True):
        sparse_model = sparsified(model, threshold)
        report = evaluate(sparse_model, graph, split=split, known=known)
        point = CurvePoint(
            target_share=share,
            share=share_of_zeros(sparse_model),
            threshold=threshold,
            storage=storage_of(sparse_model),
            metrics=report.metrics,
        )
        points.append(point)
    return points
