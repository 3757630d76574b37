"""Answers: a trained model asked by name."""

from __future__ import annotations

from dualkg.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
