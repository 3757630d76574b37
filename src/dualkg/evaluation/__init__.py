"""Evaluation: filtered ranks, metrics, reports and paired comparison of runs."""

from __future__ import annotations

from dualkg.evaluation.candidates import CandidateLists, TypeConstraint, read_candidates
from dualkg.evaluation.comparison import Comparison, compare_ranks
from dualkg.evaluation.ranking import Ranks, rank
from dualkg.evaluation.report import Metrics, Report, build_report, evaluate, evaluate_relations, load_ranks, save_ranks

__all__ = [
    "CandidateLists",
    "Comparison",
    "Metrics",
    "Ranks",
    "Report",
    "TypeConstraint",
    "build_report",
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "load_ranks",
    "rank",
    "read_candidates",
    "save_ranks",
]
