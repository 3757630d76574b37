"""Do explanations hold: remove the training triples that support test triples most, train again, and rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import rank
from dualkg.evaluation.report import Metrics
from dualkg.extras import optional_import
from dualkg.inference.explanation import Influence, influence
from dualkg.inference.inductive import FrozenContext, with_adjoint
from dualkg.models.base import Model
from dualkg.training.api import train_recipe
from dualkg.training.recipe import Recipe

Rows = npt.NDArray[np.int64]
COUNTS = (1, 3)  # training triples removed per test triple
MAX_TRIPLES = 150


def study_explanations(
    graph: Graph,
    recipe: Recipe,
    *,
    counts: Sequence[int] = COUNTS,
    max_triples: int = MAX_TRIPLES,
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> list[dict[str, Any]]:
    """Metrics of test triples after training without the most supporting, the most opposing or random triples.

    The test triples have no common entity, so that one training serves all of them. Removed triples are still
    filtered in ranking.
    """
    triples = disjoint_triples(graph, np.random.default_rng(0), min_degree=max(counts) + 1, max_triples=max_triples)
    known = KnownAnswers.of(graph)
    results: list[dict[str, Any]] = []
    for seed in seeds:
        seeded = recipe.with_changes({"training.seed": seed})
        random = np.random.default_rng(seed)
        model = with_adjoint(train_recipe(seeded, graph=graph, device=device).model)
        context = FrozenContext.of(model, graph, recipe=seeded)
        influences = [influence((head, relation, tail), context) for head, relation, tail in triples.tolist()]
        scores = _scores(model, triples)

        def result(model: Model, removed: str, count: int, **drops: Any) -> dict[str, Any]:
            ranks = rank(model, replace(graph, test=triples), known=known).mean
            about = {"removed": removed, "seed": seed, "count": count, "num_triples": len(triples)}  # noqa: B023
            return {**about, "metrics": Metrics.of(ranks).as_dict(), **drops}

        results.append(result(model, "nothing", 0, num_removed=0))
        for count in counts:
            for removed, rows in select_triples(influences, count, random).items():
                gone = np.unique(np.concatenate(rows))
                rest = replace(graph, train=np.delete(graph.train, gone, axis=0))
                retrained = train_recipe(seeded, graph=rest, device=device).model
                drops = scores - _scores(retrained, triples)
                pairs = zip(influences, rows, strict=True)
                expected = np.array([float(one.score_drops[np.isin(one.rows, some)].sum()) for one, some in pairs])
                compared: dict[str, Any] = {"score_drop": float(drops.mean()), "expected_drop": float(expected.mean())}
                compared["rank_correlation"] = rank_correlation(drops, expected)
                results.append(result(retrained, removed, count, num_removed=len(gone), **compared))
    return results


def disjoint_triples(graph: Graph, random: np.random.Generator, *, min_degree: int, max_triples: int) -> Triples:
    """Test triples without a common entity, whose entities have at least `min_degree` training triples."""
    used = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=len(graph.entities)) < min_degree
    rows: list[int] = []
    for row in random.permutation(len(graph.test)).tolist():
        head, _, tail = graph.test[row].tolist()
        if len(rows) < max_triples and head != tail and not (used[head] or used[tail]):
            rows.append(row)
            used[[head, tail]] = True
    if len(rows) < 2:
        raise RequestError(f"{graph.name} has too few test triples whose entities have {min_degree} training triples.")
    triples: Triples = graph.test[rows]
    return triples


def select_triples(influences: Sequence[Influence], count: int, random: np.random.Generator) -> dict[str, list[Rows]]:
    """The rows of train to remove for each test triple, by kind."""
    return {
        "supporting": [one.rows[np.argsort(-one.score_drops, kind="stable")[:count]] for one in influences],
        "random": [random.permutation(one.rows)[:count] for one in influences],
        "opposing": [one.rows[np.argsort(one.score_drops, kind="stable")[:count]] for one in influences],
    }


@torch.no_grad()
def _scores(model: Model, triples: Triples) -> npt.NDArray[np.float64]:
    ids = torch.from_numpy(triples).long().to(model.device).unbind(1)
    scores: npt.NDArray[np.float64] = model.score(*ids).double().cpu().numpy()
    return scores


def rank_correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 if one of the two is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    with optional_import("scipy", purpose="The study of explanations"):
        from scipy.stats import spearmanr
    return float(spearmanr(a, b).statistic)
