"""For those who run the server: is it well, and what has it done."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import PlainTextResponse

from dualkg.serve.routes.choices import Served, router
from dualkg.serve.shapes.problems import Health

routes = router("operation")


@routes.get("/health")
async def health() -> Health:
    """Answers where the server does; no token is asked for."""
    return Health(status="ok")


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Counts and times as Prometheus reads them."""
    entities = {run.name: len(run.entities) for run in service.runs}
    return Response(service.counts.text(entities), media_type="text/plain; version=0.0.4; charset=utf-8")
