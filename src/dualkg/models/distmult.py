"""DistMult."""

from __future__ import annotations

from dualkg.models.diagonal import RealDiagonalModel


class DistMult(RealDiagonalModel):
    """A relation scales each coordinate (Yang et al., 2015), so all are symmetric."""
