"""The given entity as an answer to its own query: shown if train has such triples, else left
out.
"""

import json

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.probability import calibration_for
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.serve.server import request_once

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
def test_page_and_api_leave_out_the_given_entity(places, query):
    side = "tails" if "head" in query else "heads"
    from_api = get(places, f"/api/{side}?{query}&known=omit&k=9")["predictions"]
    assert "place 3" not in names(from_api)

    run = places.get(None).run
    unrestricted = kg.Predictor.of(run, loops=True)
    given = ("place 3", "borders") if side == "tails" else ("borders", "place 3")
    every = [answer.name for answer in getattr(unrestricted, side)(*given, k=10, known="omit")]
    assert "place 3" in every[:5]  # the model scores it high
    assert names(from_api) == [name for name in every if name != "place 3"]

    from_page = get(places, f"/query.json?{query}&k=9")
    assert names(from_page["predictions"]) == names(from_api)
    page = get(places, f"/?{query}&k=9")
    assert page.count("data-why") == 9
    assert page.count("/entity/place%203") == 0


def test_the_prediction_set_is_the_first_predictions(places):
    for coverage in (0.5, 0.9):
        members = get(
            places,
            f"/api/prediction-set?entity=place+3&relation=borders&coverage={coverage}&k=1000",
        )["predictions"]
        assert "place 3" not in names(members)
        shown = get(places, f"/query.json?{QUERIES['borders']}&coverage={coverage}&k=50")
        assert shown["prediction_set"]["size"] == len(members)
        assert shown["prediction_set"]["is_first"]
        assert names(shown["predictions"])[: len(members)] == names(members)


def test_all_readers_get_the_same_answers(places, run_cli):
    """Python, the API, the page and the command."""
    run = places.get(None).run
    for relation in ("borders", "near"):
        from_python = [
            answer.name for answer in run.predictor().tails("place 3", relation, k=8, known="omit")
        ]
        query = f"head=place+3&relation={relation}&k=8"
        assert names(get(places, f"/api/tails?{query}&known=omit")["predictions"]) == from_python
        assert names(get(places, f"/query.json?{query}")["predictions"]) == from_python
        command = ["predict", run.folder, "--head", "place 3", "--relation", relation]
        printed = run_cli(*command, "--new", "--top", 8, "--json").json["predictions"]
        assert names(printed) == from_python


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
