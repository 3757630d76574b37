"""Evaluation: filtered ranks, metrics, reports and paired comparison of runs."""

from dualkg.evaluation.candidates import CandidateLists, TypeConstraint, read_candidates
from dualkg.evaluation.comparison import Comparison, compare_ranks
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.evaluation.report import Metrics, Report, evaluate, evaluate_relations, load_ranks

__all__ = ["CandidateLists", "Comparison", "Metrics", "Ranks", "Report", "TypeConstraint"]
__all__ += [
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "load_ranks",
    "rank",
    "read_candidates",
]
