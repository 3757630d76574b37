"""Forms in which a table is kept: float32, half as long, whole numbers of one byte, or without its zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dualkg.answers.index.base import ROWS, check_table
from dualkg.errors import RequestError
from dualkg.training.checkpoint import compress, expand

Form = Literal["float32", "float16", "bf16", "int8", "sparse"]
FORMS: tuple[Form, ...] = get_args(Form)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table `(num_rows, width)` in one form: the arrays that keep it, and its rows as float32, block by block.

    int8 has `codes` from −127 to 127 and a scale for every row, its greatest magnitude / 127. sparse has the CSR that
    runs are kept as: `values`, their `columns`, and where each row `starts`.
    """

    form: Form
    shape: tuple[int, int]
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, table: Tensor, form: Form = "float32") -> StoredTable:
        """Bring a table into a form; float32 is not copied. NaN and infinity are refused."""
        if form not in FORMS:
            raise RequestError(f"A table is kept as {', '.join(FORMS)}; '{form}' was asked for.")
        table = check_table(table)
        shape = (table.shape[0], table.shape[1])
        if form in FLOATS:
            return cls(form, shape, {"values": table.to(FLOATS[form])})
        return cls(form, shape, _as_int8(table) if form == "int8" else compress(table))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def block(self, start: int, stop: int) -> Tensor:
        """Some rows as float32, `(stop − start, width)`; of a float32 table the rows themselves."""
        parts = self.parts
        if self.form in FLOATS:
            return parts["values"][start:stop].float()
        if self.form == "int8":
            return parts["codes"][start:stop].float() * parts["scales"][start:stop, None]
        starts = parts["starts"][start : stop + 1].long()
        first, last = int(starts[0]), int(starts[-1])
        held = parts["values"][first:last], parts["columns"][first:last]
        return expand(*held, starts - first, shape=(stop - start, self.shape[1]))

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """All rows in blocks, each with the number of its first row."""
        for start in range(0, self.shape[0], size):
            yield start, self.block(start, min(start + size, self.shape[0]))

    def whole(self) -> Tensor:
        """All rows as float32."""
        return self.block(0, self.shape[0])

    def check(self) -> None:
        """Refuse arrays that are not a table of this form and shape, as a damaged file would bring."""
        rows, width = self.shape
        if self.form == "sparse":
            expected = {"starts": (rows + 1,), "columns": (num := self.parts["values"].shape), "values": num}
        else:
            expected = {"codes": (rows, width), "scales": (rows,)} if self.form == "int8" else {"values": (rows, width)}
        found = {name: tuple(part.shape) for name, part in self.parts.items()}
        if found != {name: tuple(shape) for name, shape in expected.items()}:
            raise ValueError(f"its arrays {found} are no {self.form} table of {rows:,} × {width:,}")


def _as_int8(table: Tensor) -> dict[str, Tensor]:
    codes = torch.empty(table.shape, dtype=torch.int8)
    scales = torch.empty(len(table))
    for start in range(0, len(table), ROWS):
        block = table[start : start + ROWS].float()
        largest = block.abs().amax(1)
        scales[start : start + ROWS] = largest / 127
        steps = torch.where(largest > 0, 127 / largest, 0.0)
        codes[start : start + ROWS] = (block * steps[:, None]).round().to(torch.int8)
    return {"codes": codes, "scales": scales}
