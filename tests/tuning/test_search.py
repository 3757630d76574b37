"""Searches of a given space: their trials, what is resumed, and processes that share a study."""

import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import optuna
import pytest

import dualkg as kg
from dualkg.cli import main
from dualkg.errors import DamagedFile, InvalidValue, MissingExtra, PathExists, RequestError
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import load_recipe
from dualkg.tuning.search import search
from dualkg.tuning.space import space_from
from dualkg.tuning.study import trials_by_slot
from tests.processes import Started, until

BASE = {"model": {"name": "CP", "dim": 4}, "training": {"epochs": 2, "batch_size": 100}}


def space(choices, **settings):
    return space_from({**BASE, "space": choices, "search": settings}, source="it", name="it")


FOUR = space({"model.dim": [2, 3], "optimizer.learning_rate": [0.1, 0.3]})


def states_in(out: Path) -> Counter[str]:
    """How many trials of a search have each state, with those that were repeated."""
    database = sqlite3.connect(out / "study.db")
    states = Counter(state for (state,) in database.execute("select state from trials"))
    database.close()
    return states


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
    assert states_in(tmp_path) == {"COMPLETE": 4}


def test_a_damaged_database_is_refused(small_graph, tmp_path):
    search(FOUR, out=tmp_path, graph=small_graph)
    file = tmp_path / "study.db"
    good = file.read_bytes()
    file.write_bytes(good[:4096] + bytes(len(good) - 4096))
    with pytest.raises((DamagedFile, RequestError), match="database disk image is malformed"):
        search(FOUR, out=tmp_path, graph=small_graph)


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


@pytest.mark.slow
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
    assert "needs a model whose relations are diagonal" in errors["N3", 0.1]
    assert "needs a model whose relations are diagonal" in errors["N3", 1e30]
    assert "diverged" in errors["DURA", 1e30]
    assert errors["DURA", 0.1] == ""
    assert "diverged" in (tmp_path / "trials.csv").read_text()
    assert result.as_dict()["failed"] == 3
    assert result.best.params["regularizer.name"] == "DURA"


@pytest.mark.parametrize("method", ["tpe", pytest.param("random", marks=pytest.mark.slow)])
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

    with pytest.raises(InterruptedRunError, match="Stopped; 2 of 4 trials are done and saved"):
        search(FOUR, out=tmp_path, graph=small_graph, on_progress=stop)
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 2
    result = search(FOUR, out=tmp_path, graph=small_graph)
    assert len({tuple(row.params.items()) for row in result.trials}) == 4
    # The numbers are those of a search without the stop, so that ties end the same way.
    assert [row.number for row in result.trials] == [0, 1, 2, 3]
    assert states_in(tmp_path) == {"COMPLETE": 4, "FAIL": 1}


