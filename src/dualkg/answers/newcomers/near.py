"""The problem of one entity near some rows: with few rivals that stand for all of them, and its gradient written out.

At those rows objective and gradient are the problem's own. Vectors are short, and NumPy is done with them before
PyTorch has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.answers.newcomers import rivals
from dualkg.answers.newcomers.descent import Array
from dualkg.answers.newcomers.maps import Maps, as_array, maps_of
from dualkg.answers.newcomers.problem import Problem, Role
from dualkg.answers.newcomers.rivals import SMALLEST, Few, are_few
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.models.base import Side

PLACES: dict[Side, int] = {"head": 0, "tail": -1}  # of an entity's rows: one, or two
ALMOST_SURE = 1 - 1e-6
Part = Callable[[Array], tuple[float, Array]]  # what it adds for a row `(width,)`, and the gradient


@dataclass(frozen=True, eq=False)
class Near:
    """The objective and its gradient for rows `(num_rows, width)`, as a sum of parts that see one row each."""

    parts: tuple[tuple[int, Part], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Problem) -> Near:
        """Of a problem; where somebody asks, nothing is known of rivals before `looked`."""
        parts: list[tuple[int, Part]] = []
        for role in problem.roles:
            at, maps = PLACES[role.side], maps_of(problem.around.model, role.relations, role.side)
            parts += [(at, _losses(role, maps)), (at, _penalty(role, maps, problem.around))]
        for one in problem.bystanders:
            arrays = as_array(one.images), as_array(-one.rivals), as_array(one.weights)
            parts.append((PLACES[one.side], Rising(*arrays)))
        return cls(tuple(parts))

    @property
    def is_small(self) -> bool:
        """Whether the few are all, so that it is the problem's own objective everywhere."""
        return all(part.is_small for _, part in self.parts if isinstance(part, Looking))

    @torch.no_grad()
    def looked(self, rows: Array) -> Near:
        """The same with the rivals, and the queries of others, that stand for all of them near these rows."""
        looked = [(at, part.looked(rows[at]) if isinstance(part, Looking) else part) for at, part in self.parts]
        return replace(self, parts=tuple(looked))

    def __call__(self, rows: Array) -> tuple[float, Array]:
        value, slopes = 0.0, np.zeros_like(rows)
        for at, part in self.parts:
            more, slope = part(rows[at])
            value += more
            slopes[at] += slope
        return value, slopes


@dataclass(frozen=True, eq=False)
class Rising:
    """Σ weight · log(1 + exp(⟨row, vector⟩ + constant)), and what is added to it."""

    vectors: Array
    constants: Array
    weights: Array
    more: float = 0.0

    @property
    def is_small(self) -> bool:
        return are_few(self.vectors)

    def looked(self, row: Array) -> Rising:
        """Those that rise most at this row, and one that stands for all others: as high and as steep there as they."""
        if self.is_small:
            return self
        losses, rises = softplus(_product(self.vectors, row) + self.constants)
        steep = self.weights * rises
        order = np.argpartition(steep, -rivals.FEW)
        others, chosen = order[: -rivals.FEW], order[-rivals.FEW :]
        steep[chosen] = 0
        weight, slope = self.weights[others].sum(), max(steep.sum(), SMALLEST)
        mean = _product(self.vectors.T, steep) / slope
        chance = min(slope / max(weight, SMALLEST), ALMOST_SURE)
        score = np.log(chance) - np.log1p(-chance)
        return Rising(
            np.concatenate([self.vectors[chosen], mean[None]]),
            np.append(self.constants[chosen], score - mean @ row).astype(row.dtype),
            np.append(self.weights[chosen], weight).astype(row.dtype),
            self.more + float(self.weights[others] @ losses[others] + weight * np.log1p(-chance)),
        )

    def __call__(self, row: Array) -> tuple[float, Array]:
        losses, rises = softplus(self.vectors @ row + self.constants)
        return float(self.weights @ losses) + self.more, (self.weights * rises) @ self.vectors


@dataclass(frozen=True, eq=False)
class Asking:
    """The losses of examples in which the entity asks."""

    candidates: Tensor
    maps: Maps
    vectors: Array
    groups: npt.NDArray[np.int64]
    weights: Array
    apart: npt.NDArray[np.bool_] | None  # None where all answers are among the rivals
    few: Few | None = None

    @property
    def is_small(self) -> bool:
        return are_few(self.candidates)

    def looked(self, row: Array) -> Asking:
        return replace(self, few=Few.of(self.candidates, torch.from_numpy(self.maps(row)).to(self.candidates)))

    def __call__(self, row: Array) -> tuple[float, Array]:
        if self.few is None:
            raise ValueError("the rivals have not been looked at")
        sums, means = self.few(self.maps(row))
        losses, rises = sums[self.groups] - self.vectors @ row, self.weights
        if self.apart is not None:
            softer, slower = softplus(losses)
            losses, rises = np.where(self.apart, softer, losses), rises * np.where(self.apart, slower, 1)
        counts = np.bincount(self.groups, rises, len(sums)).astype(row.dtype)
        return float(self.weights @ losses), self.maps.back(counts[:, None] * means) - rises @ self.vectors


Looking = Asking | Rising


def _losses(role: Role, maps: Maps) -> Part:
    vectors, weights = as_array(role.vectors), as_array(role.weights)
    if not role.asks:
        return Rising(-vectors, as_array(role.rivals), weights)
    apart = role.apart.cpu().numpy() if role.apart.any() else None
    return Asking(role.rivals, maps, vectors, role.groups.cpu().numpy(), weights, apart)


def _penalty(role: Role, maps: Maps, around: Surroundings) -> Part:
    """The penalty of a role's examples. Of squares it is known once and for all by what they are multiplied with."""
    counts = role.share * torch.bincount(role.groups, minlength=len(role.relations)).to(role.vectors)

    @torch.no_grad()
    def slopes(row: Array, images: Array) -> tuple[float, Array, Array]:
        f = role.factors(torch.from_numpy(row).to(counts), around)
        setattr(f, f"mapped_{role.side}", torch.from_numpy(images).to(counts))
        value, slope, of_images = around.penalty.slopes(f, role.side, counts)
        return float(value), as_array(slope), as_array(of_images)

    def penalty(row: Array) -> tuple[float, Array]:
        value, slope, of_images = slopes(row, maps(row))
        return value, slope + maps.back(of_images)

    if not around.penalty.quadratic:
        return penalty
    ones = np.ones_like(as_array(role.vectors)[0])
    _, plain, mapped = slopes(ones, np.ones((len(counts), len(ones)), ones.dtype))

    def squares(row: Array) -> tuple[float, Array]:
        slope = plain * row + maps.back(mapped * maps(row))
        return 0.5 * float(slope @ row), slope

    if not around.model.diagonal:
        return squares
    _, curvature = squares(ones)

    def by_coordinate(row: Array) -> tuple[float, Array]:
        slope = curvature * row
        return 0.5 * float(slope @ row), slope

    return by_coordinate


def _product(table: Array, vector: Array) -> Array:
    """Of a large table with a vector, by the threads that PyTorch has anyway."""
    return as_array(torch.from_numpy(table) @ torch.from_numpy(vector))


def softplus(numbers: Array) -> tuple[Array, Array]:
    """log(1 + exp x), and its slope."""
    small = np.exp(-np.abs(numbers))
    slopes = np.where(numbers > 0, 1, small) / (1 + small)
    return np.maximum(numbers, 0) + np.log1p(small), slopes
