"""All entities in the plane."""

from __future__ import annotations

import asyncio

from fastapi import Response
from fastapi.responses import JSONResponse

from dualkg.serve.routes.choices import AskedRun, router
from dualkg.serve.runs import ServedRun
from dualkg.serve.shapes.runs import EntityMap, MapInTheMaking

routes = router("entities")
MARGIN = 0.8  # of the time that a request may take, for waiting


@routes.get("/api/map", response_model=EntityMap, responses={202: {"model": MapInTheMaking}})
async def entity_map(whom: AskedRun) -> Response:
    """Where t-SNE puts each entity; made once, which may take minutes, and kept with the run. Until then 202."""
    service, run = whom
    making = asyncio.wrap_future(service.maps.of(run))
    done, _ = await asyncio.wait([making], timeout=MARGIN * service.limits.seconds)
    if not done:
        sentence = f"The map of {len(run.entities):,} entities is being made. Ask again in a while."
        waiting = MapInTheMaking(run=run.name, sentence=sentence)
        return JSONResponse(waiting.model_dump(), status_code=202, headers={"Retry-After": "10"})
    places = making.result()
    found = await service.slowly(lambda: _shape(run, places.round(5).tolist()).model_dump_json())
    return Response(found, media_type="application/json")


def _shape(run: ServedRun, places: list[list[float]]) -> EntityMap:
    names = run.entities.names.to_pylist()
    labels = None if run.entities.labels is None else run.entities.labels.to_pylist()
    return EntityMap(
        run=run.name,
        x=[x for x, _ in places],
        y=[y for _, y in places],
        names=names,
        labels=None if labels is None else [label or name for label, name in zip(labels, names, strict=True)],
    )
