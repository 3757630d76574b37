"""Relation prediction: where the relation of each triple stands among all relations of the graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import Asked, evaluating, fastest_count, full_precision, refuse_nonfinite
from dualkg.models.base import Model

BLOCK = 1024  # queries scored at once


@torch.no_grad()
def evaluate_relations(model: Model, graph: Graph, *, split: Split = "test") -> Metrics:
    """Ask (head, ?, tail) of every triple of a split; filtered by all three splits, ties at their mean.

    Candidates are the graph's own relations: their inverses are the same facts said the other way round.
    """
    model.check_shape(graph.shape)
    num_relations, triples, device = graph.shape.num_relations, graph.split(split), model.device
    heads, relations, tails = torch.tensor(triples, device=device).long().unbind(1)
    known, first, last = (found.to(device) for found in _known_between(triples, graph))
    count = fastest_count(device.type, len(triples) * num_relations)
    counts = torch.empty(len(triples), 2, dtype=torch.int32, device=device)
    with full_precision(), evaluating(model):
        for start in range(0, len(triples), BLOCK):
            block = slice(start, start + BLOCK)
            scores = model.score_relations(heads[block], tails[block])[:, :num_relations]
            rows = torch.arange(len(scores), device=device)
            counts[block] = count(scores, known, Asked(rows, relations[block], first[block], last[block]))
    found = counts.cpu().numpy().astype(np.int64)
    refuse_nonfinite(found, lambda row: f"({triples[row, 0]}, ?, {triples[row, 2]})")
    better, tied = found.T
    return Metrics.of(better + 1 + tied / 2)


def _known_between(asked: Triples, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """The relations of all pairs, known from any split, and where those of each triple's pair begin and end."""
    known = distinct_triples(np.concatenate([graph.split(name) for name in SPLITS]), graph.shape)
    num_entities = graph.shape.num_entities
    pairs, wanted = (triples[:, 0].astype(np.int64) * num_entities + triples[:, 2] for triples in (known, asked))
    order = np.argsort(pairs, kind="stable")
    first, last = (np.searchsorted(pairs[order], wanted, side=side) for side in ("left", "right"))
    return torch.from_numpy(known[order, 1]), torch.from_numpy(first), torch.from_numpy(last)
