"""Details of a run, comparison of two, completion, and metrics."""

import asyncio
import json
import re
import shutil
import time
from dataclasses import replace
from threading import Event

import pytest
from fastapi import Request

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.inference.completion import complete
from dualkg.inference.completion.search import CompletionSettings
from dualkg.serve import facts
from dualkg.serve.app import application
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.serve.server import request_once
from dualkg.serve.service import Limits, RequestContext
from dualkg.training.run_folder import RunFolder
from tests.processes import until


def test_run_names(client):
    assert client.get("/api/runs").json() == {"runs": ["calibrated", "plain"]}


def test_run_details(client, run_folders):
    found = client.get("/api/run").json()
    assert found["model"] == "ComplEx"
    assert found["graph"]["counts"]["entities"] == 40
    assert [relation["name"] for relation in found["relations"]] == ["likes", "is a", "<b>bold</b>"]
    assert found["recipe"]["model"]["dim"] == 4
    assert "dim = 4" in found["recipe_toml"]
    assert [epoch["epoch"] for epoch in found["history"]] == [1, 2, 3]
    assert found["reports"] == RunFolder(run_folders[0]).saved_reports()
    assert found["calibrated"]
    assert found["sparsity"]["share"] == 0
    assert not client.get("/api/run", params={"run": "plain"}).json()["calibrated"]


def test_calibration_checks_are_in_the_details(run_cli, untouched_folders, tmp_path):
    shutil.copytree(untouched_folders[0], tmp_path / "checked")
    assert run_cli("calibrate", tmp_path / "checked").code == 0
    result = run_cli("serve", tmp_path / "checked", "--get", "/api/run").json
    assert result["reliability"]["overall"]["bins"]
    assert result["coverage"]["target_coverage"] == 0.9


def test_queries_on_which_two_runs_differ_most(client, run_cli, run_folders):
    response = client.get("/api/compare", params={"most": 5}).json()
    result = run_cli("compare", *run_folders, "--differences", 5, "--samples", 2000, "--json").json
    assert (response["a"], response["b"], response["split"]) == ("calibrated", "plain", "test")
    differences = [query["difference"] for query in response["queries"]]
    assert differences == [query["difference"] for query in result["differences"]]
    assert response["queries"][0]["head"]["label"] == result["differences"][0]["head"]
    assert response["metrics"]["MRR"]["difference"] == pytest.approx(result["mrr"]["difference"])
    assert response["sentence"].split(" (")[0].rpartition(" ")[2] in result["sentence"]


def test_a_comparison_needs_two_runs(served, client_of):
    alone = application(ServedRuns([served.get("plain")]))
    reply = request_once(alone, "/api/compare")
    assert reply.status == 400
    assert json.loads(reply.body)["error"] == (
        "A comparison needs two runs, and one is served. Serve both: dualkg serve RUN RUN"
    )


def test_runs_of_different_graphs_cannot_be_compared(served, small_graph):
    other = kg.train(kg.CP(small_graph.shape, dim=2), small_graph, epochs=1)
    app = application(
        ServedRuns([served.get("plain"), ServedRun.of(other, name="other", device="cpu")])
    )
    reply = request_once(app, "/api/compare")
    assert reply.status == 400
    assert "but the data were not the same" in json.loads(reply.body)["error"]


def test_runs_must_have_different_names(served):
    run = served.get("plain")
    with pytest.raises(RequestError, match="Two of the runs are named 'plain'"):
        ServedRuns([run, run])


def lines_of(reply):
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_other_requests_are_answered_between_the_lines_of_a_completion(served):
    """A completion with many triples made all requests wait until it was sent."""
    request = Request({"type": "http"})
    context = RequestContext(request, application(served).state.service, served.get(None))
    since = most = 0

    async def others() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    async def run() -> list[str]:
        nonlocal since, most
        other = asyncio.create_task(others())
        kinds = []
        options = {"top": 5 * facts.LINES_AT_ONCE, "types": False}
        async for line in facts.completion(context, options):
            kinds.append(line.kind)
            since += 1
            most = max(most, since)
        other.cancel()
        return kinds

    assert asyncio.run(run()).count("triple") == 5 * facts.LINES_AT_ONCE
    assert 1 < most <= facts.LINES_AT_ONCE + 1


