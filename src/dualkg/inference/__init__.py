"""Inference: predictions, probabilities, completion and explanations of a trained model."""

from __future__ import annotations

from dualkg.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
