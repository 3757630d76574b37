"""Optimizers, learning-rate schedules, and the state of an optimizer as tensors."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dualkg.training.recipe import Optimizer

EPS = 1e-10  # PyTorch's


class Adagrad:
    """`torch.optim.Adagrad` in one pass over each table, or its rows with a sparse gradient; with the same state.

    The tables in `row_sums` have one sum for a row, of the means of its squared gradients.
    PyTorch's optimizers load its compiler when they are constructed, which takes a second and 70 MiB.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        eps: float = EPS,
        *,
        row_sums: Collection[nn.Parameter] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr, "eps": eps}]
        by_row = {id(table) for table in row_sums}
        self.state = {
            table: {
                "sum": table.new_zeros((len(table), 1) if id(table) in by_row else table.shape, requires_grad=False),
                "step": torch.tensor(0.0),
            }
            for table in self.parameters
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        for table in self.parameters:
            table.grad = None

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for table in self.parameters:
            if table.grad is None:
                continue
            if table.grad.is_sparse:
                rows, gradient = sum_rows(table.grad._indices()[0], table.grad._values())
                step_rows(self, table, rows, gradient, group["lr"])
            else:
                self._update(table, self.state[table]["sum"], table.grad, group["lr"], eps=group["eps"])

    @staticmethod
    def _update(table: Tensor, sums: Tensor, gradient: Tensor, learning_rate: float, *, eps: float) -> None:
        by_element = sums.shape == table.shape
        if by_element and table.device.type == "cpu" and table.is_contiguous() and gradient.is_contiguous():
            from dualkg.kernels.cpu import adagrad_

            adagrad_(table.detach(), sums, gradient, None, learning_rate, eps=eps)
        else:
            add_squares_(sums, gradient)
            table.addcdiv_(gradient, sums.sqrt().add_(eps), value=-learning_rate)

    def state_dict(self) -> dict[str, Any]:
        states = {index: self.state[table] for index, table in enumerate(self.parameters)}
        return {"state": states, "param_groups": []}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for index, table in enumerate(self.parameters):
            for name, value in saved["state"].get(index, {}).items():
                self.state[table][name].copy_(value)


AnyOptimizer = torch.optim.Optimizer | Adagrad


def build_optimizer(
    choice: Optimizer,
    parameters: Iterable[nn.Parameter],
    *,
    entity_tables: Collection[nn.Parameter] = (),
    one_pass: bool = False,
    captured: bool = False,
) -> AnyOptimizer:
    """PyTorch's optimizer of that name, `captured` as Adam for a CUDA graph; with `one_pass`, the faster Adagrad.

    With `sums = "rows"`, the `entity_tables` have one sum for a row.
    """
    keywords: dict[str, Any] = {"lr": choice.learning_rate}
    if choice.epsilon is not None:
        keywords["eps"] = choice.epsilon
    if captured:
        tables = list(parameters)
        keywords["lr"] = torch.tensor(choice.learning_rate, device=tables[0].device)
        return torch.optim.Adam(tables, capturable=True, fused=True, **keywords)
    if choice.sums == "rows":
        return Adagrad(parameters, row_sums=entity_tables, **keywords)
    if one_pass and choice.name == "Adagrad":
        return Adagrad(parameters, **keywords)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, choice.name)
    return kind(parameters, **keywords)


def can_step_rows(optimizer: AnyOptimizer) -> bool:
    """Whether rows without a gradient do not change, so that skipping them is exact; Adam's moments decay."""
    return isinstance(optimizer, (Adagrad, torch.optim.Adagrad, torch.optim.SGD))


def sum_rows(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids `(n,)`, ascending, and the sum of the gradients `(num, width)` of each, `(n, width)`.

    The backward pass of an embedding look-up adds in the order of the ids, on every device.
    """
    distinct, positions = torch.unique(ids, return_inverse=True)
    return distinct, torch.ops.aten.embedding_dense_backward(gradient, positions, len(distinct), -1, False)


def add_squares_(sums: Tensor, gradient: Tensor) -> Tensor:
    """Add squared gradients to Adagrad's sums `(num_rows, width)`, or their mean over a row to `(num_rows, 1)`."""
    if sums.shape == gradient.shape:
        return sums.addcmul_(gradient, gradient)
    return sums.add_(gradient.square().mean(-1, keepdim=True))


@torch.no_grad()
def step_rows(
    optimizer: AnyOptimizer, table: nn.Parameter, rows: Tensor, gradient: Tensor, learning_rate: float
) -> None:
    """Update some distinct rows of a table; `gradient` is `(num_rows, width)`. Other rows are neither read nor written.

    The update is that of a dense gradient which is zero in all other rows.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        sums = optimizer.state[table]["sum"]
        seen = add_squares_(sums[rows], gradient)
        sums[rows] = seen
        gradient = gradient / seen.sqrt_().add_(optimizer.param_groups[0]["eps"])
    table[rows] = table[rows] - learning_rate * gradient


def learning_rate(choice: Optimizer, progress: float) -> float:
    """The learning rate after the share `progress` of all steps."""
    if choice.schedule == "constant" or progress <= choice.decay_from:
        return choice.learning_rate
    decayed = (progress - choice.decay_from) / (1 - choice.decay_from)
    if choice.schedule == "linear":
        return choice.learning_rate * (1 - decayed)
    return choice.learning_rate * (1 + math.cos(math.pi * decayed)) / 2


def optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """The state of the optimizer as named tensors, for a checkpoint."""
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": torch.as_tensor(value)
        for index, state in states.items()
        for key, value in state.items()
        if value is not None
    }


def restore_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned; tensors that do not fit the parameters raise ValueError."""
    states: dict[int, dict[str, Tensor]] = {}
    tables = [table for group in optimizer.param_groups for table in group["params"]]
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        if int(index) not in range(len(tables)):
            raise ValueError(f"{name} is of another table")
        table = tables[int(index)]
        present = optimizer.state.get(table, {}).get(key, table)  # Adagrad's sums may be smaller than the table
        if value.shape not in (present.shape, ()):
            raise ValueError(f"{name} is of another table")
        states.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
