"""ComplEx."""

from __future__ import annotations

from typing import Any

from dualkg.models.diagonal import DiagonalModel


class ComplEx(DiagonalModel):
    """A relation scales and rotates each complex coordinate (Trouillon et al., 2016).

    A row holds all real parts, then all imaginary parts. `dim` counts complex coordinates.
    """

    numbers_per_coordinate = 2

    @staticmethod
    def times(x: "Any", r: "Any") -> "Any":
        return x[0] * r[0] - x[1] * r[1], x[0] * r[1] + x[1] * r[0]

    @staticmethod
    def conjugate(x: "Any") -> "Any":
        return x[0], -x[1]
