"""Embedding inductive entities: batched L-BFGS, and the order in which entities with common triples are embedded."""

from collections import deque
from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from dualkg.data.graph import Triples
from dualkg.inference.inductive import EmbeddingProblem, FrozenContext

HISTORY = 20  # steps that L-BFGS remembers
MAX_STEPS = 200
MAX_TRIALS = 10  # step lengths tried in a line search
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # of the gradient: about four and ten digits of a row
MAX_BATCH = 1024  # entities
MAX_ROUNDS = 5  # over entities that have triples with each other
ROUND_TOLERANCE = 1e-3  # change of the rows in a round, relative to their norm
TINY = 1e-30

History = deque[tuple[Tensor, Tensor, Tensor]]  # steps, changes of the gradients, and their dot products


class Objectives(Protocol):
    """Smooth convex functions, one for each point of a batch `(batch, …)`."""

    def value_and_gradient(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Values `(batch,)` and gradients `(batch, …)`."""

    def select(self, kept: Tensor) -> Self:
        """The functions of some points, `kept` `(batch,)` boolean."""


@torch.no_grad()
def minimize(objectives: Objectives, start: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Minimize convex functions side by side from points `(batch, …)`, by L-BFGS.

    A function has converged when no number of its gradient is above the tolerance: it stays where it is, and is no
    longer evaluated once a quarter has converged. A convex function falls along a line up to its minimum, so a step is
    judged by its slope, which rounding hurts less than the value.
    """
    tolerance = tolerance or TOLERANCE[start.dtype]
    minima, active = start.clone(), torch.arange(len(start), device=start.device)
    history: History = deque(maxlen=HISTORY)
    points = start
    values, gradients = objectives.value_and_gradient(points)
    for _ in range(MAX_STEPS):
        converged = gradients.flatten(1).abs().amax(1) <= tolerance
        if bool(converged.all()):
            break
        if 4 * int(converged.sum()) >= len(converged):
            minima[active] = points
            kept = ~converged
            objectives, active, converged = objectives.select(kept), active[kept], converged[kept]
            points, values, gradients = points[kept], values[kept], gradients[kept]
            history = deque(((step[kept], change[kept], dot[kept]) for step, change, dot in history), maxlen=HISTORY)
        directions = -_inverse_hessian(gradients, history)
        directions[converged] = 0.0
        slopes = _dot(gradients, directions)
        lengths = torch.ones_like(values)
        if not history:
            lengths = (1 / gradients.flatten(1).norm(dim=1).clamp(min=TINY)).clamp(max=1.0)
        for _ in range(MAX_TRIALS):
            new_points = points + _like(lengths, points) * directions
            new_values, new_gradients = objectives.value_and_gradient(new_points)
            new_slopes = _dot(new_gradients, directions)
            accepted = converged | (new_slopes <= 0) | (new_values - values <= 1e-4 * lengths * slopes)
            if bool(accepted.all()):
                break
            # To the root of the slope by linear interpolation, but at most half way: beyond it may be flat.
            shorter = lengths * (slopes / (slopes - new_slopes)).clamp(0.1, 0.5)
            lengths = torch.where(accepted, lengths, shorter)
        steps, changes = new_points - points, new_gradients - gradients
        history.append((steps, changes, _dot(steps, changes).clamp(min=TINY)))
        points, values, gradients = new_points, new_values, new_gradients
    minima[active] = points
    return minima


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).flatten(1).sum(1)


def _like(numbers: Tensor, points: Tensor) -> Tensor:
    """Numbers `(batch,)` with the dimensions of points `(batch, …)`, to be multiplied with them."""
    return numbers.view(-1, *[1] * (points.dim() - 1))


def _inverse_hessian(gradients: Tensor, history: History) -> Tensor:
    """The gradients times the inverse Hessian that past steps suggest: the two-loop recursion of L-BFGS."""
    factors = []
    for steps, changes, dots in reversed(history):
        factors.append(_dot(steps, gradients) / dots)
        gradients = gradients - _like(factors[-1], changes) * changes
    if history:
        _, changes, dots = history[-1]
        gradients = gradients * _like(dots / _dot(changes, changes).clamp(min=TINY), gradients)
    for (steps, changes, dots), factor in zip(history, reversed(factors), strict=True):
        gradients = gradients + _like(factor - _dot(changes, gradients) / dots, steps) * steps
    return gradients


def embed_entities(triples: Triples, context: FrozenContext) -> Tensor:
    """Rows `(num_new, num_rows, width)` of new entities by their triples, each connected to a known entity.

    An entity is embedded as soon as one of its triples has an entity that has a row. Entities that have triples with
    each other are then embedded again, in turns, until nothing moves: every turn lowers the same objective.
    """
    ids = torch.from_numpy(triples).long().to(context.model.device)
    rows = context.new_rows.clone()
    context = replace(context, new_rows=rows)  # later problems read the rows of earlier ones
    embedded = torch.arange(context.num_known + len(rows), device=ids.device) < context.num_known

    def embed(entities: Tensor, *, again: bool) -> None:
        for batch in entities.split(MAX_BATCH):  # type: ignore[no-untyped-call]
            problem = EmbeddingProblem.of(batch, ids, context, embedded=embedded)
            positions = batch - context.num_known
            rows[positions] = minimize(problem, rows[positions] if again else problem.start())

    while not bool(embedded.all()):
        ready = _adjacent(ids, embedded)
        if not len(ready):
            raise ValueError("some inductive entities have no triples that connect them to a known entity")
        embed(ready, again=False)
        embedded[ready] = True
    turns = _independent_sets(ids, context.num_known)
    for _ in range(MAX_ROUNDS if turns else 0):
        before = rows.clone()
        for entities in turns:
            embed(entities, again=True)
        if float((rows - before).norm()) <= ROUND_TOLERANCE * float(before.norm()):
            break
    return rows


def _adjacent(triples: Tensor, embedded: Tensor) -> Tensor:
    """The entities without a row that have a triple with one that has."""
    ends = triples[:, [0, 2]]
    has_row = embedded[ends]
    adjacent: Tensor = torch.unique(ends[~has_row & has_row.flip(1)])
    return adjacent


def _independent_sets(triples: Tensor, num_known: int) -> list[Tensor]:
    """The new entities that have triples with each other, by a greedy coloring: no two of a set share a triple."""
    ends = triples[:, [0, 2]]
    neighbours: dict[int, set[int]] = {}
    for one, other in ends[(ends >= num_known).all(1) & (ends[:, 0] != ends[:, 1])].tolist():
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    color_of: dict[int, int] = {}
    for entity in sorted(neighbours):
        taken = {color_of[other] for other in neighbours[entity] if other in color_of}
        color_of[entity] = next(color for color in range(len(taken) + 1) if color not in taken)
    colors = sorted(set(color_of.values()))
    return [triples.new_tensor([entity for entity, one in color_of.items() if one == color]) for color in colors]
