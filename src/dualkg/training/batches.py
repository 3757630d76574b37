"""The order of training examples: batches that depend on seed and epoch alone."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.triples import Triples, slices
from dualkg.kernels.hashing import STEP, splitmix64
from dualkg.losses.queries import starts_query

MAX_GROUP = 16  # answers of a query that stand together; more would leave a batch with few queries
ROUNDS = 6  # of the Feistel network; each replaces half of the bits
EXAMPLES_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22}  # of a large graph


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The integers below `size` in an order that seed and epoch determine, `(size,)`.

    It is the order of their hashes, the same on every device.
    """
    return torch.argsort(_hashed(torch.arange(size, device=device), seed=seed, epoch=epoch))


def in_keyed_order(positions: Tensor, size: int, *, seed: int, epoch: int) -> Tensor:
    """The integers at some positions of an order of those below `size`, by seed and epoch.

    The order is a Feistel network of hashes, a bijection of numbers with an even number of bits. A
    result that is not below `size` is put through it again.
    """
    half = ((max(size, 2) - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keys = _hashed(torch.arange(ROUNDS), seed=seed, epoch=epoch).tolist()

    def permuted(numbers: Tensor) -> Tensor:
        left = numbers >> half
        right = numbers & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right * STEP + key) & mask)
        return (left << half) | right

    integers = permuted(positions)
    while len(too_large := (integers >= size).nonzero().squeeze(1)):
        integers[too_large] = permuted(integers[too_large])
    return integers


class ComputedExamples:
    """The training examples of a large graph: its triples, and computed reciprocals.

    On a CPU the triples are those of the graph; on a GPU they are copied, with 12 bytes each.
    `examples[indices]` is a batch.
    """

    def __init__(
        self,
        triples: Triples,
        num_relations: int,
        *,
        reciprocal: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.num_relations = num_relations
        self.reciprocal = reciprocal
        self._triples = triples
        self._copy = None
        if self.device.type != "cpu":
            self._copy = torch.empty(triples.shape, dtype=torch.int32, device=self.device)
            for part in slices(len(triples)):
                self._copy[part] = torch.from_numpy(np.array(triples[part]))

    def __len__(self) -> int:
        return len(self._triples) * (2 if self.reciprocal else 1)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """The examples with these numbers, `(batch, 3)`.

        Those from the number of triples on are reciprocals.
        """
        rows = indices % len(self._triples)
        if self._copy is None:
            triples = torch.from_numpy(self._triples[rows.numpy()]).long()
        else:
            triples = self._copy[rows].long()
        if not self.reciprocal:
            return triples
        heads, relations, tails = triples.unbind(1)
        reciprocals = torch.stack([tails, relations + self.num_relations, heads], dim=1)
        is_reciprocal = (indices >= len(self._triples))[:, None]
        return torch.where(is_reciprocal, reciprocals, triples)

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Tensor]:
        """The batches of one epoch, `(batch, 3)` each."""
        step = max(1, EXAMPLES_AT_ONCE[self.device.type] // batch_size) * batch_size
        for part in slices(len(self), step):
            positions = torch.arange(part.start, part.stop, device=self.device)
            examples = self[in_keyed_order(positions, len(self), seed=seed, epoch=epoch)]
            yield from torch.split(examples, batch_size)


class GroupedByQuery:
    """Orders in which answers of the same query stand together, so that it is scored only once.

    The answers of each query are shuffled and cut into groups of at most `MAX_GROUP`; then the
    groups are shuffled.
    """

    def __init__(self, triples: Tensor) -> None:
        keys = triples[:, 0] * (triples[:, 1].max() + 1) + triples[:, 1]
        _, self.queries, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        groups = (counts + MAX_GROUP - 1) // MAX_GROUP
        self.starts = counts.cumsum(0) - counts
        self.first_groups = groups.cumsum(0) - groups

    def shuffled(self, *, seed: int, epoch: int) -> Tensor:
        """An order of the triples by seed and epoch, grouped by query, `(size,)`."""
        size = len(self.queries)
        device = self.queries.device
        order = shuffled(size, seed=seed, epoch=epoch, device=device)
        order = order[torch.argsort(self.queries[order], stable=True)]
        queries = self.queries[order]
        positions = torch.arange(size, device=device)
        groups = self.first_groups[queries] + (positions - self.starts[queries]) // MAX_GROUP
        # Triples use the hashes of the integers below `size`, so groups use those from there on.
        group_keys = _hashed(groups + size, seed=seed, epoch=epoch)
        return order[torch.argsort(group_keys, stable=True)]


def one_of_each_query(triples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first triple of every head and relation, in the order of the triples."""
    _, first = np.unique(triples[:, :2], axis=0, return_index=True)
    return triples[np.sort(first)]


def queries_of_both_directions(graph: Graph) -> Triples:
    """One triple of every head and relation of train and of its reciprocals."""
    known = KnownAnswers.of(graph, ["train"])
    heads, relations = np.divmod(known.queries, 2 * graph.shape.num_relations)
    columns = [heads, relations, known.answers[known.offsets[:-1]]]
    return np.stack([column.astype(np.int32) for column in columns], axis=1)


def most_queries(triples: Tensor, batch_size: int) -> int:
    """The most queries in a batch, where batches are cut from triples in this order."""
    starts = starts_query(triples[:, 0], triples[:, 1])
    starts[::batch_size] = True
    batches = torch.arange(len(triples), device=triples.device) // batch_size
    return int(torch.bincount(batches[starts]).max())


def _hashed(numbers: Tensor, *, seed: int, epoch: int) -> Tensor:
    start = int(splitmix64(splitmix64(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return splitmix64(numbers * STEP + start)
