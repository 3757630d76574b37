"""Metrics of a set of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

HITS = (1, 3, 10)


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
        at_1, at_3, at_10 = (float((ranks <= k).mean()) for k in HITS)
        return cls(float((1 / ranks).mean()), float(ranks.mean()), at_1, at_3, at_10, num_queries=len(ranks))

    def as_dict(self) -> dict[str, float | None]:
        """Ready for JSON, which has no NaN: no queries give no numbers."""
        return {
            name: value if self.num_queries or name == "num_queries" else None for name, value in asdict(self).items()
        }

    def row(self) -> list[str]:
        """For a table: MRR, H@1, H@3, H@10, MR, queries."""
        if not self.num_queries:
            return ["–"] * 5 + ["0"]
        shares = [self.mrr, self.hits_at_1, self.hits_at_3, self.hits_at_10]
        return [*(f"{share:.4f}" for share in shares), f"{self.mr:,.1f}", f"{self.num_queries:,}"]


COLUMNS = ["MRR", "H@1", "H@3", "H@10", "MR", "queries"]
