"""Batched L-BFGS: many smooth objectives, each of its own point, minimized together.

The directions are linear combinations of past steps, of changes of the gradient and of the
gradient. Their coefficients follow from the dot products of these vectors, which are computed
together (Chen, Wang and Zhou, Large-scale L-BFGS using MapReduce, 2014): a few launches on a GPU
in place of some hundreds.
"""

import threading
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HISTORY = 20  # steps that are remembered
MAX_STEPS = 200
MAX_TRIALS = 10  # step lengths tried in a line search
# The largest number of a gradient that counts as 0: about four and ten digits of a row.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
TINY = 1e-30
MAX_CAPTURED = 64  # objectives of a batch; with more, the time of a GPU is not that of launches


class Objectives(Protocol):
    """A batch of objectives, of which some can be selected."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can evaluate them: on a GPU, and never waiting for it."""

    def value_and_gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives `(batch,)` at points `(batch, …)`, and the gradient of each."""

    def select(self, kept: Tensor) -> "Objectives":
        """The objectives that are marked in `(batch,)`."""


# -- past steps --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _History:
    """The last steps, and the changes of the gradient in them.

    Row 0 of `vectors` `(batch, 1 + 2 · HISTORY, size)` is for a gradient. A step and its change
    are neighbours after it. `slots` are the numbers of the steps that are kept, oldest first.
    """

    vectors: Tensor
    slots: tuple[int, ...] = ()

    @classmethod
    def of(cls, points: Tensor) -> Self:
        """No steps yet."""
        batch, size = points.flatten(1).shape
        return cls(points.new_zeros(batch, 1 + 2 * HISTORY, size))

    def select(self, kept: Tensor) -> Self:
        return replace(self, vectors=self.vectors[kept])

    def append(self, steps: Tensor, changes: Tensor) -> Self:
        """The history with another step, which replaces the oldest if there are `HISTORY`.

        Both share their vectors, so the history before is not used again.
        """
        if len(self.slots) < HISTORY:
            slot = len(self.slots)
            slots = (*self.slots, slot)
        else:
            slot, *newer = self.slots
            slots = (*newer, slot)
        self.vectors[:, 1 + 2 * slot] = steps.flatten(1)
        self.vectors[:, 2 + 2 * slot] = changes.flatten(1)
        return replace(self, slots=slots)

    def direction(self, gradients: Tensor) -> Tensor:
        """Minus the gradients times the inverse Hessian that past steps suggest."""
        if not self.slots:
            return -gradients
        used = self.vectors[:, : 1 + 2 * len(self.slots)]
        used[:, 0] = gradients.flatten(1)
        products = (used @ used.mT).double().cpu().numpy()
        coefficients = torch.from_numpy(self._coefficients(products)).to(used)
        return -(coefficients[:, None] @ used).view_as(gradients)

    def _coefficients(self, products: NDArray[np.float64]) -> NDArray[np.float64]:
        """The coefficients of the vectors, by their dot products `(batch, used, used)`.

        This is the two-loop recursion of L-BFGS.
        """
        coefficients = np.zeros(products.shape[:2])
        coefficients[:, 0] = 1.0
        factors = {}
        for slot in reversed(self.slots):
            step = 1 + 2 * slot
            dots = np.maximum(products[:, step, step + 1], TINY)
            factor = (products[:, step] * coefficients).sum(1) / dots
            coefficients[:, step + 1] -= factor
            factors[slot] = factor

        newest = 1 + 2 * self.slots[-1]
        dots = np.maximum(products[:, newest, newest + 1], TINY)
        squares = np.maximum(products[:, newest + 1, newest + 1], TINY)
        coefficients *= (dots / squares)[:, None]

        for slot in self.slots:
            step = 1 + 2 * slot
            dots = np.maximum(products[:, step, step + 1], TINY)
            factor = (products[:, step + 1] * coefficients).sum(1) / dots
            coefficients[:, step] += factors[slot] - factor
        return coefficients


# -- evaluations by a CUDA graph ---------------------------------------------


class _Captured:
    """Objectives that a CUDA graph evaluates: one launch in place of hundreds."""

    capturable = False
    lock = threading.Lock()  # two threads cannot capture on one stream
    streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, problem: Objectives, rows: Tensor) -> None:
        self.problem = problem
        self.rows = rows.clone()
        current = torch.cuda.current_stream(rows.device)
        with self.lock, torch.cuda.device(rows.device):
            stream = self.streams.get(rows.device)
            is_first = stream is None
            if stream is None:
                stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                if is_first:
                    # What libraries do at their first use cannot be captured.
                    problem.value_and_gradient(self.rows)
                    self.streams[rows.device] = stream
                self.graph = torch.cuda.CUDAGraph()
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.values, self.gradients = problem.value_and_gradient(self.rows)
                finally:
                    self.graph.capture_end()
            current.wait_stream(stream)

    def value_and_gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.copy_(rows)
        self.graph.replay()
        return self.values.clone(), self.gradients.clone()

    def select(self, kept: Tensor) -> Objectives:
        return self.problem.select(kept)


def _captured(problem: Objectives, rows: Tensor) -> Objectives:
    """The objectives, by a CUDA graph where launches take most of the time."""
    if problem.capturable and len(rows) <= MAX_CAPTURED:
        return _Captured(problem, rows)
    return problem


# -- the solver --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _State:
    """The objectives that L-BFGS still minimizes: their numbers, points and past steps."""

    problem: Objectives
    numbers: Tensor
    points: Tensor
    values: Tensor
    gradients: Tensor
    history: _History

    def select(self, kept: Tensor) -> Self:
        """The state of some of the objectives, `kept` `(batch,)` boolean."""
        points = self.points[kept]
        return replace(
            self,
            problem=_captured(self.problem.select(kept), points),
            numbers=self.numbers[kept],
            points=points,
            values=self.values[kept],
            gradients=self.gradients[kept],
            history=self.history.select(kept),
        )


@torch.no_grad()
def minimize(problem: Objectives, start: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Minimize the objectives of a batch from points `(batch, …)`, by L-BFGS.

    An objective has converged when no number of its gradient is above the tolerance: its point
    stays, and it is no longer evaluated once a quarter has converged.
    """
    tolerance = tolerance or TOLERANCE[start.dtype]
    minima = start.clone()
    problem = _captured(problem, start)
    values, gradients = problem.value_and_gradient(start)
    state = _State(
        problem=problem,
        numbers=torch.arange(len(start), device=start.device),
        points=start,
        values=values,
        gradients=gradients,
        history=_History.of(start),
    )
    for _ in range(MAX_STEPS):
        converged = state.gradients.flatten(1).abs().amax(1) <= tolerance
        num_converged = int(converged.sum())
        if num_converged == len(converged):
            break
        if 4 * num_converged >= len(converged):
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
    directions = state.history.direction(state.gradients)
    directions = torch.where(_shaped(converged, directions), 0.0, directions)
    slopes = _dot(state.gradients, directions)
    lengths = torch.ones_like(state.values)
    if not state.history.slots:
        lengths = (1 / state.gradients.flatten(1).norm(dim=1).clamp(min=TINY)).clamp(max=1.0)

    for _ in range(MAX_TRIALS):
        points = state.points + _shaped(lengths, directions) * directions
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

    history = state.history.append(points - state.points, gradients - state.gradients)
    return replace(state, points=points, values=values, gradients=gradients, history=history)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).flatten(1).sum(1)


def _shaped(factors: Tensor, points: Tensor) -> Tensor:
    """Factors `(batch,)` in a shape that broadcasts over points `(batch, …)`."""
    trailing = [1] * (points.dim() - 1)
    return factors.view(-1, *trailing)
