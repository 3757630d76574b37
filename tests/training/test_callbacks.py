"""Callbacks of a training, and trackers that write for TensorBoard, MLflow and Weights & Biases."""

import json
import logging
import struct

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue, MissingExtra, UnknownName
from dualkg.training import callbacks as module
from dualkg.training.callbacks import TRACKERS, Tracker, find_callbacks
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import Recipe
from dualkg.training.run_folder import RunFolder

QUICK = {"model.dim": 4, "training.epochs": 4, "training.batch_size": 100, "validation.every": 2}


class Recorder(kg.Callback):
    """Keeps what it was called with; may raise in an epoch."""

    def __init__(self, raises: Exception | None = None, epoch: int = 2) -> None:
        self.calls = []
        self.raises = raises
        self.epoch = epoch

    def on_start(self, training):
        self.calls.append(("start", training.epoch))
        self.training = training

    def on_validation(self, epoch, report):
        self.calls.append(("validation", epoch, report.mrr))

    def on_epoch(self, epoch, metrics):
        self.calls.append(("epoch", epoch))
        self.metrics = metrics
        if self.raises and epoch == self.epoch:
            raise self.raises

    def on_end(self, run):
        self.calls.append(("end", run and run.report.mrr))


def train(graph, *callbacks, out=None, **changes):
    recipe = Recipe().with_changes({**QUICK, **changes})
    return kg.train_recipe(recipe, graph=graph, out=out, callbacks=callbacks)


def test_callbacks_are_called_in_order(small_graph, tmp_path):
    recorder = Recorder()
    run = train(small_graph, recorder, out=tmp_path / "run")
    mrr = {entry["epoch"]: entry["valid_mrr"] for entry in run.history if "valid_mrr" in entry}
    middle = [
        ("epoch", 1),
        ("validation", 2, mrr[2]),
        ("epoch", 2),
        ("epoch", 3),
        ("validation", 4, mrr[4]),
    ]
    assert recorder.calls == [("start", 0), *middle, ("epoch", 4), ("end", run.report.mrr)]
    assert recorder.metrics.keys() == {"loss", "seconds", "learning_rate", "valid_mrr"}
    assert recorder.metrics["loss"] == run.history[-1]["loss"]
    assert recorder.training.graph is small_graph
    assert recorder.training.folder == tmp_path / "run"


def test_callbacks_do_not_change_the_weights(small_graph):
    with_one = train(small_graph, Recorder())
    without = train(small_graph)
    assert torch.equal(with_one.model.entities, without.model.entities)
    assert with_one.history[0].keys() == without.history[0].keys()


def test_a_callback_can_end_training_early(small_graph, tmp_path):
    stopping = Recorder(kg.StopTraining())
    other = Recorder()
    run = train(small_graph, stopping, other, out=tmp_path / "run")
    assert len(run.history) == 2
    assert other.calls[-2:] == [("epoch", 2), ("end", run.report.mrr)]
    assert kg.load_run(tmp_path / "run").report.mrr == run.report.mrr


def test_another_exception_is_passed_on_and_the_run_can_be_resumed(small_graph, tmp_path):
    failing = Recorder(OSError("the disk is full"))
    other = Recorder()
    with pytest.raises(OSError, match="the disk is full"):
        train(small_graph, other, failing, out=tmp_path / "run")
    assert failing.calls[-1] == other.calls[-1] == ("end", None)
    again = Recorder()
    run = kg.resume(tmp_path / "run", callbacks=[again])
    assert again.calls[0] == ("start", 0)
    assert torch.equal(run.model.entities, train(small_graph).model.entities)


def test_on_end_reaches_all_callbacks(small_graph):
    class Fails(kg.Callback):
        def on_end(self, run):
            raise OSError("no more")

    other = Recorder()
    with pytest.raises(OSError, match="no more"):
        train(small_graph, Fails(), other)
    assert other.calls[-1][0] == "end"


def test_an_interruption_ends_callbacks_without_a_run(small_graph, tmp_path):
    class Stops(Recorder):
        def on_epoch(self, epoch, metrics):
            raise InterruptedRunError("Stopped.")

    callback = Stops()
    with pytest.raises(InterruptedRunError):
        train(small_graph, callback, out=tmp_path / "run")
    assert callback.calls == [("start", 0), ("end", None)]


@pytest.mark.parametrize("given", ["mlflow", [print], 3])
def test_wrong_callbacks_are_refused(small_graph, given):
    with pytest.raises(InvalidValue) as error:
        kg.train(kg.ComplEx(small_graph, dim=2), small_graph, epochs=1, callbacks=given)
    assert error.value.setting == "callbacks"


