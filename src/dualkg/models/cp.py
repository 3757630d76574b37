"""CP."""

from __future__ import annotations

from dualkg.models.diagonal import RealDiagonalModel


class CP(RealDiagonalModel):
    """A relation scales each coordinate; an entity is one vector as head, another as tail (Hitchcock, 1927)."""

    two_entity_tables = True
