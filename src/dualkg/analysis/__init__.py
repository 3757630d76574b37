"""Analysis of trained models: sparsity, the nuclear-norm bound, projections, figures, ranks of runs
and records.
"""

from dualkg.analysis.nuclear import bound_before_and_after, nuclear_bound, rebalanced
from dualkg.analysis.sparsity import rotated, sparsify, sparsity_curve, storage_of

__all__ = ["bound_before_and_after", "nuclear_bound", "rebalanced"]
__all__ += ["rotated", "sparsify", "sparsity_curve", "storage_of"]
