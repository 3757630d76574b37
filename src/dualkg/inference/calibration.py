"""From log_probability to a probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import SPLITS, Graph, GraphShape, Split, Triples, distinct_triples, triple_keys
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import check_finite, eval_mode, full_precision
from dualkg.models.base import Model, Side


@dataclass(frozen=True)
class Calibration:
    """p = σ(slope · log_probability + offset), but at most the ceiling, with slope > 0: more log_probability is never less.

    A relation has a slope, and an offset for each of the four `DomainRange` of its triples: its own where there is enough
    data, one for all others.
    """

    slopes: Tensor  # of each of the graph's relations, `(num_relations,)`
    offsets: Tensor  # of each relation and kind, `(num_relations, 4)`
    relation_specific: Tensor  # whether a relation has its own, `(num_relations,)`
    max_probability: float = 1.0  # what no probability is above
    metadata: dict[str, Any] = field(default_factory=dict)  # on what it was fitted, and how well it held

    def log_odds(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Evidence, relation ids of the graph and patterns, which broadcast → log odds, as if there were no ceiling.

        They order triples as probabilities do, and also those that stand at the ceiling.
        """
        slopes, offsets = (one.to(log_probability.device) for one in (self.slopes, self.offsets))
        return slopes[relations] * log_probability + offsets[relations, patterns]

    def probability(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """The same → probabilities. More log_probability is never less."""
        return torch.sigmoid(self.log_odds(log_probability, relations, patterns)).clamp(max=self.max_probability)

    def as_dict(self) -> dict[str, Any]:
        tables = {name: getattr(self, name).tolist() for name in ("slopes", "offsets", "relation_specific")}
        return {**tables, "max_probability": self.max_probability, "metadata": self.metadata}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Calibration:
        return cls(
            torch.tensor(found["slopes"], dtype=torch.float32),
            torch.tensor(found["offsets"], dtype=torch.float32),
            torch.tensor(found["relation_specific"], dtype=torch.bool),
            float(found["max_probability"]),
            found.get("metadata", {}),
        )


Ids = npt.NDArray[np.int64]
SCORES_AT_ONCE = {"cpu": 2**23, "cuda": 2**28}


def query_block_size(model: Model) -> int:
    """How many questions have all their scores in memory together."""
    return max(1, SCORES_AT_ONCE[model.device.type] // model.shape.num_entities)


@torch.no_grad()
def triple_log_probabilities(model: Model, triples: Ids) -> Tensor:
    """Triples `(n, 3)` of ids → their log_probability `(n,)`; a question is scored once, however many triples share it."""
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    with full_precision(), eval_mode(model):
        of_tails = _log_probabilities(model, model.predict_tails, (heads, relations), tails)
        of_heads = _log_probabilities(model, model.predict_heads, (relations, tails), heads)
    return (of_tails + of_heads) / 2


def _log_probabilities(model: Model, ask: Callable[..., Tensor], asked: tuple[Ids, Ids], answers: Ids) -> Tensor:
    """log p(answer | question) of each, by blocks of distinct questions."""
    distinct, inverse = np.unique(np.stack(asked), axis=1, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    found = torch.empty(len(answers), device=model.device)
    size = query_block_size(model)
    for first in range(0, distinct.shape[1], size):
        block = [torch.from_numpy(ids[first : first + size].copy()).to(model.device) for ids in distinct]
        scores = ask(*block)
        there = order[np.searchsorted(inverse[order], first) : np.searchsorted(inverse[order], first + size)]
        rows, chosen = (torch.from_numpy(ids).to(model.device) for ids in (inverse[there] - first, answers[there]))
        found[torch.from_numpy(there).to(model.device)] = scores[rows, chosen] - scores.logsumexp(-1)[rows]
    return found


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
    """Distinct questions, `(num_queries,)`; relation `r + num_relations` asks for the heads of `r`."""

    given: Ids
    relations: Ids
    num_false: Ids  # how many false candidates each has


@torch.no_grad()
def sample_candidates(model: Model, graph: Graph, split: Split, *, seed: int = 0) -> Candidates:
    """Candidates of the questions of a split, in both directions; with the same seed the same."""
    model.check_shape(graph.shape)
    known = KnownAnswers.of(graph)
    answered = with_reciprocals(_only_in(graph, split), graph.shape.num_relations).astype(np.int64)
    questions = _questions(answered, known)
    random = np.random.default_rng(seed)
    with full_precision(), eval_mode(model):
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
    size = query_block_size(model)
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


def _some_of_each(patterns: Ids, most: int, random: np.random.Generator) -> Ids:
    """Places of at most about `most` questions: all of each kind, or where that is too many an equal number."""
    order = random.permutation(len(patterns))
    order = order[np.argsort(patterns[order], kind="stable")]
    counts = np.bincount(patterns)
    within = np.arange(len(patterns)) - (np.cumsum(counts) - counts)[patterns[order]]
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
    entities, patterns = (torch.from_numpy(ids).to(model.device) for ids in (given, relations))
    scores = torch.empty(len(given), model.shape.num_entities, device=model.device)
    backward = patterns >= num_relations
    for rows, ask in ((~backward, _ask_tails), (backward, _ask_heads)):
        if rows.any():
            scores[rows] = ask(model, entities[rows], patterns[rows] % num_relations).to(scores.dtype)
    finite = torch.isfinite(scores).all(1).cpu().numpy()
    check_finite(np.where(finite, 0, -1)[:, None], lambda row: f"({given[row]}, {relations[row] % num_relations}, ?)")
    rows_known, answers = (torch.from_numpy(ids).to(model.device) for ids in known(given, relations))
    scores[rows_known, answers] = -torch.inf
    return scores.argsort(dim=1, descending=True)


def _ask_tails(model: Model, given: Tensor, relations: Tensor) -> Tensor:
    return model.predict_tails(given, relations)


def _ask_heads(model: Model, given: Tensor, relations: Tensor) -> Tensor:
    return model.predict_heads(relations, given)


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


NUM_PATTERNS = 4


@dataclass(frozen=True, eq=False)
class DomainRange:
    """Which entities triples, those of train, have on each side of a relation, as sorted keys."""

    num_entities: int
    heads: Ids
    tails: Ids

    @classmethod
    def of(cls, graph: Graph) -> DomainRange:
        return cls.of_triples(graph.train, graph.shape.num_entities)

    @classmethod
    def of_triples(cls, triples: Triples, num_entities: int) -> DomainRange:
        relations = triples[:, 1].astype(np.int64) * num_entities
        return cls(num_entities, *(np.unique(relations + triples[:, column]) for column in (0, 2)))

    def __call__(self, triples: Ids) -> Ids:
        """Triples `(n, 3)` → their patterns `(n,)`: 1 where the head is new to its side, and 2 where the tail is."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        keys = relations * self.num_entities
        return 1 * _missing(self.heads, keys + heads) + 2 * _missing(self.tails, keys + tails)


def _missing(present: Ids, keys: Ids) -> npt.NDArray[np.bool_]:
    if not len(present):
        return np.ones(len(keys), dtype=bool)
    found: npt.NDArray[np.bool_] = present[np.searchsorted(present, keys).clip(max=len(present) - 1)] != keys
    return found


Marks = npt.NDArray[np.bool_]

MIN_TRIPLES = 5  # valid triples that give a relation a line of its own
# A line is a slope and the offsets of the patterns. Before any data a softmax is believed: p ≈ exp(log_probability).
CENTRE = np.array([1.0, *[0.0] * NUM_PATTERNS])
# How far the shared line may lie from that (one standard deviation each): its slope, its value, what a new head and a
# new tail add to it, and what both add beyond the sum of the two.
SHARED_SPREADS = (1.0, 5.0, 1.0, 1.0, 2.0)
# How far lines of relations lie from the shared one, their slopes as a share of its slope.
SPREADS = (0.25, 1.0, 1.0, 1.0, 1.0)
NEW_ENDS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])  # of each kind: a new head, a new tail, both
LEAST_SLOPE = 1e-3  # more log_probability never makes a triple less probable
NUM_STEPS = 100


def calibrate(model: Model, graph: Graph, *, seed: int = 0) -> Calibration:
    """Learn from the valid split how probable a candidate with so much log_probability is; `seed` draws the false ones."""
    drawn = sample_candidates(model, graph, "valid", seed=seed)
    log_probability = triple_log_probabilities(model, drawn.triples).double().cpu().numpy()
    patterns = DomainRange.of(graph)(drawn.triples)
    lines, own = fit_relation_lines(log_probability, patterns, drawn, graph.shape.num_relations)
    metadata = {
        "graph": graph.name,
        "fingerprint": graph.fingerprint,
        "split": "valid",
        "seed": seed,
        "num_true": int(drawn.true.sum()),
        "num_candidates": round(float(drawn.weights.sum())),
        "num_drawn": len(drawn.true),
    }
    return Calibration(
        slopes=torch.from_numpy(lines[:, 0].astype(np.float32)),
        offsets=torch.from_numpy(lines[:, 1:].astype(np.float32)),
        relation_specific=torch.from_numpy(own),
        max_probability=max_supported_probability(
            values_of(lines[drawn.relations], log_probability, patterns), drawn.true, drawn.weights
        ),
        metadata=metadata,
    )


def fit_relation_lines(
    log_probability: Floats, patterns: Ids, drawn: Candidates, num_relations: int
) -> tuple[Floats, Marks]:
    """The line of each relation, `(num_relations, 1 + NUM_PATTERNS)`, and whether it has its own, `(num_relations,)`."""
    spread = _spread(SHARED_SPREADS, middle=0.0)
    shared = fit_line(log_probability, patterns, drawn.true, drawn.weights, centre=CENTRE, spread=spread)
    near = _spread(
        (SPREADS[0] * shared[0], *SPREADS[1:]), middle=middle_of(shared, log_probability, patterns, drawn.weights)
    )
    lines = np.tile(shared, (num_relations, 1))
    num_valid = np.bincount(drawn.relations[drawn.true], minlength=num_relations) // 2  # each is asked from both ends
    own = num_valid >= MIN_TRIPLES
    for relation in np.flatnonzero(own):
        its = drawn.relations == relation
        parts = (log_probability[its], patterns[its], drawn.true[its], drawn.weights[its])
        lines[relation] = fit_line(*parts, centre=shared, spread=near)
    return lines, own


def max_supported_probability(values: Floats, true: Marks, weights: Floats) -> float:
    """The largest share of true ones that the candidates can vouch for: k of the n best, counted as (k + 1) / (n + 2).

    A valid triple is asked about from both its ends, and counts once.
    """
    order = np.argsort(-values, kind="stable")
    num_best, num_true = (np.cumsum(counted[order]) / 2 for counted in (weights, weights * true))
    return float(((num_true + 1) / (num_best + 2)).max())


def values_of(lines: Floats, log_probability: Floats, patterns: Ids) -> Floats:
    """Log odds of candidates `(n,)`, by a line or by one for each."""
    found: Floats = lines[..., 0] * log_probability + np.take_along_axis(
        np.broadcast_to(lines[..., 1:], (len(patterns), NUM_PATTERNS)), patterns[:, None], axis=1
    ).squeeze(1)
    return found


def middle_of(line: Floats, log_probability: Floats, patterns: Ids, weights: Floats) -> float:
    """Where the log_probability decides: its mean, each candidate counted by p (1 − p)."""
    probability = _sigmoid(values_of(line, log_probability, patterns))
    matters = weights * probability * (1 - probability)
    return float((matters * log_probability).sum() / max(matters.sum(), 1e-300))


def _spread(spreads: Sequence[float], *, middle: float) -> Floats:
    """The covariance of lines whose slope, value at the middle and what new ends add to it spread independently."""
    causes = np.zeros((1 + NUM_PATTERNS, 2 + NEW_ENDS.shape[1]))
    causes[0, 0], causes[1:, 0] = 1.0, -middle
    causes[1:, 1], causes[1:, 2:] = 1.0, NEW_ENDS
    causes *= np.asarray(spreads)
    covariance: Floats = causes @ causes.T
    return covariance


def fit_line(
    log_probability: Floats, patterns: Ids, true: Marks, weights: Floats, *, centre: Floats, spread: Floats
) -> Floats:
    """The line that fits best, drawn to a centre by a Gaussian prior with this covariance."""
    precision = np.linalg.inv(spread).astype(np.float64)
    line = _newton(log_probability, patterns, true, weights, centre, precision)
    if (
        line[0] < LEAST_SLOPE
    ):  # log_probability says nothing, or the contrary: then all candidates of a kind are as probable
        fixed, precision = centre.copy(), np.zeros_like(spread)
        fixed[0], precision[0, 0] = LEAST_SLOPE, 1e12
        precision[1:, 1:] = np.linalg.inv(spread[1:, 1:])
        line = _newton(log_probability, patterns, true, weights, fixed, precision)
        line[0] = LEAST_SLOPE
    return line


def _newton(
    log_probability: Floats, patterns: Ids, true: Marks, weights: Floats, centre: Floats, precision: Floats
) -> Floats:
    design = np.concatenate([log_probability[:, None], np.eye(NUM_PATTERNS)[patterns]], axis=1)

    def loss(line: Floats) -> float:
        logits, away = design @ line, line - centre
        return float((weights * (np.logaddexp(0, logits) - true * logits)).sum() + away @ precision @ away / 2)

    line, now = centre.copy(), loss(centre)
    for _ in range(NUM_STEPS):
        probability = _sigmoid(design @ line)
        slope = design.T @ (weights * (probability - true)) + precision @ (line - centre)
        curvature = (design * (weights * probability * (1 - probability))[:, None]).T @ design + precision
        step, length = np.linalg.solve(curvature, slope), 1.0
        while (after := loss(line - length * step)) > now and length > 1e-10:
            length /= 2
        line, gained, now = line - length * step, now - after, after
        if gained <= 1e-12 * abs(now):
            break
    return line


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = np.exp(-np.logaddexp(0, -logits))
    return found


ROUNDING = 1e-9  # by which two log odds are taken to be the same


@dataclass(frozen=True, eq=False)
class PriorCorrection:
    """A calibration, and the shares of questions that lack an answer."""

    calibration: Calibration
    domain_range: DomainRange
    heads: Tensor  # of the questions (h, r, ?), `(num_relations, 2)`: of heads that train has there, and of new ones
    tails: Tensor  # of the questions (?, r, t)

    @classmethod
    def of(cls, calibration: Calibration, graph: Graph) -> PriorCorrection:
        there, asked = DomainRange.of(graph), DomainRange.of_triples(graph.valid, graph.shape.num_entities)
        heads = _priors(there.heads, asked.heads, graph.shape)
        tails = _priors(there.tails, asked.tails, graph.shape)
        return cls(calibration, there, heads, tails)

    @cached_property
    def priors(self) -> Tensor:
        """By relation and kind, `(num_relations, 4)`."""
        patterns = torch.arange(NUM_PATTERNS)
        return (self.heads[:, patterns % 2] + self.tails[:, patterns // 2]) / 2

    def log_odds(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Evidence, relation ids of the graph and patterns, which broadcast → log odds of triples."""
        odds = self.calibration.log_odds(log_probability, relations, patterns).double()
        return odds.clamp(max=self._max_log_odds) + self.priors[relations, patterns].log()

    @property
    def _max_log_odds(self) -> float:
        """The log odds that no answer is above."""
        return log_odds_of(self.calibration.max_probability)

    def probability(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        return self.log_odds(log_probability, relations, patterns).sigmoid()

    def required_log_probability(self, log_odds: float, relation: int) -> Tensor:
        """The log_probability that a triple of each kind needs for such log odds, `(2, 2)`: by head, then by tail, 1 if new.

        Infinite where no log_probability is enough.
        """
        answers = log_odds - self.priors[relation].log()
        found = (answers - self.calibration.offsets[relation]) / self.calibration.slopes[relation]
        return torch.where(answers > self._max_log_odds + ROUNDING, inf, found.double()).reshape(2, 2).T

    def query_priors(self, entity: int, relations: Tensor, side: Side) -> Tensor:
        """The shares of the questions that give an entity as head or as tail, `(num_relations asked,)`."""
        shares, given = (
            (self.heads, self.domain_range.heads) if side == "head" else (self.tails, self.domain_range.tails)
        )
        new = ~np.isin(relations.numpy() * self.domain_range.num_entities + entity, given, assume_unique=True)
        return shares[relations, torch.from_numpy(new).long()]


def log_odds_of(probability: float) -> float:
    """Infinite where it is sure."""
    return log(probability / (1 - probability)) if 0 < probability < 1 else inf if probability else -inf


def _priors(there: Ids, asked: Ids, shape: GraphShape) -> Tensor:
    """Of the questions that give an entity of a side of train, and of those that give another, how many valid asks.

    A relation with few of them is drawn to all: as if one question more, which lacks an answer, came with as many
    others as it does over all relations.
    """
    new = ~np.isin(asked, there)
    lacking = np.stack([_by_relation(asked[which], shape) for which in (~new, new)])
    in_train = _by_relation(there, shape)
    number = np.stack([in_train, shape.num_entities - in_train])
    # Where valid has none at all, one is imagined: nothing is impossible.
    pooled = np.maximum(lacking.sum(1), 1) / np.maximum(number.sum(1), 1)
    return torch.from_numpy(np.minimum((lacking + 1) / (number + 1 / pooled[:, None]), 1.0).T.copy())


def _by_relation(keys: Ids, shape: GraphShape) -> Ids:
    return np.bincount(keys // shape.num_entities, minlength=shape.num_relations)


MOST = 2**20  # sums that are remembered; some 150 MB


class CachedLogProbabilities:
    """Called with triples `(n, 3)` it gives what `triple_log_probabilities` gives, but for rounding."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sums: dict[tuple[Side, int, int], float] = {}

    @torch.no_grad()
    def __call__(self, triples: Ids) -> Tensor:
        model = self._model
        heads, relations, tails = torch.from_numpy(np.ascontiguousarray(triples)).to(model.device).unbind(1)
        with full_precision(), eval_mode(model):
            forward = backward = model.score(heads, relations, tails)
            if model.reciprocal:
                backward = model.score(tails, relations + model.shape.num_relations, heads)
            of_tails = forward - self._summed("tail", triples[:, 0], triples[:, 1])
            of_heads = backward - self._summed("head", triples[:, 2], triples[:, 1])
        return (of_tails + of_heads) / 2

    def _summed(self, side: Side, given: Ids, relations: Ids) -> Tensor:
        """log Σ exp of the scores of each question, `(n,)`; each is summed once."""
        keys = [(side, entity, relation) for entity, relation in zip(given.tolist(), relations.tolist(), strict=True)]
        missing = [key for key in dict.fromkeys(keys) if key not in self._sums]
        if len(self._sums) + len(missing) > MOST:
            self._sums.clear()
            missing = list(dict.fromkeys(keys))
        size = query_block_size(self._model)
        for block in (missing[start : start + size] for start in range(0, len(missing), size)):
            entity, relation = (
                torch.tensor(ids, device=self._model.device) for ids in list(zip(*block, strict=True))[1:]
            )
            asks_tails = side == "tail"
            scores = (
                self._model.predict_tails(entity, relation)
                if asks_tails
                else self._model.predict_heads(relation, entity)
            )
            self._sums.update(zip(block, scores.logsumexp(-1).tolist(), strict=True))
        return torch.tensor([self._sums[key] for key in keys], device=self._model.device)
