"""Sums over the differences of all pairs, and their gradients, against float64."""

import torch
from torch import Tensor

from dualkg.kernels.pairwise import pairwise_modulus_sums, pairwise_sine_sums

KINDS = ("one number", "two numbers", "sine")


def sums_of(kind: str, one: Tensor, other: Tensor) -> Tensor:
    """The sums by the kernel of that kind."""
    if kind == "sine":
        return pairwise_sine_sums(one, other)
    return pairwise_modulus_sums(one, other, parts=2 if kind == "two numbers" else 1)


def check_sums(
    kind: str, batch: int, others: int, dim: int, *, dtype: torch.dtype, device: str
) -> None:
    """Values and both gradients against float64; one row equals another, where a modulus has
    gradient 0.
    """
    parts = 2 if kind == "two numbers" else 1
    one, other = (
        torch.randn(rows, parts * dim, dtype=dtype, device=device) for rows in (batch, others)
    )
    if (
        kind == "sine"
    ):  # equal, or different by more than rounding: at 0 the gradient changes its sign
        one, other = (3 * angles.mul(1000).round() / 1000 for angles in (one, other))
    if batch:
        other[0] = one[0]
    one = one.requires_grad_()
    other = other.requires_grad_()
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
    for found_side, exact_side in ((one, exact_one), (other, exact_other)):
        torch.testing.assert_close(
            found_side.grad.double(), exact_side.grad, rtol=tolerance, atol=tolerance
        )
