"""Where relations take one vector, and back, in arrays of NumPy."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.newcomers.descent import Array
from dualkg.models.base import Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel


def as_array(tensor: Tensor) -> Array:
    """The same numbers in NumPy; those on a CPU are not copied."""
    found: Array = tensor.detach().cpu().numpy()
    return found


class Maps(Protocol):
    """The maps of some relations."""

    def __call__(self, vector: Array) -> Array:
        """A vector `(width,)` → its images `(num_relations, width)`."""

    def back(self, vectors: Array) -> Array:
        """Vectors `(num_relations, width)`, each by the transpose of a map → their sum `(width,)`."""


def maps_of(model: BilinearModel, relations: Tensor, side: Side) -> Maps:
    """Those of heads or of tails."""
    if isinstance(model, DiagonalModel):
        return Products(model, relations, side)
    return Matrices(model, relations, side)


class Matrices:
    """Any maps, by their matrices: where each takes the unit vectors."""

    @torch.no_grad()
    def __init__(self, model: BilinearModel, relations: Tensor, side: Side) -> None:
        width = model.head_table.shape[1]
        units = torch.eye(width, device=relations.device, dtype=model.head_table.dtype).repeat(len(relations), 1)
        there = model.map_head if side == "head" else model.map_tail
        self._matrices = as_array(there(units, relations.repeat_interleave(width))).reshape(-1, width, width)

    def __call__(self, vector: Array) -> Array:
        return np.stack([vector @ matrix for matrix in self._matrices])

    def back(self, vectors: Array) -> Array:
        found: Array = sum(matrix @ vector for matrix, vector in zip(self._matrices, vectors, strict=True))
        return found


class Products:
    """Products of coordinates; with so few, NumPy is done before PyTorch has begun."""

    def __init__(self, model: DiagonalModel, relations: Tensor, side: Side) -> None:
        self._model = model
        multipliers = self._parts(as_array(model.multipliers[relations]))
        turned = np.stack(model.conjugate(multipliers))
        self._there = multipliers if side == "head" else turned
        self._back = turned if side == "head" else multipliers

    def __call__(self, vector: Array) -> Array:
        return self._times(vector[None], self._there)

    def back(self, vectors: Array) -> Array:
        found: Array = self._times(vectors, self._back).sum(0)
        return found

    def _times(self, vectors: Array, multipliers: Array) -> Array:
        return np.concatenate(self._model.times(self._parts(vectors), multipliers), axis=1)

    def _parts(self, vectors: Array) -> Array:
        """`(n, width)` → `(numbers_per_coordinate, n, num_coordinates)`."""
        return vectors.reshape(len(vectors), self._model.numbers_per_coordinate, -1).swapaxes(0, 1)
