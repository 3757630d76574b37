"""Rows for newcomers: each one's problem solved, and in turns where newcomers have triples with each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.newcomers.descent import MEMORY, Array, Function, Past, least
from dualkg.answers.newcomers.maps import as_array
from dualkg.answers.newcomers.near import Near
from dualkg.answers.newcomers.problem import Problem
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.data.graph import Triples

TOLERANCE = 1e-4  # of the slope, by triple, in numbers of 32 bits
MOST_LOOKS = 12  # at all rivals
ENOUGH = 0.01  # of the slope may be left to the next look
MOST_ROUNDS = 5
SETTLED = 1e-3  # change of a round, relative to the rows


def minimise(problem: Problem, start: Tensor) -> Tensor:
    """The rows at which a problem is least: to about four digits in numbers of 32 bits, to ten in those of 64."""
    tolerance = TOLERANCE if start.dtype == torch.float32 else 1e-10
    point, found = by_few_rivals(problem, as_array(start), tolerance=tolerance)
    return torch.from_numpy(point if found else plainly(problem, point, tolerance=tolerance)).to(start)


def plainly(problem: Problem, start: Array, *, tolerance: float) -> Array:
    """Every step looks at all rivals."""

    def value_and_slope(rows: Array) -> tuple[float, Array]:
        value, slope = problem.slope(torch.from_numpy(rows).to(problem.around.newcomers))
        return float(value), as_array(slope)

    return least(_by_triple(problem, value_and_slope), start, tolerance=tolerance)


def by_few_rivals(problem: Problem, start: Array, *, tolerance: float) -> tuple[Array, bool]:
    """A look at all rivals finds few that stand for them nearby; where these lead to is the next look.

    The second answer is whether that came to an end. It need not, for their objective is below that of all.
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


def solve_newcomers(triples: Triples, around: Surroundings) -> Tensor:
    """Rows `(num_newcomers, num_rows, width)` of newcomers by their triples, which all lead to known entities.

    Each is placed as soon as one of its triples is with an entity that has a row. Then those that have triples with
    each other are solved again, in turns, until nothing moves: every turn lowers the same objective.
    """
    found = torch.from_numpy(triples).long().to(around.model.device)
    rows = around.newcomers.clone()
    around = replace(around, newcomers=rows)  # problems read what has been solved before
    placed = torch.arange(around.num_known + len(rows), device=found.device) < around.num_known
    waiting = list(range(around.num_known, around.num_known + len(rows)))
    while waiting:
        still = []
        for entity in waiting:
            mine = _triples_of(entity, found, placed)
            if len(mine):
                _place(entity, mine, around, rows)
                placed[entity] = True
            else:
                still.append(entity)
        if len(still) == len(waiting):
            raise ValueError("some newcomers have no triples that lead to a known entity")
        waiting = still
    together = _with_each_other(found, around.num_known)
    for _ in range(MOST_ROUNDS if together else 0):
        before = rows.clone()
        for entity in together:
            _place(entity, _triples_of(entity, found, placed), around, rows, again=True)
        if float((rows - before).norm()) <= SETTLED * float(before.norm()):
            break
    return rows


def _place(entity: int, triples: Tensor, around: Surroundings, rows: Tensor, *, again: bool = False) -> None:
    usual = around.usual_triples
    bystanding = min(1.0, len(triples) / usual) if usual else 1.0
    problem = Problem.of(entity, triples, around, bystanding=bystanding)
    place = entity - around.num_known
    rows[place] = minimise(problem, rows[place] if again else problem.start())


def _triples_of(entity: int, triples: Tensor, placed: Tensor) -> Tensor:
    """Those that join an entity to one that has a row."""
    as_head, as_tail = triples[:, 0] == entity, triples[:, 2] == entity
    return triples[(as_head & placed[triples[:, 2]]) | (as_tail & placed[triples[:, 0]])]


def _with_each_other(triples: Tensor, num_known: int) -> list[int]:
    new = triples[:, [0, 2]] >= num_known
    between = triples[new.all(1) & (triples[:, 0] != triples[:, 2])]
    found: list[int] = torch.unique(between[:, [0, 2]]).tolist()
    return found
