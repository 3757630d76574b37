"""The log-sum-exp of the scores of many candidates, in bounded memory; and with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCORES_AT_ONCE = 16_000_000


def images_at_once(num_candidates: int) -> int:
    """How many images are scored at a time, so that memory is bounded."""
    return max(1, SCORES_AT_ONCE // max(num_candidates, 1))


def log_sums(images: Tensor, candidates: Tensor) -> Tensor:
    """The log-sum-exp of the scores of all candidates for each image, `(num_images,)`, in bounded memory."""
    size = images_at_once(len(candidates))
    parts = [torch.logsumexp(part @ candidates.T, dim=-1) for part in images.split(size)]  # type: ignore[no-untyped-call]
    return torch.cat(parts) if parts else images.new_zeros(0)


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
        found = []
        for part in images.split(images_at_once(len(candidates))):  # type: ignore[no-untyped-call]
            scores = candidates @ part.T
            sums = scores.logsumexp(0)
            found.append((sums, (candidates.T @ scores.sub_(sums).exp_()).T))
        sums, means = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(images, candidates, means)
        return sums

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        images, candidates, means = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, which the means of the first pass do not have
            means = torch.softmax(images @ candidates.T, dim=-1) @ candidates
        return slopes[0][:, None] * means, None
