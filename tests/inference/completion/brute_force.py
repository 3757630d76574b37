"""Completion of a small graph by scoring every triple."""

from itertools import product

import numpy as np
import torch

import dualkg as kg
from dualkg.inference.probability import Calibration, query_classes, triple_log_probabilities
from dualkg.inference.query_classes import NUM_CLASSES, QueryClasses
from tests.conftest import graph_of
from tests.inference.calibrations import calibration_on, recalibration_of

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


def graph_with_a_symmetric_relation(seed: int) -> kg.Graph:
    """A random graph in whose relation 0 every training triple has its reverse."""
    graph = random_graph(seed)
    first = graph.train[graph.train[:, 1] == 0]
    train = np.unique(np.concatenate([graph.train, first[:, ::-1]]), axis=0)
    return graph_of(train, graph.valid, graph.test, num_entities=9, num_relations=3)


def random_calibration(seed: int, num_relations: int = 3) -> Calibration:
    """A calibration that is recalibrated if the seed is even, for any graph with the relations."""
    random = torch.Generator().manual_seed(seed)
    slopes = 0.3 + 2 * torch.rand(num_relations, generator=random)
    offsets = 4 * torch.rand(num_relations, 4, generator=random)
    recalibration = None
    if seed % 2 == 0:
        recalibration = recalibration_of([-3.0, -1.0, 0.0, 1.0], [-4.0, -1.2, 0.4, 0.9])
    return calibration_on(
        graph_of([(0, 0, 1)], num_relations=num_relations),
        slopes=slopes.tolist(),
        offsets=offsets.tolist(),
        max_probability=0.8,
        recalibration=recalibration,
    )


def every_new_triple(
    graph, *, relations=None, heads=None, types=False, loops=False, known=("train", "valid", "test")
):
    """Ids of all triples that may be new, `(n, 3)`, in the order of head, relation, tail."""
    known_triples = {tuple(triple) for split in known for triple in graph.split(split).tolist()}
    entity_ids = range(graph.shape.num_entities)
    relation_ids = range(graph.shape.num_relations)

    classes = query_classes(graph)
    new_triples = []
    for head, relation, tail in product(entity_ids, relation_ids, entity_ids):
        if relations is not None and relation not in relations:
            continue
        if heads is not None and head not in heads:
            continue
        train_pairs = [(h, t) for h, r, t in graph.train.tolist() if r == relation]
        if graph.symmetric_relations[relation]:
            train_pairs += [(tail, head) for head, tail in train_pairs]
        if types and _has_unusual_type(classes, head, relation, tail):
            continue
        if head == tail and not loops and not _may_loop(head, train_pairs):
            continue
        if (head, relation, tail) not in known_triples:
            new_triples.append((head, relation, tail))
    return np.array(new_triples, dtype=np.int64).reshape(-1, 3)


def _has_unusual_type(classes: QueryClasses, head: int, relation: int, tail: int) -> bool:
    """Whether a page would remark that the head or the tail is of an unusual type."""
    roles = np.array([relation, classes.tail_roles[relation]])
    return NUM_CLASSES - 1 in classes.of_pairs(np.array([head, tail]), roles)


def _may_loop(entity: int, train_pairs: list[tuple[int, int]]) -> bool:
    """Whether a hundredth of the training triples are self-loops and one has the entity."""
    num_loops = sum(head == tail for head, tail in train_pairs)
    are_common = 100 * num_loops >= len(train_pairs) > 0
    return are_common and any(entity in pair for pair in train_pairs)


def complete_brute_force(
    model, graph, *, top, calibration=None, min_probability=0.0, **candidate_filter
):
    """The triples, log-probabilities and probabilities of the best, best first."""
    triples = every_new_triple(graph, **candidate_filter)
    symmetric = graph.symmetric_relations
    log_probability = triple_log_probabilities(model, triples, symmetric=symmetric).double()
    sort_key = log_probability.numpy()
    probability = None
    if calibration is not None:
        of_triples = calibration.on(graph).of_triples(triples, log_probability)
        sort_key = of_triples.log_odds
        probability = of_triples.probability

    order = np.lexsort((-log_probability.numpy(), -sort_key))
    if probability is not None:
        order = order[probability[order] >= min_probability]
    best = order[:top]
    best_probability = None if probability is None else probability[best]
    return triples[best], log_probability.numpy()[best], best_probability
