"""Beliefs: what a model says of triples as probabilities, and how far to trust them."""

from __future__ import annotations

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.evidence import evidence_of

__all__ = ["Calibration", "evidence_of"]
