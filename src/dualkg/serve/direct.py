"""Queries whose parameters are plain are answered before FastAPI's routing and checks.

Those take longer than all else that a server does for a query but the scores. What is not plain,
and what is wrong, goes the usual way, so that the description of the API, the limits and the
messages are in one place. A test compares the responses of both.
"""

from typing import Any
from urllib.parse import parse_qsl

from pydantic import TypeAdapter
from starlette.types import Scope

from dualkg.inference.predictor import Known, Prediction, Query, QueryType
from dualkg.serve import schemas
from dualkg.serve.fairness import client_of
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import PARTS, Part, vocabulary_of
from dualkg.serve.service import LARGE_REQUEST, ServedRun, Service

MAX_PARAMETERS = 5
ANY = TypeAdapter[Any](Any)
DEFAULT_K = "10"
KNOWN: dict[str, Known] = {"mark": "mark", "omit": "omit"}
# The fields of an answer that the prediction has; the last one is that of the server.
ROW = [name for name in schemas.ScoredItem.model_fields if name != "verdict"]
# The given parts of a query by its address, in the order of the ids.
QUERIES: dict[str, tuple[QueryType, tuple[Part, Part]]] = {
    "/api/tails": ("tails", ("head", "relation")),
    "/api/heads": ("heads", ("relation", "tail")),
    "/api/relations": ("relations", ("head", "tail")),
}


async def direct_response(scope: Scope, service: Service) -> bytes | None:
    """The JSON that answers a plain request to an address of `QUERIES`; None for others."""
    if scope["method"] != "GET":
        return None
    given = _parameters(scope["query_string"])
    if given is None:
        return None

    k = given.pop("k", DEFAULT_K)
    known = KNOWN.get(given.pop("known", "mark"))
    is_small = k.isascii() and k.isdecimal() and len(k) <= 3 and 1 <= int(k) <= LARGE_REQUEST
    run_name = given.pop("run", None)
    kind, parts = QUERIES[scope["path"]]
    if known is None or not is_small or given.keys() != set(parts):
        return None
    if not service.runs.names or run_name not in (None, *service.runs.names):
        return None

    run = service.runs.get(run_name)
    ids: dict[Part, int] = {}
    for part in parts:
        vocabulary = vocabulary_of(run.graph, part)
        if given[part] not in vocabulary:
            return None
        ids[part] = vocabulary.id(given[part])
    query = Query(tuple(ids.values()), int(k), known)
    predictions = await service.batcher.predict(
        run.predictor, kind, query, client=client_of(scope.get("client"))
    )
    return _body(service, run, ids, predictions)


def _parameters(query: bytes) -> dict[str, str] | None:
    """The parameters of an address, unless one is repeated or very long."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    if len(given) < len(pairs) or len(pairs) > MAX_PARAMETERS:
        return None
    if any(len(value) > MAX_NAME_LENGTH for value in given.values()):
        return None
    return given


def _body(
    service: Service, run: ServedRun, ids: dict[Part, int], predictions: list[Prediction]
) -> bytes:
    """`Predictions` as JSON; what was computed here needs no validation."""
    query: dict[str, Any] = dict.fromkeys(PARTS)
    for part, id in ids.items():
        query[part] = vars(schemas.Item.of(vocabulary_of(run.graph, part), id))
    verdicts = service.verdicts(run, ids, predictions)
    rows = [
        {**{name: getattr(answer, name) for name in ROW}, "verdict": verdict}
        for answer, verdict in zip(predictions, verdicts, strict=True)
    ]
    return ANY.dump_json({"run": run.name, "query": query, "predictions": rows})
