"""Searching: every part of the work once, by the validation split alone, whatever is stopped or fails."""

from __future__ import annotations

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
from dualkg.training.recipe import load_recipe
from dualkg.training.trainer import InterruptedRunError
from dualkg.tuning.search import search
from dualkg.tuning.space import space_from
from dualkg.tuning.study import slots

BASE = {"model": {"name": "CP", "dim": 4}, "training": {"epochs": 2, "batch_size": 100}}


def space(choices, **how):
    return space_from({**BASE, "space": choices, "search": how}, source="it", name="it")


FOUR = space({"model.dim": [2, 3], "optimizer.learning_rate": [0.1, 0.3]})


def trials_in(out):
    study = optuna.load_study(study_name="it", storage=f"sqlite:///{out / 'study.db'}")
    return study.trials


def test_a_grid_and_what_is_written_of_it_and_called_again_it_repeats_nothing(small_graph, tmp_path):
    events = []
    result = search(FOUR, out=tmp_path, graph=small_graph, on_progress=events.append)
    assert len({tuple(row.values.items()) for row in result.trials}) == 4
    assert {row.outcome for row in result.trials} == {"finished"}
    assert result.best.mrr == max(row.mrr for row in result.trials)
    assert load_recipe(tmp_path / "best.toml") == result.recipe == FOUR.recipe(result.best.values)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.as_dict()
    table = (tmp_path / "trials.csv").read_text().splitlines()
    assert table[0] == "number,outcome,mrr,seconds,model.dim,optimizer.learning_rate,why"
    assert len(table) == 5
    assert result.importance is None
    assert (events[-1].num_done, events[-1].num_trials, events[-1].best) == (4, 4, result.best.mrr)
    assert any(event.training for event in events)
    again = search(FOUR, out=tmp_path, graph=small_graph)
    assert again.trials == result.trials
    assert len(trials_in(tmp_path)) == 4


class Poison:
    """A split that cannot be looked at."""

    def _refuse(self, *names, **choices):
        raise AssertionError("the test split was looked at")

    __getattr__ = __len__ = __getitem__ = __iter__ = __array__ = _refuse


def test_the_objective_is_what_training_gives_and_the_test_split_is_not_looked_at(small_graph, tmp_path):
    poisoned = dataclasses.replace(small_graph, test=Poison())
    result = search(space({"optimizer.learning_rate": [0.1, 0.3]}), out=tmp_path, graph=poisoned)
    run = kg.train_recipe(result.recipe, graph=dataclasses.replace(small_graph, test=small_graph.test[:0]))
    assert run.reports["valid"].mrr == pytest.approx(result.best.mrr, abs=1e-6)


def test_the_unpromising_are_pruned(small_graph, tmp_path):
    choices = {"optimizer.learning_rate": [0.5, 0.4, 1e-6, 2e-6], "training.seed": [0, 1, 2]}
    wide = space({**choices, "training.epochs": [3]}, validate_every=1, prune_after=1)
    result = search(wide, out=tmp_path, graph=small_graph)
    told = Counter(row.outcome for row in result.trials)
    assert told["pruned"] >= 1
    assert told["finished"] >= 5
    pruned = [row for row in result.trials if row.outcome == "pruned"]
    assert all(row.mrr is not None and row.mrr < result.best.mrr for row in pruned)
    whole = search(space({**choices, "training.epochs": [1]}, prune=False), out=tmp_path / "whole", graph=small_graph)
    assert {row.outcome for row in whole.trials} == {"finished"}
    assert set(whole.importance) == set(choices)
    assert sum(whole.importance.values()) == pytest.approx(1, abs=1e-3)


def test_a_failing_trial_is_written_down_and_the_search_goes_on(small_graph, tmp_path):
    choices = {"regularizer.name": ["N3", "DURA"], "optimizer.learning_rate": [0.1, 1e30], "optimizer.name": ["SGD"]}
    tables = {"model": {"name": "RESCAL", "dim": 3}, "regularizer": {"weight": 0.1}, "training": {"epochs": 3}}
    result = search(space_from({**tables, "space": choices}, source="it"), out=tmp_path, graph=small_graph)
    why = {(row.values["regularizer.name"], row.values["optimizer.learning_rate"]): row.why for row in result.trials}
    assert "those of RESCAL are not" in why["N3", 0.1]
    assert "those of RESCAL are not" in why["N3", 1e30]
    assert "diverged" in why["DURA", 1e30]
    assert why["DURA", 0.1] == ""
    assert "diverged" in (tmp_path / "trials.csv").read_text()
    assert result.as_dict()["failed"] == 3
    assert result.best.values["regularizer.name"] == "DURA"


@pytest.mark.parametrize("method", ["tpe", "random"])
def test_a_sampled_search_stays_in_its_ranges_and_can_be_made_longer(small_graph, tmp_path, method):
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
        assert 1e-2 <= row.values["optimizer.learning_rate"] <= 1
        assert row.values["model.dim"] in (2, 4, 6)
    assert len({row.values["optimizer.learning_rate"] for row in longer.trials}) == 4
    whole = search(space(choices, method=method, trials=4), out=tmp_path / "whole", graph=small_graph)
    assert [row.values for row in whole.trials] == [row.values for row in longer.trials]


