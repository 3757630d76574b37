"""Searches: every trial runs once, selected by the validation split, whatever fails."""

import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from itertools import pairwise

import optuna
import pytest

import dualkg as kg
from dualkg.cli.main import main
from dualkg.errors import (
    DamagedFile,
    InvalidValue,
    MissingExtra,
    PathExists,
    Unsupported,
)
from dualkg.training.recipe import load_recipe
from dualkg.tuning.search import SearchInterrupted, search
from dualkg.tuning.space import space_from
from dualkg.tuning.storage import StorageNotOpened, open_storage, sqlite_url
from dualkg.tuning.study import DifferentSearch, trials_by_slot

BASE = {"model": {"name": "CP", "dim": 4}, "training": {"epochs": 2, "batch_size": 100}}


def space(choices, **settings):
    return space_from({**BASE, "space": choices, "search": settings}, source="it", name="it")


FOUR = space({"model.dim": [2, 3], "optimizer.learning_rate": [0.1, 0.3]})


def trials_in(out):
    storage = open_storage(sqlite_url(out / "study.db"))
    return optuna.load_study(study_name="it", storage=storage.backend).trials


def test_grid_writes_its_results_and_repeats_nothing_when_called_again(small_graph, tmp_path):
    events = []
    result = search(FOUR, out=tmp_path, graph=small_graph, on_progress=events.append)
    assert len({tuple(row.params.items()) for row in result.trials}) == 4
    assert {row.state for row in result.trials} == {"finished"}
    assert result.best.mrr == max(row.mrr for row in result.trials)
    assert load_recipe(tmp_path / "best.toml") == result.recipe == FOUR.recipe(result.best.params)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.as_dict()
    table = (tmp_path / "trials.csv").read_text().splitlines()
    assert table[0] == "number,state,mrr,seconds,model.dim,optimizer.learning_rate,error"
    assert len(table) == 5
    assert result.importance is None
    assert (events[-1].num_done, events[-1].num_trials, events[-1].best) == (4, 4, result.best.mrr)
    assert any(event.training for event in events)
    again = search(FOUR, out=tmp_path, graph=small_graph)
    assert again.trials == result.trials
    assert len(trials_in(tmp_path)) == 4


