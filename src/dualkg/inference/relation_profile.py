"""What a graph says about one relation, and how well a model predicts it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.inspection import Inspection, RedundantRelations, RelationFacts
from dualkg.data.roles import End, Role
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import Ranks
from dualkg.models.base import SIDES
from dualkg.tables.lookup import Side

COLUMNS: dict[End, int] = {"head": 0, "tail": 2}
NUM_COMMON = 5  # roles, and entities, of one end
NUM_EXAMPLES = 6
NUM_HARDEST = 10


class CommonRole(NamedTuple):
    """A role, and the share of the entities at one end of a relation that have it."""

    role: Role
    share: float


class CommonEntity(NamedTuple):
    """An entity, and the number of triples of a relation with it at one end."""

    id: int
    num_triples: int


@dataclass(frozen=True)
class RelationEnd:
    """The entities at one end of a relation: its domain (heads) or its range (tails).

    They are counted on all splits. `roles` are the other roles that most of them have, and `common`
    the entities with most triples.
    """

    num_entities: int
    roles: list[CommonRole]
    common: list[CommonEntity]


class RankedQuery(NamedTuple):
    """A test triple, the missing part of its query, and the realistic rank of its answer."""

    triple: tuple[int, int, int]
    side: Side
    rank: float


@dataclass(frozen=True)
class RelationProfile:
    """Counts, ends, redundancy and examples of a relation, and test metrics of a model.

    `metrics` are by the missing part, and empty without test triples of the relation. `hardest` are
    the queries whose answers have the highest ranks.
    """

    facts: RelationFacts
    ends: dict[End, RelationEnd]
    redundant: list[RedundantRelations]
    examples: list[tuple[int, int, int]]
    metrics: dict[Side, Metrics]
    hardest: list[RankedQuery]

    @classmethod
    def of(
        cls, graph: Graph, relation: int, *, inspection: Inspection, ranks: Ranks | None
    ) -> "RelationProfile":
        """The profile of a relation by id; `ranks` are those of a model on test, if it has any."""
        name = graph.relations[relation]
        by_split = [graph.split(split) for split in SPLITS]
        triples = np.concatenate([part[part[:, 1] == relation] for part in by_split])
        redundant = [row for row in inspection.redundant if name in (row.relation, row.other)]
        return cls(
            facts=inspection.by_relation[name],
            ends={end: end_of(graph, triples, relation, end=end) for end in COLUMNS},
            redundant=redundant,
            examples=_spread(triples, NUM_EXAMPLES),
            metrics={} if ranks is None else metrics_by_side(ranks, relation),
            hardest=[] if ranks is None else hardest_queries(ranks, relation),
        )


def end_of(graph: Graph, triples: Triples, relation: int, *, end: End) -> RelationEnd:
    """The entities at one end of a relation, given its triples."""
    entities, numbers = np.unique(triples[:, COLUMNS[end]], return_counts=True)
    order = np.argsort(-numbers, kind="stable")[:NUM_COMMON].tolist()
    common = [CommonEntity(int(entities[row]), int(numbers[row])) for row in order]
    own = {Role(relation, end)}
    if graph.symmetric_relations[relation]:
        own = {Role(relation, both) for both in COLUMNS}
    return RelationEnd(len(entities), _common_roles(graph, entities, own), common)


def _common_roles(
    graph: Graph, entities: npt.NDArray[np.int32], own: Collection[Role]
) -> list[CommonRole]:
    """The commonest roles of entities besides those that all of them have."""
    is_member = np.zeros(graph.shape.num_entities, dtype=bool)
    is_member[entities] = True
    triples = np.concatenate([graph.split(split) for split in SPLITS]).astype(np.int64)

    shares = []
    for end, column in COLUMNS.items():
        of_members = triples[is_member[triples[:, column]]]
        keys = np.unique(of_members[:, 1] * graph.shape.num_entities + of_members[:, column])
        numbers = np.bincount(keys // graph.shape.num_entities)
        for relation in np.flatnonzero(numbers).tolist():
            role = Role(relation, end)
            if role not in own:
                shares.append(CommonRole(role, float(numbers[relation] / len(entities))))
    shares.sort(key=lambda common: -common.share)
    return shares[:NUM_COMMON]


def metrics_by_side(ranks: Ranks, relation: int) -> dict[Side, Metrics]:
    """The metrics of the queries of a relation by their missing part; none without queries."""
    chosen = ranks.triples[:, 1] == relation
    if not chosen.any():
        return {}
    return {side: Metrics.of(ranks.mean[row, chosen]) for row, side in enumerate(SIDES)}


def hardest_queries(ranks: Ranks, relation: int) -> list[RankedQuery]:
    """The queries of a relation whose answers have the highest ranks, highest first."""
    rows = np.flatnonzero(ranks.triples[:, 1] == relation)
    of_relation = ranks.mean[:, rows].reshape(-1)
    hardest = []
    for query in np.argsort(-of_relation, kind="stable")[:NUM_HARDEST].tolist():
        side, place = divmod(query, len(rows))
        head, _, tail = ranks.triples[rows[place]].tolist()
        rank = float(of_relation[query])
        hardest.append(RankedQuery((head, relation, tail), SIDES[side], rank))
    return hardest


def _spread(triples: Triples, number: int) -> list[Any]:
    """Triples at equal distances, so that their names begin with different letters."""
    places = np.linspace(0, len(triples) - 1, min(number, len(triples))).astype(int)
    return [tuple(row) for row in triples[places].tolist()]
