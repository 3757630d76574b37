"""The rivals of one who asks: log Σ exp(score) over all of them, and over few that stand for all nearby."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.newcomers.descent import Array
from dualkg.answers.newcomers.maps import as_array

FEW = 512
ONE_BY_ONE = 4
SMALLEST = 1e-30


def are_few(candidates: Tensor | Array) -> bool:
    return len(candidates) <= FEW


@dataclass(frozen=True, eq=False)
class Few:
    """The likeliest candidates `(num_chosen, width)`, and for each image one that stands for all the others.

    That one is their mean, `means` `(num_images, width)`; `weights` `(num_images,)` are added to its scores, so that it
    counts for their sum. For the images that they were chosen by, log-sums and their gradients are those of all. For
    others log-sums are below those of all: exp of a mean is below the mean of exp.
    """

    chosen: Array
    means: Array
    weights: Array

    @classmethod
    def of(cls, candidates: Tensor, images: Tensor) -> Few:
        """Choose among candidates `(num_candidates, width)`; where they are no more than `FEW`, all of them."""
        if are_few(candidates):
            nothing = torch.full_like(images[:, 0], -torch.inf)
            return cls(as_array(candidates), as_array(torch.zeros_like(images)), as_array(nothing))
        chances = _times(candidates, images)
        sums = chances.logsumexp(1)
        chances.sub_(sums[:, None]).exp_()
        best = chances.amax(0).topk(FEW, sorted=False).indices
        chances[:, best] = 0.0
        shares = chances.sum(1).clamp(min=SMALLEST)
        means = _times(candidates.T, chances) / shares[:, None]
        weights = sums + shares.log() - (images * means).sum(1)
        return cls(as_array(candidates[best]), as_array(means), as_array(weights))

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """Images `(num_images, width)` → log-sums `(num_images,)`, and their gradients `(num_images, width)`.

        A gradient is the mean of the rivals, each as likely as its score makes it.
        """
        # One image at a time: a product of few with few is not worth its threads, which NumPy's own would be beside
        # those of PyTorch.
        scores = np.stack([self.chosen @ image for image in images])
        rest = (images * self.means).sum(1) + self.weights
        top = np.maximum(scores.max(1), rest)
        scores -= top[:, None]
        likely, of_rest = np.exp(scores, out=scores), np.exp(rest - top)
        totals = likely.sum(1) + of_rest
        means = np.stack([shares @ self.chosen for shares in likely]) + of_rest[:, None] * self.means
        return top + np.log(totals), means / totals[:, None]


def _times(table: Tensor, vectors: Tensor) -> Tensor:
    """Vectors `(n, width)` times the rows of a table `(num_rows, width)` → `(n, num_rows)`.

    The table is on the left. A product of which it is on the right is split over threads that wait for each other where
    it is a sum over many rows, and takes a hundred times as long when a core is busy with something else. A product for
    many vectors takes more than one for each of a few.
    """
    if len(vectors) > ONE_BY_ONE:
        return (table @ vectors.T).T
    return torch.stack([table @ vector for vector in vectors])
