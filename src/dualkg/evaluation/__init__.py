"""Evaluation: filtered ranks, metrics, reports and paired comparison of runs."""

from dualkg.evaluation.comparison import Comparison, compare_ranks
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.evaluation.report import Metrics, Report, evaluate, evaluate_relations, load_ranks

__all__ = ["Comparison", "Metrics", "Ranks", "Report"]
__all__ += ["compare_ranks", "evaluate", "evaluate_relations", "load_ranks", "rank"]
