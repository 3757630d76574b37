"""The best new facts, of a whole graph or of one relation: the part of a page that takes long.

The first page and the pages of relations load it when they are open.
"""

from contextlib import aclosing
from typing import Annotated

from fastapi import Query, Response

from dualkg.errors import RequestError
from dualkg.inference.decisions import Triple
from dualkg.serve.downloads import Table, fact_row, table
from dualkg.serve.facts import completion, names_of
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import CompletionLine, Item
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import page, page_router, page_url

pages = page_router()
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
NUM_BEST = 6
# More are found than are listed, since those that were decided on are left out.
NUM_FOUND = 100


async def best_facts(context: RequestContext, relation: Item | None) -> list[CompletionLine]:
    """The best new facts that nobody has decided on."""
    options = {
        "top": NUM_FOUND,
        "types": context.run.search_takes_long(relation),
        "relations": [relation.id] if relation else None,
    }
    async with aclosing(completion(context, options)) as lines:
        found = [line async for line in lines if line.kind == "triple"]

    decided = context.decided
    undecided = []
    seen: set[Triple] = set()
    for line in found:
        triple = names_of(line)
        is_reverse = triple[1] in decided.symmetric and triple[::-1] in seen
        if not is_reverse and not decided.on(*triple):
            seen.add(triple)
            undecided.append(line)
    return undecided[:NUM_BEST]


@table("best-facts", of_facts=True)
async def best_facts_table(context: Context, relation: Name = "") -> Table:
    facts = await best_facts(context, await context.relation(relation))
    return Table(context.run.name, [fact_row(fact) for fact in facts])


@pages.get("/facts/best")
async def best_facts_page(context: Context, relation: Name = "") -> Response:
    """The list as a page of its own, from which scripts take the list."""
    chosen = await context.relation(relation)
    error = None
    facts: list[CompletionLine] = []
    try:
        facts = await best_facts(context, chosen)
    except RequestError as problem:  # such as a model without probabilities
        error = problem
    json = page_url(
        context,
        "/facts.json",
        relation=relation or None,
        top=NUM_FOUND,
        types=str(context.run.search_takes_long(chosen)).lower(),
    )
    return page(context, "best_facts.html", json=json, facts=facts, relation=chosen, error=error)
