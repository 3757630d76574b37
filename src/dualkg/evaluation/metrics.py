"""Metrics of a set of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

HITS = (1, 3, 10)
COLUMNS = {"MRR": "mrr", "H@1": "hits_at_1", "H@3": "hits_at_3", "H@10": "hits_at_10"}
"""What tables show, by its title."""


def gains(ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What each rank adds to the means of `COLUMNS`, `(4, …)`: 1/rank, and 1 where it is within 1, 3 and 10."""
    return np.stack([1 / ranks, *(ranks <= k for k in HITS)])


@dataclass(frozen=True)
class Metrics:
    """Mean reciprocal rank, mean rank, and the share of ranks within 1, 3 and 10."""

    mrr: float
    mr: float
    hits_at_1: float
    hits_at_3: float
    hits_at_10: float
    num_queries: int

    @classmethod
    def of(cls, ranks: npt.NDArray[np.number]) -> Metrics:
        """A rank that is a mean over ties may lie between two places; it is within k if it is at most k."""
        ranks = np.asarray(ranks, dtype=np.float64).reshape(-1)
        if not len(ranks):
            nan = float("nan")
            return cls(nan, nan, nan, nan, nan, num_queries=0)
        mrr, at_1, at_3, at_10 = (float(values.mean()) for values in gains(ranks))
        return cls(mrr, float(ranks.mean()), at_1, at_3, at_10, num_queries=len(ranks))

    def as_dict(self) -> dict[str, float | None]:
        """Ready for JSON, which has no NaN: no queries give no numbers."""
        return {
            name: value if self.num_queries or name == "num_queries" else None for name, value in asdict(self).items()
        }

    def row(self) -> list[str]:
        """For a table: `COLUMNS`, then the mean rank and the number of queries."""
        if not self.num_queries:
            return ["–"] * 5 + ["0"]
        shares = [f"{getattr(self, name):.4f}" for name in COLUMNS.values()]
        return [*shares, f"{self.mr:,.1f}", f"{self.num_queries:,}"]
