"""Rows of tables in pinned host memory, which kernels read and write over the link.

A kernel reads the rows of a batch straight from a table, and writes them straight into it, so that
no thread of the host copies them, and each number crosses the memory of the host once. The tables
are tensors of the CPU whose memory is pinned: see `dualkg.tables.pinned`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Enough programs to fill the link, and few enough to leave room for a step that runs beside. Writes
# to the host make other kernels wait for them, so fewer programs write than read.
READ_PROGRAMS = 32
WRITE_PROGRAMS = 8
BLOCK = 1024


@triton.jit
def _copy_rows(
    table,
    ids,
    count,
    rows,
    width,
    to_table: tl.constexpr,
    num_programs: tl.constexpr,
    block: tl.constexpr,
):
    """Copy row ids[i] of a table to row i, or back, for each i below the number at `count`."""
    num_elements = tl.load(count) * width
    start = tl.program_id(0).to(tl.int64) * block
    while start < num_elements:
        element = start + tl.arange(0, block)
        is_valid = element < num_elements
        row = element // width
        of_table = tl.load(ids + row, mask=is_valid, other=0) * width + (element - row * width)
        if to_table:
            tl.store(table + of_table, tl.load(rows + element, mask=is_valid), mask=is_valid)
        else:
            tl.store(rows + element, tl.load(table + of_table, mask=is_valid), mask=is_valid)
        start += num_programs * block


def read_rows(table: Tensor, ids: Tensor, count: Tensor, rows: Tensor) -> None:
    """Copy the rows of the first `count` ids from a pinned table to a tensor of the device."""
    _launch(table, ids, count, rows, to_table=False)


def write_rows(table: Tensor, ids: Tensor, count: Tensor, rows: Tensor) -> None:
    """Copy the rows of the first `count` ids from a tensor of the device to a pinned table."""
    _launch(table, ids, count, rows, to_table=True)


def _launch(table: Tensor, ids: Tensor, count: Tensor, rows: Tensor, *, to_table: bool) -> None:
    num_programs = WRITE_PROGRAMS if to_table else READ_PROGRAMS
    _copy_rows[(num_programs,)](
        table, ids, count, rows, table.shape[1], to_table, num_programs, BLOCK, num_warps=4
    )
