"""Optimizers, learning-rate schedules, and the state of an optimizer as tensors."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dualkg.training.recipe import Optimizer


class Adagrad:
    """`torch.optim.Adagrad` in one pass over each table, or its rows with a sparse gradient; with
    the same state.

    The tables in `row_sums` have one sum for a row, of the means of its squared gradients. `copies`
    are bfloat16 copies of tables on a CPU, which are written too. PyTorch's own optimizers load its
    compiler, which takes a second.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        eps: float = 1e-10,
        *,
        row_sums: Iterable[nn.Parameter] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.param_groups: list[dict[str, Any]] = [
            {"params": self.parameters, "lr": lr, "eps": eps}
        ]
        by_row = {id(table) for table in row_sums}
        self.state = {
            table: {
                "sum": table.new_zeros(
                    (len(table), 1) if id(table) in by_row else table.shape, requires_grad=False
                ),
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
            sums = self.state[table]["sum"]
            gradient = table.grad
            rate = group["lr"]
            eps = group["eps"]
            arrays = (table.detach(), sums, gradient)
            if gradient.is_sparse:
                step_rows(self, table, *sum_rows(gradient._indices()[0], gradient._values()))
            elif sums.shape == table.shape and all(
                one.is_cpu and one.is_contiguous() for one in arrays
            ):
                from dualkg.kernels.cpu import adagrad_

                adagrad_(*arrays, self.copies.get(table), rate, eps=eps)
            else:
                add_squares_(sums, gradient)
                table.addcdiv_(gradient, sums.sqrt().add_(eps), value=-rate)


AnyOptimizer = torch.optim.Optimizer | Adagrad


def build_optimizer(
    choice: Optimizer,
    parameters: Iterable[nn.Parameter],
    *,
    entity_tables: Collection[nn.Parameter] = (),
    one_pass: bool = False,
    captured: bool = False,
) -> AnyOptimizer:
    """PyTorch's optimizer of that name, `captured` as Adam for a CUDA graph; with `one_pass`, the
    faster Adagrad.
    """
    tables = list(parameters)
    keywords = dict[str, Any](lr=choice.learning_rate)
    if choice.epsilon is not None:
        keywords["eps"] = choice.epsilon
    if captured:
        keywords["lr"] = torch.tensor(choice.learning_rate, device=tables[0].device)
        return torch.optim.Adam(tables, capturable=True, fused=True, **keywords)
    if choice.sums == "rows" or (one_pass and choice.name == "Adagrad"):
        return Adagrad(tables, row_sums=entity_tables if choice.sums == "rows" else (), **keywords)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, choice.name)
    return kind(tables, **keywords)


def sum_rows(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids `(n,)`, ascending, and the sum of the gradients `(num, width)` of each, `(n,
    width)`.

    The backward pass of an embedding look-up adds in the order of the ids, on every device.
    """
    distinct, positions = torch.unique(ids, return_inverse=True)
    return distinct, torch.ops.aten.embedding_dense_backward(
        gradient, positions, len(distinct), -1, False
    )


def add_squares_(sums: Tensor, gradient: Tensor) -> Tensor:
    """Add squared gradients to Adagrad's sums `(num_rows, width)`, or their mean over a row to
    `(num_rows, 1)`.
    """
    if sums.shape == gradient.shape:
        return sums.addcmul_(gradient, gradient)
    return sums.add_(gradient.square().mean(-1, keepdim=True))


@torch.no_grad()
def step_rows(optimizer: AnyOptimizer, table: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
    """Update some distinct rows of a table by `(num_rows, width)`, as a dense gradient that is zero
    elsewhere would.
    """
    group = optimizer.param_groups[0]
    if not isinstance(optimizer, torch.optim.SGD):
        sums = optimizer.state[table]["sum"]
        seen = add_squares_(sums[rows], gradient)
        sums[rows] = seen
        gradient = gradient / seen.sqrt_().add_(group["eps"])
    table[rows] = table[rows] - group["lr"] * gradient


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
    states = [
        optimizer.state.get(table, {})
        for group in optimizer.param_groups
        for table in group["params"]
    ]
    named = {
        f"{index}.{key}": value
        for index, state in enumerate(states)
        for key, value in state.items()
    }
    return {name: torch.as_tensor(value) for name, value in named.items() if value is not None}


def restore_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned; tensors that do not fit the parameters raise
    ValueError.
    """
    states: dict[int, dict[str, Tensor]] = {}
    tables = [table for group in optimizer.param_groups for table in group["params"]]
    for name, value in tensors.items():
        index = int(name.partition(".")[0])
        key = name.partition(".")[2]
        table = tables[index] if index in range(len(tables)) else None
        # Adagrad's sums may be smaller than the table.
        if table is None or value.shape not in (
            optimizer.state.get(table, {}).get(key, table).shape,
            (),
        ):
            raise ValueError(f"{name} is of another table")
        if isinstance(optimizer, Adagrad):
            optimizer.state[table][key].copy_(value)
        states.setdefault(index, {})[key] = value
    if not isinstance(optimizer, Adagrad):
        optimizer.load_state_dict(
            {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
        )
