from __future__ import annotations

import pytest
import torch

from dualkg.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from dualkg.training.recipe import Optimizer


@pytest.mark.parametrize(
    ("schedule", "decay_from", "rates"),
    [
        ("constant", 0.0, {0.0: 0.2, 0.5: 0.2, 1.0: 0.2}),
        ("linear", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("linear", 0.5, {0.0: 0.2, 0.5: 0.2, 0.75: 0.1, 1.0: 0.0}),
        ("cosine", 0.0, {0.0: 0.2, 0.5: 0.1, 1.0: 0.0}),
        ("cosine", 0.5, {0.25: 0.2, 0.75: 0.1}),
    ],
)
def test_the_course_of_the_learning_rate(schedule, decay_from, rates):
    choice = Optimizer(learning_rate=0.2, schedule=schedule, decay_from=decay_from)
    for progress, rate in rates.items():
        assert learning_rate(choice, progress) == pytest.approx(rate)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_steps_as_the_first_one_would(name):
    def step(parameter, optimizer):
        optimizer.zero_grad()
        parameter.pow(4).sum().backward()
        optimizer.step()

    one = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    first = build_optimizer(Optimizer(name=name, learning_rate=0.1), [one])
    step(one, first)
    other = torch.nn.Parameter(one.detach().clone())
    second = build_optimizer(Optimizer(name=name, learning_rate=0.1), [other])
    restore_optimizer(second, {key: value.clone() for key, value in optimizer_tensors(first).items()})
    for _ in range(3):
        step(one, first)
        step(other, second)
    assert torch.equal(one, other)
