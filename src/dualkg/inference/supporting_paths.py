"""The paths in the training graph that carry a prediction of a path network.

The message along every edge in every step has a weight of 1, and the gradient of the score by a
weight says how much the score depends on the message. A beam search finds the paths from the head
to the tail with the largest gradients. docs/explanation.md describes the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dualkg.kernels import paths
from dualkg.kernels.paths import Edges, WeightedEdges
from dualkg.models.paths import PathNetwork

Ids = tuple[int, int, int]
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BEAM_WIDTH = 50  # beginnings of paths of one length that are kept after each step
MAX_PATHS = 10  # of one length
SMALLER_WEIGHTS = (0.25, 0.5, 0.75, 1.0)


class FoundPath(NamedTuple):
    """The numbers of the edges of a path in their order, its weight, and its share.

    The weight is the mean of the gradients along the path. The share is the weight divided by the
    sum of the weights of all paths that the search found.
    """

    edges: tuple[int, ...]
    weight: float
    share: float


@dataclass(frozen=True, eq=False)
class EdgeGradients:
    """The score of a triple, and its gradients by the weights of edges in each step.

    `numbers` are the edges of each step on which the score can depend, sorted by their beginning;
    `gradients` belong to them. `edges` are the edges of the graph without the triple.
    """

    edges: Edges
    score: float
    numbers: Sequence[Numbers]
    gradients: Sequence[Floats]


def edges_without(triple: Ids, network: PathNetwork) -> Edges:
    """The edges of the graph, without the two edges of a triple."""
    edges = network.edges
    head, relation, tail = triple
    inverse = relation + network.shape.num_relations
    is_triple = (edges.relations == relation) & (edges.heads == head) & (edges.tails == tail)
    is_inverse = (edges.relations == inverse) & (edges.heads == tail) & (edges.tails == head)
    return edges.keep(~(is_triple | is_inverse))


def edge_gradients(
    triple: Ids, network: PathNetwork, *, weights: Sequence[float] = (1.0,)
) -> EdgeGradients:
    """The gradients of the score of a triple, which is not among the edges itself.

    They are means of those at some weights, which all edges have, up to 1.
    """
    edges = edges_without(triple, network)
    kept = edges.kept
    assert kept is not None
    head, _, tail = (torch.tensor([id], device=network.device) for id in triple)

    # A message counts only if its beginning is reached, and if the tail can be reached from its
    # end in the steps that are left. Edges have both directions, so that the tail reaches what it
    # is reached from.
    num_steps = network.steps
    from_head = paths.reach(head, edges, num_steps)
    from_tail = paths.reach(tail, edges, num_steps)
    edges_by_step = []
    for step in range(num_steps):
        begins = from_head[step][edges.heads, 0]
        ends = from_tail[num_steps - 1 - step][edges.tails, 0]
        # Degrees count all edges that are kept.
        edges_by_step.append(replace(edges, kept=kept & begins & ends))

    sums: list[Floats] = []
    for weight in weights:
        score, gradients = _gradients_at(weight, triple, network, edges, edges_by_step)
        sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients

    heads = edges.heads.cpu().numpy()
    sorted_numbers = []
    sorted_gradients = []
    for step_edges, step_sums in zip(edges_by_step, sums, strict=True):
        assert step_edges.kept is not None
        numbers = step_edges.kept.nonzero().flatten().cpu().numpy()
        order = np.argsort(heads[numbers], kind="stable")
        sorted_numbers.append(numbers[order])
        sorted_gradients.append(step_sums[order] / len(weights))
    return EdgeGradients(edges, score, sorted_numbers, sorted_gradients)


def _gradients_at(
    weight: float, triple: Ids, network: PathNetwork, edges: Edges, edges_by_step: Sequence[Edges]
) -> tuple[float, list[Floats]]:
    """The score where all messages have a weight, and its gradients by the weight of each edge."""
    head, relation = (torch.tensor([id], device=network.device) for id in triple[:2])
    weighted = []
    for step_edges in edges_by_step:
        assert step_edges.kept is not None
        shape = (int(step_edges.kept.sum()),)
        weights = network.query_vectors.new_full(shape, weight, requires_grad=True)
        weighted.append(WeightedEdges(step_edges, weights))
    with torch.enable_grad():
        scores = network.scores_over(head, relation, edges, weighted=weighted)
        score = scores[0, triple[2]]
        gradients = torch.autograd.grad(score, [step.weights for step in weighted])
    return float(score.detach()), [of_step.double().cpu().numpy() for of_step in gradients]


class _Beginning(NamedTuple):
    """The beginning of a path: its edges, its entities, the sum of its gradients.

    `bound` is the largest sum that a path of the wanted length can have that begins like this.
    """

    bound: float
    total: float
    edges: tuple[int, ...]
    entities: tuple[int, ...]


class PathSearch:
    """A beam search for the paths with the largest sums of gradients, for each length.

    In each step a path follows an edge or stays at its entity. It visits no entity twice.
    """

    def __init__(self, gradients: EdgeGradients, head: int, tail: int) -> None:
        self.gradients = gradients
        self.head = head
        self.tail = tail
        self.num_steps = len(gradients.numbers)
        heads = gradients.edges.heads.cpu().numpy()
        tails = gradients.edges.tails.cpu().numpy()
        num_entities = gradients.edges.num_entities
        self._targets = [tails[numbers] for numbers in gradients.numbers]
        sources = [heads[numbers] for numbers in gradients.numbers]
        # The edges of a step that begin at entity e are from starts[e] to starts[e + 1] − 1.
        bounds = np.arange(num_entities + 1)
        self._starts = [np.searchsorted(of_step, bounds) for of_step in sources]
        self._bounds = self._best_sums(sources, num_entities)

    def _best_sums(self, sources: Sequence[Numbers], num_entities: int) -> list[Floats]:
        """The largest sums of gradients from each entity to the tail, `(length, num_entities)`.

        There is one array for each step, with the edges that follow from it on. Entities may be
        visited twice here, so that these are bounds.
        """
        last = np.full((self.num_steps + 1, num_entities), -np.inf)
        last[0, self.tail] = 0.0
        best = [last]
        for step in reversed(range(self.num_steps)):
            later = best[-1]
            sums = later.copy()  # of paths that stay
            gradients = self.gradients.gradients[step]
            for length in range(1, self.num_steps - step + 1):
                along = gradients + later[length - 1, self._targets[step]]
                np.maximum.at(sums[length], sources[step], along)
            best.append(sums)
        return best[::-1]

    def run(self) -> list[FoundPath]:
        """The paths whose weights are positive, largest first."""
        weights: dict[tuple[int, ...], float] = {}
        for length in range(1, self.num_steps + 1):
            for path in self._paths_of(length)[:MAX_PATHS]:
                weights[path.edges] = path.total / length
        positive = {edges: weight for edges, weight in weights.items() if weight > 0}
        whole = sum(positive.values())
        paths = [FoundPath(edges, weight, weight / whole) for edges, weight in positive.items()]
        return sorted(paths, key=lambda path: -path.weight)

    def _paths_of(self, length: int) -> list[_Beginning]:
        """The best paths of a length, largest sum first."""
        bound = float(self._bounds[0][length, self.head])
        if bound == -np.inf:
            return []
        beam = [_Beginning(bound, 0.0, (), (self.head,))]
        for step in range(self.num_steps):
            # The same edges may be followed in different steps: the best ones count.
            best: dict[tuple[int, ...], _Beginning] = {}
            for beginning in beam:
                for further in self._continued(beginning, step, length):
                    known = best.get(further.edges)
                    if known is None or further.bound > known.bound:
                        best[further.edges] = further
            beam = sorted(best.values(), key=lambda path: -path.bound)[:BEAM_WIDTH]
        return beam

    def _continued(self, path: _Beginning, step: int, length: int) -> list[_Beginning]:
        """The beginning after one more step: it stays, or follows an edge."""
        entity = path.entities[-1]
        num_left = length - len(path.edges)
        further = []
        bound = path.total + float(self._bounds[step + 1][num_left, entity])
        if bound > -np.inf:
            further.append(path._replace(bound=bound))
        if not num_left:
            return further

        of_entity = slice(*self._starts[step][entity : entity + 2])
        targets = self._targets[step][of_entity]
        totals = path.total + self.gradients.gradients[step][of_entity]
        bounds = totals + self._bounds[step + 1][num_left - 1, targets]
        # A path ends where it arrives at the tail.
        visited = [*path.entities, self.tail] if num_left > 1 else path.entities[1:]
        bounds[np.isin(targets, visited)] = -np.inf
        numbers = self.gradients.numbers[step][of_entity]
        for place in np.argsort(-bounds, kind="stable")[:BEAM_WIDTH].tolist():
            if bounds[place] == -np.inf:
                break
            further.append(
                _Beginning(
                    float(bounds[place]),
                    float(totals[place]),
                    (*path.edges, int(numbers[place])),
                    (*path.entities, int(targets[place])),
                )
            )
        return further


def find_paths(triple: Ids, network: PathNetwork) -> tuple[float, list[FoundPath]]:
    """The score of a triple that is not among the edges, and the paths that carry it.

    Near its maximum, a score may not grow further with any path. Then smaller weights are taken.
    """
    head, _, tail = triple
    gradients = edge_gradients(triple, network)
    paths = PathSearch(gradients, head, tail).run()
    is_reached = any(map(len, gradients.numbers))
    if not paths and is_reached:
        gradients = edge_gradients(triple, network, weights=SMALLER_WEIGHTS)
        paths = PathSearch(gradients, head, tail).run()
    return gradients.score, paths