def test_one_trial_counts_for_each_slot():
    def trial(number, state="FAIL", error=None, retry_of=None):
        user_attrs = {"error": error} if error else {}
        if retry_of is not None:
            user_attrs["retry_of"] = retry_of
        made = optuna.trial.create_trial(
            state=optuna.trial.TrialState[state],
            value=0.5 if state == "COMPLETE" else None,
            user_attrs=user_attrs,
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


def test_another_search_in_the_same_folder_is_refused(small_graph, tmp_path):
    search(space({"model.dim": [2]}), out=tmp_path, graph=small_graph)
    with pytest.raises(RequestError) as other_space:
        search(space({"model.dim": [3]}), out=tmp_path, graph=small_graph)
    assert str(other_space.value) == (
        f"{tmp_path} holds a search named 'it' with a different setup: [space] differs. "
        "Use another `out`, or another name in [search]."
    )
    other_graph = dataclasses.replace(small_graph, fingerprint="other")
    with pytest.raises(RequestError, match="the data differs"):
        search(space({"model.dim": [2]}), out=tmp_path, graph=other_graph)


@pytest.mark.parametrize(
    ("url", "error", "sentence"),
    [
        ("nonsense", InvalidValue, "such as postgresql://user@server/searches"),
        ("oracle+oracledb://nowhere/x", RequestError, "driver is not installed: .*oracledb"),
        ("sqlite:////nowhere/x.db", RequestError, "cannot be opened: unable to open database file"),
        ("postgresql://nowhere/x", MissingExtra, r"pip install 'dualkg\[postgresql\]'"),
    ],
)
def test_a_storage_that_cannot_be_opened(small_graph, tmp_path, monkeypatch, url, error, sentence):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(error, match=sentence):
        search(FOUR, out=tmp_path, graph=small_graph, storage=url)


def test_what_cannot_be_searched(small_graph, tmp_path):
    with pytest.raises(InvalidValue, match="a SearchSpace; 3 was given"):
        search(3, graph=small_graph)
    without = dataclasses.replace(small_graph, valid=small_graph.valid[:0])
    with pytest.raises(RequestError, match="made has no validation triples"):
        search(FOUR, out=tmp_path, graph=without)
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(PathExists, match="a search needs a folder of its own"):
        search(FOUR, out=tmp_path, graph=small_graph)


def test_without_optuna_the_error_is_the_install_line(small_graph, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "dualkg.tuning.study")
    with pytest.raises(MissingExtra) as refused:
        search(FOUR, out=tmp_path / "out", graph=small_graph)
    assert str(refused.value) == "Tuning needs optuna. Install it: pip install 'dualkg[search]'"


# -- several processes ---

SPACE = """
[data]
graph = "mine.tsv"
[model]
dim = 4
[training]
epochs = 1
batch_size = 50
[space]
"model.dim" = [2, 3, 4]
"training.seed" = [0, 1]
[search]
prune = false
"""
# Search `mine.toml`. The words are the folder, the storage or nothing, and `pause` if the second
# trial is to stop in its middle and say so by a file.
SEARCH = """
import os, pathlib, sys, time
import torch
from dualkg.tuning.search import search

def pause(event):
    if event.num_done and event.training:
        pathlib.Path(f"{os.getpid()}.paused").touch()
        time.sleep(10_000)

torch.set_num_threads(1)
out, storage, pauses = sys.argv[1:]
on_progress = pause if pauses == "pause" else None
search("mine.toml", out=out, storage=storage or None, device="cpu", on_progress=on_progress)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The working directory, with a search space and its graph."""
    monkeypatch.chdir(tmp_path)
    rows = [f"thing{i}\t{kind}\t{kind}{i % 4}\n" for kind in ("colour", "shape") for i in range(60)]
    (tmp_path / "mine.tsv").write_text("".join(rows))
    (tmp_path / "mine.toml").write_text(SPACE)
    return tmp_path


def start(folder: Path, *, out: str = "out", storage: str = "", pause: bool = False) -> Started:
    return Started(SEARCH, out, storage, "pause" if pause else "", cwd=folder)


def best_in(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())["best"]


def test_killed_processes_lose_nothing_and_the_same_best_is_found(folder: Path):
    with start(folder, pause=True) as first, start(folder, pause=True) as second:
        until(lambda: len(list(folder.glob("*.paused"))) == 2)
        first.kill()
        second.kill()
    assert states_in(folder / "out")["RUNNING"] == 2
    # As after the time in which a trial without a heartbeat is lost.
    with sqlite3.connect(folder / "out" / "study.db") as database:
        database.execute("update trial_heartbeats set heartbeat = '2000-01-01 00:00:00'")
    database.close()
    resumed = search("mine.toml", out="out", device="cpu")
    assert states_in(folder / "out") == {"COMPLETE": 6, "FAIL": 2}
    whole = search("mine.toml", out="whole", device="cpu")
    assert resumed.best.params == whole.best.params
    assert resumed.best.mrr == pytest.approx(whole.best.mrr)
    assert [trial.params for trial in resumed.trials] == [trial.params for trial in whole.trials]


def test_two_processes_share_one_study(folder: Path):
    with start(folder) as first, start(folder) as second:
        ends = first.finish(), second.finish()
    assert [end.code for end in ends] == [0, 0], ends
    assert states_in(folder / "out")["COMPLETE"] == 6
    assert json.loads((folder / "out" / "summary.json").read_text())["finished"] == 6


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL server that listens on a socket in a folder of its own."""
    pytest.importorskip("psycopg")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    initdb = shutil.which("initdb") or (str(programs[-1] / "initdb") if programs else None)
    if initdb is None:
        pytest.skip("PostgreSQL's server is not installed")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="pg") as folder:  # the path of a socket is short
        Path(folder).chmod(0o777)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
        subprocess.run(
            [initdb, "-D", f"{folder}/data", "-U", "test", "-A", "trust", "-N"], check=True, **quiet
        )
        words = ["-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses=", "-F"]
        with subprocess.Popen([str(Path(initdb).with_name("postgres")), *words], **quiet) as server:
            try:
                until(lambda: Path(folder, ".s.PGSQL.5432").exists())
                yield f"postgresql://test@/postgres?host={folder}"
            finally:
                server.send_signal(signal.SIGQUIT)


@pytest.mark.slow
def test_processes_share_a_study_in_postgresql(folder: Path, postgresql: str):
    with (
        start(folder, out="first", storage=postgresql) as first,
        start(folder, out="second", storage=postgresql) as second,
    ):
        ends = first.finish(), second.finish()
    assert [end.code for end in ends] == [0, 0], ends
    assert best_in(folder / "first") == best_in(folder / "second")


# -- the command ---

COMMAND_SPACE = """
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
    (tmp_path / "mine.toml").write_text(COMMAND_SPACE)
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
        COMMAND_SPACE.replace("dim = 2", "dim = 2\noptions = { colour = 1 }")
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
    (tmp_path / "mine.toml").write_text(COMMAND_SPACE)

    def stop(self):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("dualkg.tuning.study.SearchStudy.report_progress", stop)
    words = ("tune", tmp_path / "mine.toml", "--out", tmp_path / "out")
    assert type_in(monkeypatch, *words) == 130
    result = capsys.readouterr().err
    assert f"Resume with: dualkg tune {tmp_path / 'mine.toml'} --out {tmp_path / 'out'}" in result
