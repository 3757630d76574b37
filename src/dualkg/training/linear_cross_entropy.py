"""Cross entropy of a matrix product over all entities, with its gradients, in one buffer.

Autograd would keep the scores, their log-softmax and the gradient of both: four arrays of batch × entities. Here
the scores are turned into probabilities and then into the gradient where they stand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores:
    """The one array of batch × entities, kept from step to step: fresh pages cost as much as the softmax."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, images: Tensor, table: Tensor) -> Tensor:
        """images @ tableᵀ, `(batch, num_entities)`, in the buffer."""
        shape = (len(images), len(table))
        buffer = self._buffer
        if buffer is None or buffer.numel() < shape[0] * shape[1] or buffer.dtype != images.dtype:
            self._buffer = buffer = images.new_empty(shape[0] * shape[1])
        return torch.mm(images, table.T, out=buffer[: shape[0] * shape[1]].view(shape))


class LossAndGradient(NamedTuple):
    """The loss, and its gradient with respect to the images; that of the table is written where it was asked for."""

    loss: Tensor
    images: Tensor


def linear_cross_entropy(
    images: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    weights: Tensor | None,
    scores: Scores,
    table_gradient: Tensor,
    accumulate: bool = False,
    scale: float = 1.0,
) -> LossAndGradient:
    """`scale` times the mean of −log softmax(images @ tableᵀ)[target], weighted by `weights[target]` where given.

    The gradient of the table, `(num_entities, width)`, is written to `table_gradient`, or added to it.
    """
    share = scale * _shares(targets, weights, images)
    probabilities = scores.of(images, table)
    torch.softmax(probabilities, dim=-1, out=probabilities)
    places = torch.arange(len(targets), device=targets.device) * len(table) + targets
    flat = probabilities.view(-1)
    of_target = flat[places]
    loss = -(share.squeeze(-1) * of_target.clamp_min(torch.finfo(images.dtype).tiny).log()).sum()
    flat[places] = of_target - 1  # the probabilities are now the gradient, but for the share of each row
    torch.addmm(table_gradient, probabilities.T, share * images, beta=int(accumulate), out=table_gradient)
    return LossAndGradient(loss, share * (probabilities @ table))


def _shares(targets: Tensor, weights: Tensor | None, images: Tensor) -> Tensor:
    """What each row counts in the mean, `(batch, 1)`."""
    if weights is None:
        return images.new_full((len(targets), 1), 1 / len(targets))
    chosen = weights[targets]
    return (chosen / chosen.sum()).unsqueeze(-1)
