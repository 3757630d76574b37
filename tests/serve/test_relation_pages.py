"""The first page, the pages of relations, and the best new facts on both."""

import shutil

import httpx
import numpy as np
import pytest

from dualkg.data.graph import SPLITS
from dualkg.serve import facts
from dualkg.serve import served as served_runs
from dualkg.serve.app import application
from dualkg.serve.relations import hardest_queries
from dualkg.serve.served import ServedRuns
from dualkg.serve.templating import percent, short
from tests.processes import LIMIT
from tests.serve.conftest import serving
from tests.serve.test_pages import Audit, audited


def test_the_first_page_says_what_is_served_and_how_good_it_is(client, served):
    run = served.get(None)
    found = client.get("/start.json").json()
    metrics = run.run.report_on("test").metrics
    graph = run.graph
    num_facts = len(graph.train) + len(graph.valid) + len(graph.test)
    assert (found["num_entities"], found["num_relations"]) == (40, 3)
    assert found["num_facts"] == num_facts
    assert found["right_first"] == metrics.hits_at_1
    assert found["right_among_ten"] == metrics.hits_at_10
    page = audited(client.get("/"))
    assert f"{100 * metrics.hits_at_10:.0f} %" in page.text
    assert f"{found['num_test']} facts that it had not seen" in page.text
    assert "/start.json" in page.values("link", "href")
    for example in found["examples"]:
        assert short(example["head"]["label"]) in page.text


def test_the_known_example_is_between_entities_with_most_facts(client, served):
    graph = served.get(None).graph
    every = np.concatenate([graph.split(split) for split in SPLITS])
    degrees = [int((every[:, [0, 2]] == id).any(1).sum()) for id in range(40)]
    lowest = [min(degrees[head], degrees[tail]) for head, _, tail in graph.train.tolist()]
    example = client.get("/start.json").json()["example"]
    assert min(degrees[example[end]["id"]] for end in ("head", "tail")) == max(lowest)


@pytest.mark.parametrize("name", ["likes", "is a", "<b>bold</b>"])
def test_the_page_of_a_relation_has_the_content_of_its_json(client, served, name):
    run = served.get(None)
    id = run.graph.relations.id(name)
    reply = client.get("/relation", params={"name": name})
    page = Audit(reply.text)  # which has no markup of the name, but a table
    assert page.tags.count("h1") == 1
    found = client.get("/relation.json", params={"name": name}).json()
    json = [value for value in page.values("link", "href") if value.startswith("/relation")]
    assert client.get(json[0]).json() == found
    counts = {split: int((run.graph.split(split)[:, 1] == id).sum()) for split in SPLITS}
    assert found["counts"] == counts
    assert f"{sum(counts.values())} known facts" in page.text
    hardest = hardest_queries(run.graph, run.run.report_on("test").ranks, id)
    assert [query["rank"] for query in found["hardest"]] == [query.rank for query in hardest]
    for fact in found["examples"]:
        assert fact["relation"]["name"] == name
        assert short(fact["tail"]["label"]) in page.text
    links = {value for value in page.values("a", "href") if value[0] == "/"}
    for link in links - {"/docs"}:
        # Some names have line ends, which a file of tab-separated values cannot have.
        assert client.get(link).status_code == (400 if ".tsv" in link else 200)


def test_an_unknown_relation(client):
    reply = client.get("/relation/like")
    assert reply.status_code == 404
    message = "No relation is named 'like'. Did you mean 'likes'?"
    assert message in audited(reply).text
    assert client.get("/relation/like.json").json()["suggestions"] == ["likes"]


@pytest.mark.parametrize("params", [{}, {"relation": "is a"}])
def test_the_best_new_facts_are_those_of_the_list(client, params):
    page = audited(client.get("/facts/best", params=params))
    first = client.get("/facts.json", params=params | {"types": False}).json()["facts"][
        : facts.NUM_BEST
    ]
    assert page.values("li", "class").count("best-fact") == len(first)
    for fact in first:
        assert percent(fact["probability"]) in page.text
        assert short(fact["tail"]["label"]) in page.text


def test_what_was_decided_on_is_no_longer_among_the_best(untouched_folders, tmp_path):
    folder = shutil.copytree(untouched_folders[0], tmp_path / "mine")
    with (
        serving(application(ServedRuns.load([folder], device="cpu"))) as address,
        httpx.Client(base_url=address, timeout=LIMIT) as client,
    ):
        first, second = client.get("/facts.json", params={"top": 2, "types": False}).json()["facts"]
        before = client.get("/facts/best").text
        decision = {part: first[part]["name"] for part in ("head", "relation", "tail")}
        decisions = {"decisions": [decision | {"verdict": "rejected"}]}
        client.post("/api/decisions", json=decisions).raise_for_status()
        after = client.get("/facts/best").text
        best = Audit(after).text
        assert percent(second["probability"]) in best
        assert before != after


def test_a_long_search_waits_until_somebody_asks(client, monkeypatch):
    assert "data-at-once" in client.get("/").text
    monkeypatch.setattr(served_runs, "MAX_SCORES", 100)
    for address in ("/", "/relation/likes"):
        page = client.get(address).text
        assert "data-at-once" not in page
        assert "The search takes a while." in page
