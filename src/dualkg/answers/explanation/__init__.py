"""Explanation: what supports an answer, among the training triples and among entities alike."""

from __future__ import annotations

from dualkg.answers.explanation.influence import Influence, influence
from dualkg.answers.explanation.reasons import Explanation, Likeness, NamedTriple, Reason, explain
from dualkg.answers.explanation.study import LeftOut, study

__all__ = [
    "Explanation",
    "Influence",
    "LeftOut",
    "Likeness",
    "NamedTriple",
    "Reason",
    "explain",
    "influence",
    "study",
]
