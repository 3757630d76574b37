"""Trials on the validation split, as `scripts/trials.py` makes them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "trials.py"


@pytest.fixture
def run(monkeypatch):
    """Runs the script with some words, as it is run from a shell."""

    def with_words(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words), "--device", "cpu"])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return with_words


def test_trials_are_ranked_along_the_way_and_what_fails_is_left_out(tmp_path, run, capsys):
    recipe = {"data": {"graph": "world"}, "model": {"dim": 4}, "training": {"epochs": 5}}
    trials = [
        {"name": "one", "recipe": recipe},
        {"name": "wrong", "recipe": {**recipe, "loss": {"margn": 1}}},
        {"name": "other", "recipe": recipe},
    ]
    asked, found, again = (tmp_path / name for name in ("trials.json", "found.json", "again.json"))
    asked.write_text(json.dumps(trials))
    run(asked, "--out", found, "--only", "n")
    assert "wrong: a trial: loss.margn is not a choice of [loss]. Did you mean 'margin'?" in capsys.readouterr().out
    (one,) = json.loads(found.read_text())
    assert list(one) == ["name", "recipe", "engine", "seconds", "valid_mrr", "train_mrr"]
    assert list(one["valid_mrr"]) == ["2", "4", "5"]
    assert 0 < one["valid_mrr"]["5"] < 1
    run(found, "--out", again)
    assert json.loads(again.read_text())[0]["valid_mrr"] == one["valid_mrr"]
    run(found, "--out", again, "--seconds", "-1")
    assert capsys.readouterr().out.endswith("one: not begun.\n")
