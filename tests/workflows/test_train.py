"""`fit`, `train_source` and `resume`: from triples to a run, and the events on the way."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import dualkg as kg
from dualkg.errors import (
    InvalidValue,
    MissingExtra,
    PathExists,
    UnknownName,
)
from dualkg.training.errors import InterruptedRunError, RunNotFinished
from dualkg.training.run_folder import RunFolder
from dualkg.training.trainer import ProgressEvent
from dualkg.tuning.automatic import AutomaticProgress, AutomaticTuner
from dualkg.tuning.plan import SearchPlan
from dualkg.tuning.starting_recipe import NUM_SAMPLED
from dualkg.workflows import run_name, train, train_source, train_source_seeds
from dualkg.workflows.events import (
    DefaultsDiffer,
    Evaluated,
    GraphChecked,
    GraphRead,
    Saved,
    TrainingPlanned,
    TrainingStarted,
    Tuned,
    TuningSkipped,
    TuningStarted,
)
from dualkg.workflows.sources import check_graph
from tests.conftest import graph_of
from tests.raising import refused

QUICK = {"model.dim": 4, "training.epochs": 2}
TWO_TRIALS = SearchPlan(max_trials=(2, 2))


@pytest.fixture(scope="module")
def graph():
    """Thirty people in ten families; siblings of a parent's child are held out."""
    random = np.random.default_rng(0)
    people = np.arange(30)
    pairs = [(int(a), 0, int(b)) for a in people for b in people if a % 10 == b % 10 and a != b]
    pairs += [(int(a), 1, int((a + 1) % 30)) for a in people]
    triples = np.array(pairs, dtype=np.int32)[random.permutation(len(pairs))]
    names = kg.Vocabulary([f"p{i}" for i in people])
    return kg.Graph(
        "families",
        names,
        kg.Vocabulary(["sibling", "next"]),
        triples[20:],
        triples[10:20],
        triples[:10],
    )


