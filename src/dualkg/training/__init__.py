"""Training: from a recipe, or from objects, to a run."""

from dualkg.training.api import resume, train, train_recipe
from dualkg.training.importing import from_arrays
from dualkg.training.recipe import Optimizer, Recipe, Validation, list_recipes, load_recipe
from dualkg.training.run import Run, RunFolder, load_run
from dualkg.training.trainer import InterruptedRunError

__all__ = ["Optimizer", "Recipe", "Run", "Validation", "from_arrays", "list_recipes", "load_recipe", "load_run"]
__all__ += ["InterruptedRunError", "RunFolder", "resume", "train", "train_recipe"]
