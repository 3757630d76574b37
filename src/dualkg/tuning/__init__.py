"""Hyperparameter tuning: automatic tuning before a training, and searches of a given space with
Optuna.
"""

from dualkg.tuning.space import (
    SearchSpace,
    TrialResult,
    TuningProgress,
    TuningResult,
    load_space,
    space_from,
)
from dualkg.tuning.tune import search, tune

__all__ = [
    "SearchSpace",
    "TrialResult",
    "TuningProgress",
    "TuningResult",
    "load_space",
    "search",
]
__all__ += ["space_from", "tune"]
