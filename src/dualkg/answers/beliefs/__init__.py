"""Beliefs: what a model says of triples as probabilities, and how far to trust them."""

from __future__ import annotations

from dualkg.answers.beliefs.answer_sets import AnswerSet, AnswerSets
from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.classification import ClassificationReport, evaluate_classification
from dualkg.answers.beliefs.coverage import CoverageReport, check_answer_sets
from dualkg.answers.beliefs.evidence import evidence_of
from dualkg.answers.beliefs.fitting import calibrate
from dualkg.answers.beliefs.kept import Beliefs, beliefs_of, ensure_calibration, load_beliefs, save_beliefs
from dualkg.answers.beliefs.kinds import Kinds
from dualkg.answers.beliefs.negatives import read_negatives
from dualkg.answers.beliefs.prospects import Prospects
from dualkg.answers.beliefs.reliability import CalibrationReport, Reliability, check_calibration

__all__ = [
    "AnswerSet",
    "AnswerSets",
    "Beliefs",
    "Calibration",
    "CalibrationReport",
    "ClassificationReport",
    "CoverageReport",
    "Kinds",
    "Prospects",
    "Reliability",
    "beliefs_of",
    "calibrate",
    "check_answer_sets",
    "check_calibration",
    "ensure_calibration",
    "evaluate_classification",
    "evidence_of",
    "load_beliefs",
    "read_negatives",
    "save_beliefs",
]
