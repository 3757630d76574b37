"""The ASGI application: routes, middleware around them, and the page of all API routes."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from dualkg.errors import DualkgError
from dualkg.serve import (
    decisions,
    downloads,
    entities,
    facts,
    maps,
    middleware,
    paths,
    queries,
    relations,
    runs,
    search,
    training_pages,
    triples,
)
from dualkg.serve.errors import error_reply
from dualkg.serve.queries import examples_of
from dualkg.serve.served import ServedRuns
from dualkg.serve.service import Context, Limits, RequestContext, Service
from dualkg.serve.templating import error_response, page, page_router

pages = page_router()
TOPICS = (
    queries,
    triples,
    search,
    entities,
    facts,
    decisions,
    paths,
    maps,
    runs,
    training_pages,
    relations,
)
# JSON before pages, since /entity/NAME.json also matches /entity/NAME.
ROUTERS = (
    *(topic.routes for topic in TOPICS),
    downloads.routes,
    *(topic.pages for topic in TOPICS),
    pages,
)
NO_TOPIC = "server"


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
    return await error_response(request, error_reply(error, request.method))


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


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operation, and what its values may be."""

    name: str
    description: str
    values: str


@dataclass(frozen=True)
class Operation:
    """A method of an address."""

    method: str
    path: str
    topic: str
    description: str
    parameters: list[Parameter] = field(default_factory=list)
    body: str = ""

    @property
    def anchor(self) -> str:
        return f"{self.method}{self.path}".replace("/", "-").replace("{", "").replace("}", "")


def operations(api: dict[str, Any]) -> Iterator[Operation]:
    """The operations of an OpenAPI description, in its order."""
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield Operation(
                method=method.upper(),
                path=path,
                topic=operation.get("tags", [NO_TOPIC])[0],
                description=operation.get("description", ""),
                parameters=[_parameter(given) for given in operation.get("parameters", [])],
                body=_body(api, operation),
            )


def _parameter(given: dict[str, Any]) -> Parameter:
    schema = given["schema"]
    values = ["required"] if given.get("required") else []
    if schema.get("enum"):
        values.append(" or ".join(map(str, schema["enum"])))
    if "minimum" in schema and "maximum" in schema:
        values.append(f"{schema['minimum']:,} to {schema['maximum']:,}")
    if schema.get("default") not in (None, []):
        values.append(f"default {schema['default']}")
    return Parameter(given["name"], given.get("description", ""), ", ".join(values))


def _body(api: dict[str, Any], operation: dict[str, Any]) -> str:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"]["$ref"].rpartition("/")[2]
        described: str = api["components"]["schemas"][name].get("description", "")
        return described
    return ""


async def example_addresses(context: RequestContext) -> dict[str, str]:
    """An address that answers, for each operation that has one on the graph of the run."""
    graph = context.run.graph
    examples = examples_of(context)
    if not examples:
        return {}
    head, relation = (item.name for item in examples[0])
    triples = graph.test if len(graph.test) else graph.train
    head_id, relation_id = graph.entities.id(head), graph.relations.id(relation)
    of_query = triples[(triples[:, 0] == head_id) & (triples[:, 1] == relation_id)]
    tail = graph.entities[int(of_query[0, 2])]
    parameters: dict[str, dict[str, str | int]] = {
        "/api/tails": {"head": head, "relation": relation, "k": 5},
        "/api/heads": {"relation": relation, "tail": tail, "k": 5},
        "/api/relations": {"head": head, "tail": tail, "k": 5},
        "/api/similar": {"entity": head, "k": 5},
        "/api/score": {"head": head, "relation": relation, "tail": tail},
        "/api/explain": {"head": head, "relation": relation, "tail": tail},
        "/api/paths": {"start": head, "end": tail, "k": 3},
        "/api/entities": {"q": head[:3], "k": 5},
        "/api/complete": {"relation": relation, "top": 5},
        "/api/run": {},
        "/api/runs": {},
        "/api/decisions": {},
        "/api/map": {},
        "/health": {},
        "/metrics": {},
    }
    if context.run.predictor.prediction_sets is not None:
        parameters["/api/prediction-set"] = {"entity": head, "relation": relation, "k": 5}
    if len(context.service.runs) > 1:
        parameters["/api/compare"] = {"most": 5}
    addresses = {
        path: f"{path}?{urlencode(given)}" if given else path for path, given in parameters.items()
    }
    addresses["/api/entity/{name}"] = f"/api/entity/{quote(head, safe='')}"
    return addresses
