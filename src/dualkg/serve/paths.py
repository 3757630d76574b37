"""Paths between two entities: the API, and the page."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import numpy as np
from fastapi import Query, Response
from pydantic import Field

from dualkg.errors import DualkgError, RequestError
from dualkg.serve.downloads import Filtered, Table, is_unusual, table, triple_row
from dualkg.serve.entity_facts import Fact
from dualkg.serve.entity_paths import EntityPath, known_paths, predicted_paths
from dualkg.serve.errors import error_reply
from dualkg.serve.queries import EntityName
from dualkg.serve.schemas import MAX_NAME_LENGTH, Item, LabelledFact, OfRun, Schema
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import (
    CopiedQuery,
    api_router,
    page,
    page_router,
    page_url,
    snippets,
)

routes = api_router("entities")
pages = page_router()
MAX_PATHS = 100
NUM_PATHS = 10  # of either kind on the page
Start = Annotated[EntityName, Query(description="The first entity, by name or label.")]
End = Annotated[EntityName, Query(description="The last entity, by name or label.")]
Number = Annotated[
    int, Query(ge=1, le=MAX_PATHS, description="Number of known paths, and of predicted ones.")
]
GivenName = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


class Path(Schema):
    """Entities, and between each two in a row the triples that join them."""

    entities: list[Item]
    steps: list[list[LabelledFact]]
    probability: float | None = Field(
        description="The product of the probabilities of the predicted triples."
    )


class Paths(OfRun):
    """Paths of known triples, the shortest first, and paths with predicted ones, by probability."""

    start: Item
    end: Item
    known: list[Path]
    predicted: list[Path]


@routes.get("/api/paths")
@routes.get("/paths.json", include_in_schema=False)
async def paths(context: Context, start: Start, end: End, k: Number = NUM_PATHS) -> Paths:
    """Paths between two entities in the graph, and those with predicted triples.

    Known paths have at most four triples in either direction, predicted ones at most two.
    """
    run = context.run
    graph = run.graph
    first, last = await context.id(start), await context.id(end)
    if first == last:
        name = graph.entities.text(first)
        raise RequestError(f"A path is between two entities; both are {name!r}.")
    decided = context.decided

    def is_rejected(fact: Fact) -> bool:
        triple = (
            graph.entities[fact.head],
            graph.relations[fact.relation],
            graph.entities[fact.tail],
        )
        return decided.verdict(*triple) == "rejected"

    def search() -> tuple[list[EntityPath], list[EntityPath]]:
        known = known_paths(run.neighbours, first, last, k=k)
        predicted = predicted_paths(
            run.predictor, run.neighbours, first, last, k=k, is_rejected=is_rejected
        )
        return known, predicted

    known, predicted = await context.in_thread(search)
    return Paths(
        run=run.name,
        start=Item.of(graph.entities, first),
        end=Item.of(graph.entities, last),
        known=[_labelled(context, path) for path in known],
        predicted=await context.in_thread(lambda: _remarked(context, predicted)),
    )


def _labelled(context: RequestContext, path: EntityPath) -> Path:
    graph = context.run.graph
    steps = []
    for step in path.steps:
        facts = [LabelledFact.of(graph, **vars(fact)) for fact in step]
        for fact in facts:
            if fact.split is None:
                names = (fact.head.name, fact.relation.name, fact.tail.name)
                fact.verdict = context.decided.verdict(*names)
        steps.append(facts)
    return Path(
        entities=[Item.of(graph.entities, id) for id in path.entities],
        steps=steps,
        probability=path.probability,
    )


def _remarked(context: RequestContext, paths: Sequence[EntityPath]) -> list[Path]:
    """Paths whose predicted triples have remarks."""
    run = context.run
    labelled = [_labelled(context, path) for path in paths]
    facts = [fact for path in labelled for fact in predicted_facts_of(path)]
    if facts:
        triples = np.array([(fact.head.id, fact.relation.id, fact.tail.id) for fact in facts])
        for fact, remarks in zip(facts, run.remarker.of_triples(triples), strict=True):
            fact.remark(run.graph, remarks)
    return labelled


def predicted_facts_of(path: Path) -> list[LabelledFact]:
    return [fact for step in path.steps for fact in step if fact.split is None]


@pages.get("/paths")
async def paths_page(context: Context, start: GivenName = "", end: GivenName = "") -> Response:
    """The form, and the paths between two entities."""
    values: dict[str, Any] = {
        "given": {"start": start, "end": end},
        "items": {"start": None, "end": None},
        "found": None,
        "error": None,
        "of_path": predicted_facts_of,
        "symmetric": context.decided.symmetric,
        "examples": _examples(context.run),
    }
    try:
        for name, text in values["given"].items():
            if text:
                entities = context.run.graph.entities
                values["items"][name] = Item.of(entities, await context.id(text))
        if not start or not end:
            return page(context, "paths.html", **values)
        values["found"] = await paths(context, start, end)
    except DualkgError as error:
        values["error"] = error
        return page(context, "paths.html", status=error_reply(error).status, **values)
    found = values["found"]
    names = {"start": found.start.name, "end": found.end.name}
    return page(
        context,
        "paths.html",
        json=page_url(context, "/paths.json", **names),
        copies=snippets(context, _copied(**names)),
        params=names,
        **values,
    )


def _examples(run: ServedRun) -> list[tuple[Item, Item]]:
    """Pairs of the entities with most triples."""
    best = np.argsort(-run.roles.degrees, kind="stable")[:4].tolist()
    items = [Item.of(run.graph.entities, id) for id in best]
    return list(zip(items[::2], items[1::2], strict=False))


def _copied(start: str, end: str) -> CopiedQuery:
    python = (
        "import dualkg as kg\n"
        "from dualkg.serve.entity_paths import Neighbours, known_paths, predicted_paths\n\n"
        "predictor = kg.load_run(RUN).predictor()\n"
        "neighbours = Neighbours.of(predictor.graph)\n"
        f"start, end = map(predictor.graph.entities.id, ({start!r}, {end!r}))\n"
        f"known = known_paths(neighbours, start, end, k={NUM_PATHS})\n"
        f"predicted = predicted_paths(predictor, neighbours, start, end, k={NUM_PATHS})"
    )
    parameters = {"start": start, "end": end}
    get = f"/api/paths?{urlencode(parameters)}"
    return CopiedQuery("/api/paths", parameters, "serve", {"get": get}, python)


@table("paths")
async def paths_table(context: Context, start: Start, end: End, filter: Filtered) -> Table:
    """The triples of all paths, in their order."""
    found = await paths(context, start, end)
    rows = []
    for kind, of_kind in (("known", found.known), ("predicted", found.predicted)):
        for number, path in enumerate(of_kind, start=1):
            is_hidden = any(is_unusual(fact) for facts in path.steps for fact in facts)
            if filter.hide_unusual and is_hidden:
                continue
            for step, facts in enumerate(path.steps, start=1):
                for fact in facts:
                    place = {"kind": kind, "path": number, "step": step}
                    figures = {"split": fact.split, "probability": fact.probability}
                    rows.append(place | triple_row(fact) | figures)
    return Table(found.run, rows)
