"""The ASGI application: routes, middleware around them, and the page of all API routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.staticfiles import StaticFiles

from dualkg.errors import DualkgError
from dualkg.serve import entities, facts, middleware, queries, runs
from dualkg.serve.errors import error_reply
from dualkg.serve.limits import Limits
from dualkg.serve.service import Context, ServedRuns, Service
from dualkg.serve.templating import error_response, page, page_router

pages = page_router()
ROUTERS = (  # JSON first: /entity/NAME.json also matches /entity/NAME
    *(queries.routes, entities.routes, facts.routes, facts.decision_routes, runs.routes),
    *(queries.pages, entities.pages, facts.pages, runs.pages, pages),
)
POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'"


def application(
    served: ServedRuns,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    log: bool = False,
    read_only: bool = False,
    micro_batching: bool = True,
) -> FastAPI:
    """An ASGI application that serves runs.

    `read_only` refuses decisions on new facts. Without `micro_batching` every query is one call of
    the model, which is slower; tests and benchmarks compare with it.
    """
    limits = limits or Limits()
    service = Service(
        served, limits=limits, log=log, read_only=read_only, micro_batching=micro_batching
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

    async def handle(request: Request, error: Exception) -> Response:
        if (
            isinstance(error, HTTPException) and error.status_code == 405
        ):  # it names the methods of one route alone
            found = [
                one
                for router in ROUTERS
                for one in router.routes
                if one.matches(request.scope)[0] != Match.NONE
            ]
            methods = {
                method for route in found for method in getattr(route, "methods", None) or ()
            }
            error.headers = {"Allow": ", ".join(sorted(methods))}
        return await error_response(request, error_reply(error, request.method))

    for kind in (DualkgError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    access = middleware.loopback_host if token is None else middleware.requires_token(token)
    app.add_middleware(
        middleware.RequestMiddleware, service=service, checks=[access, middleware.same_origin]
    )
    return app


def description(app: FastAPI) -> bytes:
    """The OpenAPI description as JSON. It takes half a second to make and 2 ms to write, so it is
    made once.
    """
    if not hasattr(app.state, "description"):
        app.state.description = JSONResponse(app.openapi()).body
    made: bytes = app.state.description
    return made


@pages.get("/openapi.json")
async def openapi(context: Context) -> Response:
    return Response(description(context.request.app), media_type="application/json")


@pages.get("/docs")
async def reference_page(context: Context) -> Response:
    response = page(context, "reference.html", api=context.request.app.openapi())
    response.headers["Content-Security-Policy"] = POLICY
    return response
