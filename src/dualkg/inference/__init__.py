"""Inference: predictions, probabilities, completion and explanations of a trained model."""

from dualkg.inference.api import CheckedCalibration, calibrate, complete
from dualkg.inference.predictor import Prediction, Predictor

__all__ = ["CheckedCalibration", "Prediction", "Predictor", "calibrate", "complete"]
