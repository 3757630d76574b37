"""Dropout of the images that entities are scored with, and of the vectors that they are images of."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.grouping import Questions
from dualkg.models.base import Factors


class Dropout:
    """Sets a share of each query's vector to zero while it is scored, and makes the rest larger by as much.

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
        """Factors of vectors `like` these, `(batch, width)`: 0, or 1 / (1 − share); `backward` asks for heads.

        With `questions`, the vectors are of those: `(questions, width)`.
        """
        places = torch.arange(len(f.heads), device=like.device) if questions is None else questions.first
        start = hash_columns(2 * self.seed + backward, places, f.heads[places], f.tails[places])
        drawn = splitmix64(start[:, None] + torch.arange(like.shape[1], device=like.device) * STEP)
        kept: Tensor = shift_right(drawn, 64 - self.DIGITS) >= round(self.share * 2**self.DIGITS)
        return kept.to(like.dtype) / (1 - self.share)


class Dropouts:
    """What a loss drops of the factors that it scores: of images, and of the given entities before they are mapped."""

    def __init__(self, *, images: float = 0.0, heads: float = 0.0, seed: int = 0) -> None:
        self.images = Dropout(images, seed=seed) if images else None
        self.heads = Dropout(heads, seed=-1 - seed) if heads else None  # numbers that no image is dropped by

    def __call__(self, f: Factors, *, both: bool = False, grouped_by_query: bool = False) -> Factors:
        """The same factors with some dropped of what tails are scored by; with `both`, heads too.

        With `grouped_by_query`, neighbours that ask the same have the same dropped.
        """
        if self.images is None and self.heads is None:
            return f
        found = Factors(f.model, f.heads, f.relations, f.tails)
        questions = Questions.of(f.heads, f.relations) if grouped_by_query else None
        if self.heads is not None:
            found.head = _dropped(f.head, self.heads, f, questions=questions)
        image = f.mapped_head if self.heads is None else found.mapped_head  # which a regularizer may have asked for
        found.mapped_head = _dropped(image, self.images, f, questions=questions)
        if both:
            if self.heads is not None:
                found.tail = _dropped(f.tail, self.heads, f, backward=True)
            image = f.mapped_tail if self.heads is None else found.mapped_tail
            found.mapped_tail = _dropped(image, self.images, f, backward=True)
        return found


def _dropped(
    vectors: Tensor, dropout: Dropout | None, f: Factors, *, backward: bool = False, questions: Questions | None = None
) -> Tensor:
    if dropout is None:
        return vectors
    mask = dropout.mask(f, vectors, backward=backward, questions=questions)
    return vectors * (mask if questions is None else mask[questions.rows])
