"""Paths between two entities over HTTP."""

import pytest

from tests.serve.conftest import HOSTILE

ENDS = {"start": "thing 15", "end": "thing 20"}


def test_numbers_of_predicted_facts_are_those_of_the_score(client):
    found = client.get("/api/paths", params=ENDS).json()
    assert (found["start"]["name"], found["end"]["label"]) == ("thing 15", "Twenty")
    assert found["known"]
    assert all(path["probability"] is None for path in found["known"])
    assert len(found["predicted"]) > 3
    figures = [path["probability"] for path in found["predicted"]]
    assert figures == sorted(figures, reverse=True)
    for path in found["predicted"]:
        product = 1.0
        for fact in (fact for step in path["steps"] for fact in step if fact["split"] is None):
            triple = {part: fact[part]["name"] for part in ("head", "relation", "tail")}
            [score] = client.get("/api/score", params=triple).json()["scores"]
            assert fact["probability"] == pytest.approx(score["probability"], rel=1e-4)
            product *= fact["probability"]
        assert path["probability"] == pytest.approx(product)


def test_the_page_has_the_same_paths(client):
    found = client.get("/paths.json", params=ENDS).json()
    page = client.get("/paths", params=ENDS).text
    assert page.count("<li") >= len(found["known"]) + len(found["predicted"])
    rows = client.get("/table/paths.json", params=ENDS).json()["rows"]
    number = sum(len(step) for path in found["known"] for step in path["steps"])
    assert sum(row["kind"] == "known" for row in rows) == number
    assert "Find paths" in client.get("/paths").text
    assert 'value="Twenty"' in client.get("/paths", params={"start": "thing 20"}).text


def test_names_are_text(client):
    for name in HOSTILE:
        page = client.get("/paths", params={"start": "thing 15", "end": name})
        assert page.status_code == 200
        assert "<script>alert" not in page.text


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ({"start": "thing 15", "end": "thing 15"}, 400),
        ({"start": "thing 15", "end": "nobody"}, 404),
    ],
)
def test_what_has_no_path_is_told(client, ends, status):
    assert client.get("/api/paths", params=ends).status_code == status
    page = client.get("/paths", params=ends)
    assert page.status_code == status
    assert 'role="alert"' in page.text


def test_rejected_facts_join_nothing(client_of):
    client = client_of()
    found = client.get("/api/paths", params=ENDS).json()
    [fact] = next(
        facts
        for path in found["predicted"]
        if len(facts := [f for step in path["steps"] for f in step if f["split"] is None]) == 1
    )
    triple = {part: fact[part]["name"] for part in ("head", "relation", "tail")}

    def decide(verdict):
        body = {"decisions": [{**triple, "verdict": verdict}]}
        assert client.post("/api/decisions", json=body).status_code == 200

    def has_fact():
        paths = client.get("/api/paths", params=ENDS).json()["predicted"]
        return any(
            {part: other[part]["name"] for part in triple} == triple
            for path in paths
            for step in path["steps"]
            for other in step
        )

    assert has_fact()
    decide("rejected")
    try:
        assert not has_fact()
    finally:
        decide("undecided")
