"""A model without the smallest of its entity entries, and the run that keeps it so."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from dualkg.analysis.thresholds import check_share, find_thresholds, num_entries
from dualkg.analysis.turning import turned
from dualkg.errors import RequestError
from dualkg.models.base import Model
from dualkg.training import Run, load_run
from dualkg.training.start import choose_device, evaluate_held_out

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
    """Make a new run of a finished one: a share of its entity entries set to zero, evaluated anew, kept as CSR.

    With `turn`, RESCAL is first written in axes in which that costs least.
    """
    check_share(share)
    folder = Path(path).resolve()
    target = folder.with_name(f"{folder.name}-sparse-{share:g}") if out is None else Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"{target} exists already. Name a new folder with --out.")
    run = load_run(path)
    model = run.model.to(choose_device(device))
    model = turned(model, share=share) if turn else model
    tables = entity_tables(model)
    [threshold] = find_thresholds(tables.values(), [share])
    model = sparsified(model, threshold)
    about = {
        "source": str(path),
        "wanted_share": share,
        "share": share_of_zeros(model),
        "threshold": threshold,
        "turned": turn,
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
