"""Adagrad that goes over each table once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-10  # PyTorch's


class Adagrad:
    """What `torch.optim.Adagrad` does, with the same state under the same names, for dense gradients.

    PyTorch's optimizers load its compiler when they are made: a second, and 70 MiB. They also need a pass for each
    operation, where one is enough.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float = EPS) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr, "eps": eps}]
        self.state = {
            table: {"sum": torch.zeros_like(table, requires_grad=False), "step": torch.tensor(0.0)}
            for table in self.parameters
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        for table in self.parameters:
            table.grad = None

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for table in self.parameters:
            if table.grad is not None:
                step_table(table, self.state[table]["sum"], table.grad, group["lr"], eps=group["eps"])

    def state_dict(self) -> dict[str, Any]:
        states = {index: self.state[table] for index, table in enumerate(self.parameters)}
        return {"state": states, "param_groups": []}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for index, table in enumerate(self.parameters):
            for name, value in saved["state"].get(index, {}).items():
                self.state[table][name].copy_(value)


def step_table(table: Tensor, sums: Tensor, gradient: Tensor, learning_rate: float, *, eps: float) -> None:
    """Step a table in one pass, or, on a GPU and for arrays with gaps, in those that PyTorch needs."""
    if table.device.type == "cpu" and table.is_contiguous() and gradient.is_contiguous():
        from dualkg.kernels.cpu.adagrad import adagrad_

        adagrad_(table.detach(), sums, gradient, None, learning_rate, eps=eps)
    else:
        sums.addcmul_(gradient, gradient)
        table.addcdiv_(gradient, sums.sqrt().add_(eps), value=-learning_rate)
