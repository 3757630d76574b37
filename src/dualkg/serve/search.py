"""The search in the header of all pages: entities and relations by a part of their name."""

from typing import Annotated

from fastapi import Query, Response

from dualkg.serve.downloads import Table, item_row, table
from dualkg.serve.entities import matched_entities
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import Item, MatchedRelation, SearchPage
from dualkg.serve.service import Context, ServedRun
from dualkg.serve.templating import page, page_router, page_url, relation_text, short

pages = page_router()
MAX_FOUND = 100
NUM_RELATIONS = 5
Typed = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


@pages.get("/search.json")
async def search(
    context: Context, q: Typed = "", k: Annotated[int, Query(ge=1, le=MAX_FOUND)] = 50
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
