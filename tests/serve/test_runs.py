"""What is kept of a run, two runs side by side, new facts, and what the server tells of itself."""

from __future__ import annotations

import json
import shutil
import time
from threading import Event

import pytest

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.inference.completion import complete
from dualkg.serve.app import application
from dualkg.serve.limits import Limits
from dualkg.serve.routes import completion
from dualkg.serve.server import request_once
from dualkg.serve.state import ServedRun, ServedRuns


def test_the_runs_by_name(client):
    assert client.get("/api/runs").json() == {"runs": ["calibrated", "plain"]}


def test_all_that_is_kept_of_a_run(client, run_folders):
    found = client.get("/api/run").json()
    assert found["model"] == "ComplEx"
    assert found["graph"]["counts"]["entities"] == 40
    assert [relation["name"] for relation in found["relations"]] == ["likes", "is a", "<b>bold</b>"]
    assert found["recipe"]["model"]["dim"] == 4
    assert "dim = 4" in found["recipe_toml"]
    assert [epoch["epoch"] for epoch in found["history"]] == [1, 2, 3]
    assert found["reports"] == json.loads((run_folders[0] / "report.json").read_text())
    assert found["calibrated"]
    assert found["sparsity"]["share"] == 0
    assert not client.get("/api/run", params={"run": "plain"}).json()["calibrated"]


def test_how_probabilities_held_is_told_where_it_was_checked(run_cli, untouched_folders, tmp_path):
    shutil.copytree(untouched_folders[0], tmp_path / "checked")
    assert run_cli("calibrate", tmp_path / "checked").code == 0
    told = run_cli("serve", tmp_path / "checked", "--get", "/api/run").json
    assert told["reliability"]["overall"]["bins"]
    assert told["coverage"]["target_coverage"] == 0.9


def test_the_questions_on_which_two_runs_differ_most(client, run_cli, run_folders):
    found = client.get("/api/compare", params={"most": 5}).json()
    told = run_cli("compare", *run_folders, "--differences", 5, "--samples", 2000, "--json").json
    assert (found["a"], found["b"], found["split"]) == ("calibrated", "plain", "test")
    assert [q["difference"] for q in found["questions"]] == [q["difference"] for q in told["differences"]]
    assert found["questions"][0]["head"]["label"] == told["differences"][0]["head"]
    assert found["metrics"]["MRR"]["difference"] == pytest.approx(told["mrr"]["difference"])
    assert found["sentence"].split(" (")[0].rpartition(" ")[2] in told["sentence"]


def test_one_run_alone_is_not_compared(served, client_of):
    alone = application(ServedRuns([served.get("plain")]))
    reply = request_once(alone, "/api/compare")
    assert reply.status == 400
    assert json.loads(reply.body)["error"] == (
        "Two runs are compared, and one is served. Serve both: dualkg serve RUN RUN"
    )


def test_runs_of_different_graphs_are_not_compared(served, small_graph):
    other = kg.train(kg.CP(small_graph.shape, dim=2), small_graph, epochs=1)
    app = application(ServedRuns([served.get("plain"), ServedRun.of(other, name="other", device="cpu")]))
    reply = request_once(app, "/api/compare")
    assert reply.status == 400
    assert "but the data were not the same" in json.loads(reply.body)["error"]


def test_runs_must_have_different_names(served):
    run = served.get("plain")
    with pytest.raises(RequestError, match="Two of the runs are called 'plain'."):
        ServedRuns([run, run])


def lines_of(reply):
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


@pytest.mark.parametrize("name", ["calibrated", "plain"])
def test_new_facts_are_streamed(client, served, name):
    predictor = served.get(name).predictor
    lines = lines_of(client.get("/api/complete", params={"run": name, "top": 7, "types": False}))
    wanted = complete(predictor.model, predictor.graph, top=7, calibration=predictor.calibration)
    assert lines[0]["kind"] == "progress"
    assert lines[-1] == {"kind": "end", "triples": 7}
    triples = [line for line in lines if line["kind"] == "triple"]
    assert [[line[part]["id"] for part in ("head", "relation", "tail")] for line in triples] == wanted.triples.tolist()
    assert [line["rank"] for line in triples] == list(range(1, 8))
    assert ("probability" in triples[0]) == (name == "calibrated")


def test_new_facts_of_some_relations_and_heads(client):
    asked = {"top": 50, "relation": ["likes", "<b>bold</b>"], "head": "Twenty"}
    triples = [line for line in lines_of(client.get("/api/complete", params=asked)) if line["kind"] == "triple"]
    assert {line["head"]["id"] for line in triples} == {20}
    assert {line["relation"]["id"] for line in triples} == {0, 2}


def test_one_list_at_a_time(served):
    app = application(served)
    with app.state.service.completing:
        reply = request_once(app, "/api/complete")
    assert reply.status == 503
    assert json.loads(reply.body)["error"].startswith("Another list of new triples is being made.")
    assert request_once(application(served), "/api/complete").status == 200


def test_a_list_that_takes_too_long_ends_with_a_sentence(client_of):
    lines = lines_of(client_of(Limits(long_seconds=1e-6)).get("/api/complete"))
    assert lines[-1]["error"].startswith("The list took longer than the 1e-06 seconds")


def test_a_list_that_nobody_reads_is_given_up(served, client_of, monkeypatch):
    ended = Event()

    def endless(*nouns, on_progress, **choices):
        try:
            while True:
                on_progress(1, 2)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(completion, "complete", endless)
    client = client_of()
    with client.stream("GET", "/api/complete") as reply:
        assert json.loads(next(reply.iter_lines())) == {"kind": "progress", "done": 1, "of": 2}
        assert client.get("/api/complete").status_code == 503
    assert ended.wait(10)
    monkeypatch.undo()
    assert lines_of(client.get("/api/complete"))[-1]["kind"] == "end"


def test_what_prometheus_reads(client):
    client.get("/api/tails", params={"head": "thing 30", "relation": "likes"})
    client.get("/api/entity/%3Cnobody%3E%0A")
    client.get("/no/such/address")
    text = client.get("/metrics").text
    assert '\ndualkg_requests_total{route="/api/tails",status="200"} ' in text
    assert '\ndualkg_requests_total{route="/api/entity/{name}",status="404"} ' in text
    assert '\ndualkg_requests_total{route="other",status="404"} ' in text
    assert '\ndualkg_entities{run="calibrated"} 40\n' in text
    assert "nobody" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_a_name_cannot_break_what_prometheus_reads(served):
    run = ServedRun(name='a"b\\c\nd', run=served.get("plain").run, predictor=served.get("plain").predictor)
    text = request_once(application(ServedRuns([run])), "/metrics").body.decode()
    assert 'dualkg_entities{run="a\\"b\\\\c\\nd"} 40' in text.splitlines()
