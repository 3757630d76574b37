"""Entities: by a few letters, and all about one."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from dualkg.inference.predictor import Query as ModelQuery
from dualkg.inference.predictor import known_facts, predicted_facts
from dualkg.serve.limits import LONGEST_NAME, MOST_FOUND
from dualkg.serve.routes.queries import AskedRun, EntityInPath, router
from dualkg.serve.schemas import Entity, Fact, FoundName, FoundNames, Thing
from dualkg.serve.state import ServedRun

routes = router("entities")
MOST_KNOWN, NUM_PREDICTED, NUM_SIMILAR = 500, 20, 10


@routes.get("/api/entities")
async def entities(
    context: AskedRun,
    q: Annotated[str, Query(max_length=LONGEST_NAME, description="How a name begins, what it holds, or nearly so.")],
    k: Annotated[int, Query(ge=1, le=MOST_FOUND, description="How many names.")] = 10,
) -> FoundNames:
    """Find entities as people type; case and accents are ignored."""
    service, run = context
    matches = await service.slowly(lambda: run.finder.search(q, limit=k))
    found = [FoundName.matching(run.entities, match) for match in matches]
    return FoundNames(run=run.name, q=q, entities=found)


@routes.get("/api/entity/{name:name}")
async def entity(context: AskedRun, name: EntityInPath) -> Entity:
    """Known facts, predicted facts and neighbours of an entity."""
    service, run = context
    id = await service.entity(run, name)
    similar = await service.answers(run, "similar", ModelQuery((id,), NUM_SIMILAR))
    found: Entity = await service.slowly(lambda: _facts(run, id))
    return found.model_copy(update={"similar": similar})


@routes.get("/entity/{name:name}.json", include_in_schema=False)
async def entity_page_as_json(context: AskedRun, name: EntityInPath) -> Entity:
    return await entity(context, name)


def _facts(run: ServedRun, id: int) -> Entity:
    graph = run.run.graph
    known, num_known = known_facts(run.predictor, id, limit=MOST_KNOWN)
    predicted = predicted_facts(run.predictor, id, k=NUM_PREDICTED)
    return Entity(
        run=run.name,
        entity=Thing.of(graph.entities, id),
        num_known=num_known,
        known=[Fact.of(graph, fact) for fact in known],
        predicted=[Fact.of(graph, fact) for fact in predicted],
        similar=[],
    )
