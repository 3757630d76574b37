"""Predictions over HTTP are those of a predictor."""

import pytest

from tests.serve.conftest import HOSTILE


@pytest.fixture
def predictor(served):
    return served.get("calibrated").predictor


def expected(predictions):
    return [(p.id, p.name, p.label, p.known, p.split) for p in predictions]


def received(reply):
    assert reply.status_code == 200, reply.text
    return [
        (a["id"], a["name"], a["label"], a["known"], a["split"])
        for a in reply.json()["predictions"]
    ]


def test_tails(client, predictor):
    reply = client.get("/api/tails", params={"head": "thing 30", "relation": "likes", "k": 7})
    answers = predictor.tails("thing 30", "likes", k=7)
    assert received(reply) == expected(answers)
    found = reply.json()
    assert found["run"] == "calibrated"
    assert found["query"]["head"] == {"id": 30, "name": "thing 30", "label": "thing 30"}
    assert found["query"]["tail"] is None
    assert [a["score"] for a in found["predictions"]] == pytest.approx(
        [a.score for a in answers], abs=1e-5
    )
    assert [a["probability"] for a in found["predictions"]] == pytest.approx(
        [a.probability for a in answers], abs=1e-5
    )
    assert any(a["probability"] for a in found["predictions"])


def test_heads_without_known_answers(client, predictor):
    reply = client.get("/api/heads", params={"tail": "Twenty", "relation": "is a", "known": "omit"})
    assert received(reply) == expected(predictor.heads("is a", "thing 20", known="omit"))
    assert reply.json()["query"]["tail"] == {"id": 20, "name": "thing 20", "label": "Twenty"}


def test_relations(client, predictor):
    reply = client.get("/api/relations", params={"head": "thing 30", "tail": "thing 31"})
    assert received(reply) == expected(predictor.relations("thing 30", "thing 31"))


def test_similar(client, predictor):
    reply = client.get("/api/similar", params={"entity": "thing 30", "k": 4})
    assert [a["id"] for a in reply.json()["predictions"]] == [
        a.id for a in predictor.similar("thing 30", k=4)
    ]


def test_a_run_is_chosen_by_name(client, served):
    reply = client.get(
        "/api/tails", params={"head": "thing 30", "relation": "likes", "run": "plain"}
    )
    assert received(reply) == expected(served.get("plain").predictor.tails("thing 30", "likes"))
    assert {a["probability"] for a in reply.json()["predictions"]} == {None}


def test_score_of_one_triple_and_of_several(client, predictor):
    one = client.get(
        "/api/score", params={"head": "thing 30", "relation": "likes", "tail": "Twenty"}
    ).json()
    judged = predictor.triple("thing 30", "likes", "Twenty")
    assert one["scores"][0]["score"] == pytest.approx(judged.score, abs=1e-5)
    assert one["scores"][0]["known"] == judged.known
    triples = [["thing 30", "likes", "Twenty"], [0, 1, 2], ["thing 31", 2, HOSTILE[0]]]
    many = client.post("/api/score", json={"triples": triples}).json()["scores"]
    wanted = [predictor.triple(*triple) for triple in triples]
    assert [score["score"] for score in many] == pytest.approx(
        [answer.score for answer in wanted], abs=1e-5
    )
    assert many[1]["head"]["name"] == HOSTILE[0]
    assert many[2]["tail"]["name"] == HOSTILE[0]


@pytest.mark.parametrize("side", ["tail", "head"])
def test_prediction_set(client, predictor, side):
    params = {"entity": "thing 30", "relation": "likes", "coverage": 0.5, "side": side}
    found = client.get("/api/prediction-set", params=params).json()
    ends = ("thing 30", "likes", None) if side == "tail" else (None, "likes", "thing 30")
    wanted = predictor.prediction_set(*ends, coverage=0.5)
    assert found["size"] == len(wanted)
    assert [a["id"] for a in found["predictions"]] == [a.id for a in wanted]
    assert found["query"][side] is None


def test_explanation(client, predictor):
    reply = client.get(
        "/api/explain", params={"head": "thing 30", "relation": "likes", "tail": "thing 31", "k": 2}
    )
    wanted = predictor.explain("thing 30", "likes", "thing 31", k=2)
    assert reply.json()["sentences"] == wanted.sentences()
    assert [reason["sentence"] for reason in reply.json()["supporting_triples"]] == [
        one.sentence for one in wanted.supporting_triples
    ]