def test_the_page_of_new_facts_gets_the_best_so_far(client_of, served):
    """Each list replaces the one before."""
    run = served.get("calibrated")

    def in_blocks(*args, **options):
        settings = CompletionSettings(max_scores=40, best_after=0.0)
        return complete(*args, settings=settings, **options)

    client = client_of(runs=ServedRuns([replace(run, complete=in_blocks)]))
    lines = lines_of(client.get("/facts/rows", params={"top": 10, "types": False}))
    lists = []
    for line in lines:
        if line["kind"] == "list":
            lists.append((line["is_final"], []))
        elif line["kind"] == "triple":
            lists[-1][1].append(re.search(r'data-row="([^"]*)"', line["html"])[1])
    *so_far, (is_final, rows) = lists
    assert is_final
    assert so_far
    assert not any(last for last, _ in so_far)
    assert all(0 < len(found) <= 10 for _, found in so_far)
    assert len(rows) == 10
    kinds = {line["kind"] for line in lines_of(client.get("/api/complete", params={"top": 10}))}
    assert kinds == {"progress", "triple", "end"}


@pytest.mark.parametrize("name", ["calibrated", "plain"])
def test_completion_is_streamed(client, served, name):
    predictor = served.get(name).predictor
    lines = lines_of(client.get("/api/complete", params={"run": name, "top": 7, "types": False}))
    wanted = complete(predictor.model, predictor.graph, top=7, calibration=predictor.calibration)
    assert lines[0]["kind"] == "progress"
    assert lines[-1] == {"kind": "end", "num_triples": 7}
    triples = [line for line in lines if line["kind"] == "triple"]
    assert [
        [line[part]["id"] for part in ("head", "relation", "tail")] for line in triples
    ] == wanted.triples.tolist()
    assert [line["rank"] for line in triples] == list(range(1, 8))
    assert ("probability" in triples[0]) == (name == "calibrated")


def test_completion_of_some_relations_and_heads(client):
    params = {"top": 50, "relation": ["likes", "<b>bold</b>"], "head": "Twenty"}
    triples = [
        line
        for line in lines_of(client.get("/api/complete", params=params))
        if line["kind"] == "triple"
    ]
    assert {line["head"]["id"] for line in triples} == {20}
    assert {line["relation"]["id"] for line in triples} == {0, 2}


def test_one_completion_at_a_time(served):
    app = application(served)
    with app.state.service.searches.running:
        reply = request_once(app, "/api/complete")
    assert reply.status == 503
    assert json.loads(reply.body)["error"].startswith("Another completion is running.")
    assert request_once(application(served), "/api/complete").status == 200


def test_a_completion_that_takes_too_long_ends_with_an_error(client_of):
    lines = lines_of(client_of(Limits(stream_seconds=1e-6)).get("/api/complete"))
    assert lines[-1]["error"].startswith(
        "The completion took longer than its limit of 1e-06 seconds"
    )


def test_a_completion_without_a_reader_is_cancelled(client_of, served):
    cancelled = Event()

    def endless(*args, on_progress, **options):
        try:
            while True:
                on_progress(1, 2)
                time.sleep(0.01)
        finally:
            cancelled.set()

    endless_run = replace(served.get("plain"), complete=endless)
    client = client_of(runs=ServedRuns([served.get("calibrated"), endless_run]))
    with client.stream("GET", "/api/complete", params={"run": "plain"}) as reply:
        # An iterator that nobody holds closes the connection.
        lines = reply.iter_lines()
        assert json.loads(next(lines)) == {"kind": "progress", "done": 1, "total": 2}
        assert client.get("/api/complete").status_code == 503
    assert cancelled.wait(120)
    # The lock is released afterwards.
    until(lambda: client.get("/api/complete", params={"top": 1}).status_code == 200)
    assert lines_of(client.get("/api/complete"))[-1]["kind"] == "end"


def test_metrics(client):
    client.get("/api/tails", params={"head": "thing 30", "relation": "likes"})
    client.get("/api/entity/%3Cnobody%3E%0A")
    client.get("/no/such/address")
    text = client.get("/metrics").text
    assert '\ndualkg_requests_total{route="/api/tails",status="200"} ' in text
    assert '\ndualkg_requests_total{route="/api/entity/{name}",status="404"} ' in text
    assert '\ndualkg_requests_total{route="other",status="404"} ' in text
    assert '\ndualkg_entities{run="calibrated"} 40.0\n' in text
    assert "nobody" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_a_run_name_cannot_break_the_metrics(served):
    run = ServedRun(
        name='a"b\\c\nd', run=served.get("plain").run, predictor=served.get("plain").predictor
    )
    text = request_once(application(ServedRuns([run])), "/metrics").body.decode()
    assert 'dualkg_entities{run="a\\"b\\\\c\\nd"} 40.0' in text.splitlines()
