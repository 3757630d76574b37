"""What a model takes, whole and without its zeros: in numbers, as the paper counts, and in bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from dualkg.analysis.sparsity import entity_tables, num_nonzero, share_of_zeros
from dualkg.models.base import Model
from dualkg.training.checkpoint import load_tensors, smallest_integer

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
