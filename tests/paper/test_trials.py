"""Trials on the validation split."""

import json


def test_trials_report_validation_mrr_and_leave_failed_ones_out(run_paper, tmp_path):
    recipe = {"data": {"graph": "world"}, "model": {"dim": 4}, "training": {"epochs": 5}}
    trials = [
        {"name": "one", "recipe": recipe},
        {"name": "wrong", "recipe": {**recipe, "loss": {"margn": 1}}},
        {"name": "other", "recipe": recipe},
    ]
    file, results, again = (
        tmp_path / name for name in ("trials.json", "results.json", "again.json")
    )
    file.write_text(json.dumps(trials))
    shown = run_paper("trials", file, "--out", results, "--only", "n", "--device", "cpu")
    assert "wrong: a trial: loss.margn" in shown.out
    (one,) = json.loads(results.read_text())
    assert list(one) == ["name", "recipe", "engine", "seconds", "valid_mrr", "train_mrr"]
    assert list(one["valid_mrr"]) == ["2", "4", "5"]
    assert 0 < one["valid_mrr"]["5"] < 1
    run_paper("trials", results, "--out", again, "--device", "cpu")
    assert json.loads(again.read_text())[0]["valid_mrr"] == one["valid_mrr"]
    shown = run_paper("trials", results, "--out", again, "--seconds", "-1", "--device", "cpu")
    assert shown.out.endswith("one: not started.\n")
    file.write_text("{}x")
    assert (
        "is not a JSON list of names and recipes" in run_paper("trials", file, "--out", again).err
    )
