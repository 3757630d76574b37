"""Search for entities and relations by a part of their name, in the API and on all pages."""

from typing import Annotated

from fastapi import Query, Response

from dualkg.data.roles import End
from dualkg.serve.downloads import Table, item_row, table
from dualkg.serve.queries import EntityName
from dualkg.serve.schemas import (
    MAX_MATCHES,
    MAX_NAME_LENGTH,
    Item,
    MatchedEntities,
    MatchedEntity,
    MatchedRelation,
    SearchPage,
)
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context
from dualkg.serve.templating import (
    api_router,
    page,
    page_router,
    page_url,
    relation_text,
    short,
)

routes = api_router("entities")
pages = page_router()
MAX_RELATION = 40  # characters of the relation of a found entity
NUM_RELATIONS = 5
Typed = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


@routes.get("/api/entities")
async def entities(
    context: Context,
    q: Annotated[
        EntityName,
        Query(
            description="The beginning of a name, a part of it, or a misspelling.", examples=["a"]
        ),
    ],
    k: Annotated[int, Query(ge=1, le=MAX_MATCHES, description="Number of names.")] = 10,
) -> MatchedEntities:
    """Search entities by name while typing; case and accents are ignored."""
    run = context.run
    matched = await context.in_thread(lambda: matched_entities(run, q, limit=k))
    return MatchedEntities(run=run.name, q=q, entities=matched)


def matched_entities(run: ServedRun, q: str, *, limit: int) -> list[MatchedEntity]:
    """Entities by a part of their name, with what they are."""
    matched = []
    for match in run.name_search.search(q, limit=limit):
        item = Item.of(run.graph.entities, match.id)
        degree = int(run.roles.degrees[match.id])
        role = run.roles.of_entity(match.id)
        relation = None if role is None else run.relations[role.relation]
        end = None if role is None else role.end
        matched.append(
            MatchedEntity(
                **item.model_dump(),
                match_type=match.match_type,
                degree=degree,
                relation=relation,
                end=end,
                text=short(item.label),
                note=short(item.name) if item.name != item.label else None,
                about=about_entity(degree, relation, end),
            )
        )
    return matched


def about_entity(degree: int, relation: Item | None, end: End | None) -> str:
    """`borders → · 34 facts` for the head of a relation, `→ currency · 9 facts` for a tail."""
    facts = f"{degree:,} {'fact' if degree == 1 else 'facts'}"
    if relation is None:
        return facts
    text = relation_text(relation.label, MAX_RELATION)
    return f"{text} → · {facts}" if end == "head" else f"→ {text} · {facts}"


@pages.get("/search.json")
async def search(
    context: Context, q: Typed = "", k: Annotated[int, Query(ge=1, le=MAX_MATCHES)] = 50
) -> SearchPage:
    """The `k` best entities, and a few relations.

    Names that are only similar to the typed text are left out if others contain it.
    """
    run = context.run

    def find() -> SearchPage:
        matched = matched_entities(run, q, limit=k)
        relations = _matched_relations(run, q)
        entities_with_text = [match for match in matched if match.match_type != "fuzzy"]
        relations_with_text = [match for match in relations if match.match_type != "fuzzy"]
        if entities_with_text or relations_with_text:
            matched = entities_with_text
            relations = relations_with_text
        return SearchPage(run=run.name, q=q, entities=matched, relations=relations)

    return await context.in_thread(find)


@pages.get("/search")
async def search_page(context: Context, q: Typed = "") -> Response:
    found = await search(context, q)
    return page(context, "search.html", json=page_url(context, "/search.json", q=q), found=found)


@table("search")
async def search_table(context: Context, q: Typed = "") -> Table:
    found = await search(context, q)
    rows = []
    for kind, items in (("entity", found.entities), ("relation", found.relations)):
        rows += [{"kind": kind, **item_row(item, "name"), "about": item.about} for item in items]
    return Table(found.run, rows)


def _matched_relations(run: ServedRun, q: str) -> list[MatchedRelation]:
    matched = []
    for match in run.relation_search.search(q, limit=NUM_RELATIONS):
        item = Item.of(run.graph.relations, match.id)
        number = run.num_triples[match.id]
        matched.append(
            MatchedRelation(
                **item.model_dump(),
                match_type=match.match_type,
                num_triples=number,
                text=relation_text(item.label),
                note=short(item.name) if item.name != item.label else None,
                about=f"relation · {number:,} {'fact' if number == 1 else 'facts'}",
            )
        )
    return matched