@pytest.mark.parametrize("pages", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_database_is_refused_wherever_it_is_damaged(small_graph, tmp_path, pages):
    """Every table of it once is a page of zeros, or each of so many pages."""
    search(FOUR, out=tmp_path, graph=small_graph)
    file = tmp_path / "study.db"
    good = file.read_bytes()
    size = 4096
    reasons = []
    for start in range(size, len(good), pages * size):
        file.write_bytes(good[:start] + bytes(size) + good[start + size :])
        try:
            search(FOUR, out=tmp_path, graph=small_graph)
        except (DamagedFile, StorageNotOpened) as error:
            reasons.append(error.reason)
    assert len(reasons) > 10 / pages
    assert set(reasons) == {"database disk image is malformed"}


class Poison:
    """A split that cannot be read."""

    def _refuse(self, *names, **choices):
        raise AssertionError("the test split was used")

    __getattr__ = __len__ = __getitem__ = __iter__ = __array__ = _refuse


def test_objective_equals_training_and_the_test_split_is_never_used(small_graph, tmp_path):
    poisoned = dataclasses.replace(small_graph, test=Poison())
    result = search(space({"optimizer.learning_rate": [0.1, 0.3]}), out=tmp_path, graph=poisoned)
    run = kg.train_recipe(
        result.recipe, graph=dataclasses.replace(small_graph, test=small_graph.test[:0])
    )
    assert run.reports["valid"].mrr == pytest.approx(result.best.mrr, abs=1e-6)


def test_unpromising_trials_are_pruned(small_graph, tmp_path):
    choices = {"optimizer.learning_rate": [0.5, 0.4, 1e-6, 2e-6], "training.seed": [0, 1, 2]}
    wide = space({**choices, "training.epochs": [3]}, validate_every=1, prune_after=1)
    result = search(wide, out=tmp_path, graph=small_graph)
    states = Counter(row.state for row in result.trials)
    assert states["pruned"] >= 1
    assert states["finished"] >= 5
    pruned = [row for row in result.trials if row.state == "pruned"]
    assert all(row.mrr is not None and row.mrr < result.best.mrr for row in pruned)
    whole = search(
        space({**choices, "training.epochs": [1]}, prune=False),
        out=tmp_path / "whole",
        graph=small_graph,
    )
    assert {row.state for row in whole.trials} == {"finished"}
    assert set(whole.importance) == set(choices)
    assert sum(whole.importance.values()) == pytest.approx(1, abs=1e-3)


def test_error_of_a_failed_trial_is_saved_and_the_search_continues(small_graph, tmp_path):
    choices = {
        "regularizer.name": ["N3", "DURA"],
        "optimizer.learning_rate": [0.1, 1e30],
        "optimizer.name": ["SGD"],
    }
    tables = {
        "model": {"name": "RESCAL", "dim": 3},
        "regularizer": {"weight": 0.1},
        "training": {"epochs": 3},
    }
    result = search(
        space_from({**tables, "space": choices}, source="it"), out=tmp_path, graph=small_graph
    )
    errors = {
        (row.params["regularizer.name"], row.params["optimizer.learning_rate"]): row.error
        for row in result.trials
    }
    assert "those of RESCAL are not" in errors["N3", 0.1]
    assert "those of RESCAL are not" in errors["N3", 1e30]
    assert "diverged" in errors["DURA", 1e30]
    assert errors["DURA", 0.1] == ""
    assert "diverged" in (tmp_path / "trials.csv").read_text()
    assert result.as_dict()["failed"] == 3
    assert result.best.params["regularizer.name"] == "DURA"


@pytest.mark.parametrize("method", ["tpe", "random"])
def test_sampled_search_stays_in_its_ranges_and_can_be_extended(small_graph, tmp_path, method):
    choices = {
        "optimizer.learning_rate": {"low": 1e-2, "high": 1, "log": True},
        "model.dim": {"low": 2, "high": 6, "step": 2},
        "training.seed": [0, 1],
    }
    short = search(space(choices, method=method, trials=2), out=tmp_path, graph=small_graph)
    longer = search(space(choices, method=method, trials=4), out=tmp_path, graph=small_graph)
    assert longer.trials[:2] == short.trials
    assert len(longer.trials) == 4
    for row in longer.trials:
        assert 1e-2 <= row.params["optimizer.learning_rate"] <= 1
        assert row.params["model.dim"] in (2, 4, 6)
    assert len({row.params["optimizer.learning_rate"] for row in longer.trials}) == 4
    whole = search(
        space(choices, method=method, trials=4), out=tmp_path / "whole", graph=small_graph
    )
    assert [row.params for row in whole.trials] == [row.params for row in longer.trials]


def test_params_sampled_twice_are_trained_once(small_graph, tmp_path):
    choices = {"model.dim": [2, 3]}
    epochs = []
    result = search(
        space(choices, method="random", trials=4),
        out=tmp_path,
        graph=small_graph,
        on_progress=lambda event: epochs.append(event.training.epoch) if event.training else None,
    )
    assert len({(row.params["model.dim"], row.mrr) for row in result.trials}) == 2
    assert len(result.trials) == 4
    assert sum(after < before for before, after in pairwise(epochs)) == 1


def test_ctrl_c_saves_finished_trials_and_the_rest_is_done_later(small_graph, tmp_path):
    def stop(event):
        if event.num_done == 2 and event.training:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SearchInterrupted) as stopped:
        search(FOUR, out=tmp_path, graph=small_graph, on_progress=stop)
    assert str(stopped.value) == "Stopped; 2 of 4 trials are done and saved."
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 2
    result = search(FOUR, out=tmp_path, graph=small_graph)
    assert len({tuple(row.params.items()) for row in result.trials}) == 4
    # The numbers are those of a search without the stop, so that ties end the same way.
    assert [row.number for row in result.trials] == [0, 1, 2, 3]
    states = Counter(trial.state.name for trial in trials_in(tmp_path))
    assert states == {"COMPLETE": 4, "FAIL": 1}


@pytest.mark.parametrize("queued_by", ["dualkg", "optuna"])
def test_one_trial_counts_for_each_slot(queued_by):
    """Retries of dualkg 0.2 were queued by Optuna, and are recognized too."""

    def trial(number, state="FAIL", error=None, retry_of=None):
        user_attrs = {"error": error} if error else {}
        system_attrs = {}
        if retry_of is not None and queued_by == "dualkg":
            user_attrs["retry_of"] = retry_of
        elif retry_of is not None:
            system_attrs["failed_trial"] = retry_of
        made = optuna.trial.create_trial(
            state=optuna.trial.TrialState[state],
            value=0.5 if state == "COMPLETE" else None,
            user_attrs=user_attrs,
            system_attrs=system_attrs,
        )
        made.number = number
        return made

    def counted(*trials):
        return {slot: trial.number for slot, trial in trials_by_slot(reversed(trials)).items()}

    first_retry = trial(2, "RUNNING", retry_of=0)
    second_retry = trial(3, "WAITING", retry_of=0)
    assert counted(trial(0), trial(1), first_retry, second_retry) == {0: 2, 1: 1}
    lost_retries = trial(2, retry_of=0), trial(3, retry_of=0)
    all_lost = counted(trial(0), trial(1, "COMPLETE"), *lost_retries, trial(4))
    assert all_lost == {0: 3, 1: 1, 2: 4}
    assert counted(trial(0, error="diverged"), trial(1, "COMPLETE", retry_of=0)) == {0: 0}


