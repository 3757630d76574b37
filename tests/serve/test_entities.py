"""Entities by a few letters, all about one, and all on a map."""

import shutil
from dataclasses import replace
from threading import Event
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from dualkg.inference.probability import triple_log_probabilities
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.serve.service import Limits
from tests.processes import LIMIT, until
from tests.serve.conftest import HOSTILE, serving


@pytest.mark.parametrize(
    ("typed", "first", "match_type"),
    [
        ("thing 2", "thing 20", "prefix"),
        ("TWENTY-ONE", "thing 21", "exact"),
        ("hing 35", "thing 35", "substring"),
        ("one", "thing 21", "word"),
        ("twnety", "thing 20", "fuzzy"),
        ("שלום", HOSTILE[7], "prefix"),
        ("passwd", HOSTILE[2], "word"),
    ],
)
def test_names_are_found_while_typing(client, typed, first, match_type):
    found = client.get("/api/entities", params={"q": typed, "k": 5}).json()["entities"]
    assert (found[0]["name"], found[0]["match_type"]) == (first, match_type)
    assert len(found) <= 5


def test_no_match(client):
    for typed in ("", "\n", "qqqqqqqqqq", "x" * 1999):
        assert client.get("/api/entities", params={"q": typed}).json()["entities"] == []


@pytest.mark.parametrize("name", [*HOSTILE, "Twenty"])
def test_entity_details(client, served, name):
    run = served.get("calibrated")
    id = run.graph.entities.id(name)
    graph = run.graph
    reply = client.get(f"/api/entity/{quote(name, safe='')}")
    assert reply.status_code == 200
    found = reply.json()
    assert found["entity"]["id"] == id
    assert found["entity"]["name"] == run.graph.entities[id]
    every = np.concatenate([graph.train, graph.valid, graph.test])
    assert found["num_known"] == len(found["known"]) == int((every[:, [0, 2]] == id).any(1).sum())
    known = {tuple(row) for row in every.tolist()}
    predicted = [
        tuple(fact[part]["id"] for part in ("head", "relation", "tail"))
        for fact in found["predicted"]
    ]
    assert predicted
    assert not known & set(predicted)
    assert all(id in (head, tail) and head != tail for head, _, tail in predicted)
    probabilities = [fact["probability"] for fact in found["predicted"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert [a["id"] for a in found["similar"]] == [a.id for a in run.predictor.similar(id)]
    assert client.get(f"/entity/{quote(name, safe='')}.json").json() == found


def test_the_first_prediction_is_the_best_of_all_triples(client, served):
    """Compared with every triple of the entity."""
    run = served.get("calibrated")
    predictor = run.predictor
    shape = run.graph.shape
    calibration = predictor.calibration
    best = (-1.0, ())
    for relation in range(shape.num_relations):
        for other in range(shape.num_entities):
            for triple in ((30, relation, other), (other, relation, 30)):
                if other == 30 or predictor.triple(*triple).known:
                    continue
                ids = np.array([triple])
                log_probability = triple_log_probabilities(predictor.model, ids)
                of_triples = calibration.of_triples(ids, log_probability)
                probability = float(of_triples.probability[0])
                if probability > best[0] + 1e-6:
                    best = (probability, triple)
    first = client.get("/api/entity/thing 30").json()["predicted"][0]
    assert tuple(first[part]["id"] for part in ("head", "relation", "tail")) == best[1]
    assert first["probability"] == pytest.approx(best[0], abs=1e-5)


def test_an_unknown_entity_gets_a_message_and_similar_names(client):
    for address in ("/api/entity/thnig 33", "/entity/thnig 33.json"):
        reply = client.get(address)
        assert reply.status_code == 404
        assert reply.json()["error"].startswith(
            "No entity is named 'thnig 33'. Did you mean 'thing 33'"
        )
        assert reply.json()["suggestions"][0].startswith("thing")


def test_the_map_is_computed_once_and_stored(untouched_folders, tmp_path):
    folder = shutil.copytree(untouched_folders[0], tmp_path / "mine")
    with (
        serving(application(ServedRuns.load([folder], device="cpu"))) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        assert_computed_once(client, folder / "map.parquet")


def assert_computed_once(client, path):
    first = client.get("/api/map").json()
    assert len(first["x"]) == len(first["y"]) == len(first["names"]) == 40
    assert max(map(abs, first["x"] + first["y"])) == pytest.approx(1.0)
    assert first["labels"][20] == "Twenty"
    written = path.stat().st_mtime_ns
    assert client.get("/api/map").json() == first
    assert path.stat().st_mtime_ns == written


def test_a_map_that_takes_long_is_pending(client_of, served):
    """No request waits for the map: the first one is answered while the map is blocked."""
    finish = Event()

    def blocked_map(run, *, on_progress, on_positions):
        on_progress(0.0)
        on_progress(0.25)
        assert finish.wait(LIMIT)
        return np.zeros((40, 2))

    run = replace(served.get("plain"), compute_map=blocked_map)
    client = client_of(Limits(map_share=0.0), runs=ServedRuns([run]))
    reply = client.get("/api/map")
    assert reply.status_code == 202
    until(lambda: client.get("/api/map").json()["done"] == 0.25)
    content = client.get("/api/map").json()
    message = "The map of 40 entities is being computed. 25% is done, about"
    assert content["message"].startswith(message)
    assert content["seconds_left"] >= 0
    finish.set()
    until(lambda: client.get("/api/map").status_code == 200)
