"""The order of training examples: batches that depend on seed and epoch alone."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.kernels.hashing import STEP, splitmix64
from dualkg.losses.queries import starts_query

MAX_GROUP = 16  # answers of a query that stand together: more would leave a batch with few queries


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The integers below `size` in an order by hashes of seed and epoch, the same on every device, `(size,)`."""
    return torch.argsort(_hashed(torch.arange(size, device=device), seed=seed, epoch=epoch))


class GroupedByQuery:
    """Orders in which answers of the same query stand together, so that it is scored only once.

    The answers of each query are shuffled and cut into groups of at most `MAX_GROUP`; then the groups are shuffled.
    """

    def __init__(self, triples: Tensor) -> None:
        keys = triples[:, 0] * (triples[:, 1].max() + 1) + triples[:, 1]
        _, self.queries, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        groups = (counts + MAX_GROUP - 1) // MAX_GROUP
        self.starts, self.first_groups = counts.cumsum(0) - counts, groups.cumsum(0) - groups

    def shuffled(self, *, seed: int, epoch: int) -> Tensor:
        """The same as the function of that name, grouped."""
        size, device = len(self.queries), self.queries.device
        order = shuffled(size, seed=seed, epoch=epoch, device=device)
        order = order[torch.argsort(self.queries[order], stable=True)]
        queries, positions = self.queries[order], torch.arange(size, device=device)
        groups = self.first_groups[queries] + (positions - self.starts[queries]) // MAX_GROUP
        # Integers from `size` on are not hashed for the triples.
        return order[torch.argsort(_hashed(groups + size, seed=seed, epoch=epoch), stable=True)]


def one_of_each_query(triples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first triple of every head and relation, in the order of the triples."""
    _, first = np.unique(triples[:, :2], axis=0, return_index=True)
    return triples[np.sort(first)]


def most_queries(triples: Tensor, batch_size: int) -> int:
    """The most queries in a batch, where batches are cut from triples in this order."""
    starts = starts_query(triples[:, 0], triples[:, 1])
    starts[::batch_size] = True
    batches = torch.arange(len(triples), device=triples.device) // batch_size
    return int(torch.bincount(batches[starts]).max())


def _hashed(numbers: Tensor, *, seed: int, epoch: int) -> Tensor:
    start = int(splitmix64(splitmix64(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return splitmix64(numbers * STEP + start)
