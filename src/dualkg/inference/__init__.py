"""Inference: predictions, probabilities, completion and explanations of a trained model."""

from dualkg.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
