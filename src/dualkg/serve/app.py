"""The ASGI application: routes, and middleware around them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.staticfiles import StaticFiles

from dualkg.errors import DualkgError
from dualkg.serve import middleware, pages, routes
from dualkg.serve.errors import error_reply
from dualkg.serve.limits import Limits
from dualkg.serve.service import ServedRuns, Service
from dualkg.serve.templating import error_response

DESCRIPTION = "Link prediction with a trained knowledge-graph model: names in, names out."


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

    `read_only` refuses decisions on new facts. Without `micro_batching` every query is one call of the model, which is
    slower; tests and benchmarks compare with it.
    """
    limits = limits or Limits()
    service = Service(served, limits=limits, log=log, read_only=read_only, micro_batching=micro_batching)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="dualkg",
        description=DESCRIPTION,
        version=metadata.version("dualkg"),
        docs_url=None,  # FastAPI's page loads scripts from another host; ours is pages/reference.py
        redoc_url=None,
        openapi_url=None,  # FastAPI writes the description again for every request
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    for module in (*routes.MODULES, *pages.MODULES):  # JSON first: /entity/NAME.json also matches /entity/NAME
        app.include_router(module.routes)
    app.mount("/static", StaticFiles(packages=[("dualkg.serve", "static")]))

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:  # it names the methods of one route alone
            error.headers = {"Allow": ", ".join(sorted(_methods(request)))}
        return await error_response(request, error_reply(error, request.method))

    for kind in (DualkgError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    access = middleware.loopback_host if token is None else middleware.requires_token(token)
    app.add_middleware(middleware.RequestMiddleware, service=service, checks=[access, middleware.same_origin])
    return app


def _methods(request: Request) -> set[str]:
    """The methods of all routes with the path of a request."""
    routers = [module.routes for module in (*routes.MODULES, *pages.MODULES)]
    found = [route for router in routers for route in router.routes if route.matches(request.scope)[0] != Match.NONE]
    return {method for route in found for method in getattr(route, "methods", None) or ()}
