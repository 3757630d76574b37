"""Analysis of trained models: sparsity, the nuclear-norm bound, projections, figures, records of runs."""

from __future__ import annotations

from dualkg.analysis.nuclear import NuclearBound, bound_before_and_after, nuclear_bound, rebalanced
from dualkg.analysis.sparsity import (
    SHARES,
    CurvePoint,
    Size,
    Storage,
    entity_tables,
    find_thresholds,
    rotated,
    sparsified,
    sparsify,
    sparsity,
    sparsity_curve,
    storage_of,
)

__all__ = [
    "SHARES",
    "CurvePoint",
    "NuclearBound",
    "Size",
    "Storage",
    "bound_before_and_after",
    "entity_tables",
    "find_thresholds",
    "nuclear_bound",
    "rebalanced",
    "rotated",
    "sparsified",
    "sparsify",
    "sparsity",
    "sparsity_curve",
    "storage_of",
]
