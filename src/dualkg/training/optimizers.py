"""Optimizers and the course of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dualkg.training.adagrad import Adagrad
from dualkg.training.sections import Optimizer

AnyOptimizer = torch.optim.Optimizer | Adagrad


def build_optimizer(
    choice: Optimizer, parameters: Iterable[nn.Parameter], *, one_pass: bool = False, captured: bool = False
) -> AnyOptimizer:
    """PyTorch's optimizer of that name; with `one_pass`, one that goes over each table once where there is one.

    If it is to be `captured`, Adam with a learning rate that is read on the device.
    """
    keywords: dict[str, Any] = {"lr": choice.learning_rate}
    if choice.epsilon is not None:
        keywords["eps"] = choice.epsilon
    if captured:
        tables = list(parameters)
        keywords["lr"] = torch.tensor(choice.learning_rate, device=tables[0].device)
        return torch.optim.Adam(tables, capturable=True, fused=True, **keywords)
    if one_pass and choice.name == "Adagrad":
        return Adagrad(parameters, **keywords)
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "Adagrad": torch.optim.Adagrad,
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
    }
    return kinds[choice.name](parameters, **keywords)


def is_adagrad(optimizer: AnyOptimizer) -> bool:
    return isinstance(optimizer, (Adagrad, torch.optim.Adagrad))


def can_step_rows(optimizer: AnyOptimizer) -> bool:
    """Whether rows without a gradient stay as they are, so that leaving them out is exact. Adam's moments decay."""
    return is_adagrad(optimizer) or isinstance(optimizer, torch.optim.SGD)


@torch.no_grad()
def step_rows(
    optimizer: AnyOptimizer, table: nn.Parameter, rows: Tensor, gradient: Tensor, learning_rate: float
) -> None:
    """Step on some rows of a table, each named once; `gradient` is `(num_rows, width)`."""
    if is_adagrad(optimizer):
        sums = optimizer.state[table]["sum"]
        seen = sums[rows].addcmul_(gradient, gradient)
        sums[rows] = seen
        gradient = gradient / seen.sqrt_().add_(optimizer.param_groups[0]["eps"])
    table[rows] = table[rows] - learning_rate * gradient


def learning_rate(choice: Optimizer, progress: float) -> float:
    """The learning rate when the share `progress` of all steps is done."""
    if choice.schedule == "constant" or progress <= choice.decay_from:
        return choice.learning_rate
    fallen = (progress - choice.decay_from) / (1 - choice.decay_from)
    if choice.schedule == "linear":
        return choice.learning_rate * (1 - fallen)
    return choice.learning_rate * (1 + math.cos(math.pi * fallen)) / 2


def optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """The optimizer's memory as named tensors, for a checkpoint."""
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": torch.as_tensor(value)
        for index, state in states.items()
        for key, value in state.items()
        if value is not None
    }


def restore_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        states.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
