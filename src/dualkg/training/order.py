"""The order in which an epoch sees its triples: the same on every device, made where it is used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.kernels.mixing import STEP, mixed
from dualkg.losses.questions import asks_anew

MOST_TOGETHER = 16  # answers of a question that stand together: more would leave a batch with few questions


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The numbers below `size` in an order that depends on seed and epoch alone, `(size,)`.

    Whole numbers are mixed and sorted, so the order needs no generator whose numbers differ between devices.
    """
    return torch.argsort(_drawn(torch.arange(size, device=device), seed=seed, epoch=epoch))


class ByQuestion:
    """Orders in which answers of the same question stand together, so that it need be scored only once.

    The answers of each question are shuffled and dealt into hands of at most `MOST_TOGETHER`; then the hands are.
    """

    def __init__(self, triples: Tensor) -> None:
        keys = triples[:, 0] * (triples[:, 1].max() + 1) + triples[:, 1]
        _, self.questions, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        hands = (counts + MOST_TOGETHER - 1) // MOST_TOGETHER
        self.starts, self.first_hands = counts.cumsum(0) - counts, hands.cumsum(0) - hands

    def shuffled(self, *, seed: int, epoch: int) -> Tensor:
        """As the function of that name."""
        size, device = len(self.questions), self.questions.device
        order = shuffled(size, seed=seed, epoch=epoch, device=device)
        order = order[torch.argsort(self.questions[order], stable=True)]
        questions, places = self.questions[order], torch.arange(size, device=device)
        hands = self.first_hands[questions] + (places - self.starts[questions]) // MOST_TOGETHER
        # Numbers from `size` on have not been drawn for the triples.
        return order[torch.argsort(_drawn(hands + size, seed=seed, epoch=epoch), stable=True)]


def one_of_each_question(triples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first triple of every head and relation, in the order of the triples."""
    _, first = np.unique(triples[:, :2], axis=0, return_index=True)
    return triples[np.sort(first)]


def most_questions(triples: Tensor, batch_size: int) -> int:
    """The most questions that a batch asks, where batches are cut from triples in this order."""
    anew = asks_anew(triples[:, 0], triples[:, 1])
    anew[::batch_size] = True
    batches = torch.arange(len(triples), device=triples.device) // batch_size
    return int(torch.bincount(batches[anew]).max())


def _drawn(numbers: Tensor, *, seed: int, epoch: int) -> Tensor:
    start = int(mixed(mixed(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return mixed(numbers * STEP + start)
