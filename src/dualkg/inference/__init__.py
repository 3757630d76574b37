"""Answers: a trained model asked by name."""

from __future__ import annotations

from dualkg.inference.predictor import Answer, Predictor

__all__ = ["Answer", "Predictor"]
