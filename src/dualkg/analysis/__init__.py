"""Analysis of trained models: sparsity, projections, figures, ranks of runs."""

from dualkg.analysis.sparsity import rotated, sparsify, sparsity_curve, storage_of

__all__ = [
    "rotated",
    "sparsify",
    "sparsity_curve",
    "storage_of",
]
