"""The OpenAPI description, checked against the server by generated requests."""

import json

import pytest
from hypothesis import HealthCheck, given, settings

from dualkg.serve.app import application
from dualkg.serve.app import description as description_of
from dualkg.serve.server import request_once
from tests.serve.conftest import HOSTILE

KNOWN = {"head": "thing 30", "tail": HOSTILE[0], "entity": HOSTILE[4], "relation": "likes"}
PATHS = {
    "/api/tails",
    "/api/heads",
    "/api/relations",
    "/api/similar",
    "/api/prediction-set",
    "/api/score",
    "/api/explain",
    "/api/entities",
    "/api/entity/{name}",
    "/api/complete",
    "/api/map",
    "/api/paths",
    "/api/runs",
    "/api/run",
    "/api/compare",
    "/api/decisions",
    "/health",
    "/metrics",
}


@pytest.fixture(scope="module")
def description(address):
    import schemathesis  # not above: it takes seconds, and only one worker needs it

    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def check(case):
    case.call_and_validate()


def requests(operation, check, *, mode):
    """Generated requests, valid or invalid, each checked: 3, and 20 in the slow suite."""
    from schemathesis import GenerationMode

    quick = settings(
        max_examples=settings().max_examples // 10,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return quick(given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))(check))


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_server_conforms_to_its_description(description, path):
    def by_known_names(case):
        case.query = {
            key: KNOWN.get(key, value) for key, value in case.query.items() if key != "run"
        }
        case.path_parameters = dict.fromkeys(case.path_parameters, KNOWN["head"])
        reply = case.call_and_validate()
        assert reply.status_code in (200, 202, 400, 404)

    for operation in description[path].values():
        requests(operation, check, mode="positive")()
        requests(operation, by_known_names, mode="positive")()


@pytest.mark.parametrize("path", sorted(PATHS - {"/health", "/metrics", "/api/runs"}))
def test_invalid_requests_are_refused(description, path):
    for operation in description[path].values():
        requests(operation, check, mode="negative")()


def test_the_description_is_made_once(served, monkeypatch):
    """Each request for it took a multiple of others."""
    app = application(served)
    made = description_of(app)
    assert json.loads(made) == app.openapi()
    monkeypatch.setattr(app, "openapi", None)
    monkeypatch.setattr(json, "dumps", None)
    reply = request_once(app, "/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == made


def test_the_description_is_complete(served):
    described = application(served).openapi()
    assert set(described["paths"]) == PATHS
    assert set(described["paths"]["/api/score"]) == {"get", "post"}
    prediction = described["components"]["schemas"]["ScoredItem"]
    assert {"id", "name", "label", "score", "probability", "known", "split"} == set(
        prediction["required"]
    )
