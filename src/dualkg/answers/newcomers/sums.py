"""The log-sum-exp of many scores and its gradient, in two passes through the table of candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_sums_with_slopes(images: Tensor, candidates: Tensor) -> Tensor:
    """As log Σ exp(images @ candidatesᵀ) over the candidates, `(num_images,)`, with its gradient found beside it."""
    found: Tensor = _LogSums.apply(images, candidates)  # type: ignore[no-untyped-call]
    return found


class _LogSums(torch.autograd.Function):
    """The gradient is the mean of the candidates, each as likely as its score makes it.

    The table is multiplied from the left in both passes. A product that sums over all candidates row by row is split
    over threads that wait for each other, and takes a hundred times as long where a core is busy with something else.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, candidates: Tensor) -> Tensor:
        scores = candidates @ images.T
        sums = scores.logsumexp(0)
        means = (candidates.T @ scores.sub_(sums).exp_()).T
        ctx.save_for_backward(images, candidates, means)
        return sums

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        images, candidates, means = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, which the means of the first pass do not have
            means = torch.softmax(images @ candidates.T, dim=-1) @ candidates
        return slopes[0][:, None] * means, None
