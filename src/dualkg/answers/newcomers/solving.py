"""Rows for newcomers: each one's problem solved, and in turns where newcomers have triples with each other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dualkg.answers.newcomers.descent import least
from dualkg.answers.newcomers.problem import Problem
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.data.graph import Triples

TOLERANCE = 1e-4  # of the slope, by triple, in numbers of 32 bits
MOST_ROUNDS = 5
SETTLED = 1e-3  # change of a round, relative to the rows


def minimise(problem: Problem, start: Tensor) -> Tensor:
    """The rows at which a problem is least: to about four digits in numbers of 32 bits, to ten in those of 64."""
    scale = 1 / max(problem.num_triples, 1)

    def value_and_slope(rows: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = problem.slope(rows)
        return scale * value, scale * slope

    return least(value_and_slope, start, tolerance=TOLERANCE if start.dtype == torch.float32 else 1e-10)


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
