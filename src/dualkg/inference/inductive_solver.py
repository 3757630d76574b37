"""The problems of many inductive_entities at once, for a GPU: each has its own objective, and one product serves them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import Triples
from dualkg.inference.inductive import (
    MEMORY,
    MOST_STEPS,
    MOST_TRIALS,
    Array,
    FrozenContext,
    Function,
    Near,
    NegativeQuery,
    Past,
    Problem,
    Role,
    as_array,
    least,
    negative_queries_of,
    roles_in,
    row_of,
)


@dataclass(frozen=True, eq=False)
class Crowd:
    """InductiveEntities of which none has a triple with another one; `bystanding` and `num_triples` are `(num_new,)`."""

    context: FrozenContext
    inductive_entities: Tensor
    places: Tensor  # of every entity among the inductive_entities
    roles: tuple[Role, ...]
    negative_queries: tuple[NegativeQuery, ...]
    bystanding: Tensor
    num_triples: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, inductive_entities: Tensor, triples: Tensor, placed: Tensor, context: FrozenContext) -> Crowd:
        """Of inductive_entities by those of the triples `(num_triples, 3)` that join one of them to an entity with a row."""
        places = torch.full_like(placed, -1, dtype=torch.long)
        places[inductive_entities] = torch.arange(len(inductive_entities), device=places.device)
        heads, tails = triples[:, 0], triples[:, 2]
        as_head = (places[heads] >= 0) & placed[tails] & (heads != tails)
        as_tail = (places[tails] >= 0) & placed[heads] & (heads != tails)
        owners = torch.cat([heads[as_head], tails[as_tail], heads[(heads == tails) & placed[heads]]])
        counts = torch.bincount(owners, minlength=len(placed))[inductive_entities].to(context.inductive_entities)
        usual = context.usual_triples
        return cls(
            context=context,
            inductive_entities=inductive_entities,
            places=places,
            roles=roles_in(triples, as_head, as_tail, context, without=context.num_known),
            negative_queries=negative_queries_of(context.num_known, context),
            bystanding=(counts / usual).clamp(max=1.0) if usual else torch.ones_like(counts),
            num_triples=counts,
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """The objective of each by its rows `(num_new, num_rows, width)`, over the number of its triples."""
        found = torch.zeros_like(self.num_triples)
        for role in self.roles:
            at = self.places[role.owners]
            losses = role.losses(row_of(rows, role.side)[at], self.context)
            found = found.index_add(0, at[role.groups], losses)
        for one in self.negative_queries:
            found = found + self.bystanding * one.loss(row_of(rows, one.side))
        return found / self.num_triples.clamp(min=1)

    def slopes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives, and the gradient of each with respect to its own rows."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            values = self(rows)
            (gradient,) = torch.autograd.grad(values.sum(), rows)
        return values.detach(), gradient

    def start(self) -> Tensor:
        """Rows to begin with, as `Problem.start` has them."""
        rows = self.context.inductive_entities.new_zeros(
            len(self.inductive_entities), *self.context.inductive_entities.shape[1:]
        )
        counts = rows.new_zeros(*rows.shape[:2], 1)
        for role in self.roles:
            at = self.places[role.owners][role.groups]
            row_of(rows, role.side).index_add_(0, at, role.vectors)
            row_of(counts, role.side).index_add_(0, at, torch.ones_like(role.vectors[:, :1]))
        return rows / counts.clamp(min=1)


Functions = Callable[[Tensor], tuple[Tensor, Tensor]]  # points `(n, size)` → values `(n,)` and gradients `(n, size)`
LEAST = 1e-30


@torch.no_grad()
def least_of_each(values_and_slopes: Functions, start: Tensor, *, tolerance: float) -> Tensor:
    """Descend from points `(n, size)` until no number of any gradient is above `tolerance`."""
    past: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)
    point = start
    values, slopes = values_and_slopes(point)
    for _ in range(MOST_STEPS):
        there_already = slopes.abs().amax(1) <= tolerance
        if bool(there_already.all()):
            break
        directions = -_over_curvature(slopes, past).masked_fill(there_already[:, None], 0.0)
        falls = _dots(slopes, directions)
        lengths = torch.ones_like(values)
        if not past:
            lengths = (1 / slopes.norm(dim=1).clamp(min=LEAST)).clamp(max=1.0)
        for _ in range(MOST_TRIALS):
            there = point + lengths[:, None] * directions
            there_values, there_slopes = values_and_slopes(there)
            rises = _dots(there_slopes, directions)
            short_enough = there_already | (rises <= 0) | (there_values - values <= 1e-4 * lengths * falls)
            if bool(short_enough.all()):
                break
            shorter = lengths * (falls / (falls - rises)).clamp(0.1, 0.5)
            lengths = torch.where(short_enough, lengths, shorter)
        step, change = there - point, there_slopes - slopes
        past.append((step, change, _dots(step, change).clamp(min=LEAST)))
        point, values, slopes = there, there_values, there_slopes
    return point


def _dots(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)


def _over_curvature(slopes: Tensor, past: deque[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    shares = []
    for step, change, product in reversed(past):
        shares.append((_dots(step, slopes) / product)[:, None])
        slopes = slopes - shares[-1] * change
    if past:
        _, change, product = past[-1]
        slopes = slopes * (product / _dots(change, change).clamp(min=LEAST))[:, None]
    for (step, change, product), share in zip(past, reversed(shares), strict=True):
        slopes = slopes + (share - (_dots(change, slopes) / product)[:, None]) * step
    return slopes


TOLERANCE = 1e-4  # of the slope, by triple, in numbers of 32 bits
MOST_LOOKS = 12  # at all rivals
ENOUGH = 0.01  # of the slope may be left to the next look
MOST_ROUNDS = 5
MOST_AT_ONCE = 1024  # inductive_entities
SETTLED = 1e-3  # change of a round, relative to the rows


def minimise(problem: Problem, start: Tensor) -> Tensor:
    """The rows at which a problem is least: to about four digits in numbers of 32 bits, to ten in those of 64."""
    tolerance = TOLERANCE if start.dtype == torch.float32 else 1e-10
    point, found = by_few_rivals(problem, as_array(start), tolerance=tolerance)
    return torch.from_numpy(point if found else plainly(problem, point, tolerance=tolerance)).to(start)


def minimise_each(crowd: Crowd, start: Tensor) -> Tensor:
    """The same for all of a crowd: every step looks at all rivals of all of them."""
    tolerance = TOLERANCE if start.dtype == torch.float32 else 1e-10

    def values_and_slopes(rows: Tensor) -> tuple[Tensor, Tensor]:
        values, slopes = crowd.slopes(rows.view_as(start))
        return values, slopes.flatten(1)

    return least_of_each(values_and_slopes, start.flatten(1), tolerance=tolerance).view_as(start)


def plainly(problem: Problem, start: Array, *, tolerance: float) -> Array:
    """Every step looks at all rivals."""

    def value_and_slope(rows: Array) -> tuple[float, Array]:
        value, slope = problem.slope(torch.from_numpy(rows).to(problem.context.inductive_entities))
        return float(value), as_array(slope)

    return least(_by_triple(problem, value_and_slope), start, tolerance=tolerance)


def by_few_rivals(problem: Problem, start: Array, *, tolerance: float) -> tuple[Array, bool]:
    """A look at all rivals finds few that stand for them nearby; where these lead to is the next look.

    The second answer is whether that came to an end. It need not, for elsewhere their objective is not that of all.
    """
    everyone, past = Near.of(problem), Past(maxlen=MEMORY)
    point, near = start, _by_triple(problem, everyone.looked(start))
    value, slope = near(point)
    steepest = float(np.abs(slope).max())
    if everyone.is_small:
        return least(near, point, tolerance=tolerance, at_start=(value, slope)), True
    left = ENOUGH
    for _ in range(MOST_LOOKS):
        if steepest <= tolerance:
            return point, True
        enough = max(left * steepest, tolerance / 3)
        there = least(near, point, tolerance=enough, at_start=(value, slope), past=past)
        near = _by_triple(problem, everyone.looked(there))
        there_value, there_slope = near(there)
        before, steepest = steepest, float(np.abs(there_slope).max())
        if steepest >= before and there_value > value:
            break
        left = min(max(steepest / before / 2, ENOUGH), 10 * ENOUGH)  # a few that are far from all need no more
        near = _agreeing(near, there, point, slope)
        point, value, slope = there, there_value, there_slope
    return point, False


def _agreeing(near: Function, here: Array, before: Array, slope: Array) -> Function:
    """The same with the curvature that it lacks along the last step, so that its slope is right at both ends of it."""
    lacking = near(before)[1] - slope
    lack = float(np.vdot(lacking, here - before))
    if lack <= 0:
        return near

    def value_and_slope(rows: Array) -> tuple[float, Array]:
        value, found = near(rows)
        share = float(np.vdot(lacking, rows - here)) / lack
        return value + 0.5 * lack * share * share, found + share * lacking

    return value_and_slope


def _by_triple(problem: Problem, function: Function) -> Function:
    """The same over the number of triples."""
    scale = 1 / max(problem.num_triples, 1)

    def value_and_slope(rows: Array) -> tuple[float, Array]:
        value, slope = function(rows)
        return scale * value, scale * slope

    return value_and_slope


def embed_entities(triples: Triples, context: FrozenContext) -> Tensor:
    """Rows `(num_new, num_rows, width)` of inductive_entities by their triples, which all lead to known entities.

    Each is placed as soon as one of its triples is with an entity that has a row. Then those that have triples with
    each other are solved again, in turns, until nothing moves: every turn lowers the same objective.
    """
    found = torch.from_numpy(triples).long().to(context.model.device)
    rows = context.inductive_entities.clone()
    solver = _Solver(found, replace(context, inductive_entities=rows))  # problems read what has been solved before
    placed = torch.arange(context.num_known + len(rows), device=found.device) < context.num_known
    while not bool(placed.all()):
        ready = _joined(found, placed)
        if not len(ready):
            raise ValueError("some inductive_entities have no triples that lead to a known entity")
        solver(ready, placed, again=False)
        placed[ready] = True
    turns = _turns(found, context.num_known)
    for _ in range(MOST_ROUNDS if turns else 0):
        before = rows.clone()
        for inductive_entities in turns:
            solver(inductive_entities, placed, again=True)
        if float((rows - before).norm()) <= SETTLED * float(before.norm()):
            break
    return rows


def are_solved_together(inductive_entities: Tensor) -> bool:
    """On a GPU, to which one alone is hardly less work than all; a CPU is faster with few rivals of one at a time."""
    return inductive_entities.is_cuda


@dataclass(frozen=True, eq=False)
class _Solver:
    """Solves inductive_entities, none of which has a triple with another one, by their triples with entities that have a row."""

    triples: Tensor
    context: FrozenContext

    def __call__(self, inductive_entities: Tensor, placed: Tensor, *, again: bool) -> None:
        rows, num_known = self.context.inductive_entities, self.context.num_known
        if are_solved_together(inductive_entities):
            for some in inductive_entities.split(MOST_AT_ONCE):  # type: ignore[no-untyped-call]
                crowd = Crowd.of(some, self.triples, placed, self.context)
                rows[some - num_known] = minimise_each(crowd, rows[some - num_known] if again else crowd.start())
            return
        for entity in inductive_entities.tolist():
            problem = self._problem(entity, placed)
            start = rows[entity - num_known] if again else problem.start()
            rows[entity - num_known] = minimise(problem, start)

    def _problem(self, entity: int, placed: Tensor) -> Problem:
        heads, tails = self.triples[:, 0], self.triples[:, 2]
        mine = self.triples[((heads == entity) & placed[tails]) | ((tails == entity) & placed[heads])]
        usual = self.context.usual_triples
        bystanding = min(1.0, len(mine) / usual) if usual else 1.0
        return Problem.of(entity, mine, self.context, bystanding=bystanding)


def _joined(triples: Tensor, placed: Tensor) -> Tensor:
    """The entities without a row that have a triple with one that has."""
    ends = triples[:, [0, 2]]
    has_row = placed[ends]
    found: Tensor = torch.unique(ends[~has_row & has_row.flip(1)])
    return found


def _turns(triples: Tensor, num_known: int) -> list[Tensor]:
    """The inductive_entities that have triples with each other, in as many turns as it takes for no two of one to have any."""
    ends = triples[:, [0, 2]]
    between = ends[(ends >= num_known).all(1) & (ends[:, 0] != ends[:, 1])]
    neighbours: dict[int, set[int]] = {}
    for one, other in between.tolist():
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    turn_of: dict[int, int] = {}
    for one in sorted(neighbours):
        taken = {turn_of[other] for other in neighbours[one] if other in turn_of}
        turn_of[one] = next(turn for turn in range(len(taken) + 1) if turn not in taken)
    turns = sorted(set(turn_of.values()))
    return [triples.new_tensor([one for one, turn in turn_of.items() if turn == which]) for which in turns]
