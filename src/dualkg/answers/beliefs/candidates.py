"""Candidates of a split's questions, some of them standing for all.

A question is (h, r, ?) or (?, r, t), of a triple of the split. Its candidates are the entities that no other split
gives as an answer; those that the split gives are true, all others false. All true candidates are taken. Of the false
ones there are nearly as many as entities, so they are drawn: from some questions of each relation and direction, the
best-scored ones and a few from each band of ranks behind them, a band reaching four times as far as the one before it.
A candidate that was drawn stands for as many as its weight says, and all weights together are all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.answers.beliefs.evidence import Ids, queries_at_once
from dualkg.data.graph import SPLITS, Graph, Split, Triples, distinct_triples, triple_keys
from dualkg.data.known import KnownAnswers, with_reciprocals
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import evaluating, full_precision, refuse_nonfinite
from dualkg.models.base import Model

Floats = npt.NDArray[np.float64]

NUM_QUESTIONS = 4000  # from which false candidates are drawn
NUM_SCORES = 2**32  # made for all that is drawn; a graph with many entities is asked fewer questions
FEW_QUESTIONS = 200  # but never fewer than so many
BEST = 10  # false candidates of a question that are all taken
FROM_A_BAND = 2  # drawn of those in a band of ranks
REACH = 4  # how many times as far a band reaches as the one before it


@dataclass(frozen=True, eq=False)
class Candidates:
    """Triples `(n, 3)`; whether each is of the split; how many candidates it stands for."""

    triples: Ids
    true: npt.NDArray[np.bool_]
    weights: Floats

    @property
    def relations(self) -> Ids:
        return self.triples[:, 1]


@dataclass(frozen=True, eq=False)
class Questions:
    """Distinct questions, `(num_questions,)`; relation `r + num_relations` asks for the heads of `r`."""

    given: Ids
    relations: Ids
    num_false: Ids  # how many false candidates each has


@torch.no_grad()
def draw_candidates(model: Model, graph: Graph, split: Split, *, seed: int = 0) -> Candidates:
    """Candidates of the questions of a split, in both directions; with the same seed the same."""
    model.check_shape(graph.shape)
    known = KnownAnswers.of(graph)
    answered = with_reciprocals(_only_in(graph, split), graph.shape.num_relations).astype(np.int64)
    questions = _questions(answered, known)
    random = np.random.default_rng(seed)
    with full_precision(), evaluating(model):
        false, weights = _draw_false(model, questions, known, random)
    triples = np.concatenate([answered, false])
    backward = triples[:, 1] >= graph.shape.num_relations
    triples[backward] = triples[backward][:, [2, 1, 0]] - [0, graph.shape.num_relations, 0]
    true = np.arange(len(triples)) < len(answered)
    return Candidates(triples, true, np.concatenate([np.ones(len(answered)), weights]))


def _only_in(graph: Graph, split: Split) -> Triples:
    """The distinct triples of a split that no other split has: what another has is known, and no candidate."""
    others = np.concatenate([graph.split(name) for name in SPLITS if name != split])
    wanted = distinct_triples(graph.split(split), graph.shape)
    keys = triple_keys(np.concatenate([wanted, others]), graph.shape)
    only = wanted[~np.isin(keys[: len(wanted)], keys[len(wanted) :])]
    if not len(only):
        what = f"no {split} triples" if not len(wanted) else f"no {split} triples that are not in another split too"
        raise RequestError(
            f"Probabilities need withheld triples, and {graph.name} has {what}. "
            f"Split the graph so that {split} has some."
        )
    return only


def _questions(answered: Ids, known: KnownAnswers) -> Questions:
    keys = np.unique(known.keys(answered[:, 0], answered[:, 1]))
    given, relations = np.divmod(keys, 2 * known.shape.num_relations)
    first, last = known.on(torch.device("cpu")).ranges(torch.from_numpy(keys))
    return Questions(given, relations, known.shape.num_entities - (last - first).numpy())


def _draw_false(
    model: Model, questions: Questions, known: KnownAnswers, random: np.random.Generator
) -> tuple[Ids, Floats]:
    """False candidates as (given, relation, candidate), and their weights."""
    num_entities = known.shape.num_entities
    chosen = _some_of_each(questions.relations, _num_questions(num_entities), random)
    bands = _bands(num_entities)
    size = queries_at_once(model)
    drawn, weights = [], []
    for start in range(0, len(chosen), size):
        block = chosen[start : start + size]
        given, relations, num_false = (
            values[block] for values in (questions.given, questions.relations, questions.num_false)
        )
        best_first = _best_first(model, given, relations, known)
        places, stands_for = _places(num_false, bands, random)
        picked = best_first.gather(1, torch.from_numpy(places).to(model.device)).cpu().numpy()
        rows, columns = np.nonzero(stands_for)
        drawn.append(np.stack([given[rows], relations[rows], picked[rows, columns]], axis=1))
        weights.append(stands_for[rows, columns])
    false, joined = np.concatenate(drawn), np.concatenate(weights)
    return false, joined * _to_all(questions, false, joined)


def _num_questions(num_entities: int) -> int:
    """How many questions are asked: fewer where one has many candidates, since each of them is scored from its end."""
    per_question = num_entities * (BEST + FROM_A_BAND * (len(_bands(num_entities)) - 1))
    return min(NUM_QUESTIONS, max(FEW_QUESTIONS, NUM_SCORES // per_question))


def _some_of_each(kinds: Ids, most: int, random: np.random.Generator) -> Ids:
    """Places of at most about `most` questions: all of each kind, or where that is too many an equal number."""
    order = random.permutation(len(kinds))
    order = order[np.argsort(kinds[order], kind="stable")]
    counts = np.bincount(kinds)
    within = np.arange(len(kinds)) - (np.cumsum(counts) - counts)[kinds[order]]
    each = np.searchsorted(np.cumsum(np.bincount(within)), most, side="right")  # how many are the n-th of their kind
    return np.sort(order[within < max(1, each)])


def _bands(num_entities: int) -> list[int]:
    """Where bands of ranks begin: behind the best, then always `REACH` times further."""
    starts = [BEST]
    while starts[-1] * REACH < num_entities:
        starts.append(starts[-1] * REACH)
    return [*starts, num_entities]


def _best_first(model: Model, given: Ids, relations: Ids, known: KnownAnswers) -> Tensor:
    """All entities from the best-scored to the worst, `(batch, num_entities)`; known answers last."""
    num_relations = model.shape.num_relations
    entities, kinds = (torch.from_numpy(ids).to(model.device) for ids in (given, relations))
    scores = torch.empty(len(given), model.shape.num_entities, device=model.device)
    backward = kinds >= num_relations
    for rows, ask in ((~backward, _ask_tails), (backward, _ask_heads)):
        if rows.any():
            scores[rows] = ask(model, entities[rows], kinds[rows] % num_relations).to(scores.dtype)
    finite = torch.isfinite(scores).all(1).cpu().numpy()
    refuse_nonfinite(
        np.where(finite, 0, -1)[:, None], lambda row: f"({given[row]}, {relations[row] % num_relations}, ?)"
    )
    rows_known, answers = (torch.from_numpy(ids).to(model.device) for ids in known(given, relations))
    scores[rows_known, answers] = -torch.inf
    return scores.argsort(dim=1, descending=True)


def _ask_tails(model: Model, given: Tensor, relations: Tensor) -> Tensor:
    return model.ask_tails(given, relations)


def _ask_heads(model: Model, given: Tensor, relations: Tensor) -> Tensor:
    return model.ask_heads(relations, given)


def _places(num_false: Ids, bands: list[int], random: np.random.Generator) -> tuple[Ids, Floats]:
    """Ranks that are drawn for questions with so many false candidates, and how many each stands for, 0 for none.

    Both are `(batch, n)`. In a band the draws are equally far apart and begin at random, so each rank is as likely.
    """
    places = [np.broadcast_to(np.arange(BEST), (len(num_false), BEST))]
    weights = [places[0] < num_false[:, None]]
    for start, stop in pairwise(bands):
        size = (np.minimum(stop, num_false) - start).clip(0)[:, None]
        steps = np.arange(FROM_A_BAND) + random.random((len(num_false), 1))
        places.append(start + (steps * size / FROM_A_BAND).astype(np.int64))
        weights.append(np.broadcast_to(size / FROM_A_BAND, places[-1].shape))
    return np.concatenate(places, 1).clip(max=bands[-1] - 1), np.concatenate(weights, 1).astype(np.float64)


def _to_all(questions: Questions, false: Ids, weights: Floats) -> Floats:
    """What makes the drawn candidates of each relation and direction stand for those of all its questions."""
    num_kinds = int(questions.relations.max()) + 1
    wanted = np.bincount(questions.relations, questions.num_false, minlength=num_kinds)
    there = np.bincount(false[:, 1], weights, minlength=num_kinds)
    factors: Floats = (wanted / np.maximum(there, 1e-300))[false[:, 1]]
    return factors
