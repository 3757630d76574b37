"""What sums over differences are held against, on a CPU and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.kernels.pairwise import pairwise_modulus_sums, pairwise_sine_sums

KINDS = ("one number", "two numbers", "sine")


def sums_of(kind: str, one: Tensor, other: Tensor) -> Tensor:
    """As the kernels have them."""
    if kind == "sine":
        return pairwise_sine_sums(one, other)
    return pairwise_modulus_sums(one, other, parts=2 if kind == "two numbers" else 1)


def check_sums(kind: str, batch: int, others: int, dim: int, *, dtype: torch.dtype, device: str) -> None:
    """Values and both gradients against float64; two of the rows are the same, where a modulus has no slope."""
    parts = 2 if kind == "two numbers" else 1
    one, other = (torch.randn(rows, parts * dim, dtype=dtype, device=device) for rows in (batch, others))
    if kind == "sine":  # the same, or apart by more than rounding: where they meet, a slope changes its sign
        one, other = (3 * angles.mul(1000).round() / 1000 for angles in (one, other))
    if batch:
        other[0] = one[0]
    one, other = one.requires_grad_(), other.requires_grad_()
    exact_one, exact_other = (table.detach().double().requires_grad_() for table in (one, other))
    gap = exact_one[:, None] - exact_other
    if kind == "sine":
        exact = gap.sin().abs().sum(-1)
    else:
        squared = sum(part.square() for part in gap.chunk(parts, dim=-1))
        exact = squared.masked_fill(squared == 0, 1.0).sqrt().masked_fill(squared == 0, 0.0).sum(-1)
    found = sums_of(kind, one, other)
    upstream = torch.randn(others, batch, dtype=dtype, device=device).T  # not contiguous
    found.backward(upstream)
    exact.backward(upstream.double())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    for mine, theirs in ((one, exact_one), (other, exact_other)):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)
