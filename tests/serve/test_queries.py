"""Predictions over HTTP are those of a predictor."""

import json

import pytest

from dualkg.serve.schemas import Predictions, ScoredItem
from tests.serve.conftest import HOSTILE


@pytest.fixture
def predictor(served):
    return served.get("calibrated").predictor


def expected(predictions):
    return [(p.id, p.name, p.label, p.known, p.split) for p in predictions]


def received(reply):
    assert reply.status_code == 200, reply.text
    predictions = reply.json()["predictions"]
    return [(p["id"], p["name"], p["label"], p["known"], p["split"]) for p in predictions]


def test_tails(client, predictor):
    reply = client.get("/api/tails", params={"head": "thing 30", "relation": "likes", "k": 7})
    wanted = predictor.tails("thing 30", "likes", k=7)
    assert received(reply) == expected(wanted)
    response = reply.json()
    assert response["run"] == "calibrated"
    assert response["query"]["head"] == {"id": 30, "name": "thing 30", "label": "thing 30"}
    assert response["query"]["tail"] is None
    scores = [prediction["score"] for prediction in response["predictions"]]
    probabilities = [prediction["probability"] for prediction in response["predictions"]]
    assert scores == pytest.approx([p.score for p in wanted], abs=1e-5)
    assert probabilities == pytest.approx([p.probability for p in wanted], abs=1e-5)
    assert any(probabilities)


def test_a_large_reply_has_the_fields_of_its_schema(client):
    params = {"head": "thing 30", "relation": "likes"}
    small = client.get("/api/tails", params={**params, "k": 100})
    large = client.get("/api/tails", params={**params, "k": 1000})
    answers = large.json()["predictions"]
    assert large.headers["content-type"] == small.headers["content-type"]
    assert json.loads(Predictions.model_validate(large.json()).model_dump_json()) == large.json()
    assert [list(answer) for answer in answers[:3]] == [list(ScoredItem.model_fields)] * 3
    of_small = [answer["id"] for answer in small.json()["predictions"]]
    assert [answer["id"] for answer in answers][: len(of_small)] == of_small


def test_heads_without_known_answers(client, predictor):
    reply = client.get("/api/heads", params={"tail": "Twenty", "relation": "is a", "known": "omit"})
    assert received(reply) == expected(predictor.heads("is a", "thing 20", known="omit"))
    assert reply.json()["query"]["tail"] == {"id": 20, "name": "thing 20", "label": "Twenty"}


def test_relations(client, predictor):
    reply = client.get("/api/relations", params={"head": "thing 30", "tail": "thing 31"})
    assert received(reply) == expected(predictor.relations("thing 30", "thing 31"))


def test_similar(client, predictor):
    reply = client.get("/api/similar", params={"entity": "thing 30", "k": 4})
    wanted = predictor.similar("thing 30", k=4)
    ids = [prediction["id"] for prediction in reply.json()["predictions"]]
    assert ids == [prediction.id for prediction in wanted]


def test_a_run_is_chosen_by_name(client, served):
    params = {"head": "thing 30", "relation": "likes", "run": "plain"}
    reply = client.get("/api/tails", params=params)
    assert received(reply) == expected(served.get("plain").predictor.tails("thing 30", "likes"))
    assert {prediction["probability"] for prediction in reply.json()["predictions"]} == {None}


def test_score_of_one_triple_and_of_several(client, predictor):
    params = {"head": "thing 30", "relation": "likes", "tail": "Twenty"}
    [scored] = client.get("/api/score", params=params).json()["scores"]
    prediction = predictor.triple("thing 30", "likes", "Twenty")
    assert scored["score"] == pytest.approx(prediction.score, abs=1e-5)
    assert scored["known"] == prediction.known

    triples = [["thing 30", "likes", "Twenty"], [0, 1, 2], ["thing 31", 2, HOSTILE[0]]]
    many = client.post("/api/score", json={"triples": triples}).json()["scores"]
    wanted = [predictor.triple(*triple).score for triple in triples]
    assert [scored["score"] for scored in many] == pytest.approx(wanted, abs=1e-5)
    assert many[1]["head"]["name"] == HOSTILE[0]
    assert many[2]["tail"]["name"] == HOSTILE[0]


@pytest.mark.parametrize("side", ["tail", "head"])
def test_prediction_set(client, predictor, side):
    params = {"entity": "thing 30", "relation": "likes", "coverage": 0.5, "side": side}
    response = client.get("/api/prediction-set", params=params).json()
    query = ("thing 30", "likes", None) if side == "tail" else (None, "likes", "thing 30")
    wanted = predictor.prediction_set(*query, coverage=0.5)
    assert response["size"] == len(wanted)
    ids = [prediction["id"] for prediction in response["predictions"]]
    assert ids == [prediction.id for prediction in wanted]
    assert response["query"][side] is None


def test_explanation(client, predictor):
    params = {"head": "thing 30", "relation": "likes", "tail": "thing 31", "k": 2}
    response = client.get("/api/explain", params=params).json()
    wanted = predictor.explain("thing 30", "likes", "thing 31", k=2)
    assert response["sentences"] == wanted.sentences()
    sentences = [triple["sentence"] for triple in response["supporting_triples"]]
    assert sentences == [triple.sentence for triple in wanted.supporting_triples]
