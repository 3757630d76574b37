"""Whether a path network depends on the paths that explain it: its edges are deleted.

The network is not trained again. Scores and ranks of triples are computed over the graph without
the edges of their supporting paths, and in comparison without as many random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Triples
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import realistic_rank
from dualkg.inference.supporting_paths import Ids, edges_without, find_paths
from dualkg.models.paths import PathNetwork

Rows = npt.NDArray[np.int64]
Deleted = Literal["nothing", "supporting paths", "neighbours", "random"]
NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Deletion:
    """Scores and ranks of triples without some training triples each.

    `paths` is the number of supporting paths whose triples were deleted, or as many others.
    `num_deleted` is the mean number of training triples per triple, and `score_drop` the mean of
    the score drops.
    """

    deleted: Deleted
    paths: int
    num_triples: int
    num_deleted: float
    score_drop: float
    mrr: float

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def delete_paths(
    network: PathNetwork,
    graph: Graph,
    triples: Triples,
    *,
    counts: Sequence[int] = (1, 3, 5),
    seed: int = 0,
) -> Iterator[Deletion]:
    """Measure triples, as answers to (head, relation, ?), without their supporting paths.

    `counts` are numbers of paths. In comparison, as many random triples are deleted: triples of the
    head or the tail ("neighbours"), and any triples ("random").
    """
    known = KnownAnswers.of(graph)
    random = np.random.default_rng(seed)
    results: dict[tuple[Deleted, int], list[tuple[int, float, float]]] = {}
    for row in triples.tolist():
        triple: Ids = (row[0], row[1], row[2])
        choices = _choices(triple, network, graph, counts, random)
        candidates = _candidates(triple, known, graph)
        score, rank = _score_and_rank(triple, network, NO_ROWS, candidates)
        results.setdefault(("nothing", 0), []).append((0, 0.0, rank))
        for key, rows in choices.items():
            without, rank = _score_and_rank(triple, network, rows, candidates)
            results.setdefault(key, []).append((len(rows), score - without, rank))
    for (deleted, count), values in results.items():
        numbers, drops, ranks = np.array(values, dtype=np.float64).T
        yield Deletion(
            deleted,
            count,
            len(values),
            num_deleted=float(numbers.mean()),
            score_drop=float(drops.mean()),
            mrr=Metrics.of(ranks).mrr,
        )


def _choices(
    triple: Ids,
    network: PathNetwork,
    graph: Graph,
    counts: Sequence[int],
    random: np.random.Generator,
) -> dict[tuple[Deleted, int], Rows]:
    """The rows of train to delete, by kind and number of paths."""
    _, found = find_paths(triple, network)
    num_train = len(graph.train)
    ends = graph.train[:, [0, 2]]
    neighbours = np.flatnonzero(((ends == triple[0]) | (ends == triple[2])).any(1))
    choices: dict[tuple[Deleted, int], Rows] = {}
    for count in counts:
        # The inverse edges come after the edges of all triples.
        numbers = [number % num_train for path in found[:count] for number in path.edges]
        rows = np.unique(np.array(numbers, dtype=np.int64))
        choices["supporting paths", count] = rows
        choices["neighbours", count] = random.permutation(neighbours)[: len(rows)]
        choices["random", count] = random.choice(num_train, len(rows), replace=False)
    return choices


def _candidates(triple: Ids, known: KnownAnswers, graph: Graph) -> npt.NDArray[np.bool_]:
    """The tails that compete with the tail of a triple: all that are not known answers."""
    head, relation, tail = triple
    _, answers = known(np.array([head]), np.array([relation]))
    is_candidate = np.ones(len(graph.entities), dtype=bool)
    is_candidate[answers] = False
    is_candidate[tail] = True
    return is_candidate


@torch.no_grad()
def _score_and_rank(
    triple: Ids, network: PathNetwork, rows: Rows, candidates: npt.NDArray[np.bool_]
) -> tuple[float, float]:
    """The score of a triple and its filtered rank, without some rows of train and without itself.

    Ties are at their mean rank.
    """
    edges = edges_without(triple, network)
    assert edges.kept is not None
    kept = edges.kept.clone()
    deleted = torch.from_numpy(rows).to(kept.device)
    num_triples = len(kept) // 2
    kept[deleted] = False
    kept[deleted + num_triples] = False
    head, relation = (torch.tensor([id], device=network.device) for id in triple[:2])
    scores = network.scores_over(head, relation, edges.keep(kept))[0].double().cpu().numpy()
    score = float(scores[triple[2]])
    num_better = int((scores[candidates] > score).sum())
    num_tied = int((scores[candidates] == score).sum()) - 1  # without the answer itself
    return score, float(realistic_rank(num_better, num_tied))


def correct_triples(
    network: PathNetwork, graph: Graph, *, max_triples: int, seed: int = 0
) -> Triples:
    """Random test triples whose tails have the first rank."""
    known = KnownAnswers.of(graph)
    correct: list[list[int]] = []
    for number in np.random.default_rng(seed).permutation(len(graph.test)).tolist():
        if len(correct) == max_triples:
            break
        row = graph.test[number].tolist()
        triple: Ids = (row[0], row[1], row[2])
        candidates = _candidates(triple, known, graph)
        _, rank = _score_and_rank(triple, network, NO_ROWS, candidates)
        if rank == 1:
            correct.append(row)
    return np.array(correct, dtype=graph.test.dtype).reshape(-1, 3)