def test_a_recipe_that_cannot_be_trained_is_refused_and_nothing_is_written(graph, tmp_path):
    with refused(UnknownName, kind="model", name="Complexx", suggestions=["ComplEx"]):
        kg.fit(graph, model="Complexx", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_fit_saves_its_trials_and_resumes_bit_for_bit(graph, tmp_path, monkeypatch):
    options = {
        "tune": SearchPlan(max_trials=(4, 6)),
        "changes": {"model.dim": 8, "training.epochs": 9, "training.batch_size": 20},
        "device": "cpu",
    }
    whole = kg.fit(graph, out=tmp_path / "whole", **options)
    saved = json.loads((tmp_path / "whole" / "tuning.json").read_text())
    assert len(saved["trials"]) == 6
    assert saved["summary"].startswith("Chose ")

    train = AutomaticTuner._train

    def stops_after_three(self, params, rung):
        if len(self.trials) == 3:
            raise InterruptedRunError("Stopped.")
        return train(self, params, rung)

    monkeypatch.setattr(AutomaticTuner, "_train", stops_after_three)
    sentence = "after 3 trials, which are saved. Resume with: dualkg resume .*stopped"
    with pytest.raises(InterruptedRunError, match=sentence):
        kg.fit(graph, out=tmp_path / "stopped", **options)
    monkeypatch.setattr(AutomaticTuner, "_train", train)
    again = kg.resume(tmp_path / "stopped")
    assert again.recipe == whole.recipe
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    assert RunFolder(tmp_path / "stopped").finished


def test_a_tracker_survives_an_interrupt_while_tuning(graph, tmp_path, monkeypatch):
    """The final training is tracked, once, also if `resume` makes it; trials are not."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train = AutomaticTuner._train

    def stops_after_two(self, params, rung):
        if len(self.trials) == 2:
            raise InterruptedRunError("Stopped.")
        return train(self, params, rung)

    monkeypatch.setattr(AutomaticTuner, "_train", stops_after_two)
    with pytest.raises(InterruptedRunError):
        kg.fit(
            graph,
            out=tmp_path / "run",
            tune=SearchPlan(max_trials=(3, 3)),
            changes={"model.dim": 4, "training.epochs": 4},
            callbacks=["tensorboard"],
        )
    assert not list(tmp_path.rglob("events*"))
    with pytest.raises(RunNotFinished) as unfinished:
        kg.load_run(tmp_path / "run")
    assert unfinished.value.resumable
    monkeypatch.setattr(AutomaticTuner, "_train", train)
    run = kg.resume(tmp_path / "run")
    found = accumulator.EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4]
    assert found.Scalars("final/test/mrr")[-1].value == pytest.approx(run.report.mrr, rel=1e-5)


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def swap(run: Path) -> None:
    move(run)
    shutil.copytree(run.with_name("other"), run)


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("change", [move, swap, shutil.rmtree])
def test_a_training_whose_folder_is_gone_fails_and_leaves_what_is_there(graph, tmp_path, change):
    recipe = kg.Recipe().with_changes(QUICK)
    other = kg.train_recipe(recipe, graph=graph, device="cpu", out=tmp_path / "other").folder
    before = contents(other)
    run = tmp_path / "run"
    changes = []

    def on_progress(event):
        if event.epoch == 2 and not changes:
            changes.append(event)
            change(run)

    with pytest.raises(kg.DualkgError, match="was moved, removed or replaced"):
        kg.train_recipe(recipe, graph=graph, device="cpu", out=run, on_progress=on_progress)
    left = contents(run)
    assert before.items() <= left.items() if change is swap else "report.json" not in left
    if change is not shutil.rmtree:
        resumed = kg.resume(tmp_path / "moved", device="cpu")
        undisturbed = kg.load_run(other)
        for name, table in resumed.model.state_dict().items():
            assert torch.equal(table, undisturbed.model.state_dict()[name])


def test_fit_warns_of_leakage_and_of_what_the_reader_noted(tmp_path, caplog):
    for split, rows in {"train": range(30), "valid": range(5), "test": range(5)}.items():
        reverse = [(f"b{i}", "is child of", f"a{i}") for i in range(30)] if split == "train" else []
        pairs = [
            (f"a{i}", "is parent of", f"b{i} ")
            for i in (range(5, 30) if split == "train" else rows)
        ]
        lines = ["\t".join(row) for row in (pairs + reverse)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines))
    kg.fit(tmp_path, tune=False, changes={"model.dim": 2, "training.epochs": 1})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("Blanks around" in line for line in warnings)
    assert any("Leakage: 100.0% of the test triples" in line for line in warnings)


def test_fit_takes_a_table(graph):
    names = [(f"p{head}", f"r{relation}", f"p{tail}") for head, relation, tail in graph.train]
    columns = dict(zip(("tail", "relation", "head"), zip(*names, strict=True), strict=True))
    table = pa.table({name: list(column) for name, column in columns.items()})
    changes = {**QUICK, "data.split": "90/5/5", "data.split_seed": 3}
    run = kg.fit(table, tune=False, changes=changes)
    expected = kg.Graph.from_dataframe(table, split="90/5/5", seed=3)
    assert run.graph.fingerprint == expected.fingerprint
    by_number = kg.fit(table, tune=False, changes={**QUICK, "data.columns": (1, 2, 3)})
    assert by_number.graph.entities[0] == names[0][0]


def test_a_question_is_reported_once(tmp_path):
    rows = [f"e{i}\te{(i + step) % 150}\tr{i % 3}" for i in range(150) for step in (1, 7)]
    (tmp_path / "mine.tsv").write_text("\n".join(rows))
    graph = kg.load_graph(tmp_path / "mine.tsv", split="100/0/0")
    assert any("150 relations" in note for note in graph.notes)
    assert check_graph(graph) == []
    (warning,) = check_graph(replace(graph, notes=()))
    assert "150 relations" in str(warning)


def test_fit_refuses_what_it_cannot_train_with_the_right_call(graph):
    rows = [("a", "r", "b")] * 1000
    with pytest.raises(kg.RequestError, match="Use kg.Graph.from_triples") as caught:
        kg.fit(rows)
    assert len(str(caught.value)) < 150
    with pytest.raises(kg.RequestError) as wrong:
        kg.fit(graph, model=kg.ComplEx(graph, dim=2))
    assert "kg.train(model, graph) trains an instance" in str(wrong.value)
    with pytest.raises(kg.RequestError):
        kg.fit(graph, changes=["model.dim"])
    with pytest.raises(kg.RequestError):
        kg.fit(graph, changes={"optimizer.lr": 1})
    with pytest.raises(InvalidValue) as invalid:
        kg.fit(graph, changes={"data.graph": "other"})
    assert invalid.value.setting == "data.graph"
    with refused(
        InvalidValue, setting="tune", expected="a time such as 90s, 10m or 1.5h", found="0"
    ):
        kg.fit(graph, tune=0)


def test_a_tracker_that_has_no_folder_is_refused_before_tuning(graph):
    """Or because its package is not installed."""
    events = []
    with pytest.raises((kg.RequestError, MissingExtra)):
        kg.fit(graph, callbacks=[kg.TensorBoard()], on_event=events.append)
    assert TuningStarted not in [type(event) for event in events]


@pytest.mark.parametrize(
    ("tune", "seconds"), [(12, 12), ("12", 12), ("12s", 12), ("1m", 60), (True, 120)]
)
def test_a_budget_may_be_a_number_of_seconds(graph, tune, seconds):
    class Stop(Exception):
        pass

    def stop(event: object) -> None:
        if isinstance(event, AutomaticProgress):
            budgets.append(event.budget)
            raise Stop

    budgets = []
    with pytest.raises(Stop):
        kg.fit(graph, tune=tune, changes=QUICK, on_event=stop)
    assert budgets == [seconds]


def test_without_tuning_fit_trains_the_default_recipe(graph):
    run = kg.fit(graph, tune=False, changes={"model.dim": 4, "training.epochs": 1}, device="cpu")
    assert run.recipe.regularizer.weight == 0.05


def distinct(events: list[object]) -> list[type]:
    """The types of events in their order, without repetitions."""
    return list(dict.fromkeys(type(event) for event in events))


def write_triples(path: Path) -> Path:
    rows = [f"a{i}\tr{i % 2}\tb{j}\n" for i in range(8) for j in range(8)]
    path.write_text("".join(rows))
    return path


def test_events_of_a_tuned_training(graph, tmp_path):
    events = []
    options = {"changes": QUICK, "tune": TWO_TRIALS}
    run = kg.fit(graph, out=tmp_path / "run", on_event=events.append, **options)
    assert distinct(events) == [
        GraphRead,
        GraphChecked,
        TuningStarted,
        AutomaticProgress,
        Tuned,
        TrainingStarted,
        ProgressEvent,
        Evaluated,
        Saved,
    ]
    by_type = {type(event): event for event in events}
    saved = json.loads(RunFolder(run.folder).tuning.read_text())
    assert by_type[Tuned].summary == saved["summary"]
    assert by_type[Tuned].recipe == run.recipe
    assert by_type[TrainingStarted].engine == RunFolder(run.folder).saved_environment["engine"]
    assert by_type[Evaluated].reports == run.reports
    assert by_type[Saved].folder == run.folder


def test_progress_of_training_alone(graph):
    events = []
    progress = []
    kg.fit(graph, tune=False, changes=QUICK, on_event=events.append, on_progress=progress.append)
    assert progress == [event for event in events if isinstance(event, ProgressEvent)]
    assert TrainingPlanned in distinct(events)


def test_a_graph_without_validation_triples_is_not_tuned(graph, caplog):
    train_only = kg.Graph(
        "train only", graph.entities, graph.relations, graph.train, graph.valid[:0], graph.test
    )
    events = []
    kg.fit(train_only, changes=QUICK, on_event=events.append)
    assert TuningSkipped in distinct(events)
    kg.fit(train_only, changes=QUICK)
    assert "train only has no validation triples to tune on" in caplog.text


def test_a_large_graph_is_not_inspected(tmp_path, graph):
    """It would take much memory; `fit` and the command decide this in one place."""

    class Large:
        is_large = True

    assert check_graph(Large()) == []
    assert isinstance(check_graph(graph), list)


def test_a_recipe_by_its_file_is_trained_as_it_is(tmp_path):
    data = write_triples(tmp_path / "mine.tsv")
    recipe = tmp_path / "quick.toml"
    recipe.write_text(f'[data]\ngraph = "{data}"\n[model]\ndim = 4\n[training]\nepochs = 2\n')
    events = []
    run = train_source(recipe, changes={"training.epochs": 1}, on_event=events.append)
    assert (run.recipe.model.dim, run.recipe.training.epochs) == (4, 1)
    assert TuningStarted not in distinct(events)
    difference = next(event for event in events if isinstance(event, DefaultsDiffer))
    assert difference.of_recipe["regularizer.name"] == "none"
    assert difference.without_recipe["regularizer.name"] == "DURA"
    again = kg.train_recipe(recipe, on_event=events.append)
    assert again.recipe.training.epochs == 2


def test_settings_of_data_are_applied_when_a_file_is_read(tmp_path):
    data = write_triples(tmp_path / "mine.tsv")
    changes = {**QUICK, "data.split": "50/25/25"}
    run = kg.fit(data, tune=False, changes=changes, on_event=lambda event: None)
    assert len(run.graph.valid) == 16
    assert run.recipe.data.split == "50/25/25"
    assert run.recipe.data.graph == str(data)


def test_names_of_runs(tmp_path):
    folder = tmp_path / "recipes" / "umls"
    folder.mkdir(parents=True)
    (folder / "mine.toml").touch()
    assert run_name(folder / "mine.toml") == "umls-mine"
    assert run_name(tmp_path / "other.toml") == "other"
    assert run_name("UMLS/Complex-DURA") == "umls-complex-dura"
    assert run_name("data/mine.tsv") == "mine"


def test_several_seeds_are_tuned_once_and_resume(graph, tmp_path):
    options = {"out": tmp_path / "seeds", "changes": QUICK}
    events = []
    results = train_source_seeds(graph, 2, tune=TWO_TRIALS, on_event=events.append, **options)
    assert list(results.reports) == [0, 1]
    assert distinct(events).count(Tuned) == 1
    summary = json.loads((tmp_path / "seeds" / "summary.json").read_text())
    assert summary == results.summary()
    means = [metrics["mrr"] for metrics in results.metrics().values()]
    assert summary["mrr"]["mean"] == pytest.approx(sum(means) / 2)

    events.clear()
    again = train_source_seeds(graph, 2, on_event=events.append, **options)
    assert again.reports == results.reports
    assert AutomaticProgress not in distinct(events)
    with pytest.raises(PathExists) as refused:
        train_source_seeds(graph, 2, tune="1m", **options)
    assert refused.value.path == tmp_path / "seeds" / "tuning.json"
    with pytest.raises(kg.RequestError):
        kg.resume(tmp_path / "seeds")


def test_several_processes_train_the_recipe_of_one(tmp_path, monkeypatch):
    """Without tuning, the softmax of a large graph is computed over sampled entities."""
    random = np.random.default_rng(0)
    triples = np.stack([random.integers(0, size, 45_000) for size in (5000, 3, 5000)], axis=1)
    large = graph_of(triples, triples[:5], triples[5:10], num_entities=5000, num_relations=3)
    recipes = []

    def trained_alone(recipe, graph, options):
        recipes.append(recipe)

    def trained_together(read, options):
        recipes.append(read(lambda event: None).recipe)

    monkeypatch.setattr(train, "start_training", trained_alone)
    monkeypatch.setattr(train, "train_together", trained_together)
    for count in (1, 2):
        monkeypatch.setattr(train, "num_processes", lambda count=count: count)
        train_source(large, tune=False, device="cpu", out=tmp_path / "run")
    alone, together = recipes
    assert alone == together
    monkeypatch.undo()
    monkeypatch.setattr(train, "train_together", trained_together)
    monkeypatch.setattr(train, "num_processes", lambda: 2)
    kg.train_recipe(together, graph=large, out=tmp_path / "run")
    assert recipes[2] == together
    assert together.loss == kg.SampledSoftmax(num_negatives=NUM_SAMPLED["cpu"])


def test_several_processes_train_one_recipe(graph, tmp_path, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kg.RequestError, match="A training in several processes"):
        train_source_seeds(graph, 2, out=tmp_path / "run")
    with pytest.raises(kg.RequestError, match=r"kg\.train"):
        kg.train("ComplEx", graph)
    with pytest.raises(InvalidValue) as invalid:
        train_source(graph)
    assert invalid.value.setting == "out"
