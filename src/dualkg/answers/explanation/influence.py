"""How much the score of a triple would fall without each of the training triples of its two entities.

Without one triple, the problem of an entity has its least point elsewhere: to first order the row moves by H⁻¹ ∇l, with
H the Hessian of the whole problem and l what the triple adds to it. docs/explain.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.answers.newcomers.problem import Problem
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.data.graph import Triples

MOST_STEPS = 200
TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Influence:
    """Places of triples in train, and by how much the score falls without each: by the rows of head and of tail."""

    places: npt.NDArray[np.int64]
    by_head: npt.NDArray[np.float64]
    by_tail: npt.NDArray[np.float64]

    @property
    def falls(self) -> npt.NDArray[np.float64]:
        return self.by_head + self.by_tail


def influence(triple: tuple[int, int, int], around: Surroundings) -> Influence:
    """Of all training triples that have the head or the tail of this one."""
    head, _, tail = triple
    ends = around.train[:, [0, 2]]
    places = np.flatnonzero(((ends == head) | (ends == tail)).any(1))
    by_head = np.zeros(len(places))
    by_tail = np.zeros(len(places))
    for entity, found in ((head, by_head), (tail, by_tail)):
        if entity == head and found is by_tail:
            break  # head and tail are one entity, and one problem
        mine = (ends[places] == entity).any(1)
        found[mine] = falls_without(entity, around.train[places[mine]], score_slope(entity, triple, around), around)
    return Influence(places, by_head, by_tail)


@torch.no_grad()
def score_slope(entity: int, triple: tuple[int, int, int], around: Surroundings) -> Tensor:
    """The gradient of a triple's score with respect to the rows of one of its entities, `(num_rows, width)`."""
    head, relation, tail = (torch.tensor([id], device=around.model.device) for id in triple)
    slope = torch.zeros_like(around.rows_of(entity))
    if entity == triple[0]:
        slope[0] += around.model.map_tail(around.vectors(tail, "tail"), relation)[0]
    if entity == triple[2]:
        slope[-1] += around.model.map_head(around.vectors(head, "head"), relation)[0]
    return slope


def falls_without(entity: int, triples: Triples, slope: Tensor, around: Surroundings) -> npt.NDArray[np.float64]:
    """By how much what has this gradient in an entity's rows falls without each of its triples, `(num_triples,)`."""
    problem = Problem.of(entity, torch.from_numpy(triples).long().to(slope.device), around)
    if not problem.roles:
        return np.zeros(len(triples))
    with torch.enable_grad():
        rows = nudged(around.rows_of(entity)).requires_grad_()
        (gradient,) = torch.autograd.grad(problem(rows), rows, create_graph=True)

        def curved(direction: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, rows, direction, retain_graph=True)[0]

        moved = solved(curved, slope)
        # Σᵢ wᵢ ∇lᵢ is linear in w: its product with the solution has ∇lᵢ · solution as gradient in wᵢ.
        losses = problem.losses(rows)
        weights = torch.zeros_like(losses).requires_grad_()
        (summed,) = torch.autograd.grad(losses, rows, weights, create_graph=True)
        (rises,) = torch.autograd.grad((summed * moved).sum(), weights)
    return -rises.double().cpu().numpy()


def nudged(rows: Tensor) -> Tensor:
    """Rows without exact zeros: there the third power of a modulus has a second derivative that autograd misses."""
    return torch.where(rows == 0, 1e-12, rows.detach())


def solved(product: Callable[[Tensor], Tensor], wanted: Tensor) -> Tensor:
    """The x with H x = `wanted`, by conjugate gradients; `product` gives H x of a positive definite H."""
    found = torch.zeros_like(wanted)
    left = wanted.clone()
    direction, size = left, float(left.square().sum())
    enough = TOLERANCE**2 * size
    for _ in range(MOST_STEPS):
        if size <= enough:
            break
        image = product(direction)
        length = size / float((direction * image).sum())
        found, left = found + length * direction, left - length * image
        before, size = size, float(left.square().sum())
        direction = left + (size / before) * direction
    return found
