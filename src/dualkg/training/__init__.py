"""Training: from a recipe, or from objects, to a run."""

from __future__ import annotations

from dualkg.training.api import resume, train, train_recipe, train_seeds
from dualkg.training.importing import from_arrays
from dualkg.training.recipe import Optimizer, Recipe, Validation, list_recipes, load_recipe
from dualkg.training.run import Run, RunFolder, load_run
from dualkg.training.trainer import InterruptedRunError, ProgressEvent

__all__ = [
    "InterruptedRunError",
    "Optimizer",
    "ProgressEvent",
    "Recipe",
    "Run",
    "RunFolder",
    "Validation",
    "from_arrays",
    "list_recipes",
    "load_recipe",
    "load_run",
    "resume",
    "train",
    "train_recipe",
    "train_seeds",
]
