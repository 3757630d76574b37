"""The weights of an ensemble, fitted on validation queries."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import Graph
from dualkg.errors import DivergedError
from dualkg.evaluation.ranking import BLOCK_ELEMENTS, eval_mode, full_precision
from dualkg.models.base import Model
from dualkg.models.ensemble import EnsembleModel

MAX_SCORES = {"cpu": 2**26, "cuda": 2**28}  # of all members, in memory
MAX_CANDIDATES = 2**16  # entities per query; drawn at random if there are more
EXCLUDED = -1e15  # the margin of known answers; its square is finite in float32
MIN_GAIN = 1e-4  # of MRR; a smaller one is no reason to change the weights
MIN_ERRORS = 1.0  # standard errors by which held-out queries must confirm fitted shares
STEPS = (0.2, 0.1, 0.05, 0.025)  # of a member's share


def fit_weights(model: EnsembleModel, graph: Graph) -> tuple[list[float], dict[str, Any]]:
    """Weights with the best MRR on validation queries, and how they were fitted.

    Ranks are filtered by train and valid; test triples are not used. Scores of each member are
    scaled to the temperature with the best likelihood. Shares of the members are fitted twice more,
    on each half of the triples. Where the other half does not confirm them by `MIN_ERRORS` standard
    errors of their gain over equal shares, they follow noise, and the shares are equal.
    """
    margins, halves = _margins(model, graph)
    temperatures = [_temperature(of_member) for of_member in margins]
    scales = torch.tensor(temperatures, device=margins.device)
    scaled = margins.mul_(scales[:, None, None])
    shares = _fit_shares(scaled, 1 / scales)
    equal = torch.full_like(scales, 1 / len(scaled))
    gains = []
    for half in (halves, ~halves):
        fitted = _fit_shares(scaled[:, half], 1 / scales)
        with_fitted = _reciprocal_ranks(fitted, scaled[:, ~half])
        with_equal = _reciprocal_ranks(equal, scaled[:, ~half])
        gains.append(with_fitted - with_equal)
    gain = torch.cat(gains)
    confirmed = False
    if len(gain) > 1:
        standard_error = float(gain.std()) / len(gain) ** 0.5
        confirmed = float(gain.mean()) > MIN_ERRORS * standard_error
    if not confirmed:
        shares = equal

    weights = [float(f"{weight:.4g}") for weight in (shares * scales).tolist()]
    alone = torch.eye(len(scaled), device=scaled.device)
    return weights, {
        "split": "valid",
        "num_queries": margins.shape[1],
        "equal_shares": not confirmed,
        "mrr": round(_mrr(shares, scaled), 6),
        "mrr_of_members": [round(_mrr(member, scaled), 6) for member in alone],
    }


def mrr_by_weight(
    model: EnsembleModel, graph: Graph, weights: Sequence[float]
) -> dict[float, float]:
    """The MRR on validation queries by the weight of the second of two members; the first has 1.

    Queries and filter are those of `fit_weights`. Scores are taken as they are.
    """
    margins, _ = _margins(model, graph)
    return {weight: _mrr(margins.new_tensor([1.0, weight]), margins) for weight in weights}


def _fit_shares(scaled: Tensor, inverse_scales: Tensor) -> Tensor:
    """Shares of the members with the best MRR.

    Shares are moved between pairs of members while it grows. They are no worse than any member
    alone, equal shares, or the unweighted sum of scores, up to `MIN_GAIN`.
    """
    alone = torch.eye(len(scaled), device=scaled.device)
    unweighted = inverse_scales / inverse_scales.sum()
    shares, best = _best([torch.full_like(unweighted, 1 / len(scaled)), unweighted, *alone], scaled)
    for step in STEPS:
        improved = True
        while improved:
            candidates = [shares]
            for giver, taker in permutations(range(len(scaled)), 2):
                moved = min(step, float(shares[giver]))
                if moved > 0:
                    candidates.append(shares + moved * (alone[taker] - alone[giver]))
            shares, after = _best(candidates, scaled)
            improved = after > best
            best = after
    return torch.where(shares < 1e-6, 0.0, shares)  # of rounding


def _best(candidates: list[Tensor], scaled: Tensor) -> tuple[Tensor, float]:
    """The shares with the largest MRR; it must be better by `MIN_GAIN` than those before it."""
    best = candidates[0]
    value = _mrr(candidates[0], scaled)
    for shares in candidates[1:]:
        mrr = _mrr(shares, scaled)
        if mrr > value + MIN_GAIN:
            best = shares
            value = mrr
    return best, value


@torch.no_grad()
def _margins(model: EnsembleModel, graph: Graph) -> tuple[Tensor, Tensor]:
    """Scores of candidates minus the score of the answer, and a random half of the queries.

    The margins are `(num_members, num_queries, 1 + num_candidates)`. Queries are those of the
    validation split in both directions, or as many of them as fit in memory. The first column is
    the answer itself; known answers are `EXCLUDED`. The half is a mask, `(num_queries,)`.
    """
    random = np.random.default_rng(0)
    device = model.device
    num_entities, num_relations = graph.shape
    columns = np.arange(num_entities)
    if num_entities > MAX_CANDIDATES:
        columns = np.sort(random.choice(num_entities, MAX_CANDIDATES, replace=False))
    queries = with_reciprocals(graph.valid, num_relations)
    most = max(1, MAX_SCORES[device.type] // (len(model.members) * len(columns)))
    # Both queries of a triple are in one half.
    halves = np.tile(random.permutation(len(graph.valid)) % 2 == 0, 2)
    if len(queries) > most:
        chosen = np.sort(random.choice(len(queries), most, replace=False))
        queries = queries[chosen]
        halves = halves[chosen]
    known = KnownAnswers.of(graph, ("train", "valid"))
    candidates = torch.from_numpy(columns).to(device)
    margins = torch.zeros(len(model.members), len(queries), 1 + len(columns), device=device)
    num_forward = int((queries[:, 1] < num_relations).sum())
    size = max(1, BLOCK_ELEMENTS // num_entities)
    starts = [*range(0, num_forward, size), *range(num_forward, len(queries), size)]
    with full_precision(), eval_mode(model):
        for start, stop in zip(starts, [*starts[1:], len(queries)], strict=True):
            block = torch.from_numpy(queries[start:stop]).long().to(device)
            known_rows, known_columns = known(queries[start:stop, 0], queries[start:stop, 1])
            is_known = torch.from_numpy(np.stack([known_rows, known_columns])).to(device)
            for number, member in enumerate(model.members):
                margins_of_block = _margins_of_block(member, block, num_relations)
                margins_of_block[tuple(is_known)] = EXCLUDED
                margins[number, start:stop, 1:] = margins_of_block[:, candidates]
    return margins, torch.from_numpy(halves).to(device)


def _margins_of_block(member: Model, queries: Tensor, num_relations: int) -> Tensor:
    """The margins of all entities `(num_queries, num_entities)`, for queries of one direction."""
    given, relations, answers = queries.unbind(1)
    if relations[0] < num_relations:
        scores = member.predict_tails(given, relations)
    else:
        scores = member.predict_heads(relations - num_relations, given)
    if not bool(scores.isfinite().all()):
        raise DivergedError(
            "A run of the ensemble scores NaN or infinity, so its training has diverged."
        )
    return scores - scores.gather(1, answers[:, None])


def _temperature(margins: Tensor) -> float:
    """The factor of scores with the best likelihood of the answers.

    It is found by bisection between 2⁻¹⁰ and 2¹⁰; the loss is convex.
    """
    low = -10.0
    high = 10.0
    for _ in range(12):
        middle = (low + high) / 2
        probabilities = (2**middle * margins).softmax(-1)
        slope = (probabilities * margins).sum(-1).mean()
        if slope < 0:
            low = middle
        else:
            high = middle
    return float(2 ** ((low + high) / 2))


def _reciprocal_ranks(shares: Tensor, scaled: Tensor) -> Tensor:
    """The reciprocals of realistic ranks; the answer is one of the ties."""
    margins = torch.tensordot(shares, scaled, dims=1)
    ranks: Tensor = (margins > 0).sum(-1) + (1 + (margins == 0).sum(-1)) / 2
    return ranks.reciprocal()


def _mrr(shares: Tensor, scaled: Tensor) -> float:
    return float(_reciprocal_ranks(shares, scaled).mean())
