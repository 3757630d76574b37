"""Knowledge-graph completion built on duality.

The package has factorization models, their distance-based duals, and the regularizer DURA:

    import dualkg as kg

    graph = kg.load_graph("world")
    model = kg.ComplEx(graph.shape, dim=100)
    run = kg.train(model, graph, regularizer=kg.DURA(0.05, plain=0.5, mapped=1.5))
    kg.Predictor(run.model, graph).tails("France", "capital")
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Threads wait for each other many times in a step of training. By OpenMP's default an idle thread
# keeps its core busy, which other processes need: on a very busy machine training takes twice as
# long (benchmarks/contention.py). OpenMP reads this when torch is imported.
SPIN_COUNT = "10000"
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

# The same of the threads of NumPy's OpenBLAS, which read it when NumPy is imported: they would wait
# for work while a command imports what it needs. 2^16 cycles are some 20 µs.
if "numpy" not in sys.modules:
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")

if TYPE_CHECKING:
    import dualkg.analysis
    import dualkg.evaluation
    import dualkg.inference
    import dualkg.training
    import dualkg.tuning
    import dualkg.workflows  # noqa: F401
    from dualkg.data.filters import KnownAnswers as KnownAnswers
    from dualkg.data.graph import Graph as Graph
    from dualkg.data.graph import GraphShape as GraphShape
    from dualkg.data.loading import load_graph as load_graph
    from dualkg.data.vocabulary import Vocabulary as Vocabulary
    from dualkg.errors import DataError as DataError
    from dualkg.errors import DivergedError as DivergedError
    from dualkg.errors import DualkgError as DualkgError
    from dualkg.errors import RequestError as RequestError
    from dualkg.evaluation.comparison import Comparison as Comparison
    from dualkg.evaluation.comparison import compare_ranks as compare_ranks
    from dualkg.evaluation.metrics import Metrics as Metrics
    from dualkg.evaluation.ranking import Ranks as Ranks
    from dualkg.evaluation.ranking import rank as rank
    from dualkg.evaluation.report import Report as Report
    from dualkg.evaluation.report import evaluate as evaluate
    from dualkg.evaluation.report import evaluate_relations as evaluate_relations
    from dualkg.inference.api import calibrate as calibrate
    from dualkg.inference.api import complete as complete
    from dualkg.inference.predictor import Prediction as Prediction
    from dualkg.inference.predictor import Predictor as Predictor
    from dualkg.losses import *  # noqa: F403
    from dualkg.models import *  # noqa: F403
    from dualkg.regularizers import *  # noqa: F403
    from dualkg.training.api import train as train
    from dualkg.training.callbacks import Callback as Callback
    from dualkg.training.callbacks import MLflow as MLflow
    from dualkg.training.callbacks import StopTraining as StopTraining
    from dualkg.training.callbacks import TensorBoard as TensorBoard
    from dualkg.training.callbacks import WandB as WandB
    from dualkg.training.ensemble import Ensemble as Ensemble
    from dualkg.training.ensemble import load_run as load_run
    from dualkg.training.importing import from_arrays as from_arrays
    from dualkg.training.importing import from_libkge as from_libkge
    from dualkg.training.importing import from_pykeen as from_pykeen
    from dualkg.training.optimizers import Optimizer as Optimizer
    from dualkg.training.recipe import Recipe as Recipe
    from dualkg.training.recipe import Validation as Validation
    from dualkg.training.recipe import list_recipes as list_recipes
    from dualkg.training.recipe import load_recipe as load_recipe
    from dualkg.training.run import Run as Run
    from dualkg.training.run import TrainedRun as TrainedRun
    from dualkg.tuning.search import search as search
    from dualkg.workflows.predict import predict_file as predict_file
    from dualkg.workflows.train import fit as fit
    from dualkg.workflows.train import resume as resume
    from dualkg.workflows.train import train_recipe as train_recipe

else:
    # The public names, by the package that has them.
    NAMES = {
        "errors": ["DataError", "DivergedError", "DualkgError", "RequestError"],
        "data": ["Graph", "GraphShape", "KnownAnswers", "Vocabulary", "load_graph"],
        "evaluation": [
            "Comparison",
            "Metrics",
            "Ranks",
            "Report",
            "compare_ranks",
            "evaluate",
            "evaluate_relations",
            "rank",
        ],
        "training": [
            "Callback",
            "Ensemble",
            "MLflow",
            "Optimizer",
            "Recipe",
            "Run",
            "TrainedRun",
            "StopTraining",
            "TensorBoard",
            "Validation",
            "WandB",
            "from_arrays",
            "from_libkge",
            "from_pykeen",
            "list_recipes",
            "load_recipe",
            "load_run",
            "train",
        ],
        "tuning": ["search"],
        "analysis": [],
        "inference": ["Prediction", "Predictor", "calibrate", "complete"],
        "workflows": ["fit", "predict_file", "resume", "train_recipe"],
    }
    # Packages whose exported names are all public: every model, loss and regularizer is.
    EXPORTING = ["models", "losses", "regularizers"]

    def _load() -> dict[str, Any]:
        """Load all packages, and return what is public by its name."""
        public = {}
        for package, names in NAMES.items():
            module = import_module(f"dualkg.{package}")
            public.update({name: getattr(module, name) for name in names})
        for package in EXPORTING:
            module = import_module(f"dualkg.{package}")
            public.update({name: getattr(module, name) for name in module.__all__})
        return public

    def __getattr__(name: str) -> object:
        """Load the packages when a name is first used.

        Importing torch takes seconds, and `--help` is printed without it.
        """
        if name == "__all__":
            globals()[name] = sorted(_load())
        elif name.startswith("_"):
            raise AttributeError(f"module 'dualkg' has no attribute {name!r}")
        elif find_spec(f"dualkg.{name}"):
            return import_module(f"dualkg.{name}")
        else:
            globals().update(_load())
        if name not in globals():
            raise AttributeError(f"module 'dualkg' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *NAMES, *EXPORTING, *_load()})
