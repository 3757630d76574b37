"""Hyperparameter tuning: automatic tuning before a training, and searches of a given space."""

from dualkg.tuning.results import TrialResult, TuningProgress, TuningResult
from dualkg.tuning.search import search
from dualkg.tuning.space import SearchSpace, load_space, space_from

__all__ = [
    "SearchSpace",
    "TrialResult",
    "TuningProgress",
    "TuningResult",
    "load_space",
    "search",
    "space_from",
]