def test_callbacks_that_are_no_list_get_an_example():
    with pytest.raises(InvalidValue) as error:
        find_callbacks("mlflow")
    assert str(error.value) == (
        "`callbacks` should be a list, such as [kg.TensorBoard()]; 'mlflow' was given."
    )


def test_an_unknown_tracker_is_refused_with_similar_names():
    with pytest.raises(UnknownName) as error:
        find_callbacks(["mlfow"])
    assert error.value.suggestions == ["mlflow"]
    with pytest.raises(UnknownName) as error:
        find_callbacks(["zzz"])
    assert error.value.known == ["tensorboard", "mlflow", "wandb"]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    small_graph, tmp_path, monkeypatch
):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(MissingExtra, match="Tracking with WandB needs wandb"):
        train(small_graph, "wandb", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Fragile(Tracker):
    """A tracker that fails after the first epoch."""

    name = "fragile"

    def __init__(self) -> None:
        self.written = []

    def check(self):
        pass

    def open(self, training, settings, run_id):
        self.settings = settings
        return "1"

    def log(self, metrics, step):
        if step > 1:
            raise ConnectionError("the server is down")
        self.written.append(metrics)

    def close(self, *, failed):
        self.written.append("closed")


def test_a_training_survives_its_tracker(small_graph, caplog):
    tracker = Fragile()
    with caplog.at_level(logging.WARNING, logger="dualkg"):
        run = train(small_graph, tracker)
    assert len(run.history) == 4
    assert [metrics.keys() for metrics in tracker.written] == [
        {"train/loss", "train/seconds", "train/learning_rate"}
    ]
    assert caplog.messages == ["fragile stopped tracking: ConnectionError: the server is down"]
    assert tracker.settings["model.dim"] == 4
    assert tracker.settings["graph.entities"] == 30


def scalars(folder):
    """Tags, steps and values of TensorBoard's event files, read by TensorBoard."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written_also_after_resuming(small_graph, tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    with pytest.raises(OSError, match="stop"):
        train(small_graph, "tensorboard", Recorder(OSError("stop"), epoch=3), out=folder)
    assert [step for step, _ in scalars(folder / "tensorboard")["train/loss"]] == [1, 2, 3]
    run = kg.resume(folder)
    found = scalars(folder / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert found["train/loss"][-1][1] == pytest.approx(run.history[-1]["loss"], rel=1e-5)
    assert found["valid/mrr"][-1][1] == pytest.approx(run.history[-1]["valid_mrr"], rel=1e-5)
    assert found["final/test/mrr"] == [(4, pytest.approx(run.report.mrr, rel=1e-5))]
    kg.train_recipe(
        run.recipe, graph=small_graph, out=folder, overwrite=True
    )  # a run with tracking is a run
    assert not (folder / "tensorboard").exists()
    with pytest.raises(kg.RequestError):
        train(small_graph, kg.TensorBoard())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_what_was_written_also_after_resuming(small_graph, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(OSError, match="stop"):
        train(small_graph, "mlflow", Recorder(OSError("stop"), epoch=3), out=tmp_path / "run")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "dualkg"]
    (failed,) = client.search_runs([experiment.experiment_id])
    assert failed.info.status == "FAILED"
    run = kg.resume(tmp_path / "run")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["model.dim"] == "4"
    assert found.data.metrics["final/test/mrr"] == pytest.approx(run.report.mrr)
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == {
        entry["epoch"]: entry["loss"] for entry in run.history
    }


def wandb_records(path):
    """The records of an offline run of Weights & Biases: a LevelDB log of protocol buffers after
    seven bytes.
    """
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    position = 7
    parts = b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = internal.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_an_offline_run(small_graph, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = train(small_graph, "wandb", out=tmp_path / "run")
    wandb.teardown()  # its process writes the last records when it ends
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    rows = []
    config = {}
    for record in wandb_records(path):
        if record.HasField("history"):
            items = record.history.item
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    losses = {row["epoch"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == pytest.approx({entry["epoch"]: entry["loss"] for entry in run.history})
    assert next(row["final/test/mrr"] for row in rows if "final/test/mrr" in row) == pytest.approx(
        run.report.mrr
    )
    assert config["model.dim"] == 4
    saved = json.loads(RunFolder(tmp_path / "run").tracking.read_text())
    assert saved["wandb"]["id"] in path.name


def test_trackers_by_name_in_any_case():
    pytest.importorskip("tensorboard")
    assert [type(one) for one in find_callbacks(["TensorBoard"])] == [kg.TensorBoard]
    assert set(TRACKERS) == {"tensorboard", "mlflow", "wandb"}
