"""The page of a run, and of two."""

import json
import math
import re
import shutil

import pytest

import dualkg as kg
from dualkg.serve.app import application
from dualkg.serve.runs import Axis, line_chart, metric_text, reliability_diagram, ticks
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.serve.server import request_once
from dualkg.serve.templating import TEMPLATES
from dualkg.training.run_folder import RunFolder
from tests.serve.conftest import hostile_graph


def page_of(served, address="/run"):
    reply = request_once(application(served), address)
    return reply.status, reply.body.decode()


def test_two_runs_are_side_by_side(client):
    page = client.get("/run")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    found = client.get("/run.json").json()
    assert [run["run"] for run in found["runs"]] == ["calibrated", "plain"]
    assert found["comparison"]["sentence"] in page.text
    for title in (
        "On test",
        "Training",
        "Largest differences",
        "By relation",
        "By cardinality",
        "Sparsity",
        "Recipe",
    ):
        assert f"<h2>{title}</h2>" in page.text
    assert page.text.count("<svg") > 5


def test_one_run_is_shown_alone(client, served):
    assert [run["run"] for run in client.get("/run.json?with=").json()["runs"]] == ["calibrated"]
    page = client.get("/run", params={"with": ""}).text
    assert "Largest differences" not in page
    assert 'href="/run.json?with="' in page
    number = len(served.get("calibrated").run.graph.train)
    assert (
        f"ComplEx with DURA, dim 4, on the {number} training triples of <bdi>made</bdi>: 3 epochs"
        in page
    )


def test_the_chosen_run_comes_first(client):
    found = client.get("/run.json", params={"run": "plain"}).json()
    assert [run["run"] for run in found["runs"]] == ["plain", "calibrated"]
    assert found["comparison"]["a"] == "plain"


def test_an_unknown_run_is_not_found(client):
    for params in ({"run": "other"}, {"with": "other"}):
        page = client.get("/run", params=params)
        assert page.status_code == 404
        assert "No served run is named" in page.text
    assert client.get("/run.json", params={"with": "other"}).status_code == 404


def test_names_are_not_markup(client):
    page = client.get("/run").text
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<b>bold" not in page
    assert "<script>alert" not in page
    assert " style=" not in page
    assert not re.search(r"<script(?! src=)", page)


def test_runs_of_two_graphs_are_shown_without_a_comparison(run_folders, served):
    graph = kg.load_graph("world")
    other = kg.train(kg.ComplEx(graph.shape, dim=2), graph, batch_size=2000, epochs=1)
    runs = ServedRuns([*served, ServedRun.of(other, name="of another graph", device="cpu")])
    status, page = page_of(runs, "/run?with=of%20another%20graph")
    assert status == 200
    assert 'class="problem"' in page
    assert "Largest differences" not in page


def test_the_reliability_diagram(run_cli, run_folders, tmp_path):
    shutil.copytree(run_folders[0], tmp_path / "checked")
    assert run_cli("calibrate", tmp_path / "checked").code == 0
    _, page = page_of(ServedRuns.load([tmp_path / "checked"], device="cpu"))
    assert "Calibration error" in page
    assert "Coverage of prediction sets" in page
    assert 'class="diagonal"' in page


def test_a_run_without_calibration(served):
    _, page = page_of(ServedRuns([served.get("plain")]))
    assert "The run is not calibrated." in page


def test_a_run_of_one_epoch_with_a_long_name():
    config = {"model": {"dim": 2}, "training": {"epochs": 1}, "validation": {"every": 1}}
    run = kg.train_recipe(kg.Recipe.model_validate(config), graph=hostile_graph())
    status, page = page_of(ServedRuns([ServedRun.of(run, name="a" * 300, device="cpu")]))
    assert status == 200
    assert page.count('class="line a"') == 2


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (2.21, 6.7), (0.35, 0.36), (5, 5), (0, 40), (-3, 1e6), (1e-9, 2e-9)]
)
def test_ticks_enclose_the_values(low, high):
    numbers = ticks(low, high)
    assert numbers[0] <= low <= high <= numbers[-1] + 1e-9
    assert 2 <= len(numbers) <= 8
    assert numbers == sorted(set(numbers))


def test_an_axis_maps_values_to_pixels():
    assert [Axis(0, 10, 100, 200)(value) for value in (0, 5, 10)] == [100, 150, 200]
    logarithmic = Axis(0.01, 1, 0, 100, log=True)
    assert [logarithmic(value) for value in (0, 0.01, 0.1, 1)] == [0, 0, 50, 100]


def test_charts_leave_out_nan():
    assert line_chart([[]], text=str) is None
    chart = line_chart([[(1, 2.0), (2, math.nan), (3, 1.0)]], text="{:.1f}".format)
    drawn = TEMPLATES.from_string(
        "{% import 'charts.html' as charts %}{{ charts.line_chart(chart, label) }}"
    ).render(chart=chart, label='"label"')
    [line] = re.findall('<path d="([^"]*)" class="line a"', drawn)
    assert "nan" not in drawn
    assert line.count("L") == 1
    assert 'aria-label="&#34;label&#34;"' in drawn
    assert reliability_diagram([{}, {}]) is None


def test_metrics_are_written_as_in_papers():
    texts = [metric_text(value) for value in (0.4795, 1.0, 0.0, None)]
    assert texts == [".479", "1.000", ".000", "–"]
    assert [metric_text(value, "mr") for value in (16.42, 1234.5)] == ["16.4", "1,234"]


def test_the_page_as_json(run_cli, run_folders):
    result = run_cli("serve", *run_folders, "--get", "/run.json").json
    assert result["runs"][0]["reports"] == RunFolder(run_folders[0]).saved_reports()
    assert len(result["comparison"]["queries"]) == 20


def test_the_page_shows_the_engine(run_cli, tmp_path):
    folder = tmp_path / "trained"
    options = ("--no-tune", "--dim", 2, "--epochs", 1, "--out", folder)
    assert run_cli("train", "world", *options).code == 0
    engine = json.loads((folder / "environment.json").read_text())["engine"]
    served = ServedRuns.load([folder], device="cpu")
    details = json.loads(request_once(application(served), "/run.json").body)
    assert details["runs"][0]["engine"] == engine
    assert f"Trained with {engine}." in page_of(served)[1]


def test_three_runs_are_side_by_side(client_of, served, run_folders, tmp_path):
    third = shutil.copytree(run_folders[0], tmp_path / "third")
    runs = ServedRuns.load([*run_folders, third], device="cpu")
    client = client_of(runs=runs)
    page = client.get("/run").text
    assert "All runs" in page
    names = [*served.names, "third"]
    for letter, name in zip("abc", names, strict=True):
        assert f'class="line {letter}"' in page
        assert f'data-name="{name}"' in page
    rows = client.get("/table/runs.json").json()["rows"]
    assert [row["run"] for row in rows] == names
    report = client.get("/api/run?run=third").json()["reports"]["test"]
    assert rows[2]["mrr"] == report["metrics"]["mrr"]
    assert "All runs" not in client_of().get("/run").text
