"""How weights are updated: Adagrad in one pass, updates of some rows, and saved optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn


class OnePassAdagrad:
    """`torch.optim.Adagrad` in one pass over each table, or over the rows of a sparse gradient.

    Its state is that of PyTorch's. The tables in `row_sums` have one sum for each row, of the means
    of its squared gradients. `copies` are bfloat16 copies of tables on a CPU, which are written
    too. PyTorch's own optimizers load its compiler, which takes a second.
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
        summed_by_row = {id(table) for table in row_sums}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for table in self.parameters:
            shape = (len(table), 1) if id(table) in summed_by_row else table.shape
            sums = table.new_zeros(shape, requires_grad=False)
            self.state[table] = {"sum": sums, "step": torch.tensor(0.0)}

    def with_tables(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> OnePassAdagrad:
        """The same optimizer with other tables in place of some, whose state is to be set.

        The state of all other tables is shared.
        """
        other = copy(self)
        other.parameters = [replaced.get(table, table) for table in self.parameters]
        other.param_groups = [{**self.param_groups[0], "params": other.parameters}]
        other.state = {
            replaced.get(table, table): dict(state) if table in replaced else state
            for table, state in self.state.items()
        }
        return other

    def zero_grad(self, set_to_none: bool = True) -> None:
        for table in self.parameters:
            table.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for table in self.parameters:
            if table.grad is not None:
                self._step(table, table.grad)

    def _step(self, table: nn.Parameter, gradient: Tensor) -> None:
        group = self.param_groups[0]
        rate = group["lr"]
        eps = group["eps"]
        sums = self.state[table]["sum"]

        if gradient.is_sparse:
            step_rows(self, table, *sum_rows(gradient._indices()[0], gradient._values()))
            return
        arrays = (table.detach(), sums, gradient)
        on_cpu = all(array.is_cpu and array.is_contiguous() for array in arrays)
        if on_cpu and sums.shape == table.shape:
            from dualkg.kernels.cpu import adagrad_

            adagrad_(*arrays, self.copies.get(table), rate, eps=eps)
            return
        add_squares_(sums, gradient)
        table.addcdiv_(gradient, sums.sqrt().add_(eps), value=-rate)


AnyOptimizer = torch.optim.Optimizer | OnePassAdagrad


def sum_rows(ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids `(n,)`, ascending, and the sum of the gradients of each, `(n, width)`.

    `gradient` is `(num, width)`. The backward pass of an embedding look-up adds in the order of the
    ids, on every device.
    """
    distinct, positions = torch.unique(ids, return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(gradient, positions, len(distinct), -1, False)
    return distinct, sums


def add_squares_(sums: Tensor, gradient: Tensor) -> Tensor:
    """Add squared gradients to Adagrad's sums, `(num_rows, width)`.

    To sums of whole rows, `(num_rows, 1)`, their mean over a row is added.
    """
    if sums.shape == gradient.shape:
        return sums.addcmul_(gradient, gradient)
    return sums.add_(gradient.square().mean(-1, keepdim=True))


@torch.no_grad()
def step_rows(optimizer: AnyOptimizer, table: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
    """Update some distinct rows of a table by their gradient `(num_rows, width)`.

    The result is that of a dense gradient that is zero elsewhere.
    """
    group = optimizer.param_groups[0]
    if not isinstance(optimizer, torch.optim.SGD):
        sums = optimizer.state[table]["sum"]
        if table.is_cpu and table.dtype == torch.float32 and sums.shape == table.shape:
            from dualkg.kernels import cpu

            if cpu.HAS_NUMBA:
                rate = float(group["lr"])
                cpu.adagrad_rows_(table.detach(), sums, rows, gradient, rate, eps=group["eps"])
                return
        new_sums = add_squares_(sums[rows], gradient)
        sums[rows] = new_sums
        gradient = gradient / new_sums.sqrt_().add_(group["eps"])
    table[rows] = table[rows] - group["lr"] * gradient


def optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """The state of an optimizer as named tensors, for a checkpoint."""
    tensors = {}
    for index, table in enumerate(_tables(optimizer)):
        for key, value in optimizer.state.get(table, {}).items():
            if value is not None:
                tensors[f"{index}.{key}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned.

    Tensors that do not fit the parameters raise ValueError.
    """
    tables = _tables(optimizer)
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition(".")
        index = int(number)
        if index not in range(len(tables)):
            raise ValueError(f"{name} is of another table")
        table = tables[index]
        # Adagrad's sums may be smaller than the table.
        expected = optimizer.state.get(table, {}).get(key, table)
        if value.shape not in (expected.shape, ()):
            raise ValueError(f"{name} is of another table")
        if isinstance(optimizer, OnePassAdagrad):
            optimizer.state[table][key].copy_(value)
        states.setdefault(index, {})[key] = value
    if not isinstance(optimizer, OnePassAdagrad):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def _tables(optimizer: AnyOptimizer) -> list[nn.Parameter]:
    return [table for group in optimizer.param_groups for table in group["params"]]
