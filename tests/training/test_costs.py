from __future__ import annotations

import pytest
import torch

import dualkg as kg
from dualkg.training import trainer
from dualkg.training.run import RunFolder
from dualkg.training.trainer import STEPS_OF_WARM_UP, WarmUp


class Timer:
    """A clock that a step of one second moves on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, batch: torch.Tensor, learning_rate: float) -> torch.Tensor:
        self.seconds += 1
        return batch.sum()


def test_only_the_first_steps_are_warm_up(monkeypatch):
    timer, warm_up = Timer(), WarmUp(torch.device("cpu"))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: timer.seconds)
    started = warm_up.clock()
    for _ in range(STEPS_OF_WARM_UP["cpu"] + 3):
        warm_up.take(timer.step, torch.zeros(4), 0.1)
    assert warm_up.seconds == STEPS_OF_WARM_UP["cpu"]
    assert warm_up.clock() - started == 3
    for _ in range(3):  # a last, short batch: its first may compile something
        warm_up.take(timer.step, torch.zeros(3), 0.1)
    warm_up.take(timer.step, torch.zeros(4), 0.1)
    assert warm_up.seconds == STEPS_OF_WARM_UP["cpu"] + 1
    assert warm_up.clock() - started == 6


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
