"""What reasons are worth: training triples that support answers left out, and the model trained again without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import rank
from dualkg.evaluation.report import Metrics
from dualkg.inference.explanation import Influence, influence
from dualkg.inference.inductive import FrozenContext, with_adjoint
from dualkg.models.base import Model
from dualkg.training.api import train_recipe
from dualkg.training.recipe import Recipe

Places = npt.NDArray[np.int64]
COUNTS = (1, 3)  # triples of each answer that are left out
MOST_ANSWERS = 150


@dataclass(frozen=True)
class LeftOut:
    """How answers rank after training without some triples of each, and by how much their scores fell."""

    way: str  # nothing, reasons, any or against
    seed: int
    count: int  # of triples that are left out of each
    num_answers: int
    num_left_out: int
    metrics: Metrics
    fall: float  # the mean over the answers
    expected: float  # the same, as influence has it
    agreement: float  # of the two over the answers: the correlation of their ranks

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": self.metrics.as_dict()}


def study(
    graph: Graph,
    recipe: Recipe,
    *,
    counts: Sequence[int] = COUNTS,
    most_answers: int = MOST_ANSWERS,
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> list[LeftOut]:
    """Leave out what most supports test triples, what most speaks against them, or any triples of their entities.

    The test triples have no entity in common, so that one training answers for all of them. What is left out is still
    known when they are ranked.
    """
    asked = apart(graph, np.random.default_rng(0), least=max(counts) + 1, most=most_answers)
    found: list[LeftOut] = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        trial = _Trial(graph, recipe.with_changes({"training.seed": seed}), asked, seed, device)
        found.append(trial.before)
        for count in counts:
            for way, places in chosen(trial.influences, count, random).items():
                found.append(trial.without(places, way, count))
    return found


def apart(graph: Graph, random: np.random.Generator, *, least: int, most: int) -> Triples:
    """Test triples, none of which has an entity of another, and whose entities have so many training triples."""
    enough = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=len(graph.entities)) >= least
    taken = ~enough
    places: list[int] = []
    for place in random.permutation(len(graph.test)).tolist():
        head, _, tail = graph.test[place].tolist()
        if len(places) < most and head != tail and not (taken[head] or taken[tail]):
            places.append(place)
            taken[[head, tail]] = True
    if len(places) < 2:
        raise RequestError(f"{graph.name} has too few test triples of entities with {least} training triples.")
    triples: Triples = graph.test[places]
    return triples


def chosen(influences: Sequence[Influence], count: int, random: np.random.Generator) -> dict[str, list[Places]]:
    """By way and answer, which triples of train are to be left out."""
    return {
        "reasons": [one.rows[np.argsort(-one.score_drops, kind="stable")[:count]] for one in influences],
        "any": [random.permutation(one.rows)[:count] for one in influences],
        "against": [one.rows[np.argsort(one.score_drops, kind="stable")[:count]] for one in influences],
    }


class _Trial:
    """A model trained on all of train, what each training triple does to each answer, and what it does without some."""

    def __init__(
        self, graph: Graph, recipe: Recipe, asked: Triples, seed: int, device: str | torch.device | None
    ) -> None:
        self.graph, self.recipe, self.asked, self.seed, self.device = graph, recipe, asked, seed, device
        self.known = KnownAnswers.of(graph)
        model = with_adjoint(train_recipe(recipe, graph=graph, device=device).model)
        context = FrozenContext.of(model, graph, recipe=recipe)
        self.influences = [influence((head, relation, tail), context) for head, relation, tail in asked.tolist()]
        self.scores = self._scores(model)
        self.before = LeftOut("nothing", seed, 0, len(asked), 0, self._metrics(model), 0.0, 0.0, 1.0)

    def without(self, places: Sequence[Places], way: str, count: int) -> LeftOut:
        """Train again without these triples of train, some for each answer."""
        gone = np.unique(np.concatenate(places))
        rest = replace(self.graph, train=np.delete(self.graph.train, gone, axis=0))
        model = train_recipe(self.recipe, graph=rest, device=self.device).model
        falls = self.scores - self._scores(model)
        pairs = zip(self.influences, places, strict=True)
        expected = np.array([float(one.score_drops[np.isin(one.rows, some)].sum()) for one, some in pairs])
        return LeftOut(
            way=way,
            seed=self.seed,
            count=count,
            num_answers=len(self.asked),
            num_left_out=len(gone),
            metrics=self._metrics(model),
            fall=float(falls.mean()),
            expected=float(expected.mean()),
            agreement=rank_correlation(falls, expected),
        )

    @torch.no_grad()
    def _scores(self, model: Model) -> npt.NDArray[np.float64]:
        ids = torch.from_numpy(self.asked).long().to(model.device).unbind(1)
        found: npt.NDArray[np.float64] = model.score(*ids).double().cpu().numpy()
        return found

    def _metrics(self, model: Model) -> Metrics:
        return Metrics.of(rank(model, replace(self.graph, test=self.asked), known=self.known).mean)


def rank_correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Spearman's; those that are alike have their mean rank. 0 where one of the two is all alike."""
    mine, others = (ranks - ranks.mean() for ranks in map(_mean_ranks, (one, other)))
    size = float(np.linalg.norm(mine) * np.linalg.norm(others))
    return float(mine @ others) / size if size else 0.0


def _mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, groups, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = np.cumsum(sizes) - (sizes - 1) / 2
    return ranks[groups]
