"""λ-sparsity: the share of a model's entity entries that are smaller than λ, and the model without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

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


def sparsity(tables: Iterable[Tensor], threshold: float) -> float:
    """The paper's s_λ: the share of all entries whose magnitude is below `threshold`."""
    tables = list(tables)
    return sum(int((table.abs() < threshold).sum()) for table in tables) / _num_entries(tables)


def find_thresholds(tables: Iterable[Tensor], shares: Sequence[float]) -> list[float]:
    """The λ of each share wanted, one for all tables together.

    With N entries and k = ⌊share · N⌋, λ is the magnitude that k others precede in order. So exactly k entries lie
    below it; fewer where entries of the same magnitude as λ are among the k, which no threshold can tell apart.
    """
    tables = list(tables)
    num_entries = _num_entries(tables)
    # A share is meant as it is written: 0.07 of 100 is 7, though 0.07 * 100 is a little more and 0.29 * 100 less.
    places = [int(Fraction(str(float(check_share(share)))) * num_entries) for share in shares]
    magnitudes = np.concatenate([table.detach().abs().cpu().numpy().ravel() for table in tables])
    magnitudes.partition(sorted(set(places)))
    return [float(magnitudes[place]) for place in places]


@torch.no_grad()
def sparsified(model: ModelT, threshold: float) -> ModelT:
    """The same model with every entity entry below the threshold set to zero; relations stay as they are."""
    copy = deepcopy(model)
    for table in entity_tables(copy).values():
        table.masked_fill_(table.abs() < threshold, 0.0)
    return copy


def sparsify(
    path: str | Path, *, share: float, out: str | Path | None = None, device: str | torch.device | None = None
) -> Run:
    """Make a new run of a finished one: a share of its entity entries set to zero, evaluated anew, kept as CSR."""
    check_share(share)
    folder = Path(path).resolve()
    target = folder.with_name(f"{folder.name}-sparse-{share:g}") if out is None else Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"{target} exists already. Name a new folder with --out.")
    run = load_run(path)
    model = run.model.to(choose_device(device))
    tables = entity_tables(model)
    [threshold] = find_thresholds(tables.values(), [share])
    model = sparsified(model, threshold)
    about = {
        "source": str(path),
        "wanted_share": share,
        "share": share_of_zeros(model),
        "threshold": threshold,
        "tables": list(tables),
    }
    sparse = Run(model, run.graph, run.recipe, run.history, evaluate_held_out(model, run.graph), sparsity=about)
    sparse.save(target)
    return sparse


def share_of_zeros(model: Model) -> float:
    """The share of all entity entries that are exactly zero."""
    tables = entity_tables(model).values()
    return 1 - sum(num_nonzero(table) for table in tables) / _num_entries(tables)


def num_nonzero(table: Tensor) -> int:
    return int(table.count_nonzero())


def check_share(share: float) -> float:
    """The share, where it is one; at 1 nothing would be left."""
    if not 0 <= share < 1:
        raise RequestError(f"A share of zeros is at least 0 and below 1; {share:g} came. For 70 %, say 0.7.")
    return share


def _num_entries(tables: Iterable[Tensor]) -> int:
    return sum(table.numel() for table in tables)
