"""ComplEx in PyTorch as a tutorial would write it: the peer that dualkg is measured against.

`python benchmarks/tutorial.py` trains and ranks on a random graph, to see that it runs.
"""

import resource
import sys
import time
from collections import defaultdict

import torch
from torch import Tensor, nn

Known = dict[tuple[int, int], list[int]]


class ComplEx(nn.Module):
    """A row of either table holds `dim` real parts, then `dim` imaginary parts."""

    def __init__(self, num_entities: int, num_relations: int, dim: int) -> None:
        super().__init__()
        self.entities = nn.Embedding(num_entities, 2 * dim)
        self.relations = nn.Embedding(num_relations, 2 * dim)
        for table in (self.entities, self.relations):
            nn.init.normal_(table.weight, std=1e-3)

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of all entities as tails, `(batch, num_entities)`, and the regularizer."""
        head = self.entities(heads)
        relation = self.relations(relations)
        tail = self.entities(tails)
        mapped_head = times(head, relation)
        mapped_tail = times(tail, conjugate(relation))
        return mapped_head @ self.entities.weight.T, dura(head, tail, mapped_head, mapped_tail)

    def scores(self, head: int, relation: int) -> Tensor:
        """The scores of all entities as tails of one query, `(num_entities,)`."""
        mapped_head = times(self.entities.weight[head], self.relations.weight[relation])
        return self.entities.weight @ mapped_head


def dura(head: Tensor, tail: Tensor, mapped_head: Tensor, mapped_tail: Tensor) -> Tensor:
    """DURA with the weights for FB15k-237."""
    plain = head.square().sum(dim=-1) + tail.square().sum(dim=-1)
    mapped = mapped_head.square().sum(dim=-1) + mapped_tail.square().sum(dim=-1)
    return 0.05 * (0.5 * plain + 1.5 * mapped).mean()


def times(left: Tensor, right: Tensor) -> Tensor:
    """The product of complex numbers."""
    left_re, left_im = left.chunk(2, dim=-1)
    right_re, right_im = right.chunk(2, dim=-1)
    real = left_re * right_re - left_im * right_im
    imaginary = left_re * right_im + left_im * right_re
    return torch.cat([real, imaginary], dim=-1)


def conjugate(numbers: Tensor) -> Tensor:
    re, im = numbers.chunk(2, dim=-1)
    return torch.cat([re, -im], dim=-1)


def in_both_directions(triples: Tensor, num_relations: int) -> Tensor:
    """Each triple, and then each with its reciprocal relation: `(2 · num_triples, 3)`."""
    heads, relations, tails = triples.unbind(-1)
    reciprocal = torch.stack([tails, relations + num_relations, heads], dim=-1)
    return torch.cat([triples, reciprocal]).long()


# -- training ----------------------------------------------------------------


def train_steps(
    graph_triples: Tensor,
    num_entities: int,
    num_relations: int,
    dim: int,
    batch_size: int,
    num_steps: int,
    threads: int,
    *,
    warm_up: int = 1,
) -> tuple[float, float]:
    """Seconds a step, and the peak memory of this process in MiB.

    `warm_up` steps go before those that count.
    """
    torch.set_num_threads(threads)
    model = ComplEx(num_entities, 2 * num_relations, dim)
    triples = in_both_directions(graph_triples, num_relations)
    train(model, triples, batch_size, warm_up)
    started = time.perf_counter()
    train(model, triples, batch_size, num_steps)
    return (time.perf_counter() - started) / num_steps, peak_mib()


def train(model: ComplEx, triples: Tensor, batch_size: int, num_steps: int) -> list[float]:
    """The losses of as many steps of 1-vs-all training, each on a batch drawn afresh."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    cross_entropy = nn.CrossEntropyLoss()
    losses = []
    for _ in range(num_steps):
        heads, relations, tails = triples[torch.randint(len(triples), (batch_size,))].unbind(-1)
        scores, penalty = model(heads, relations, tails)
        loss = cross_entropy(scores, tails) + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def peak_mib() -> float:
    """The most memory that this process has had; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


# -- ranking -----------------------------------------------------------------


def known_answers(triples: Tensor) -> Known:
    """All tails of a head and a relation."""
    known = defaultdict(list)
    for head, relation, tail in triples.tolist():
        known[head, relation].append(tail)
    return known


@torch.no_grad()
def rank(model: ComplEx, queries: Tensor, known: Known) -> list[int]:
    """The filtered rank of each query's tail, one query after the other."""
    ranks = []
    for head, relation, tail in queries.tolist():
        scores = model.scores(head, relation)
        target = scores[tail].item()
        scores[known[head, relation]] = -torch.inf
        ranks.append(1 + int((scores > target).sum()))
    return ranks


def main() -> None:
    num_entities = 2000
    num_relations = 10
    dim = 50
    sizes = (num_entities, num_relations, num_entities)
    triples = torch.stack([torch.randint(size, (20_000,)) for size in sizes], -1)
    seconds, peak = train_steps(
        triples, num_entities, num_relations, dim, 1000, 20, torch.get_num_threads()
    )
    print(f"training: {seconds * 1e3:.1f} ms a step, peak {peak:,.0f} MiB")
    model = ComplEx(num_entities, 2 * num_relations, dim)
    queries = in_both_directions(triples, num_relations)
    losses = train(model, queries, 1000, 20)
    known = known_answers(queries)
    started = time.perf_counter()
    ranks = torch.tensor(rank(model, queries[:1000], known))
    per_query = (time.perf_counter() - started) / len(ranks)
    print(f"loss: {losses[0]:.2f} to {losses[-1]:.2f}")
    print(f"ranking: {per_query * 1e6:.0f} µs a query, mean rank {ranks.double().mean():.0f}")


if __name__ == "__main__":
    main()
