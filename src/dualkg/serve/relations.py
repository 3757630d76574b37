"""Relations: what the graph says about one, how well the model predicts it; and the page of it."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Response
from pydantic import Field

from dualkg.data.graph import SPLITS
from dualkg.inference.relation_profile import RelationEnd, RelationProfile
from dualkg.serve.downloads import Table, item_row, table, triple_row
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import (
    CountedEntity,
    HardQuery,
    Item,
    RelationEndDetails,
    RelationPage,
    RoleShare,
    SimilarRelation,
    Triple,
)
from dualkg.serve.service import Context, ServedRun
from dualkg.serve.templating import page, page_router, page_url

pages = page_router()
RelationName = Annotated[
    str, Field(max_length=MAX_NAME_LENGTH, description="A relation, by name or label.")
]


# The last address is for names that a browser would change in a path, such as `..`.
@pages.get("/relation/{name:name}.json")
@pages.get("/relation.json")
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
    """The metrics on test by missing part, and those of all relations."""
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
    graph = run.graph
    report = run.run.report_on("test") if len(graph.test) else None
    profile = RelationProfile.of(
        graph, id, inspection=run.inspection, ranks=report.ranks if report else None
    )
    facts = profile.facts
    return RelationPage(
        run=run.name,
        relation=run.relations[id],
        counts={split: getattr(facts, split) for split in SPLITS},
        cardinality=facts.cardinality,
        tails_per_head=facts.tails_per_head,
        heads_per_tail=facts.heads_per_tail,
        symmetry=facts.symmetry,
        self_loops=facts.self_loops,
        domain=_end(run, profile.ends["head"]),
        range=_end(run, profile.ends["tail"]),
        similar=_similar(run, id, profile),
        metrics={side: metrics.as_dict() for side, metrics in profile.metrics.items()},
        metrics_of_all=report.metrics.as_dict() if report else None,
        examples=[Triple.of(graph, *triple) for triple in profile.examples],
        hardest=[
            HardQuery.of(graph, *query.triple, direction=query.side, rank=query.rank)
            for query in profile.hardest
        ],
    )


def _end(run: ServedRun, end: RelationEnd) -> RelationEndDetails:
    entities = run.graph.entities
    return RelationEndDetails(
        num_entities=end.num_entities,
        roles=[
            RoleShare(relation=run.relations[role.relation], end=role.end, share=share)
            for role, share in end.roles
        ],
        common=[
            CountedEntity(**Item.of(entities, id).model_dump(), num_triples=number)
            for id, number in end.common
        ],
    )


def _similar(run: ServedRun, id: int, profile: RelationProfile) -> list[SimilarRelation]:
    """Duplicate and inverse relations; a symmetric relation is its own inverse."""
    relations = run.graph.relations
    similar = []
    for row in profile.redundant:
        is_first = row.relation == relations[id]
        other = row.other if is_first else row.relation
        similar.append(
            SimilarRelation(
                kind=row.kind,
                relation=run.relations[relations.id(other)],
                num_common=row.common,
                share=row.overlap[0 if is_first else 1],
            )
        )
    return similar
