"""Entities: search by name, everything about one, and the map of all; and their pages."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from fastapi import Query, Response
from fastapi.responses import JSONResponse

from dualkg.inference.predictor import known_facts, predicted_facts
from dualkg.serve.limits import MAX_MATCHES, MAX_NAME_LENGTH
from dualkg.serve.queries import EntityName, page_query, query_results
from dualkg.serve.schemas import (
    Entity,
    EntityMap,
    Item,
    LabelledFact,
    MatchedEntities,
    MatchedEntity,
)
from dualkg.serve.service import Context, ServedRun, UnknownNameError
from dualkg.serve.templating import api_router, links, page, page_router, page_url, short, visible

routes = api_router("entities")
pages = page_router()
MAX_KNOWN = 500
NUM_PREDICTED = 20
NUM_SIMILAR = 10
MAP_SHARE = 0.8  # of the time limit of a request that it waits for a map
MAP_PREDICTIONS = 200
MIN_SCALE = 0.002  # probability that is coloured fully on the map if no prediction has a higher one
FIRST = "/entities/0/name"
MAX_ROWS = 22  # on one side of the wide drawing
# Known and predicted neighbours of each relation, from the most detailed drawing to the least.
DETAILS = ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1))
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
End = Literal["tail", "head"]


@routes.get("/api/entities", responses=links(entity={"name": FIRST}, similar={"entity": FIRST}))
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
    names = context.run.graph.entities
    search = context.run.name_search.search
    found = []
    for match in await context.in_thread(lambda: search(q, limit=k)):
        item = Item.of(names, match.id)
        note = short(item.name) if item.name != item.label else None
        found.append(
            MatchedEntity(
                **dict(item), match_type=match.match_type, text=short(item.label), note=note
            )
        )
    return MatchedEntities(run=context.run.name, q=q, entities=found)


@routes.get("/api/entity/{name:name}")
@routes.get("/entity/{name:name}.json", include_in_schema=False)
@routes.get(
    "/entity.json", include_in_schema=False
)  # for names that a browser would change in a path, such as `..`
async def entity(context: Context, name: EntityName) -> Entity:
    """Known facts, predicted facts and similar entities of an entity."""
    run = context.run
    graph = context.run.graph
    id = await context.id(name)
    similar = await context.predict("similar", id, k=NUM_SIMILAR)
    known, num_known = await context.in_thread(
        lambda: known_facts(run.predictor, id, limit=MAX_KNOWN)
    )
    predicted = await context.in_thread(lambda: predicted_facts(run.predictor, id, k=NUM_PREDICTED))
    return Entity(
        run=run.name,
        entity=Item.of(graph.entities, id),
        num_known=num_known,
        known=[LabelledFact.of(graph, **vars(fact)) for fact in known],
        predicted=[LabelledFact.of(graph, **vars(fact)) for fact in predicted],
        similar=similar,
    )


@pages.get("/entity")
@pages.get("/entity/{name:name}")
async def entity_page(context: Context, name: EntityName) -> Response:
    try:
        found = await entity(context, name)
    except UnknownNameError as error:
        names = context.run.graph.entities
        similar = [Item.of(names, names.id(name)) for name in error.suggestions]
        return page(context, "unknown_entity.html", status=404, error=error, similar=similar)
    groups = groups_of(found)
    return page(
        context,
        "entity.html",
        json=page_url(context, "/entity.json", name=found.entity.name),
        found=found,
        groups=groups,
        sides=[
            fitting([group for group in groups if group.outwards is out], MAX_ROWS)
            for out in (False, True)
        ],
        tree=fitting(groups, 2 * MAX_ROWS),
    )


@dataclass(frozen=True)
class Group:
    """Facts with one relation: their tails are neighbours of the entity if `outwards`, else their
    heads.
    """

    relation: Item
    outwards: bool
    known: list[LabelledFact] = field(default_factory=list)
    predicted: list[LabelledFact] = field(default_factory=list)
    num_omitted: int = 0

    @property
    def anchor(self) -> str:
        """The id of the list of all these facts on the page."""
        return f"{'to' if self.outwards else 'from'}-{self.relation.id}"

    @property
    def rows(self) -> list[LabelledFact | None]:
        """The rows of a drawing; None is the number of omitted neighbours."""
        return [*self.known, *self.predicted, *([None] if self.num_omitted else [])]

    def neighbour(self, fact: LabelledFact) -> Item:
        return fact.tail if self.outwards else fact.head

    def shortened(self, num_known: int, num_predicted: int) -> "Group":
        num_omitted = max(0, len(self.known) - num_known)
        if num_omitted == 1:  # "1 more" takes as much space as the neighbour itself
            num_known = num_known + 1
            num_omitted = 0
        known = self.known[:num_known]
        predicted = self.predicted[:num_predicted]
        return replace(self, known=known, predicted=predicted, num_omitted=num_omitted)


def groups_of(found: Entity) -> list[Group]:
    """Facts by relation and direction: outward ones first, then by size. A triple of two splits
    counts once.
    """
    groups: dict[tuple[bool, int], Group] = {}
    facts: dict[tuple[int, int, int], LabelledFact] = {}
    for fact in [*found.known, *found.predicted]:
        facts.setdefault((fact.head.id, fact.relation.id, fact.tail.id), fact)
    for fact in facts.values():
        outwards = fact.head.id == found.entity.id
        group = groups.setdefault((outwards, fact.relation.id), Group(fact.relation, outwards))
        (group.predicted if fact.split is None else group.known).append(fact)
    return sorted(
        groups.values(),
        key=lambda group: (not group.outwards, -len(group.known), group.relation.id),
    )


def fitting(groups: list[Group], max_rows: int) -> list[Group]:
    """The groups with as many neighbours as fit into a drawing."""
    for details in DETAILS:
        short = [group.shortened(*details) for group in groups]
        if sum(len(group.rows) for group in short) <= max_rows:
            break
    while sum(len(group.rows) for group in short) > max_rows:
        short.pop()
    return short


@routes.get(
    "/api/map", response_model=EntityMap, responses={202: {"description": "Still being computed."}}
)
@routes.get("/map.json", include_in_schema=False)
async def entity_map(context: Context) -> Response:
    """The t-SNE position of each entity; computed once, which may take minutes, and stored. Until
    then 202.
    """
    service = context.service
    run = context.run
    future = asyncio.wrap_future(service.entity_map(run))
    done, _ = await asyncio.wait([future], timeout=MAP_SHARE * service.limits.seconds)
    if not done:
        message = f"The map of {len(run.graph.entities):,} entities is being computed. Try again in a while."
        return JSONResponse(
            {"run": run.name, "message": message}, status_code=202, headers={"Retry-After": "10"}
        )
    positions = future.result()
    body = await context.in_thread(
        lambda: _map(run, *positions.round(5).T.tolist()).model_dump_json()
    )
    return Response(body, media_type="application/json")


def _map(run: ServedRun, x: list[float], y: list[float]) -> EntityMap:
    vocabulary = run.graph.entities
    names = vocabulary.names.to_pylist()
    given = names if vocabulary.labels is None else vocabulary.labels.to_pylist()
    labels = [visible(label or name) for label, name in zip(given, names, strict=True)]
    return EntityMap(
        run=run.name, x=x, y=y, names=names, labels=None if labels == names else labels
    )


@pages.get("/map")
async def map_page(
    context: Context, entity: Name = "", relation: Name = "", find: End = "tail"
) -> Response:
    """The frame; a script draws the map, since it moves."""
    return page(
        context,
        "map.html",
        json=page_url(context, "/map.json"),
        entity=Item.of(context.run.graph.entities, await context.id(entity)) if entity else None,
        relation=context.run.relations[await context.id(relation, "relation")]
        if relation
        else None,
        find=find,
    )


@pages.get("/map/predictions")
async def map_predictions(
    context: Context, entity: Name, relation: Name, find: End = "tail"
) -> Response:
    """The list next to the map; each row has the strength of its colour, from 0 to 1."""
    head, tail = (entity, None) if find == "tail" else (None, entity)
    found = await query_results(
        context, await page_query(head, relation, tail, find, k=MAP_PREDICTIONS)
    )
    best = max([MIN_SCALE, *(one.probability or 0 for one in found.predictions)])
    new = [
        (one, 1 / (1 + rank / 5) if one.probability is None else one.probability / best)
        for rank, one in enumerate(found.predictions)
    ]
    new.sort(key=lambda pair: -(pair[0].probability or 0))
    return page(context, "map_predictions.html", found=found, new=new)
