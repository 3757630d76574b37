"""The map of all entities, for the API and as a page."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query, Response
from fastapi.responses import JSONResponse

from dualkg.data.roles import End
from dualkg.logs import describe_time_left
from dualkg.serve.queries import page_query, query_results
from dualkg.serve.schemas import MAX_NAME_LENGTH, EntityMap, Item, ScoredItem, as_json
from dualkg.serve.served import Positions, ServedRun
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import (
    api_router,
    page,
    page_router,
    page_url,
    relation_text,
    visible,
)

routes = api_router("entities")
pages = page_router()
MAP_PREDICTIONS = 200
POSITIONS_INTERVAL = 0.05  # seconds between two looks for the first positions of a map
SoFar = Literal["nothing", "positions", "all"]
MAP_COLOURS = 7  # of the script that draws the map
# The probability that is coloured fully on the map if no prediction has a higher one.
MIN_SCALE = 0.002
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


@routes.get(
    "/api/map", response_model=EntityMap, responses={202: {"description": "Still being computed."}}
)
@routes.get("/map.json", include_in_schema=False)
async def entity_map(
    context: Context,
    wait: Annotated[
        float | None, Query(ge=0, le=60, description="Seconds to wait for a map in the making.")
    ] = None,
    so_far: Annotated[
        SoFar, Query(description="Send the map so far, or its positions, with the status 202.")
    ] = "nothing",
) -> Response:
    """The t-SNE position of each entity; until it has been computed, the status is 202.

    It is computed once, which may take minutes, and stored. The response 202 has the share that is
    `done`, and `seconds_left`, and `so_far` the positions so far: principal components at first.
    What nobody asks for during a minute is not computed to its end.
    """
    run = context.run
    limits = context.service.limits
    work = context.service.maps.of(run)
    future = asyncio.wrap_future(work.future)
    longest = limits.map_share * limits.seconds
    seconds = longest if wait is None else min(wait, longest)
    if so_far == "all":  # the first picture
        until = asyncio.get_running_loop().time() + seconds
        while work.positions is None and asyncio.get_running_loop().time() < until:
            if (await asyncio.wait([future], timeout=POSITIONS_INTERVAL))[0]:
                break
        seconds = 0.0
    done, _ = await asyncio.wait([future], timeout=seconds)
    if not done:
        left = describe_time_left(work.seconds_left)
        progress = f" {work.done:.0%} is done{f', {left}' if left else ''}." if work.done else ""
        message = f"The map of {len(run.graph.entities):,} entities is being computed.{progress}"
        content: dict[str, Any] = {
            "run": run.name,
            "message": message,
            "done": round(work.done, 3),
            "seconds_left": work.seconds_left,
        }
        positions = None if so_far == "nothing" else work.positions
        # A response of many positions takes long to write.
        return await context.in_thread(
            lambda: _unfinished_map(run, content, positions, is_whole=so_far == "all")
        )

    x, y = future.result().round(5).T.tolist()
    return await context.in_thread(lambda: as_json(_map(run, x, y)))


def _unfinished_map(
    run: ServedRun, content: dict[str, Any], positions: Positions | None, *, is_whole: bool
) -> Response:
    """The response 202, with the positions so far or with all of the map so far."""
    if positions is not None:
        x, y = positions.round(4).T.tolist()
        so_far = _map(run, x, y).model_dump(mode="json") if is_whole else {"x": x, "y": y}
        content["so_far"] = so_far
    return JSONResponse(content, status_code=202, headers={"Retry-After": "2"})


def _map(run: ServedRun, x: list[float], y: list[float]) -> EntityMap:
    vocabulary = run.graph.entities
    names = vocabulary.names.to_pylist()
    given_labels = names if vocabulary.labels is None else vocabulary.labels.to_pylist()
    labels = []
    for label, name in zip(given_labels, names, strict=True):
        labels.append(visible(label or name))
    has_labels = labels != names
    roles, role_names = _roles(run)
    types, type_names = _types(run)
    return EntityMap(
        run=run.name,
        x=x,
        y=y,
        names=names,
        labels=labels if has_labels else None,
        degrees=run.roles.degrees.tolist(),
        roles=roles,
        role_names=role_names,
        types=types,
        type_names=type_names,
    )


def _types(run: ServedRun) -> tuple[list[int] | None, list[str] | None]:
    """A type of each entity by its number, and the types, commonest first.

    Of several types an entity has the rarest of those that the map has colours for, since the
    commonest may be that of nearly all entities.
    """
    types = run.types
    if types is None:
        return None, None
    counts = np.bincount(types.types, minlength=len(types.names))
    ordered = np.argsort(-counts, kind="stable")
    places = np.empty(len(ordered), dtype=np.int64)
    places[ordered] = np.arange(len(ordered))
    of_pairs = places[types.types]
    # The last of the pairs of an entity is kept: a rare type with a colour.
    order = np.lexsort((of_pairs, of_pairs < MAP_COLOURS))
    of_entities = np.full(run.graph.shape.num_entities, -1)
    of_entities[types.entities[order]] = of_pairs[order]
    return of_entities.tolist(), [visible(run.type_labels[number]) for number in ordered.tolist()]


def _roles(run: ServedRun) -> tuple[list[int], list[str]]:
    """The commonest role of each entity by its number, and the roles, commonest first."""
    commonest = run.roles.commonest
    numbers, counts = np.unique(commonest[commonest >= 0], return_counts=True)
    ordered = numbers[np.argsort(-counts, kind="stable")]
    places = np.full(2 * run.roles.num_relations + 1, -1)
    places[ordered] = np.arange(len(ordered))
    names = []
    for number in ordered.tolist():
        relation = relation_text(run.graph.relations.label(number % run.roles.num_relations))
        names.append(f"{relation} of" if number >= run.roles.num_relations else relation)
    return places[commonest].tolist(), names


@pages.get("/map")
async def map_page(
    context: Context, entity: Name = "", relation: Name = "", find: End = "tail"
) -> Response:
    """The frame; a script draws the map, since it moves."""
    return page(
        context,
        "map.html",
        json=page_url(context, "/map.json"),
        entity=await _chosen_entity(context, entity),
        relation=await context.relation(relation),
        find=find,
    )


async def _chosen_entity(context: RequestContext, name: str) -> Item | None:
    if not name:
        return None
    return Item.of(context.run.graph.entities, await context.id(name))


@pages.get("/map/predictions")
async def map_predictions(
    context: Context, entity: Name, relation: Name, find: End = "tail"
) -> Response:
    """The list next to the map; each row has the strength of its colour, from 0 to 1."""
    if find == "tail":
        query = await page_query(head=entity, relation=relation, find=find, k=MAP_PREDICTIONS)
    else:
        query = await page_query(relation=relation, tail=entity, find=find, k=MAP_PREDICTIONS)
    results = await query_results(context, query)
    coloured = _coloured(results.predictions)
    known = [(item, 1) for item in results.accepted + results.known]
    return page(context, "map_predictions.html", results=results, new=coloured, known=known)


def _coloured(predictions: Sequence[ScoredItem]) -> list[tuple[ScoredItem, float]]:
    """Predictions with the strength of their colour, most probable first.

    Without probabilities, the strength falls with the rank.
    """
    probabilities = [prediction.probability or 0.0 for prediction in predictions]
    highest = max([MIN_SCALE, *probabilities])
    rows = []
    for index, prediction in enumerate(predictions):
        if prediction.probability is None:
            strength = 1 / (1 + index / 5)
        else:
            strength = prediction.probability / highest
        rows.append((prediction, strength))
    rows.sort(key=lambda row: -(row[0].probability or 0.0))
    return rows
