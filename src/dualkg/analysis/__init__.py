"""Analysis: what a trained model is like, beside how well it ranks."""

from __future__ import annotations

from dualkg.analysis.curve import SHARES, CurvePoint, sparsity_curve
from dualkg.analysis.nuclear import NuclearBound, bound_before_and_after, nuclear_bound, rebalanced
from dualkg.analysis.sparsity import entity_tables, sparsified, sparsify
from dualkg.analysis.storage import Size, Storage, storage_of
from dualkg.analysis.thresholds import find_thresholds, sparsity
from dualkg.analysis.turning import turned

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
    "sparsified",
    "sparsify",
    "sparsity",
    "sparsity_curve",
    "storage_of",
    "turned",
]
