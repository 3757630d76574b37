"""The given entity as an answer to its own query: shown if train has such triples, else left
out.
"""

import json

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.calibration import calibration_for
from dualkg.serve.app import application
from dualkg.serve.server import request_once
from dualkg.serve.service import ServedRuns

NUM_PLACES = 24
QUERIES = {"borders": "head=place+3&relation=borders", "near": "head=place+3&relation=near"}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> ServedRuns:
    """A ring of places: each borders the next, and the next it; each is near the next, and all but
    one near itself.
    """
    ring = np.arange(NUM_PLACES)
    after = np.roll(ring, -1)
    borders = [
        (a, 0, b)
        for one, other in zip(ring, after, strict=True)
        for a, b in ((one, other), (other, one))
    ]
    near = [(a, 1, a) for a in ring if a != 3] + [
        (a, 1, b) for a, b in zip(ring, after, strict=True)
    ]
    triples = np.random.default_rng(0).permutation(np.array(borders + near, dtype=np.int32))
    graph = kg.Graph(
        "ring",
        kg.Vocabulary([f"place {number}" for number in ring]),
        kg.Vocabulary(["borders", "near"], kind="relation"),
        *np.split(triples, [len(triples) - 12, len(triples) - 6]),
        fingerprint="ring",
    )
    folder = tmp_path_factory.mktemp("loops") / "ring"
    model = kg.DistMult(graph.shape, dim=16)
    plain = {"optimizer": kg.Optimizer(), "regularizer": kg.DURA(0.01)}
    kg.train(model, graph, **plain, batch_size=16, epochs=30, seed=0).save(folder)
    calibration_for(kg.load_run(folder))
    return ServedRuns.load([folder], device="cpu")


def get(places, address):
    reply = request_once(application(places), address)
    assert reply.status == 200
    return (
        json.loads(reply.body)
        if reply.headers["content-type"] == "application/json"
        else reply.body.decode()
    )


def names(predictions):
    return [prediction["name"] for prediction in predictions]


def test_relations_with_loops(places):
    assert places.get(None).predictor.relations_with_self_loops == {1}


@pytest.mark.parametrize("query", [QUERIES["borders"], "relation=borders&tail=place+3"])
def test_a_page_leaves_out_the_given_entity(places, query):
    side = "tails" if "head" in query else "heads"
    every = get(places, f"/api/{side}?{query}&known=omit&k=10")["predictions"]
    assert "place 3" in names(every)[:5]  # the API has every prediction of the model
    found = get(places, f"/query.json?{query}&k=9")
    assert names(found["predictions"]) == [name for name in names(every) if name != "place 3"]
    page = get(places, f"/?{query}&k=9")
    assert page.count("data-why") == 9
    assert page.count("/entity/place%203") == 0


def test_the_prediction_set_counts_shown_predictions(places):
    for coverage in (0.5, 0.9):
        every = get(
            places,
            f"/api/prediction-set?entity=place+3&relation=borders&coverage={coverage}&k=1000",
        )
        shown = get(places, f"/query.json?{QUERIES['borders']}&coverage={coverage}&k=50")
        inside = [name for name in names(every["predictions"]) if name != "place 3"]
        assert shown["prediction_set"] == {"coverage": coverage, "size": len(inside)}
        assert names(shown["predictions"])[: len(inside)] == inside


def test_the_given_entity_may_be_an_answer_if_train_has_loops(places):
    every = get(places, f"/api/tails?{QUERIES['near']}&known=omit&k=9")["predictions"]
    assert "place 3" in names(every)
    assert names(get(places, f"/query.json?{QUERIES['near']}&k=9")["predictions"]) == names(every)


def test_relations_of_an_entity_with_itself(places):
    assert set(names(get(places, "/query.json?head=place+3&tail=place+3")["predictions"])) == {
        "borders",
        "near",
    }


def test_an_entity_is_not_predicted_to_border_itself(places):
    facts = get(places, "/entity.json?name=place+3")["predicted"]
    assert facts
    assert all(fact["head"]["name"] != fact["tail"]["name"] for fact in facts)