def test_what_is_drawn_twice_is_trained_once(small_graph, tmp_path):
    choices = {"model.dim": [2, 3]}
    epochs = []
    result = search(
        space(choices, method="random", trials=4),
        out=tmp_path,
        graph=small_graph,
        on_progress=lambda event: epochs.append(event.training.epoch) if event.training else None,
    )
    assert len({(row.values["model.dim"], row.mrr) for row in result.trials}) == 2
    assert len(result.trials) == 4
    assert sum(after < before for before, after in pairwise(epochs)) == 1


def test_ctrl_c_keeps_what_is_done_and_the_rest_is_done_later(small_graph, tmp_path):
    def stop(event):
        if event.num_done == 2 and event.training:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError, match="Stopped; 2 of 4 trials are done and kept"):
        search(FOUR, out=tmp_path, graph=small_graph, on_progress=stop)
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 2
    result = search(FOUR, out=tmp_path, graph=small_graph)
    assert len({tuple(row.values.items()) for row in result.trials}) == 4
    states = Counter(trial.state.name for trial in trials_in(tmp_path))
    assert states == {"COMPLETE": 4, "FAIL": 1}


def test_a_trial_followed_twice_counts_once():
    def trial(number, **attributes):
        made = optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=attributes)
        made.number = number
        return made

    made = [trial(0), trial(1), trial(2, again=0), trial(3, again=0), trial(4), trial(5, again=2)]
    assert {slot: found.number for slot, found in slots(reversed(made)).items()} == {0: 5, 1: 1, 2: 4}


def test_another_space_in_the_same_place_is_refused(small_graph, tmp_path):
    search(space({"model.dim": [2]}), out=tmp_path, graph=small_graph)
    with pytest.raises(kg.RequestError, match=r"of another space: \[space\] is not the same. Use another --out"):
        search(space({"model.dim": [3]}), out=tmp_path, graph=small_graph)
    with pytest.raises(kg.RequestError, match="the data is not the same"):
        search(space({"model.dim": [2]}), out=tmp_path, graph=dataclasses.replace(small_graph, fingerprint="other"))


def test_what_cannot_be_searched(small_graph, tmp_path):
    with pytest.raises(kg.RequestError, match="made has no valid triples, and a search chooses by them"):
        search(FOUR, out=tmp_path, graph=dataclasses.replace(small_graph, valid=small_graph.valid[:0]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").touch()
    with pytest.raises(kg.RequestError, match="holds a run; a search needs a folder of its own"):
        search(FOUR, out=tmp_path / "run", graph=small_graph)
    with pytest.raises(kg.RequestError, match="A storage is a database's URL"):
        search(FOUR, out=tmp_path, graph=small_graph, storage="nonsense")
    with pytest.raises(kg.RequestError, match="needs a driver that is not installed"):
        search(FOUR, out=tmp_path, graph=small_graph, storage="postgresql://nowhere/x")
    with pytest.raises(kg.RequestError, match="The storage cannot be opened: unable to open database file"):
        search(FOUR, out=tmp_path, graph=small_graph, storage=f"sqlite:///{tmp_path}/nowhere/x.db")


def test_without_optuna_the_install_line_is_told(small_graph, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(kg.RequestError, match=r"Install it: pip install 'dualkg\[search\]'"):
        search(FOUR, out=tmp_path / "out", graph=small_graph)
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


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SPACE)
    assert type_in(monkeypatch, "search", "mine.toml") == 0
    told = capsys.readouterr()
    assert "valid MRR" in told.out
    assert "DURA" in told.out
    assert "from 8 finished trials" in told.out
    assert "dualkg train runs/search-mine/best.toml" in told.err
    assert type_in(monkeypatch, "search", "mine.toml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finished"], found["folder"]) == (2, "runs/search-mine")
    (tmp_path / "mine.toml").write_text(SPACE.replace("dim = 2", "dim = 2\noptions = { colour = 1 }"))
    assert type_in(monkeypatch, "search", "mine.toml", "--out", "bad") == 1
    assert "No trial came to its end; see bad/trials.csv. The first: ComplEx cannot be made" in capsys.readouterr().err


def test_ctrl_c_tells_the_command_to_go_on_with(tmp_path, monkeypatch, capsys, request):
    # What is started in the background may have been told to ignore it.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    (tmp_path / "mine.toml").write_text(SPACE)
    monkeypatch.setattr("dualkg.tuning.search.Worker.work", lambda self: os.kill(os.getpid(), signal.SIGINT))
    words = ("search", tmp_path / "mine.toml", "--out", tmp_path / "out")
    assert type_in(monkeypatch, *words) == 130
    told = capsys.readouterr().err
    assert f"Go on with: dualkg search {tmp_path / 'mine.toml'} --out {tmp_path / 'out'}" in told
