"""The map: all entities in the plane, coloured by the predictions of a query."""

from typing import Annotated, Literal

from fastapi import Query, Response

from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.pages.query import page_query, query_results
from dualkg.serve.schemas import Item
from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router, page_url

routes = page_router()
NUM_PREDICTIONS = 200
MIN_SCALE = 0.002  # probability that is coloured fully if no prediction has a higher one
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
End = Literal["tail", "head"]


@routes.get("/map")
async def map_page(context: Context, entity: Name = "", relation: Name = "", find: End = "tail") -> Response:
    """The frame; a script draws the map, since it moves."""
    entities = context.run.graph.entities
    return page(
        context,
        "map.html",
        json=page_url(context, "/map.json"),
        entity=Item.of(entities, await context.id(entity)) if entity else None,
        relation=context.run.relations[await context.id(relation, "relation")] if relation else None,
        find=find,
    )


@routes.get("/map/predictions")
async def map_predictions(context: Context, entity: Name, relation: Name, find: End = "tail") -> Response:
    """The list next to the map; each row has the strength of its colour, from 0 to 1."""
    head, tail = (entity, None) if find == "tail" else (None, entity)
    query = await page_query(head, relation, tail, find, k=NUM_PREDICTIONS)
    found = await query_results(context, query)
    best = max([MIN_SCALE, *(one.probability or 0 for one in found.predictions)])
    new = [
        (one, 1 / (1 + rank / 5) if one.probability is None else one.probability / best)
        for rank, one in enumerate(found.predictions)
    ]
    new.sort(key=lambda pair: -(pair[0].probability or 0))
    return page(context, "map_predictions.html", found=found, new=new)
