"""The order of rows in tables that several processes divide."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class RowOrder:
    """Entity i is row a·i mod `num_entities`, which spreads frequent entities over all rows."""

    num_entities: int

    @cached_property
    def multiplier(self) -> int:
        """The factor a: near the golden section of the number of entities, and prime to it."""
        factor = max(1, round(GOLDEN * self.num_entities))
        while math.gcd(factor, self.num_entities) > 1:
            factor += 1
        return factor

    @cached_property
    def inverse(self) -> int:
        """The inverse of the factor a: row i is entity `inverse`·i mod `num_entities`."""
        return pow(self.multiplier, -1, self.num_entities) if self.num_entities > 1 else 0

    def rows(self, ids: Tensor) -> Tensor:
        """The row of each entity."""
        return ids * self.multiplier % self.num_entities

    def entities(self, rows: Tensor) -> Tensor:
        """The entity of each row."""
        return rows * self.inverse % max(self.num_entities, 1)
