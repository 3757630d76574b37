"""Batched L-BFGS: many smooth objectives, each of its own point, minimized together."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

HISTORY = 20  # steps that are remembered
MAX_STEPS = 200
MAX_TRIALS = 10  # step lengths tried in a line search
# The largest number of a gradient that counts as 0: about four and ten digits of a row.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
TINY = 1e-30

# Past steps, the changes of the gradients, and their dot products.
History = deque[tuple[Tensor, Tensor, Tensor]]


class Objectives(Protocol):
    """A batch of objectives, of which some can be selected."""

    def value_and_gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives `(batch,)` at points `(batch, …)`, and the gradient of each."""

    def select(self, kept: Tensor) -> Self:
        """The objectives that are marked in `(batch,)`."""


@dataclass(frozen=True, eq=False)
class _State:
    """The objectives that L-BFGS still minimizes: their numbers, points and past steps."""

    problem: Objectives
    numbers: Tensor
    points: Tensor
    values: Tensor
    gradients: Tensor
    history: History

    def select(self, kept: Tensor) -> Self:
        """The state of some of the objectives, `kept` `(batch,)` boolean."""
        history: History = deque(maxlen=HISTORY)
        for steps, changes, dots in self.history:
            history.append((steps[kept], changes[kept], dots[kept]))
        return replace(
            self,
            problem=self.problem.select(kept),
            numbers=self.numbers[kept],
            points=self.points[kept],
            values=self.values[kept],
            gradients=self.gradients[kept],
            history=history,
        )


@torch.no_grad()
def minimize(problem: Objectives, start: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Minimize the objectives of a batch from points `(batch, …)`, by L-BFGS.

    An objective has converged when no number of its gradient is above the tolerance: its point
    stays, and it is no longer evaluated once a quarter has converged.
    """
    tolerance = tolerance or TOLERANCE[start.dtype]
    minima = start.clone()
    values, gradients = problem.value_and_gradient(start)
    state = _State(
        problem=problem,
        numbers=torch.arange(len(start), device=start.device),
        points=start,
        values=values,
        gradients=gradients,
        history=deque(maxlen=HISTORY),
    )
    for _ in range(MAX_STEPS):
        converged = state.gradients.flatten(1).abs().amax(1) <= tolerance
        if bool(converged.all()):
            break
        if 4 * int(converged.sum()) >= len(converged):
            minima[state.numbers] = state.points
            kept = ~converged
            state = state.select(kept)
            converged = converged[kept]
        state = _step(state, converged)
    minima[state.numbers] = state.points
    return minima


def _step(state: _State, converged: Tensor) -> _State:
    """One step of L-BFGS with a line search; converged objectives stay where they are.

    A convex function falls along a line up to its minimum, so a step is judged by its slope, which
    rounding hurts less than the value.
    """
    directions = -_inverse_hessian(state.gradients, state.history)
    directions[converged] = 0.0
    slopes = _dot(state.gradients, directions)
    lengths = torch.ones_like(state.values)
    if not state.history:
        lengths = (1 / state.gradients.flatten(1).norm(dim=1).clamp(min=TINY)).clamp(max=1.0)

    for _ in range(MAX_TRIALS):
        points = state.points + _scaled(lengths, directions)
        values, gradients = state.problem.value_and_gradient(points)
        new_slopes = _dot(gradients, directions)
        has_decreased = values - state.values <= 1e-4 * lengths * slopes
        accepted = converged | (new_slopes <= 0) | has_decreased
        if bool(accepted.all()):
            break
        # Linear interpolation leads to the root of the slope. At most half of the length is kept,
        # since the function may be flat beyond it.
        shorter = lengths * (slopes / (slopes - new_slopes)).clamp(0.1, 0.5)
        lengths = torch.where(accepted, lengths, shorter)

    steps = points - state.points
    changes = gradients - state.gradients
    history: History = deque(state.history, maxlen=HISTORY)
    history.append((steps, changes, _dot(steps, changes).clamp(min=TINY)))
    return replace(state, points=points, values=values, gradients=gradients, history=history)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).flatten(1).sum(1)


def _scaled(factors: Tensor, points: Tensor) -> Tensor:
    """Points `(batch, …)` times factors `(batch,)`."""
    trailing = [1] * (points.dim() - 1)
    return factors.view(-1, *trailing) * points


def _inverse_hessian(gradients: Tensor, history: History) -> Tensor:
    """The gradients times the inverse Hessian that past steps suggest.

    This is the two-loop recursion of L-BFGS.
    """
    factors = []
    for steps, changes, dots in reversed(history):
        factor = _dot(steps, gradients) / dots
        factors.append(factor)
        gradients = gradients - _scaled(factor, changes)
    if history:
        _, changes, dots = history[-1]
        gradients = _scaled(dots / _dot(changes, changes).clamp(min=TINY), gradients)
    for (steps, changes, dots), factor in zip(history, reversed(factors), strict=True):
        gradients = gradients + _scaled(factor - _dot(changes, gradients) / dots, steps)
    return gradients
