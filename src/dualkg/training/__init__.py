"""Training: from a recipe, or from objects, to a run."""

from __future__ import annotations

from dualkg.training.imported import from_arrays
from dualkg.training.loop import InterruptedRunError, Moment
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import Run, RunFolder, load_run
from dualkg.training.sections import Loss, Optimizer, Validation
from dualkg.training.start import resume, train, train_recipe, train_seeds

__all__ = [
    "InterruptedRunError",
    "Loss",
    "Moment",
    "Optimizer",
    "Recipe",
    "Run",
    "RunFolder",
    "Validation",
    "from_arrays",
    "load_recipe",
    "load_run",
    "resume",
    "train",
    "train_recipe",
    "train_seeds",
]
