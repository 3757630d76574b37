"""The application: routes inside, guards around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI

from dualkg.serve.batching import OneByOne, Together
from dualkg.serve.limits import Limits
from dualkg.serve.metrics import Counts, Journal
from dualkg.serve.middleware import (
    BodyLimit,
    Deadline,
    HeadLimit,
    OnProgress,
    OwnHost,
    OwnOrigin,
    TokenGuard,
    tell_in_sentences,
)
from dualkg.serve.pages import ask, entity, facts, layout, map, reference, run
from dualkg.serve.pages.layout import told
from dualkg.serve.routes import completion, decisions, entities, queries, runs
from dualkg.serve.state import ServedRuns, Service

ROUTES = (
    queries.explanation_routes,
    queries.routes,
    entities.routes,
    completion.routes,
    decisions.routes,
    runs.map_routes,
    runs.routes,
    runs.operation_routes,
    reference.routes,
    ask.routes,
    entity.explanation_routes,
    entity.routes,
    facts.routes,
    map.routes,
    run.routes,
    layout.routes,
)
ABOUT = "A trained knowledge-graph model, asked for missing facts: names in, names out."


def application(
    served: ServedRuns,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    log: bool = False,
    read_only: bool = False,
    together: bool = True,
) -> FastAPI:
    """An ASGI application that answers for some runs.

    `read_only` refuses decisions on new facts. Without `together` every request asks by itself: slower, and what the
    other way is held against.
    """
    limits, counts, journal = limits or Limits(), Counts(), Journal(requests=log)
    asker = Together(most_waiting=limits.waiting, counts=counts) if together else OneByOne()
    service = Service(served, asker, limits, counts, journal, read_only=read_only)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="dualkg",
        description=ABOUT,
        version=metadata.version("dualkg"),
        docs_url=None,  # the usual page loads scripts from another host; ours is pages/reference.py
        redoc_url=None,
        redirect_slashes=False,
        lifespan=life,
    )
    app.state.service = service
    for router in ROUTES:
        app.include_router(router)
    tell_in_sentences(app, told)
    # The last to be added is the first to be passed.
    app.add_middleware(BodyLimit, most=limits.body)
    app.add_middleware(HeadLimit, most=limits.head)
    app.add_middleware(OwnOrigin)
    app.add_middleware(Deadline, limits=limits, tell=told)
    if token is not None:
        app.add_middleware(TokenGuard, token=token)
    else:
        app.add_middleware(OwnHost)
    app.add_middleware(OnProgress, counts=counts, journal=journal, tell=told)
    return app
