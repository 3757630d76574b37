from __future__ import annotations

import time

import pytest
import torch

import dualkg as kg
from dualkg.training.run import RunFolder
from dualkg.training.trainer import STEPS_OF_WARM_UP, Clock, WarmUp


def slow_step(batch: torch.Tensor, learning_rate: float) -> torch.Tensor:
    time.sleep(0.01)
    return batch.sum()


def test_only_the_first_steps_are_warm_up():
    warm_up = WarmUp(torch.device("cpu"))
    clock = Clock(warm_up)
    for _ in range(STEPS_OF_WARM_UP["cpu"] + 3):
        warm_up.take(slow_step, torch.zeros(4), 0.1)
    after_first = warm_up.seconds
    assert after_first >= 0.01 * STEPS_OF_WARM_UP["cpu"]
    assert clock.passed() >= 0.03
    for _ in range(3):  # a last, short batch: its first may compile something
        warm_up.take(slow_step, torch.zeros(3), 0.1)
    warm_up.take(slow_step, torch.zeros(4), 0.1)
    one_more = warm_up.seconds - after_first
    assert one_more >= 0.01
    assert clock.passed() >= 0.03 + 0.03


def test_a_step_gets_what_it_is_given():
    warm_up, seen = WarmUp(torch.device("cpu")), []
    step = lambda batch, rate: seen.append((len(batch), rate)) or batch.sum()  # noqa: E731
    assert [float(warm_up.take(step, torch.ones(2), 0.5)) for _ in range(8)] == [2.0] * 8
    assert seen == [(2, 0.5)] * 8


def test_a_run_keeps_its_costs(tmp_path):
    recipe = kg.Recipe().with_changes({"training.epochs": 2, "model.dim": 4})
    made = kg.train_recipe(recipe, out=tmp_path / "run")
    kept = kg.load_run(tmp_path / "run").costs
    assert kept == made.costs
    assert kept is not None
    assert set(kept) == {"warm_up_seconds", "training_seconds", "ranking_seconds", "peak_mib"}
    assert all(value > 0 for value in kept.values())
    assert kept["training_seconds"] == pytest.approx(sum(entry["seconds"] for entry in made.history), abs=1e-3)


def test_a_run_from_before_costs_were_kept_is_read(tmp_path):
    kg.train_recipe(kg.Recipe().with_changes({"training.epochs": 1, "model.dim": 2}), out=tmp_path / "run")
    RunFolder(tmp_path / "run").costs.unlink()
    assert kg.load_run(tmp_path / "run").costs is None
