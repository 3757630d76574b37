"""Hyperparameter tuning with Optuna: a search space, a study that processes share, and the best recipe."""

from __future__ import annotations

from dualkg.tuning.results import TrialResult, TuningProgress, TuningResult
from dualkg.tuning.space import SearchSpace, load_space, space_from
from dualkg.tuning.tune import tune

__all__ = ["SearchSpace", "TrialResult", "TuningProgress", "TuningResult", "load_space", "space_from", "tune"]
