"""Trainings that a server starts or watches."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.serve.app import application
from dualkg.serve.errors import BusyError, NotFound
from dualkg.serve.served import ServedRuns
from dualkg.serve.server import LiveServer
from dualkg.serve.service import Limits
from dualkg.serve.training_process import Reporter
from dualkg.serve.trainings import MAX_REPORT, Trainings, TrainingState, WatchedTraining
from dualkg.training.callbacks import Callback
from dualkg.training.checkpoint import save_tensors
from dualkg.training.errors import InterruptedRunError
from dualkg.workflows.events import GraphChecked
from tests.conftest import graph_of
from tests.processes import LIMIT, until
from tests.serve.conftest import serving

TEXT = "".join(
    f"a{i}\tlikes\ta{(i * 7 + 1) % 30}\na{i}\tknows\ta{(i * 3) % 30}\n" for i in range(30)
)
# In place of a process that trains.
FINISHES = """
import json, sys
for line in (
    {"kind": "notes", "notes": ["a note"], "counts": {"entities": 3}},
    {"kind": "stage", "stage": "training"},
    {"kind": "progress", "text": "epoch 1/2", "share": 0.25, "time_left": "", "point":
        {"epoch": 0.5, "loss": 9.0, "valid_mrr": None}},
    {"kind": "progress", "text": "epoch 1/2", "share": 0.5, "time_left": "", "point":
        {"epoch": 1.0, "loss": 3.0, "valid_mrr": 0.5}},
    {"kind": "stage", "stage": "finished"},
):
    print(json.dumps(line), flush=True)
