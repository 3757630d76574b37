"""Relations: what the graph says about one, how well the model predicts it; and its page."""

from collections.abc import Collection
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from fastapi import Response
from pydantic import Field

from dualkg.data.graph import SPLITS, Graph
from dualkg.data.graph import Triples as TripleIds
from dualkg.data.inspection import Inspection
from dualkg.data.roles import End, Role
from dualkg.evaluation.metrics import Metrics
from dualkg.evaluation.ranking import Ranks
from dualkg.models.base import SIDES
from dualkg.serve.downloads import Table, item_row, table, triple_row
from dualkg.serve.schemas import (
    MAX_NAME_LENGTH,
    CountedEntity,
    HardQuery,
    Item,
    RelationEndDetails,
    RelationPage,
    RoleShare,
    SimilarRelation,
    Triple,
)
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router, page_url

routes = page_router()
pages = page_router()
COLUMNS: dict[End, int] = {"head": 0, "tail": 2}
NUM_COMMON = 5  # roles, and entities, of one end
NUM_EXAMPLES = 6
NUM_HARDEST = 10
RelationName = Annotated[
    str, Field(max_length=MAX_NAME_LENGTH, description="A relation, by name or label.")
]


# The last address is for names that a browser would change in a path, such as `..`.
@routes.get("/relation/{name:name}.json")
@routes.get("/relation.json")
async def relation(context: Context, name: RelationName) -> RelationPage:
    """Counts, domain and range, similar relations, metrics, examples and the hardest queries."""
    id = await context.id(name, "relation")
    run = context.run
    return await context.in_thread(lambda: relation_details(run, id))


@pages.get("/relation")
@pages.get("/relation/{name:name}")
async def relation_page(context: Context, name: RelationName) -> Response:
    details = await relation(context, name)
    return page(
        context,
        "relation.html",
        json=page_url(context, f"/relation/{quote(details.relation.name, safe='')}.json"),
        details=details,
        search_at_once=not context.run.search_takes_long(details.relation),
    )


@table("relation-facts", of_facts=True)
async def facts_table(context: Context, name: RelationName) -> Table:
    """All known facts of a relation."""
    id = await context.id(name, "relation")
    graph = context.run.graph

    def rows() -> list[dict[str, Any]]:
        found = []
        for split in SPLITS:
            triples = graph.split(split)
            for ids in triples[triples[:, 1] == id].tolist():
                found.append({**triple_row(Triple.of(graph, *ids)), "split": split})
        return found

    return Table(context.run.name, await context.in_thread(rows))


@table("relation-entities")
async def entities_table(context: Context, name: RelationName) -> Table:
    """What the entities at both ends are in other relations, and those in most facts."""
    details = await relation(context, name)
    rows = []
    for side, end in (("head", details.domain), ("tail", details.range)):
        for role in end.roles:
            row = {"end": side, **item_row(role.relation, "relation")}
            rows.append({**row, "end_of_relation": role.end, "share": role.share})
        for counted in end.common:
            row = {"end": side, **item_row(counted, "entity")}
            rows.append({**row, "num_triples": counted.num_triples})
    return Table(details.run, rows)


@table("relation-metrics")
async def metrics_table(context: Context, name: RelationName) -> Table:
    """The metrics on test by missing part, and the metrics of all relations."""
    details = await relation(context, name)
    rows = [{"missing": side, **metrics} for side, metrics in details.metrics.items()]
    if details.metrics_of_all:
        rows.append({"missing": "of all relations", **details.metrics_of_all})
    return Table(details.run, rows)


@table("hardest-queries")
async def hardest_table(context: Context, name: RelationName) -> Table:
    details = await relation(context, name)
    rows = [
        {**triple_row(query), "missing": query.direction, "rank": query.rank}
        for query in details.hardest
    ]
    return Table(details.run, rows)


def relation_details(run: ServedRun, id: int) -> RelationPage:
    report = run.run.report_on("test") if len(run.graph.test) else None
    page = profile_of(
        run.graph, id, inspection=run.inspection, ranks=report.ranks if report else None
    )
    page.run = run.name
    page.metrics_of_all = report.metrics.as_dict() if report else None
    return page


