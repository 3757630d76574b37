"""Trials on the validation split, as `scripts/trials.py` makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "trials.py"


def test_trials_are_ranked_along_the_way_and_what_fails_is_left_out(tmp_path):
    recipe = {"data": {"graph": "world"}, "model": {"dim": 4}, "training": {"epochs": 5}}
    trials = [
        {"name": "one", "recipe": recipe},
        {"name": "wrong", "recipe": {**recipe, "loss": {"margn": 1}}},
        {"name": "other", "recipe": recipe},
    ]
    asked, found = tmp_path / "trials.json", tmp_path / "found.json"
    asked.write_text(json.dumps(trials))
    words = [sys.executable, str(SCRIPT), str(asked), "--out", str(found), "--device", "cpu", "--only", "n"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "wrong: a trial: loss.margn is not a choice of [loss]. Did you mean 'margin'?" in told
    (one,) = json.loads(found.read_text())
    assert list(one) == ["name", "recipe", "engine", "seconds", "valid_mrr", "train_mrr"]
    assert list(one["valid_mrr"]) == ["2", "4", "5"]
    assert 0 < one["valid_mrr"]["5"] < 1
    again = tmp_path / "again.json"
    subprocess.run([*words[:2], str(found), "--out", str(again), "--device", "cpu"], check=True, capture_output=True)
    assert json.loads(again.read_text())[0]["valid_mrr"] == one["valid_mrr"]
