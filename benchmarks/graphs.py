"""Synthetic graphs of any size, with skewed degrees: `python benchmarks/graphs.py --help`."""

import argparse

import numpy as np
import numpy.typing as npt

import dualkg as kg
from dualkg.data.graph import Triples

Ids = npt.NDArray[np.int64]

# The k-th most frequent of n has a frequency in proportion to k^(1/power - 1), so that the most
# frequent tenth has a share of 0.1^(1/power): a third of the heads, a half of the tails and of the
# relations, as in FB15k-237.
HEAD_POWER = 2.0
TAIL_POWER = 3.0
RELATION_POWER = 4.0


def generate_graph(
    num_entities: int, num_triples: int, *, num_relations: int = 100, seed: int = 0
) -> kg.Graph:
    """A graph of distinct training triples, the same for the same seed.

    Every entity is a head and every relation is used, where there are triples enough.
    """
    if num_triples * 4 > num_entities**2 * num_relations:
        raise ValueError(
            f"{num_triples:,} distinct triples of {num_entities:,} entities and {num_relations:,} "
            "relations are more than a quarter of all there can be: take more entities or fewer "
            "triples."
        )
    random = np.random.default_rng(seed)
    triples = _distinct_triples(kg.GraphShape(num_entities, num_relations), num_triples, random)
    entities = kg.Vocabulary([f"e{number}" for number in range(num_entities)])
    relations = kg.Vocabulary([f"r{number}" for number in range(num_relations)], kind="relation")
    empty = np.empty((0, 3), dtype=np.int32)
    return kg.Graph(
        f"{num_triples:,} made triples", entities, relations, train=triples, valid=empty, test=empty
    )


def _distinct_triples(
    shape: kg.GraphShape, num_triples: int, random: np.random.Generator
) -> Triples:
    """Draw triples until there are enough distinct ones.

    Those that use every entity and relation are drawn first, and stay.
    """
    codes = np.unique(_draw(shape, num_triples, random, use_all=True))
    while len(codes) < num_triples:
        num_missing = num_triples - len(codes)
        new_codes = np.setdiff1d(_draw(shape, 2 * num_missing, random), codes)
        codes = np.concatenate([codes, random.permutation(new_codes)[:num_missing]])
    queries, tails = np.divmod(random.permutation(codes), shape.num_entities)
    heads, relations = np.divmod(queries, shape.num_relations)
    # Small numbers are frequent ones, and the id of an entity should not tell its frequency.
    entity_ids = random.permutation(shape.num_entities)
    relation_ids = random.permutation(shape.num_relations)
    columns = [entity_ids[heads], relation_ids[relations], entity_ids[tails]]
    return np.stack(columns, axis=1).astype(np.int32)


def _draw(
    shape: kg.GraphShape, num: int, random: np.random.Generator, *, use_all: bool = False
) -> Ids:
    """Triples, each coded as one number."""
    heads = skewed(shape.num_entities, num, HEAD_POWER, random)
    relations = skewed(shape.num_relations, num, RELATION_POWER, random)
    tails = skewed(shape.num_entities, num, TAIL_POWER, random)
    if use_all:
        for ids, size in ((heads, shape.num_entities), (relations, shape.num_relations)):
            ids[:size] = np.arange(size)[:num]
    return (heads * shape.num_relations + relations) * shape.num_entities + tails


def skewed(size: int, num: int, power: float, random: np.random.Generator) -> Ids:
    """Numbers below `size`, small ones more often: Zipf's law with the exponent 1 - 1/power."""
    return (size * random.random(num) ** power).astype(np.int64)


def share_of_most_frequent(ids: npt.NDArray[np.integer], size: int, part: float = 0.1) -> float:
    """The share of all occurrences that the most frequent part of `size` ids has."""
    counts = np.sort(np.bincount(ids, minlength=size))[::-1]
    return float(counts[: max(1, int(size * part))].sum() / counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entities", type=int, default=100_000)
    parser.add_argument("--triples", type=int, default=1_000_000)
    parser.add_argument("--relations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    choices = parser.parse_args()
    graph = generate_graph(
        choices.entities, choices.triples, num_relations=choices.relations, seed=choices.seed
    )
    print(graph)
    for name, column, size in (
        ("heads", 0, choices.entities),
        ("relations", 1, choices.relations),
        ("tails", 2, choices.entities),
    ):
        share = share_of_most_frequent(graph.train[:, column], size)
        print(f"The most frequent tenth of the {name} has {share:.0%} of the triples.")


if __name__ == "__main__":
    main()
