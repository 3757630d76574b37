"""Inference: predictions, probabilities, completion and explanations of a trained model."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualkg.inference.api import calibrate, complete
    from dualkg.inference.predictor import Prediction, Predictor
    from dualkg.inference.probability import Calibration

__all__ = ["Calibration", "Prediction", "Predictor", "calibrate", "complete"]


def __getattr__(name: str) -> object:
    """Load a module on first use: a prediction needs few of them."""
    if name in ("calibrate", "complete"):
        return getattr(import_module("dualkg.inference.api"), name)
    if name in ("Prediction", "Predictor"):
        return getattr(import_module("dualkg.inference.predictor"), name)
    if name == "Calibration":
        return getattr(import_module("dualkg.inference.probability"), name)
    if name.startswith("_") or find_spec(f"dualkg.inference.{name}") is None:
        raise AttributeError(f"module 'dualkg.inference' has no attribute {name!r}")
    return import_module(f"dualkg.inference.{name}")
