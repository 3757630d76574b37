"""Evaluation: ranks, metrics and reports. Training, the command and the tests all come through here."""

from __future__ import annotations

from dualkg.evaluation.comparison import Comparison, compare_ranks
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.evaluation.report import Metrics, Report, evaluate, evaluate_relations, load_ranks, report_on, save_ranks

__all__ = [
    "Comparison",
    "Metrics",
    "Ranks",
    "Report",
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "load_ranks",
    "rank",
    "report_on",
    "save_ranks",
]
