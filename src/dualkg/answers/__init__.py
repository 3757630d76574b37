"""Answers: a trained model asked by name."""

from __future__ import annotations

from dualkg.answers.predictor import Answer, Predictor

__all__ = ["Answer", "Predictor"]
