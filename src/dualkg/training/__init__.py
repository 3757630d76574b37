"""Training: from a recipe, or from objects, to a run."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dualkg.training.callbacks import (
    Callback,
    MLflow,
    StopTraining,
    TensorBoard,
    TrainingInfo,
    WandB,
)
from dualkg.training.ensemble import Ensemble, load_run
from dualkg.training.errors import InterruptedRunError
from dualkg.training.importing import from_arrays, from_libkge, from_pykeen
from dualkg.training.optimizers import Optimizer
from dualkg.training.recipe import Recipe, Validation, list_recipes, load_recipe
from dualkg.training.run import Run, TrainedRun
from dualkg.training.run_folder import RunFolder

if TYPE_CHECKING:
    from dualkg.training.api import train

__all__ = [
    "Ensemble",
    "Optimizer",
    "Recipe",
    "Run",
    "TrainedRun",
    "Validation",
    "list_recipes",
    "load_recipe",
    "load_run",
]
__all__ += ["from_arrays", "from_libkge", "from_pykeen"]
__all__ += ["InterruptedRunError", "RunFolder", "train"]
__all__ += ["Callback", "MLflow", "StopTraining", "TensorBoard", "TrainingInfo", "WandB"]


def __getattr__(name: str) -> object:
    """Load what trains on first use: to read a run takes few modules."""
    if name == "train":
        return import_module("dualkg.training.api").train
    if name.startswith("_") or find_spec(f"dualkg.training.{name}") is None:
        raise AttributeError(f"module 'dualkg.training' has no attribute {name!r}")
    return import_module(f"dualkg.training.{name}")