def test_another_space_in_the_same_folder_is_refused(small_graph, tmp_path):
    search(space({"model.dim": [2]}), out=tmp_path, graph=small_graph)
    with pytest.raises(DifferentSearch) as other_space:
        search(space({"model.dim": [3]}), out=tmp_path, graph=small_graph)
    assert other_space.value.differences == ["[space]"]
    assert str(other_space.value) == (
        f"{tmp_path} holds a search named 'it' with a different setup: [space] differs. "
        "Use another out, or another name in [search]."
    )
    other_graph = dataclasses.replace(small_graph, fingerprint="other")
    with pytest.raises(DifferentSearch) as other_data:
        search(space({"model.dim": [2]}), out=tmp_path, graph=other_graph)
    assert other_data.value.differences == ["the data"]


def test_a_space_of_another_type_is_refused(small_graph):
    with pytest.raises(InvalidValue) as refused:
        search(3, graph=small_graph)
    assert (refused.value.setting, refused.value.found) == ("space", 3)


def test_a_graph_without_validation_triples_is_refused(small_graph, tmp_path):
    without = dataclasses.replace(small_graph, valid=small_graph.valid[:0])
    with pytest.raises(Unsupported) as refused:
        search(FOUR, out=tmp_path, graph=without)
    assert str(refused.value) == (
        "made has no validation triples, and tuning selects by their MRR."
    )


def test_the_folder_of_a_run_is_refused(small_graph, tmp_path):
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(PathExists, match="a search needs a folder of its own") as refused:
        search(FOUR, out=tmp_path, graph=small_graph)
    assert (refused.value.path, refused.value.overwritable) == (tmp_path, False)


def test_a_storage_that_is_no_url_is_refused(small_graph, tmp_path):
    with pytest.raises(InvalidValue, match="such as journal:/shared/study.log") as refused:
        search(FOUR, out=tmp_path, graph=small_graph, storage="nonsense")
    assert (refused.value.setting, refused.value.found) == ("storage", "nonsense")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_without_the_driver_of_postgresql_the_error_is_the_install_line(
    small_graph, tmp_path, monkeypatch, scheme
):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra) as refused:
        search(FOUR, out=tmp_path, graph=small_graph, storage=f"{scheme}://nowhere/x")
    assert refused.value.extra == "postgresql"


def test_a_storage_that_cannot_be_opened_is_refused_with_the_reason(small_graph, tmp_path):
    with pytest.raises(StorageNotOpened, match="driver is not installed: .*oracledb"):
        search(FOUR, out=tmp_path, graph=small_graph, storage="oracle+oracledb://nowhere/x")
    missing = f"sqlite:///{tmp_path}/nowhere/x.db"
    with pytest.raises(StorageNotOpened) as refused:
        search(FOUR, out=tmp_path, graph=small_graph, storage=missing)
    assert refused.value.reason == "unable to open database file"
    assert str(refused.value) == "The storage cannot be opened: unable to open database file."


def test_without_optuna_the_error_is_the_install_line(small_graph, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for module in ("storage", "study", "worker"):
        monkeypatch.delitem(sys.modules, f"dualkg.tuning.{module}")
    with pytest.raises(MissingExtra) as refused:
        search(FOUR, out=tmp_path / "out", graph=small_graph)
    assert str(refused.value) == "Tuning needs optuna. Install it: pip install 'dualkg[search]'"
    assert not (tmp_path / "out").exists()


SPACE = """
[model]
dim = 2
[regularizer]
weight = 0.1
[training]
epochs = 1
batch_size = 2000
[space]
"regularizer.name" = ["DURA", "N3"]
"""


def type_in(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["dualkg", *map(str, words)])
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0


def test_tune_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SPACE)
    assert type_in(monkeypatch, "tune", "mine.toml") == 0
    result = capsys.readouterr()
    assert "valid MRR" in result.out
    assert "DURA" in result.out
    assert "8 finished trials" in result.out
    assert "dualkg train runs/tune-mine/best.toml" in result.err
    assert type_in(monkeypatch, "tune", "mine.toml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finished"], found["folder"]) == (2, "runs/tune-mine")
    (tmp_path / "mine.toml").write_text(
        SPACE.replace("dim = 2", "dim = 2\noptions = { colour = 1 }")
    )
    assert type_in(monkeypatch, "tune", "mine.toml", "--out", "bad") == 1
    assert (
        "No trial finished; see bad/trials.csv. The first error: ComplEx cannot be made"
        in capsys.readouterr().err
    )


def test_ctrl_c_prints_the_command_that_resumes(tmp_path, monkeypatch, capsys, request):
    # A process started in the background may ignore SIGINT.
    request.addfinalizer(
        partial(
            signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)
        )
    )
    (tmp_path / "mine.toml").write_text(SPACE)

    def stop(self):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("dualkg.tuning.worker.Worker.report_progress", stop)
    words = ("tune", tmp_path / "mine.toml", "--out", tmp_path / "out")
    assert type_in(monkeypatch, *words) == 130
    result = capsys.readouterr().err
    assert f"Resume with: dualkg tune {tmp_path / 'mine.toml'} --out {tmp_path / 'out'}" in result
