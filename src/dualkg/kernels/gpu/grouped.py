"""Rows times the matrix of their relation.

Triples are sorted by relation, so that a matrix is read once for all its triples and no matrix exists per triple.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, INNER, TILE = 16, 64, 64  # triples, summed numbers and columns that a program multiplies at once
STRANDS = 4  # programs that share the triples of one relation


class Groups(NamedTuple):
    """The triples of a batch in the order of their relations, and where each relation starts, `(relations + 1,)`."""

    order: Tensor
    starts: Tensor

    @staticmethod
    def of(relations: Tensor, num_relations: int) -> Groups:
        """Sort without asking how many relations there are, so that the host need not wait."""
        narrow = torch.int16 if num_relations < 2**15 else torch.int32  # fewer digits to sort by
        sorted_ids, order = torch.sort(relations.to(narrow))
        return Groups(
            order, torch.searchsorted(sorted_ids, torch.arange(num_relations + 1, dtype=narrow, device=order.device))
        )


@triton.jit
def _map(
    vectors,
    ids,
    id_stride,
    matrices,
    order,
    starts,
    images,
    half_images,
    half_stride,
    rows,
    dim,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    STRANDS: tl.constexpr,
):
    """Rows of vectors times the matrix of their relation, some columns of it."""
    relation = tl.program_id(2)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = tl.load(starts + relation), tl.load(starts + relation + 1)
    matrix = matrices + relation.to(tl.int64) * dim * dim
    for first in range(begin + tl.program_id(1) * ROWS, end, ROWS * STRANDS):
        place = first + tl.arange(0, ROWS)
        there = place < end
        triple = tl.load(order + place, mask=there, other=0)
        source = triple
        if GATHER:
            source = tl.load(ids + triple * id_stride, mask=there, other=0)
        summed = tl.zeros([ROWS, TILE], tl.float32)
        for start in range(0, dim, INNER):
            inner = start + tl.arange(0, INNER)
            x = tl.load(
                vectors + source[:, None].to(tl.int64) * dim + inner[None, :],
                mask=there[:, None] & (inner < dim)[None, :],
                other=0.0,
            )
            inside = (inner < dim)[:, None] & (column < dim)[None, :]
            if TRANSPOSED:
                m = tl.load(matrix + column[None, :] * dim + inner[:, None], mask=inside, other=0.0)
            else:
                m = tl.load(matrix + inner[:, None] * dim + column[None, :], mask=inside, other=0.0)
            summed = tl.dot(x, m, summed)
        inside = there[:, None] & (column < dim)[None, :]
        if SCATTER:
            target = tl.load(ids + triple * id_stride, mask=there, other=0)
            at = rows + target[:, None].to(tl.int64) * dim + column[None, :]
            tl.atomic_add(at, summed, mask=inside, sem="relaxed")
        else:
            tl.store(images + triple[:, None].to(tl.int64) * dim + column[None, :], summed, mask=inside)
        if HALF:
            at = half_images + triple[:, None].to(tl.int64) * half_stride + column[None, :]
            tl.store(at, summed.to(half_images.dtype.element_ty), mask=inside)


def map_rows_(
    vectors: Tensor,
    matrices: Tensor,
    groups: Groups,
    *,
    transposed: bool,
    ids: Tensor | None = None,
    images: Tensor | None = None,
    half_images: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Multiply each triple's vector by the matrix of its relation, or by the transpose.

    With `images` `(batch, dim)`, vectors are the rows `ids` of a table and the products are written there, and rounded
    to `half_images`. With `rows`, vectors are one a triple and the products are added to the rows `ids`.
    """
    dim = vectors.shape[1]
    num_relations = len(groups.starts) - 1
    _map[(triton.cdiv(dim, TILE), STRANDS, num_relations)](
        vectors,
        groups.order if ids is None else ids,
        1 if ids is None else ids.stride(0),
        matrices,
        *groups,
        vectors if images is None else images,
        vectors if half_images is None else half_images,
        0 if half_images is None else half_images.stride(0),
        vectors if rows is None else rows,
        dim,
        TRANSPOSED=transposed,
        GATHER=rows is None and ids is not None,
        SCATTER=rows is not None,
        HALF=half_images is not None,
        ROWS=ROWS,
        INNER=INNER,
        TILE=TILE,
        STRANDS=STRANDS,
    )
