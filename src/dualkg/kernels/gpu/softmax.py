"""Scores to their gradient, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _softmax_gradient(scores, targets, losses, num_columns: tl.constexpr, stride: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: find its maximum and sum, then write softmax − one-hot; padding columns become 0."""
    row = tl.program_id(0)
    start = scores + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        inside = first + columns < num_columns
        values = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, values)
        # A lane that has met no column yet holds −inf, and −inf − −inf is no number.
        total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(highest - higher) + tl.exp(values - higher))
        highest = higher
    top = tl.max(highest, axis=0)
    summed = tl.sum(tl.where(highest == float("-inf"), 0.0, total * tl.exp(highest - top)), axis=0)
    target = tl.load(targets + row)
    tl.store(losses + row, top + tl.log(summed) - tl.load(start + target).to(tl.float32))
    for first in range(0, stride, BLOCK):
        here = first + columns
        values = tl.load(start + here, mask=here < num_columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(values - top) / summed - tl.where(here == target, 1.0, 0.0)
        tl.store(start + here, gradient.to(scores.dtype.element_ty), mask=here < stride)


def softmax_gradient_(scores: Tensor, targets: Tensor, num_columns: int) -> Tensor:
    """Overwrite scores `(batch, padded columns)` by softmax − one-hot of their first columns; losses `(batch,)`."""
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    if len(scores):
        _softmax_gradient[(len(scores),)](
            scores, targets.contiguous(), losses, num_columns, scores.stride(0), BLOCK=BLOCK
        )
    return losses
