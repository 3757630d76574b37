"""Completion of a small graph by scoring every triple."""

from itertools import product

import numpy as np
import torch

import dualkg as kg
from dualkg.inference.calibration import Calibration, DomainRange, PriorCorrection
from dualkg.inference.scoring import triple_log_probabilities
from tests.conftest import graph_of

MODELS = {
    "CP": lambda shape: kg.CP(shape, dim=3, init_scale=1.5, seed=1),
    "ComplEx": lambda shape: kg.ComplEx(shape, dim=3, init_scale=1.0, seed=2),
    "ComplEx, one way": lambda shape: kg.ComplEx(
        shape, dim=3, init_scale=1.0, seed=2, reciprocal=False
    ),
    "RESCAL": lambda shape: kg.RESCAL(shape, dim=3, init_scale=1.0, seed=3),
    "RESCAL, one way": lambda shape: kg.RESCAL(
        shape, dim=3, init_scale=1.0, seed=3, reciprocal=False
    ),
    "TransE": lambda shape: kg.TransE(shape, dim=3, init_scale=1.0, seed=4),
    "TransE, one way": lambda shape: kg.TransE(
        shape, dim=3, init_scale=1.0, seed=4, reciprocal=False
    ),
    "SE, one way": lambda shape: kg.SE(shape, dim=3, init_scale=1.0, seed=5, reciprocal=False),
    "TuckER": lambda shape: kg.TuckER(shape, dim=3, init_scale=1.0, seed=6),
    "dual of CP": lambda shape: kg.Dual(kg.CP(shape, dim=3, init_scale=1.0, seed=7)),
}


def random_graph(
    seed: int, *, num_entities: int = 9, num_relations: int = 3, num_triples: int = 40
) -> kg.Graph:
    random = np.random.default_rng(seed)
    sizes = (num_entities, num_relations, num_entities)
    triples = np.stack([random.integers(0, size, num_triples) for size in sizes], axis=1)
    splits = (triples[12:], triples[:6], triples[6:12])
    return graph_of(*splits, num_entities=num_entities, num_relations=num_relations)


def random_calibration(seed: int, num_relations: int = 3) -> Calibration:
    random = torch.Generator().manual_seed(seed)
    slopes = 0.3 + 2 * torch.rand(num_relations, generator=random)
    offsets = 4 * torch.rand(num_relations, 4, generator=random)
    return Calibration(slopes, offsets, torch.ones(num_relations).bool(), max_probability=0.8)


def every_new_triple(
    graph, *, relations=None, heads=None, types=False, loops=False, known=("train", "valid", "test")
):
    """Ids of all triples that may be new, `(n, 3)`, in the order of head, relation, tail."""
    taken = {tuple(triple) for split in known for triple in graph.split(split).tolist()}
    train = graph.train.tolist()
    found = []
    for head, relation, tail in product(*(range(graph.shape[kind]) for kind in (0, 1, 0))):
        fits = not types or (
            any(triple[:2] == [head, relation] for triple in train)
            and any(triple[1:] == [relation, tail] for triple in train)
        )
        own = [triple for triple in train if triple[1] == relation]
        looped = loops or (
            100 * sum(head == tail for head, _, tail in own) >= len(own) > 0
            and any(head in triple[::2] for triple in own)
        )
        wanted = (relations is None or relation in relations) and (heads is None or head in heads)
        wanted = wanted and (head != tail or looped)
        if fits and wanted and (head, relation, tail) not in taken:
            found.append((head, relation, tail))
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def complete_brute_force(
    model, graph, *, top, calibration=None, min_probability=0.0, **candidate_filter
):
    """Triples, log_probability and probability of the best, best first."""
    triples = every_new_triple(graph, **candidate_filter)
    log_probability = triple_log_probabilities(model, triples).double()
    judged = (
        log_probability,
        torch.from_numpy(triples[:, 1]),
        torch.from_numpy(DomainRange.of(graph)(triples)),
    )
    rank_score = log_probability
    probability = None
    if calibration is not None:
        prior_correction = PriorCorrection.of(calibration, graph)
        rank_score = prior_correction.log_odds(*judged)
        probability = prior_correction.probability(*judged).numpy()
    order = np.lexsort((-log_probability.numpy(), -rank_score.numpy()))
    if probability is not None:
        order = order[probability[order] >= min_probability]
    order = order[:top]
    return (
        triples[order],
        log_probability.numpy()[order],
        None if probability is None else probability[order],
    )
