"""Knowledge-graph completion built on duality: factorization models, their distance-based duals, and DURA.

import dualkg as kg

graph = kg.load_graph("world")
run = kg.train(kg.ComplEx(graph.shape, dim=100), graph, regularizer=kg.DURA(0.05, plain=0.5, mapped=1.5))
kg.Predictor(run.model, graph).tails("France", "capital")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualkg.answers import Answer, Predictor
    from dualkg.data import Graph, GraphShape, KnownAnswers, Vocabulary, load_graph
    from dualkg.errors import DataError, DivergedError, DualkgError, RequestError
    from dualkg.evaluation import Comparison, Metrics, Ranks, Report, compare_ranks, evaluate, evaluate_relations, rank
    from dualkg.models import (
        CP,
        HAKE,
        RESCAL,
        SE,
        BilinearModel,
        ComplEx,
        DistanceModel,
        DistMult,
        Dual,
        EmbeddingModel,
        ModE,
        Model,
        MuRP,
        QuatE,
        RotatE,
        SimplE,
        TransE,
        TuckER,
    )
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
    from dualkg.training import (
        Loss,
        Optimizer,
        Recipe,
        Run,
        Validation,
        from_arrays,
        load_recipe,
        load_run,
        resume,
        train,
        train_recipe,
    )

__version__ = "0.1.0"

__all__ = [
    "CP",
    "DURA",
    "HAKE",
    "N3",
    "RESCAL",
    "SE",
    "Answer",
    "BasicDURA",
    "BilinearModel",
    "Comparison",
    "ComplEx",
    "DataError",
    "DistMult",
    "DistanceModel",
    "DivergedError",
    "Dual",
    "DualkgError",
    "EmbeddingModel",
    "Frobenius",
    "Graph",
    "GraphShape",
    "KnownAnswers",
    "Loss",
    "Metrics",
    "ModE",
    "Model",
    "MuRP",
    "NoRegularizer",
    "Optimizer",
    "Predictor",
    "QuatE",
    "Ranks",
    "Recipe",
    "RegP1",
    "Regularizer",
    "Report",
    "RequestError",
    "RotatE",
    "Run",
    "SimplE",
    "TransE",
    "TuckER",
    "UnweightedDURA",
    "Validation",
    "Vocabulary",
    "compare_ranks",
    "evaluate",
    "evaluate_relations",
    "from_arrays",
    "load_graph",
    "load_recipe",
    "load_run",
    "rank",
    "resume",
    "train",
    "train_recipe",
]

_ROOMS = ("answers", "data", "errors", "evaluation", "models", "regularizers", "training")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load all rooms when a name is first asked for: torch takes seconds, and --help is answered without it."""
        if name in __all__ or name in _ROOMS:
            loaded = [import_module(f"dualkg.{room}") for room in _ROOMS]
            globals().update({own: vars(room)[own] for room in loaded for own in __all__ if own in vars(room)})
        if name not in globals():
            raise AttributeError(f"module 'dualkg' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_ROOMS})
