"""Queries whose parameters are plain are answered without FastAPI's checks of every parameter.

Those take longer than all else that a server does for a query but the scores. What is not plain,
and what is wrong, goes the usual way, so that the description of the API, the limits and the
messages are in one place. A test compares the responses of both.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from dualkg.inference.predictor import Known, Prediction, QueryType
from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import PARTS, Part, vocabulary_of
from dualkg.serve.service import LARGE_REQUEST, RequestContext, Service

MAX_PARAMETERS = 5
ANY = TypeAdapter[Any](Any)
DEFAULT_K = "10"
KNOWN: dict[str, Known] = {"mark": "mark", "omit": "omit"}
# The given parts of a query by its address, in the order of the ids.
QUERIES: dict[str, tuple[QueryType, tuple[Part, Part]]] = {
    "/api/tails": ("tails", ("head", "relation")),
    "/api/heads": ("heads", ("relation", "tail")),
    "/api/relations": ("relations", ("head", "tail")),
}


class DirectRoute(APIRoute):
    """A route that answers plain queries itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()
        answer = _plain_queries(self.path)

        async def handle(request: Request) -> Response:
            return await answer(request) or await usual(request)

        return handle


def _plain_queries(path: str) -> Callable[[Request], Awaitable[Response | None]]:
    """A function that answers the plain queries at an address, and returns None for others."""
    kind, parts = QUERIES[path]

    async def answer(request: Request) -> Response | None:
        given = _parameters(request)
        if given is None:
            return None
        k = given.pop("k", DEFAULT_K)
        known = KNOWN.get(given.pop("known", "mark"))
        is_small = k.isascii() and k.isdecimal() and len(k) <= 3 and 1 <= int(k) <= LARGE_REQUEST
        service: Service = request.app.state.service
        run = given.pop("run", service.runs.default.name)
        if known is None or not is_small or given.keys() != set(parts):
            return None
        if run not in service.runs.names:
            return None

        context = RequestContext(request, service, service.runs.get(run))
        ids: dict[Part, int] = {}
        for part in parts:
            vocabulary = vocabulary_of(context.run.graph, part)
            if given[part] not in vocabulary:
                return None
            ids[part] = vocabulary.id(given[part])
        predictions = await context.predict(kind, *ids.values(), k=int(k), known=known)
        return Response(_body(context, ids, predictions), media_type="application/json")

    return answer


def _parameters(request: Request) -> dict[str, str] | None:
    """The parameters of an address, unless one is repeated or very long."""
    query: bytes = request.scope["query_string"]
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs) or len(pairs) > MAX_PARAMETERS:
        return None
    if any(len(value) > MAX_NAME_LENGTH for value in given.values()):
        return None
    return given


def _body(context: RequestContext, ids: dict[Part, int], predictions: list[Prediction]) -> bytes:
    """`Predictions` as JSON; what was computed here needs no validation."""
    graph = context.run.graph
    query: dict[str, Any] = dict.fromkeys(PARTS)
    for part, id in ids.items():
        query[part] = vars(schemas.Item.of(vocabulary_of(graph, part), id))
    names = [name for name in schemas.ScoredItem.model_fields if name != "verdict"]
    rows = [
        {**{name: getattr(answer, name) for name in names}, "verdict": verdict}
        for answer, verdict in zip(predictions, context.verdicts(ids, predictions), strict=True)
    ]
    return ANY.dump_json({"run": context.run.name, "query": query, "predictions": rows})
