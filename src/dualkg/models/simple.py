"""SimplE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dualkg.models.diagonal import DiagonalModel


class SimplE(DiagonalModel):
    """CP in which both vectors of an entity learn from every triple (Kazemi and Poole, 2018).

    The row of an entity holds its numbers as head, then those as tail; the row of a relation its own, r, then those of
    its inverse, r′. s = ½ (⟨h as head, r, t as tail⟩ + ⟨t as head, r′, h as tail⟩). `dim` counts coordinates of a half.
    """

    numbers_per_coordinate = 2
    one_modulus = False

    @staticmethod
    def times(x: "Any", r: "Any") -> "Any":
        return 0.5 * x[1] * r[1], 0.5 * x[0] * r[0]

    @staticmethod
    def conjugate(x: "Any") -> "Any":
        return x[1], x[0]

    def stretch(self, relation: Tensor) -> Tensor:
        """Numbers change places in a product, but each is multiplied by the one that stands in its own place."""
        return relation.square() / 4
