"""QuatE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dualkg.data.graph import GraphShape
from dualkg.models.diagonal import DiagonalModel


class QuatE(DiagonalModel):
    """A relation rotates each quaternion coordinate (Zhang et al., 2019); unless `normalized`, it scales it, too.

    A row holds all real parts, then all of i, of j and of k. `dim` counts quaternions. Those of a relation are divided
    by their modulus when they are used, not where they are stored: regularizers see them as stored. One of 0 stays 0.
    """

    numbers_per_coordinate = 4

    def __init__(self, shape: GraphShape, *, normalized: bool = True, **choices: Any) -> None:
        super().__init__(shape, **choices)
        self.normalized = normalized

    @property
    def choices(self) -> dict[str, object]:
        return {**super().choices, "normalized": self.normalized}

    @property
    def multipliers(self) -> Tensor:
        if not self.normalized:
            return self.relations
        modulus = self.modulus(self.relations)
        return self.relations / modulus.masked_fill(modulus == 0, 1.0).repeat(1, self.numbers_per_coordinate)

    def stretch(self, relation: Tensor) -> Tensor:
        """A rotation keeps every length. What autograd made of that would be rounding, and Adagrad would follow it."""
        stretch = super().stretch(relation)
        return stretch.detach() if self.normalized else stretch

    @staticmethod
    def times(x: "Any", r: "Any") -> "Any":
        return (
            x[0] * r[0] - x[1] * r[1] - x[2] * r[2] - x[3] * r[3],
            x[0] * r[1] + x[1] * r[0] + x[2] * r[3] - x[3] * r[2],
            x[0] * r[2] - x[1] * r[3] + x[2] * r[0] + x[3] * r[1],
            x[0] * r[3] + x[1] * r[2] - x[2] * r[1] + x[3] * r[0],
        )

    @staticmethod
    def conjugate(x: "Any") -> "Any":
        return x[0], -x[1], -x[2], -x[3]
