"""The ASGI application: routes, middleware around them, and the page of all API routes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.staticfiles import StaticFiles

from dualkg.errors import DualkgError
from dualkg.serve import (
    best_facts,
    decisions,
    downloads,
    entities,
    facts,
    likely,
    middleware,
    paths,
    queries,
    relations,
    runs,
    search,
    start,
    training_pages,
)
from dualkg.serve.limits import Limits
from dualkg.serve.reference import Operation, example_addresses, operations
from dualkg.serve.replies import error_reply
from dualkg.serve.service import Context, ServedRuns, Service
from dualkg.serve.templating import error_response, page, page_router

pages = page_router()
# JSON before pages, since /entity/NAME.json also matches /entity/NAME.
ROUTERS = (
    queries.routes,
    entities.routes,
    facts.routes,
    decisions.routes,
    paths.routes,
    runs.routes,
    training_pages.routes,
    downloads.routes,
    queries.pages,
    entities.pages,
    facts.pages,
    decisions.pages,
    paths.pages,
    likely.pages,
    runs.pages,
    training_pages.pages,
    search.pages,
    relations.pages,
    best_facts.pages,
    start.pages,
    pages,
)


def application(
    served: ServedRuns,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    log: bool = False,
    read_only: bool = False,
    micro_batching: bool = True,
    training_folder: Path | None = None,
    device: str | None = None,
) -> FastAPI:
    """An ASGI application that serves runs.

    `read_only` refuses decisions on new facts. With `training_folder`, files can be sent and
    trained on; their runs are made in this folder, and served on `device`. Without
    `micro_batching` every query is one call of the model, which is slower; tests and benchmarks
    compare with it.
    """
    limits = limits or Limits()
    service = Service(
        served,
        limits=limits,
        log=log,
        read_only=read_only,
        micro_batching=micro_batching,
        needs_token=token is not None,
        training_folder=training_folder,
        device=device,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="dualkg",
        description="Link prediction with a trained knowledge-graph model: names in, names out.",
        version=metadata.version("dualkg"),
        docs_url=None,  # FastAPI's page loads scripts from another host; ours is below
        redoc_url=None,
        openapi_url=None,  # FastAPI writes the description again for every request
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.mount("/static", StaticFiles(packages=[("dualkg.serve", "static")]))

    for kind in (DualkgError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle_error)
    access = middleware.loopback_host if token is None else middleware.requires_token(token)
    app.add_middleware(
        middleware.RequestMiddleware, service=service, checks=[access, middleware.same_origin]
    )
    return app


async def handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        # Starlette names the methods of one route; an address may have several.
        error.headers = {"Allow": ", ".join(sorted(allowed_methods(request)))}
    return await error_response(request, error_reply(error, request.method))


def allowed_methods(request: Request) -> set[str]:
    """The methods of all routes that the address of a request matches."""
    methods: set[str] = set()
    for router in ROUTERS:
        for route in router.routes:
            match, _ = route.matches(request.scope)
            if match != Match.NONE:
                methods.update(getattr(route, "methods", None) or ())
    return methods | {"HEAD"} if "GET" in methods else methods


def description(app: FastAPI) -> bytes:
    """The OpenAPI description as JSON, which is made once, since that takes half a second."""
    if not hasattr(app.state, "description"):
        app.state.description = JSONResponse(app.openapi()).body
    body: bytes = app.state.description
    return body


@pages.get("/openapi.json")
async def openapi(context: Context) -> Response:
    return Response(description(context.request.app), media_type="application/json")


@pages.get("/docs")
async def reference_page(context: Context) -> Response:
    """All API routes by topic, each with an example on the default run."""
    app = context.request.app
    api = json.loads(description(app))
    topics: dict[str, list[Operation]] = {}
    for operation in operations(api):
        topics.setdefault(operation.topic, []).append(operation)
    examples = await example_addresses(context)
    return page(context, "reference.html", json="/openapi.json", topics=topics, examples=examples)
