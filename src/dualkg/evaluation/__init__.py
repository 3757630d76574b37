"""Evaluation: filtered ranks, metrics, reports and paired comparison of runs."""

from dualkg.evaluation.candidates import CandidateLists, read_candidates
from dualkg.evaluation.comparison import Comparison, compare_ranks
from dualkg.evaluation.metrics import METRICS, Metric, Metrics
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.evaluation.report import Report, evaluate, evaluate_relations, load_ranks
from dualkg.evaluation.type_constraint import TypeConstraint

__all__ = [
    "METRICS",
    "CandidateLists",
    "Comparison",
    "Metric",
    "Metrics",
    "Ranks",
    "Report",
    "TypeConstraint",
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "load_ranks",
    "rank",
    "read_candidates",
]
