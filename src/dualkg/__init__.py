"""Knowledge-graph completion built on duality: factorization models, their distance-based duals,
and DURA.

import dualkg as kg

graph = kg.load_graph("world") run = kg.train(kg.ComplEx(graph.shape, dim=100), graph,
regularizer=kg.DURA(0.05, plain=0.5, mapped=1.5)) kg.Predictor(run.model, graph).tails("France",
"capital")
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dualkg.analysis
    import dualkg.evaluation
    import dualkg.inference
    import dualkg.tuning  # noqa: F401
    from dualkg.data.filters import KnownAnswers
    from dualkg.data.graph import Graph, GraphShape
    from dualkg.data.loading import load_graph
    from dualkg.data.vocabulary import Vocabulary
    from dualkg.errors import DataError, DivergedError, DualkgError, RequestError
    from dualkg.evaluation.comparison import Comparison, compare_ranks
    from dualkg.evaluation.metrics import Metrics
    from dualkg.evaluation.ranking import Ranks, rank
    from dualkg.evaluation.report import Report, evaluate, evaluate_relations
    from dualkg.inference.api import calibrate, complete
    from dualkg.inference.predictor import Prediction, Predictor
    from dualkg.losses import (
        KvsAll,
        Loss,
        MarginRanking,
        NegativeSampling,
        OneVsAll,
        SampledSoftmax,
    )
    from dualkg.models.base import EmbeddingModel, Model
    from dualkg.models.bilinear import BilinearModel, Dual
    from dualkg.models.diagonal import CP, ComplEx, DistMult, QuatE, SimplE
    from dualkg.models.distance import HAKE, SE, DistanceModel, ModE, MuRP, RotatE, TransE
    from dualkg.models.matrix import RESCAL, TuckER
    from dualkg.regularizers import (
        DURA,
        N3,
        BasicDURA,
        Frobenius,
        NoRegularizer,
        RegP1,
        Regularizer,
        UnweightedDURA,
    )
    from dualkg.training.api import train, train_recipe
    from dualkg.training.callbacks import Callback, MLflow, StopTraining, TensorBoard, WandB
    from dualkg.training.ensemble import Ensemble
    from dualkg.training.importing import from_arrays, from_libkge, from_pykeen
    from dualkg.training.optimizers import Optimizer
    from dualkg.training.recipe import Recipe, Validation, list_recipes, load_recipe
    from dualkg.training.run import Run, load_run
    from dualkg.tuning.automatic import fit, resume
    from dualkg.tuning.search import search

__version__ = "0.2.0"

__all__ = ["DataError", "DivergedError", "DualkgError", "RequestError"]
__all__ += ["Graph", "GraphShape", "KnownAnswers", "Vocabulary", "load_graph"]
__all__ += ["BilinearModel", "DistanceModel", "Dual", "EmbeddingModel", "Model"]
__all__ += ["CP", "RESCAL", "ComplEx", "DistMult", "QuatE", "SimplE", "TuckER"]
__all__ += ["HAKE", "SE", "ModE", "MuRP", "RotatE", "TransE"]
__all__ += [
    "DURA",
    "N3",
    "BasicDURA",
    "Frobenius",
    "NoRegularizer",
    "RegP1",
    "Regularizer",
    "UnweightedDURA",
]
__all__ += ["KvsAll", "Loss", "MarginRanking", "NegativeSampling", "OneVsAll", "SampledSoftmax"]
__all__ += [
    "Comparison",
    "Metrics",
    "Ranks",
    "Report",
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "rank",
]
__all__ += [
    "Ensemble",
    "Optimizer",
    "Recipe",
    "Run",
    "Validation",
    "list_recipes",
    "load_recipe",
    "load_run",
]
__all__ += ["from_arrays", "from_libkge", "from_pykeen"]
__all__ += ["fit", "resume", "search", "train", "train_recipe"]
__all__ += ["Callback", "MLflow", "StopTraining", "TensorBoard", "WandB"]
__all__ += ["Prediction", "Predictor", "calibrate", "complete"]

_PACKAGES = [
    "data",
    "errors",
    "models",
    "regularizers",
    "losses",
    "evaluation",
    "training",
    "tuning",
    "analysis",
]
_PACKAGES += ["inference"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load all packages when a name is first asked for: torch takes seconds, and --help is
        answered without it.
        """
        if name in __all__ or name in _PACKAGES:
            loaded = [import_module(f"dualkg.{package}") for package in _PACKAGES]
            globals().update(
                {
                    own: vars(package)[own]
                    for package in loaded
                    for own in __all__
                    if own in vars(package)
                }
            )
        if name not in globals():
            raise AttributeError(f"module 'dualkg' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_PACKAGES})
