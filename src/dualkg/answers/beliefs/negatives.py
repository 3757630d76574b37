"""False triples to tell true ones from: read from a file, or made by changing one end of a true one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualkg.answers.beliefs.evidence import Ids
from dualkg.data.graph import SPLITS, Graph, triple_keys
from dualkg.data.reading import one_source, read_triples
from dualkg.errors import DataError, RequestError

TRIES = 20  # draws from the entities of a side before any entity will do, and as many again of any


def corrupted(graph: Graph, triples: Ids, *, seed: int = 0) -> Ids:
    """For each triple a false one: its head or its tail, by a coin, is another entity.

    The other entity has stood on that side of the relation in train, so that the false triple is of the right kind.
    Where none does that is not true too, it may be any entity. A triple that some split has is never made.
    """
    random = np.random.default_rng(seed)
    triples = np.asarray(triples, dtype=np.int64)
    made = triples.copy()
    columns = np.where(random.random(len(made)) < 0.5, 0, 2)
    pools = _seen_on_each_side(graph)
    left = np.arange(len(made))
    for number in range(2 * TRIES):
        if not len(left):
            return made
        of_side = number < TRIES
        made[left, columns[left]] = _draw(made[left, 1], columns[left], pools, graph, random, of_side=of_side)
        left = left[is_known(graph, made[left])]
    for place in left:
        made[place] = _any_false(graph, triples[place], random)
    return made


def _seen_on_each_side(graph: Graph) -> dict[int, tuple[Ids, Ids]]:
    """By column, the distinct entities of each relation on that side, and where those of each begin and end."""
    pools = {}
    for column in (0, 2):
        pairs = np.unique(graph.train[:, [1, column]].astype(np.int64), axis=0)
        bounds = np.searchsorted(pairs[:, 0], np.arange(graph.shape.num_relations + 1))
        pools[column] = (pairs[:, 1], bounds)
    return pools


def _draw(
    relations: Ids,
    columns: Ids,
    pools: dict[int, tuple[Ids, Ids]],
    graph: Graph,
    random: np.random.Generator,
    *,
    of_side: bool,
) -> Ids:
    """One entity each, of those on the side of the relation, or any."""
    drawn = random.integers(0, graph.shape.num_entities, len(relations))
    if not of_side:
        return drawn
    for column, (entities, bounds) in pools.items():
        first, num = bounds[relations], bounds[relations + 1] - bounds[relations]
        its = (columns == column) & (num > 0)
        drawn[its] = entities[first[its] + random.integers(0, num[its])]
    return drawn


def _any_false(graph: Graph, triple: Ids, random: np.random.Generator) -> Ids:
    """A false triple where there are so few that chance found none: of all with another tail, or else another head."""
    for column in (2, 0):
        others = np.tile(triple, (graph.shape.num_entities, 1))
        others[:, column] = np.arange(graph.shape.num_entities)
        false = others[~is_known(graph, others)]
        if len(false):
            return np.asarray(random.choice(false), dtype=np.int64)
    head, relation, tail = graph.entities[triple[0]], graph.relations[triple[1]], graph.entities[triple[2]]
    raise RequestError(
        f"({head}, {relation}, {tail}) cannot be made false: with every other entity it is a triple of the graph too. "
        f"Give false triples of your own."
    )


def is_known(graph: Graph, triples: Ids) -> npt.NDArray[np.bool_]:
    """Whether some split has each triple."""
    known = np.concatenate([graph.split(name) for name in SPLITS])
    keys = triple_keys(np.concatenate([known, triples]), graph.shape)
    found: npt.NDArray[np.bool_] = np.isin(keys[len(known) :], keys[: len(known)])
    return found


def read_negatives(path: str | Path, graph: Graph) -> Ids:
    """False triples of a file, by the names of a graph; in any format that triples are read from."""
    read = read_triples({"negatives": one_source(path)})
    try:
        entities, relations = (
            np.array(vocabulary.ids(names.to_pylist()), dtype=np.int64)
            for vocabulary, names in ((graph.entities, read.entities), (graph.relations, read.relations))
        )
    except RequestError as error:
        raise DataError(f"{path} is not of the graph {graph.name}: {error}") from None
    heads, links, tails = read.triples["negatives"].T
    triples = np.stack([entities[heads], relations[links], entities[tails]], axis=1)
    check_false(graph, triples, str(path))
    return triples


def check_false(graph: Graph, triples: Ids, what: str) -> None:
    """Refuse false triples that the graph has as true ones."""
    true = np.flatnonzero(is_known(graph, triples))
    if len(true):
        head, relation, tail = triples[true[0]].tolist()
        named = f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"
        raise DataError(
            f"{len(true):,} of the {len(triples):,} false triples of {what} are triples of {graph.name}, {named} for "
            f"one. A false triple must be false; remove them."
        )


def beside(path: str | Path, split: str) -> Path | None:
    """The file of false triples for valid beside that of a split: valid_negatives.txt by test_negatives.txt."""
    path = Path(path)
    other = path.with_name(path.name.replace(split, "valid"))
    return other if other != path and other.is_file() else None
