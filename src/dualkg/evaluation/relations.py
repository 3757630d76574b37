"""Relation prediction: where the relation of each triple stands among all relations of the graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import count_above, ids_on, refuse_nonfinite
from dualkg.models.base import Model

BLOCK = 1024  # queries scored at once


def evaluate_relations(model: Model, graph: Graph, *, split: Split = "test") -> Metrics:
    """Ask (head, ?, tail) of every triple of a split; filtered by all three splits, ties at their mean.

    Candidates are the graph's own relations: their inverses are the same facts said the other way round.
    """
    model.check_shape(graph.shape)
    asked = graph.split(split)
    known = distinct_triples(np.concatenate([graph.split(name) for name in SPLITS]), graph.shape)
    ranks = [_rank_block(model, asked[start : start + BLOCK], known) for start in range(0, len(asked), BLOCK)]
    return Metrics.of(np.concatenate(ranks) if ranks else np.zeros(0))


@torch.no_grad()
def _rank_block(model: Model, asked: Triples, known: Triples) -> npt.NDArray[np.float64]:
    device = model.device
    heads, answers, tails = (ids_on(column, device) for column in asked.T)
    scores = model.score_relations(heads, tails)[:, : model.shape.num_relations]
    refuse_nonfinite(scores, lambda row: f"({asked[row, 0]}, ?, {asked[row, 2]})")
    which, others = _known_between(asked, known, model.shape.num_entities)
    better, tied = count_above(scores, answers, ids_on(which, device), ids_on(others, device))
    return better + 1 + tied / 2


def _known_between(
    asked: Triples, known: Triples, num_entities: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """For each row asked, the relations that are known between its head and its tail."""
    pairs = known[:, 0].astype(np.int64) * num_entities + known[:, 2]
    order = np.argsort(pairs, kind="stable")
    wanted = asked[:, 0].astype(np.int64) * num_entities + asked[:, 2]
    starts, ends = (np.searchsorted(pairs[order], wanted, side=side) for side in ("left", "right"))
    counts = ends - starts
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(asked)), counts), known[order[np.repeat(starts, counts) + within], 1]
