"""Analysis of trained models: sparsity, the nuclear norm, projections, figures, ranks of runs."""

from dualkg.analysis.nuclear import bound_before_and_after, nuclear_bound, rebalanced
from dualkg.analysis.sparsity import rotated, sparsify, sparsity_curve, storage_of

__all__ = [
    "bound_before_and_after",
    "nuclear_bound",
    "rebalanced",
    "rotated",
    "sparsify",
    "sparsity_curve",
    "storage_of",
]
