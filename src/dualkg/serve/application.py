"""The application: routes inside, guards around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI

from dualkg.serve.asking import OneByOne, Together
from dualkg.serve.counts import Counts
from dualkg.serve.guards.body import BodyLimit
from dualkg.serve.guards.deadline import Deadline
from dualkg.serve.guards.head import HeadLimit
from dualkg.serve.guards.hosts import OwnHost
from dualkg.serve.guards.origin import OwnOrigin
from dualkg.serve.guards.sentences import tell_in_sentences
from dualkg.serve.guards.token import TokenGuard
from dualkg.serve.guards.watch import Watch
from dualkg.serve.journal import Journal
from dualkg.serve.limits import Limits
from dualkg.serve.pages import ask, atlas, entity, facts, files, reference, run, why
from dualkg.serve.pages.layout import told
from dualkg.serve.routes import completion, decisions, entities, entity_map, explanation, operation, questions, runs
from dualkg.serve.runs import ServedRuns
from dualkg.serve.service import Service

ROUTES = (
    questions,
    explanation,
    entities,
    completion,
    decisions,
    entity_map,
    runs,
    operation,
    reference,
    ask,
    entity,
    why,
    facts,
    atlas,
    run,
    files,
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
    for module in ROUTES:
        app.include_router(module.routes)
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
    app.add_middleware(Watch, counts=counts, journal=journal, tell=told)
    return app
