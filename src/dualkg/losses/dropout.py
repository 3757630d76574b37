"""Dropout of the images that entities are scored with."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.mixing import STEP, chained, mixed, shifted
from dualkg.losses.questions import Questions
from dualkg.models.factors import Factors


class Dropout:
    """Sets a share of each query's image to zero while it is scored, and makes the rest larger by as much.

    What is dropped follows from the seed, the entities of the triple and its place in the batch, which changes from
    epoch to epoch: the same on every device and by every engine, and a run that goes on need not know where it was. So
    a triple has as many masks as a batch has places, which is few where batches are small. A question with several
    answers has the mask of the first.
    """

    DIGITS = 24  # in which a drawn number is compared with the share

    def __init__(self, share: float, *, seed: int = 0) -> None:
        if not 0 <= share < 1:
            raise RequestError(f"The share that dropout sets to zero is at least 0 and below 1; it is {share}.")
        self.share = share
        self.seed = seed

    def mask(self, f: Factors, like: Tensor, *, backward: bool = False, questions: Questions | None = None) -> Tensor:
        """Factors of images `like` these, `(batch, width)`: 0, or 1 / (1 − share); `backward` asks for heads.

        With `questions`, the images are of those: `(questions, width)`.
        """
        places = torch.arange(len(f.heads), device=like.device) if questions is None else questions.first
        start = chained(2 * self.seed + backward, places, f.heads[places], f.tails[places])
        drawn = mixed(start[:, None] + torch.arange(like.shape[1], device=like.device) * STEP)
        kept: Tensor = shifted(drawn, 64 - self.DIGITS) >= round(self.share * 2**self.DIGITS)
        return kept.to(like.dtype) / (1 - self.share)
