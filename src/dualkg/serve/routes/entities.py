"""Entities: search by name, everything about one, and the map of all."""

import asyncio
from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import JSONResponse

from dualkg.inference.predictor import Query as ModelQuery
from dualkg.inference.predictor import known_facts, predicted_facts
from dualkg.serve.limits import MAX_MATCHES
from dualkg.serve.routes.queries import EntityName
from dualkg.serve.schemas import Entity, EntityMap, Fact, Item, MatchedEntities, MatchedEntity
from dualkg.serve.service import Context, ServedRun
from dualkg.serve.templating import api_router, links, short, visible

routes = api_router("entities")
MAX_KNOWN, NUM_PREDICTED, NUM_SIMILAR = 500, 20, 10
MAP_SHARE = 0.8  # of the time limit of a request that it waits for a map


FIRST = "/entities/0/name"


@routes.get("/api/entities", responses=links(entity={"name": FIRST}, similar={"entity": FIRST}))
async def entities(
    context: Context,
    q: Annotated[
        EntityName, Query(description="The beginning of a name, a part of it, or a misspelling.", examples=["a"])
    ],
    k: Annotated[int, Query(ge=1, le=MAX_MATCHES, description="Number of names.")] = 10,
) -> MatchedEntities:
    """Search entities by name while typing; case and accents are ignored."""
    names, search = context.run.graph.entities, context.run.name_search.search
    matches = await context.in_thread(lambda: search(q, limit=k))
    found = []
    for match in matches:
        item = Item.of(names, match.id)
        note = short(item.name) if item.name != item.label else None
        found.append(MatchedEntity(**dict(item), match_type=match.match_type, text=short(item.label), note=note))
    return MatchedEntities(run=context.run.name, q=q, entities=found)


@routes.get("/api/entity/{name:name}")
@routes.get("/entity/{name:name}.json", include_in_schema=False)
@routes.get("/entity.json", include_in_schema=False)  # for names that a browser would change in a path, such as `..`
async def entity(context: Context, name: EntityName) -> Entity:
    """Known facts, predicted facts and similar entities of an entity."""
    run, graph, id = context.run, context.run.graph, await context.id(name)
    similar = await context.predict("similar", ModelQuery((id,), NUM_SIMILAR))
    known, num_known = await context.in_thread(lambda: known_facts(run.predictor, id, limit=MAX_KNOWN))
    predicted = await context.in_thread(lambda: predicted_facts(run.predictor, id, k=NUM_PREDICTED))
    return Entity(
        run=run.name,
        entity=Item.of(graph.entities, id),
        num_known=num_known,
        known=[Fact.of(graph, **vars(fact)) for fact in known],
        predicted=[Fact.of(graph, **vars(fact)) for fact in predicted],
        similar=similar,
    )


@routes.get("/api/map", response_model=EntityMap, responses={202: {"description": "Still being computed."}})
@routes.get("/map.json", include_in_schema=False)
async def entity_map(context: Context) -> Response:
    """The t-SNE position of each entity; computed once, which may take minutes, and stored. Until then 202."""
    service, run = context.service, context.run
    future = asyncio.wrap_future(service.entity_map(run))
    done, _ = await asyncio.wait([future], timeout=MAP_SHARE * service.limits.seconds)
    if not done:
        message = f"The map of {len(run.graph.entities):,} entities is being computed. Try again in a while."
        return JSONResponse({"run": run.name, "message": message}, status_code=202, headers={"Retry-After": "10"})
    positions = future.result()
    body = await context.in_thread(lambda: _map(run, *positions.round(5).T.tolist()).model_dump_json())
    return Response(body, media_type="application/json")


def _map(run: ServedRun, x: list[float], y: list[float]) -> EntityMap:
    entities = run.graph.entities
    names = entities.names.to_pylist()
    given = names if entities.labels is None else entities.labels.to_pylist()
    labels = [visible(label or name) for label, name in zip(given, names, strict=True)]
    return EntityMap(run=run.name, x=x, y=y, names=names, labels=None if labels == names else labels)