"""
FAILS = """print('{"kind": "error", "error": "There are no triples."}'); raise SystemExit(1)"""
WAITS = "import time; print('not JSON', flush=True); time.sleep(600)"


def trainings_of(folder, script=FINISHES, on_finish=lambda path: None):
    return Trainings(folder, on_finish=on_finish, command=(sys.executable, "-S", "-c", script))


async def over(training):
    while not training.is_over:
        await asyncio.sleep(0.01)


def start(trainings, *, name="mine", taken=()):
    file = trainings.save_file("mine.tsv", TEXT).file
    return trainings.start(file, name=name, changes={}, tune=False, taken=list(taken))


def test_a_training_reports_its_progress_and_its_result_is_served(tmp_path):
    served = []
    trainings = trainings_of(tmp_path, on_finish=served.append)

    async def run():
        training = await start(trainings)
        assert trainings.get("mine") is training
        await over(training)
        return training

    training = asyncio.run(run())
    assert training.stage == "finished"
    assert served == [tmp_path / "mine"]
    assert training.notes == ["a note"]
    assert training.counts == {"entities": 3}
    assert training.points == [{"epoch": 1.0, "loss": 3.0, "valid_mrr": 0.5}]


def test_a_training_that_fails_says_why(tmp_path):
    async def run():
        training = await start(trainings_of(tmp_path, FAILS))
        await over(training)
        return training

    training = asyncio.run(run())
    assert (training.stage, training.error) == ("failed", "There are no triples.")


def test_one_training_at_a_time_which_can_be_stopped(tmp_path):
    trainings = trainings_of(tmp_path, WAITS)

    async def run():
        training = await start(trainings)
        with pytest.raises(BusyError, match="Another training"):
            await start(trainings, name="other")
        assert (await trainings.stop("mine")).stage == "stopped"
        again = await start(trainings, name="other")
        await trainings.close()
        return training, again

    first, second = asyncio.run(run())
    assert first.stage == "stopped"
    assert second.is_over


@pytest.mark.parametrize("name", ["", "..", "a/b", "../a", ".hidden", "x" * 65, "taken", "there"])
def test_a_run_gets_a_new_folder_of_its_own(tmp_path, name):
    (tmp_path / "there").mkdir()
    with pytest.raises(RequestError, match="cannot be the name of the run"):
        asyncio.run(start(trainings_of(tmp_path), name=name, taken=["taken"]))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.gz", TEXT), ("a", TEXT), ("a.tsv", "one column\n" * 3), ("a.tsv", ""), ("a.ttl", "<a")],
)
def test_a_file_that_has_no_triples_is_refused_and_removed(tmp_path, name, text):
    trainings = trainings_of(tmp_path)
    with pytest.raises(kg.errors.DualkgError):
        trainings.save_file(name, text)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("address", ["/api/training/files", "/api/decisions/import"])
def test_a_text_with_half_a_character_is_refused(client_of, tmp_path, address):
    client = client_of(training_folder=tmp_path)
    body = json.dumps({"name": "mine.tsv", "text": TEXT + "\ud800\tlikes\ta1\n"})
    reply = client.post(address, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert "must be text" in reply.json()["error"]


def test_notes_with_long_names_are_cut_and_received(tmp_path):
    lines = []
    report = Reporter(lambda **line: lines.append(line))
    report(GraphChecked(None, ["n" * 200_000] * 30))
    training = TrainingState("mine", tmp_path)
    training.receive(lines[0])
    assert len(json.dumps(lines[0])) < MAX_REPORT
    assert len(training.notes) == 20


def test_a_line_longer_than_a_pipe_is_received(tmp_path):
    """It would leave a training that never ends."""

    async def run():
        long = """print('{"kind": "notes", "notes": ["' + "n" * 500_000 + '"]}')"""
        training = await start(trainings_of(tmp_path, long + FINISHES))
        await asyncio.wait_for(over(training), 60)
        return training

    assert asyncio.run(run()).stage == "finished"


def test_a_run_that_cannot_be_read_is_a_training_that_failed(tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path / "report.json"))

    async def run():
        training = await start(trainings_of(tmp_path, on_finish=refuse))
        await asyncio.wait_for(over(training), 60)
        return training

    training = asyncio.run(run())
    assert training.stage == "failed"
    assert "Permission denied" in training.error
    assert str(tmp_path) not in training.error


def test_names_of_files_lead_nowhere_else(tmp_path):
    trainings = trainings_of(tmp_path / "runs")
    upload = trainings.save_file("../../x/ä b.tsv", TEXT)
    assert upload.file.endswith("/b.tsv")
    assert upload.graph.name == "b"
    for file in ("../a.tsv", "/etc/passwd", upload.file.replace("/", "//"), "0" * 12 + "/a.tsv"):
        with pytest.raises(RequestError, match="was sent"):
            asyncio.run(trainings.start(file, name="a", changes={}, tune=False, taken=[]))


def test_old_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("dualkg.serve.trainings.MAX_FILES", 2)
    trainings = trainings_of(tmp_path)
    for number in range(4):
        trainings.save_file("a.tsv", f"{TEXT}b{number}\tlikes\ta1\n")
    assert len(list((tmp_path / ".uploads").iterdir())) == 2


def test_a_long_curve_keeps_its_ends():
    training = TrainingState("a", None)
    for epoch in range(1, 5000):
        point = {"epoch": float(epoch), "loss": 1.0, "valid_mrr": None}
        training.receive(
            {"kind": "progress", "text": "", "share": 0.0, "time_left": "", "point": point}
        )
    assert len(training.points) <= 500
    assert training.points[0]["epoch"] == 1
    assert training.points[-1]["epoch"] == 4999


def test_a_server_that_does_not_train_refuses_files(client):
    assert 'href="/train"' not in client.get("/").text
    for address, body in (
        ("/api/training/files", {"name": "a.tsv", "text": TEXT}),
        ("/api/training", {"file": "a", "name": "b"}),
    ):
        reply = client.post(address, json=body)
        assert reply.status_code == 403
        assert "--allow-training" in reply.json()["error"]
    assert client.get("/training?name=nobody").status_code == 404


def test_files_are_accepted_from_pages_of_the_server_alone(client_of, tmp_path):
    client = client_of(Limits(file_bytes=4000), training_folder=tmp_path)
    address = "/api/training/files"
    body = {"name": "mine.tsv", "text": TEXT}
    assert client.post(address, json=body, headers={"Origin": "http://evil"}).status_code == 403
    plain = {"Content-Type": "text/plain"}
    assert client.post(address, content=json.dumps(body), headers=plain).status_code == 415
    too_large = {"name": "a.tsv", "text": TEXT * 10}
    assert client.post(address, json=too_large).status_code == 413
    found = client.post(address, json=body).json()
    assert found["counts"]["entities"] == 30
    assert len(found["examples"]) == 8
    reply = client.post("/api/training", json={"file": "x", "name": "a", "model": "os:system"})
    assert reply.status_code == 422
    assert client.post("/api/training", json={"file": "x", "name": "a"}).status_code == 400
    assert "Drop a file" in client.get("/train").text


class Interrupt(Callback):
    """Ctrl-C after two epochs."""

    def on_epoch(self, epoch, metrics):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_folder_that_was_interrupted_has_curves(tmp_path):
    graph = graph_of([(i, 0, (i * 3 + 1) % 20) for i in range(20)], num_entities=20)
    folder = tmp_path / "watched"
    model = kg.ComplEx(graph.shape, dim=2)
    with pytest.raises(InterruptedRunError):
        kg.train(model, graph, epochs=5, out=folder, callbacks=[Interrupt()])
    served = []
    trainings = Trainings(None, on_finish=served.append)
    trainings.watch(folder)
    watched = trainings.get("watched")
    assert isinstance(watched, WatchedTraining)
    assert watched.stage == "stopped"
    assert [point["epoch"] for point in watched.points] == [1, 2]
    assert watched.share == pytest.approx(2 / 5)
    kg.resume(folder)
    assert trainings.get("watched").stage == "finished"
    assert trainings.get("watched").stage == "finished"
    assert served == [folder]
    with pytest.raises(NotFound):
        trainings.get("other")


@pytest.mark.parametrize(
    "progress",
    [[], {"history": 5}, {"history": [5]}, {"history": [{"epoch": 1, "loss": float("nan")}]}],
)
def test_a_damaged_checkpoint_has_no_curve(tmp_path, progress):
    folder = tmp_path / "watched"
    folder.mkdir()
    save_tensors({}, folder / "checkpoint.safetensors", about={"progress": progress})
    trainings = Trainings(None, on_finish=print)
    trainings.watch(folder)
    assert trainings.get("watched").points == []


def test_a_page_of_a_training_has_its_curve(served, tmp_path):
    app = application(served, training_folder=tmp_path)
    training = TrainingState("<b>mine</b>", tmp_path, stage="training", text="epoch 2/4", share=0.5)
    training.points = [{"epoch": float(epoch), "loss": 9.0 - epoch} for epoch in (1, 2)]
    app.state.service.trainings.by_name[training.name] = training
    with serving(app) as address:
        page = httpx.get(f"{address}/training", params={"name": training.name}, timeout=LIMIT).text
        content = httpx.get(
            f"{address}/training.json", params={"name": training.name}, timeout=LIMIT
        ).json()
    assert 'value="0.500"' in page
    assert 'class="line a"' in page
    assert "<b>mine" not in page
    assert content["stage"] == "training"
    assert "folder" not in content


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_shown(run_folders, tmp_path):
    folder = tmp_path / "busy"
    command = [sys.executable, "-m", "dualkg", "train", "world", "--no-tune"]
    process = subprocess.Popen([*command, "--epochs", "2000", "--out", folder])
    try:
        until(lambda: (folder / "checkpoint.safetensors").exists())
        served = ServedRuns.load([run_folders[0], folder], device="cpu")
        assert served.in_training == [folder]
        with serving(application(served)) as address:

            def state():
                return httpx.get(f"{address}/training.json?name=busy", timeout=LIMIT).json()

            until(lambda: state()["points"])
            assert state()["stage"] == "training"
            assert "busy" in httpx.get(f"{address}/train", timeout=LIMIT).text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def test_a_server_without_a_finished_run_shows_the_training(tmp_path):
    folder = tmp_path / "mine"
    app = application(ServedRuns([], in_training=[folder]))
    training = app.state.service.trainings.show(folder)
    training.receive({"kind": "stage", "stage": "training"})
    with serving(app) as address, httpx.Client(base_url=address, timeout=LIMIT) as client:
        reply = client.get("/", follow_redirects=True)
        assert str(reply.url).endswith("/training?name=mine")
        assert "No run is finished yet." in reply.text
        assert client.get("/train").status_code == 200
        reply = client.get("/entity/Twenty", headers={"accept": "text/html"})
        assert reply.status_code == 503
        assert "mine: still in training" in reply.text
        for path in ("/api/tails?head=a&relation=b", "/api/run", "/start.json"):
            reply = client.get(path)
            assert reply.status_code == 503
            assert "mine: still in training" in reply.json()["error"]


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_a_training_of_this_process_is_shown_and_then_served(tmp_path, is_calibrated):
    """With probabilities, if it has validation triples to fit them to."""
    valid = [(i, i % 2, (i * 7 + 2) % 20) for i in range(12)] if is_calibrated else []
    train = [(i % 20, i % 2, (i * 7 + 1) % 20) for i in range(60)]
    graph = graph_of(train, valid, [(0, 0, 5)], num_entities=20)
    folder = tmp_path / "mine"
    with LiveServer(folder, port=0, device="cpu") as server:
        report = server.reporter()
        with httpx.Client(base_url=server.address, timeout=LIMIT) as client:

            def state():
                return client.get("/training.json?name=mine").json()

            until(lambda: server.is_started)
            stages = []

            def on_event(event):
                report(event)
                stages.append(state()["stage"])

            changes = {"model.dim": 4, "training.epochs": 3}
            kg.fit(graph, tune=False, changes=changes, out=folder, on_event=on_event)
            assert set(stages) == {"reading", "training"}
            assert [point["epoch"] for point in state()["points"]][-1] == 3
            server.serve_result()
            assert state()["stage"] == "finished"
            assert client.get("/api/runs").json() == {"runs": ["mine"]}
            assert client.get("/").status_code == 200
            predictions = client.get("/api/tails?head=e0&relation=r0").json()["predictions"]
            assert any(answer["probability"] for answer in predictions) == is_calibrated
            notes = " ".join(state()["notes"])
            assert ("Calibration needs valid triples" in notes) != is_calibrated
