"""The plan of a search: how much work it may do, and how long its trials are.

It follows from the graph, the starting recipe and the kind of device. A clock has no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dualkg.data.graph import Graph
from dualkg.losses import OneVsAll, SampledSoftmax
from dualkg.training.costs import WorkEstimate
from dualkg.training.recipe import Recipe
from dualkg.tuning.starting_recipe import Value, is_small

SHORT = 0  # the rung of the short trials
LONG = 1  # the rung of the long trials
# Work of a search, at least: small graphs are trained in a few seconds, and their users wait two
# minutes for a better model.
MIN_BUDGET = 120.0
# Work of a search, as a multiple of the final training: on a CPU, whose trainings take long, tuning
# at most doubles the time.
BUDGETS = {"cpu": 1.0, "cuda": 3.0}
# Length of the trials of each rung, as a fraction of the final epochs. The final training has fewer
# epochs on a CPU, so that a ninth of them would say little.
RUNGS = {"cpu": (1 / 4, 1 / 2), "cuda": (1 / 9, 1 / 3)}
SMALL_RUNGS = (1 / 3, 1.0)  # of small graphs, whose final training takes seconds
MAX_VALIDATION_TRIPLES = {"cpu": 2_500, "cuda": 10_000}  # that a trial ranks
# The factor between neighbouring values of λ. The few trials on a CPU begin near the best value; a
# small graph may need one that is much smaller.
WEIGHT_FACTORS = {"cpu": 2.0, "cuda": 10**0.5}
# The best short trial of each kind is trained longer if its MRR is at least this share of the best:
# a CPU has the budget for few long trials.
PROMOTED_SHARES = {"cpu": 0.98, "cuda": 0.0}
# Trials on a CPU are cheaper than the final training: what is best in one is best in the other.
MAX_NEGATIVES = 500  # of sampled softmax
MAX_DIM = 100


@dataclass(frozen=True)
class SearchPlan:
    """The budget of a search in work, and what its trials are.

    `rungs` are the lengths of short and long trials as fractions of the final training.
    `max_trials` are the most trials up to the end of each rung, counted in place of work.
    `weight_factor` is the factor between neighbouring values of λ. The best trial of each kind is
    trained longer if it has `promoted_share` of the best MRR. With `tunes_batches`, the batch size
    is a hyperparameter. `trial_changes` are recipe keys in which a trial differs from the final
    training.
    """

    budget: float = math.inf
    rungs: tuple[float, float] = RUNGS["cuda"]
    num_validation_triples: int = MAX_VALIDATION_TRIPLES["cuda"]
    max_trials: tuple[int, int] | None = None
    weight_factor: float = WEIGHT_FACTORS["cuda"]
    promoted_share: float = PROMOTED_SHARES["cuda"]
    tunes_batches: bool = True
    trial_changes: dict[str, Value] = field(default_factory=dict)

    @classmethod
    def of_saved(cls, saved: dict[str, Any]) -> SearchPlan:
        """The plan of a saved search, whose tuples are lists in JSON."""
        pairs = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
        return cls(**{**saved, **pairs})

    @classmethod
    def of(
        cls,
        start: Recipe,
        graph: Graph,
        work: WorkEstimate,
        *,
        fixed: Collection[str] = (),
        seconds: float | None = None,
    ) -> SearchPlan:
        """The plan of a search from `start`.

        `fixed` are the recipe keys that its user chose, and `seconds` is the time for it.
        """
        device = "cuda" if is_small(graph) else work.device
        trial_changes = cheaper_trials(start, fixed) if device == "cpu" else {}
        if seconds is None:
            of_training = start.training.epochs * work.epoch(start)
            budget = max(BUDGETS[work.device] * of_training, MIN_BUDGET)
        else:
            budget = seconds
        return cls(
            budget,
            rungs=SMALL_RUNGS if is_small(graph) else RUNGS[device],
            num_validation_triples=MAX_VALIDATION_TRIPLES[device],
            weight_factor=WEIGHT_FACTORS[device],
            promoted_share=PROMOTED_SHARES[device],
            tunes_batches=device == "cuda",
            trial_changes=trial_changes,
        )


def cheaper_trials(start: Recipe, fixed: Collection[str]) -> dict[str, Value]:
    """Recipe keys in which the trials of a search on a CPU differ from the final training."""
    changes: dict[str, Value] = {}
    if "model.dim" not in fixed and start.model.dim > MAX_DIM:
        changes["model.dim"] = MAX_DIM
    loss = start.loss
    if isinstance(loss, SampledSoftmax) and loss.num_negatives > MAX_NEGATIVES:
        changes["loss.num_negatives"] = MAX_NEGATIVES
    if isinstance(loss, OneVsAll) and start.model.reciprocal:
        changes["training.order"] = "queries"
    return {key: value for key, value in changes.items() if key not in fixed}