def profile_of(
    graph: Graph, relation: int, *, inspection: Inspection, ranks: Ranks | None
) -> RelationPage:
    """What a graph says about a relation; `ranks` are the ranks of a model on test."""
    item = Item.of(graph.relations, relation)
    facts = inspection.by_relation[item.name]
    by_split = [graph.split(split) for split in SPLITS]
    triples = np.concatenate([part[part[:, 1] == relation] for part in by_split])
    return RelationPage(
        run="",
        relation=item,
        counts={split: getattr(facts, split) for split in SPLITS},
        cardinality=facts.cardinality,
        tails_per_head=facts.tails_per_head,
        heads_per_tail=facts.heads_per_tail,
        symmetry=facts.symmetry,
        self_loops=facts.self_loops,
        domain=end_of(graph, triples, relation, end="head"),
        range=end_of(graph, triples, relation, end="tail"),
        similar=_similar(graph, item, inspection),
        metrics={} if ranks is None else _metrics_by_side(ranks, relation),
        metrics_of_all=None,
        examples=[Triple.of(graph, *ids) for ids in _spread(triples, NUM_EXAMPLES)],
        hardest=[] if ranks is None else hardest_queries(graph, ranks, relation),
    )


def end_of(graph: Graph, triples: TripleIds, relation: int, *, end: End) -> RelationEndDetails:
    """The entities at one end of a relation, given its triples."""
    entities, numbers = np.unique(triples[:, COLUMNS[end]], return_counts=True)
    common = []
    for row in np.argsort(-numbers, kind="stable")[:NUM_COMMON].tolist():
        item = Item.of(graph.entities, int(entities[row]))
        common.append(CountedEntity(**item.model_dump(), num_triples=int(numbers[row])))
    own = {Role(relation, end)}
    if graph.symmetric_relations[relation]:
        own = {Role(relation, both) for both in COLUMNS}
    return RelationEndDetails(
        num_entities=len(entities), roles=_common_roles(graph, entities, own), common=common
    )


def _common_roles(
    graph: Graph, entities: npt.NDArray[np.int32], own: Collection[Role]
) -> list[RoleShare]:
    """The commonest roles of entities besides those that all of them have."""
    num_entities = graph.shape.num_entities
    is_member = np.zeros(num_entities, dtype=bool)
    is_member[entities] = True
    triples = np.concatenate([graph.split(split) for split in SPLITS]).astype(np.int64)

    shares = []
    for end, column in COLUMNS.items():
        of_members = triples[is_member[triples[:, column]]]
        keys = np.unique(of_members[:, 1] * num_entities + of_members[:, column])
        numbers = np.bincount(keys // num_entities)
        for relation in np.flatnonzero(numbers).tolist():
            if Role(relation, end) not in own:
                item = Item.of(graph.relations, relation)
                share = float(numbers[relation] / len(entities))
                shares.append(RoleShare(relation=item, end=end, share=share))
    shares.sort(key=lambda role: -role.share)
    return shares[:NUM_COMMON]


def _metrics_by_side(ranks: Ranks, relation: int) -> dict[str, dict[str, float | None]]:
    """The metrics of the queries of a relation by their missing part; none without queries."""
    chosen = ranks.triples[:, 1] == relation
    if not chosen.any():
        return {}
    return {side: Metrics.of(ranks.mean[row, chosen]).as_dict() for row, side in enumerate(SIDES)}


def hardest_queries(graph: Graph, ranks: Ranks, relation: int) -> list[HardQuery]:
    """The queries of a relation whose answers have the highest ranks, highest first."""
    rows = np.flatnonzero(ranks.triples[:, 1] == relation)
    of_relation = ranks.mean[:, rows].reshape(-1)
    hardest = []
    for query in np.argsort(-of_relation, kind="stable")[:NUM_HARDEST].tolist():
        side, place = divmod(query, len(rows))
        ids = ranks.triples[rows[place]].tolist()
        rank = float(of_relation[query])
        hardest.append(HardQuery.of(graph, *ids, direction=SIDES[side], rank=rank))
    return hardest


def _spread(triples: TripleIds, number: int) -> list[Any]:
    """Triples at equal distances, so that their names begin with different letters."""
    places = np.linspace(0, len(triples) - 1, min(number, len(triples))).astype(int)
    return list(triples[places].tolist())


def _similar(graph: Graph, relation: Item, inspection: Inspection) -> list[SimilarRelation]:
    """Duplicate and inverse relations; a symmetric relation is its own inverse."""
    similar = []
    for row in inspection.redundant:
        if relation.name not in (row.relation, row.other):
            continue
        is_first = row.relation == relation.name
        other = row.other if is_first else row.relation
        similar.append(
            SimilarRelation(
                kind=row.kind,
                relation=Item.of(graph.relations, graph.relations.id(other)),
                num_common=row.common,
                share=row.overlap[0 if is_first else 1],
            )
        )
    return similar
