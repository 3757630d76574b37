"""A block of queries of one relation: which of their answers make triples that are good enough.

Evidence is the mean of two logarithms of probabilities, neither above 0. So the first query alone rules out most
triples, and the second query is asked only for the answers that some query of the block finds likely enough."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Triples, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DivergedError
from dualkg.inference.calibration import PriorCorrection, log_odds_of
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel

Ids = npt.NDArray[np.int64]
Names = Sequence[str | int]


class ByRelation:
    """Triples looked up by their relation."""

    def __init__(self, triples: Triples, num_relations: int) -> None:
        self._triples = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
        self._starts = np.searchsorted(self._triples[:, 1], np.arange(num_relations + 1))

    def __getitem__(self, relation: int) -> Ids:
        return self._triples[self._starts[relation] : self._starts[relation + 1]]


@dataclass(frozen=True, eq=False)
class CandidateFilter:
    """The triples that are asked about: of each of `relations` the pairs of a head and a tail, but for known ones.

    With `types`, an entity is a head or a tail of a relation only where train has it so. An entity is not both of one
    triple unless such loops of the relation are common in train, and train has the entity in one of its triples:
    symmetric relations find nothing as plausible, and where loops are the rule, nothing else tells who has one.
    """

    graph: Graph
    relations: Ids
    heads: Ids | None  # all where None
    types: bool = False
    loops: bool = False  # of all relations
    known: tuple[str, ...] = SPLITS  # the splits whose triples are not new

    @classmethod
    def of(
        cls,
        graph: Graph,
        *,
        relations: Names | None = None,
        heads: Names | None = None,
        types: bool = False,
        loops: bool = False,
        known: Sequence[str] = SPLITS,
    ) -> CandidateFilter:
        """Relations and heads by name, label or id."""
        every = np.arange(graph.shape.num_relations)
        chosen = every if relations is None else _ids(graph.relations, relations)
        some = None if heads is None else _ids(graph.entities, heads)
        return cls(graph, chosen, some, types, loops, tuple(known))

    @cached_property
    def _train(self) -> ByRelation:
        return ByRelation(self.graph.train, self.graph.shape.num_relations)

    @cached_property
    def _looping(self) -> frozenset[int]:
        return relations_with_self_loops(self.graph)

    @cached_property
    def _known(self) -> ByRelation:
        joined = np.concatenate([self.graph.split(name) for name in self.known])
        return ByRelation(joined, self.graph.shape.num_relations)

    def heads_of(self, relation: int) -> Ids:
        """The heads asked about, in order."""
        found = self._side(relation, 0)
        return found if self.heads is None else np.intersect1d(found, self.heads)

    def tails_of(self, relation: int) -> Ids:
        return self._side(relation, 2)

    def _side(self, relation: int, column: int) -> Ids:
        if self.types:
            return np.unique(self._train[relation][:, column])
        return np.arange(self.graph.shape.num_entities)

    def train_triples(self, relation: int) -> Ids:
        return self._train[relation]

    def excluded_pairs(self, relation: int) -> Ids:
        """The pairs of head and tail that are known or loops, `(num_pairs, 2)`, in order."""
        num_entities = self.graph.shape.num_entities
        pairs = [self._known[relation][:, [0, 2]]]
        if not self.loops:
            pairs.append(self._idle_loops(relation).repeat(2).reshape(-1, 2))
        heads, tails = np.concatenate(pairs).T
        return np.stack(np.divmod(np.unique(heads * num_entities + tails), num_entities), axis=1)

    def _idle_loops(self, relation: int) -> Ids:
        """The entities of which a loop is not rank_score asking about."""
        every = np.arange(self.graph.shape.num_entities)
        return np.setdiff1d(every, self._train[relation][:, [0, 2]]) if relation in self._looping else every

    def answers_per_query(self, relation: int) -> tuple[float, float]:
        """How many tails a head of the relation has in train, and how many heads a tail has."""
        triples = self._train[relation]
        heads, tails = (max(1, len(np.unique(triples[:, column]))) for column in (0, 2))
        return len(triples) / heads, len(triples) / tails

    def in_candidates(self, pairs: Ids, relation: int) -> npt.NDArray[np.bool_]:
        """Which pairs of head and tail are asked about, or would be if they were not ruled out."""
        asked = self.heads_of(relation), self.tails_of(relation)
        return np.isin(pairs[:, 0], asked[0]) & np.isin(pairs[:, 1], asked[1])

    def holds(self, triples: Triples) -> npt.NDArray[np.bool_]:
        """Which of some triples may be among the new ones."""
        found, num_entities = np.zeros(len(triples), dtype=bool), self.graph.shape.num_entities
        for relation in self.relations.tolist():
            here = np.flatnonzero(triples[:, 1] == relation)
            pairs = triples[here][:, [0, 2]].astype(np.int64)
            keys, excluded_pairs = (
                one[:, 0] * num_entities + one[:, 1] for one in (pairs, self.excluded_pairs(relation))
            )
            found[here] = self.in_candidates(pairs, relation) & ~np.isin(keys, excluded_pairs)
        return found


def _ids(vocabulary: Vocabulary, names: Names) -> Ids:
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))


WORTH_NUMBA = 2**20  # scores of a block; for fewer it is not rank_score loading


def log_sums(scores: Tensor) -> Tensor:
    """`scores.logsumexp(-1)`; on a CPU several times faster where numba is installed."""
    large = scores.numel() >= WORTH_NUMBA and scores.dtype == torch.float32 and scores.device.type == "cpu"
    kernel = _kernel() if large else None
    return kernel(scores.contiguous()) if kernel else scores.logsumexp(-1)


@cache
def _kernel() -> Callable[[Tensor], Tensor] | None:
    from dualkg.kernels.cpu.compile import HAS_NUMBA
    from dualkg.kernels.cpu.softmax import logsumexp_rows

    return logsumexp_rows if HAS_NUMBA else None


EITHER = (0, 1)


@dataclass(frozen=True)
class Part:
    """The pairs of some heads and some tails of a relation; `side` is what its queries ask for.

    Of what they give all is new to its side in train, or nothing is; answers may be of both kinds.
    """

    relation: int
    side: Side
    new_given: int  # 0 or 1
    new_answers: tuple[int, ...]
    num_queries: int
    promise: float  # the larger, the likelier it has the best triples


class Parts:
    """How the triples of a candidate_filter are divided.

    Without prior_correction a relation is one part. With them nearly all that can be among the best has an entity that train
    has on its side: so the few heads that it has there are asked about, then the few tails for heads that are new, and
    at last what is left, where both are new.
    """

    def __init__(self, candidate_filter: CandidateFilter, prior_correction: PriorCorrection | None = None) -> None:
        self.candidate_filter, self.prior_correction = candidate_filter, prior_correction

    def in_order(self) -> list[Part]:
        """What is found first rules out more of the rest: so first what promises most, then what costs least."""
        found = [
            part
            for relation in self.candidate_filter.relations.tolist()
            for part in self._of(relation)
            if part.num_queries
        ]
        return sorted(found, key=lambda part: (-part.promise, part.num_queries, part.relation))

    def ends(self, part: Part) -> tuple[Ids, Ids, Ids]:
        """What the queries of a part give, the answers that count, each in order; and which answers are new, 0 or 1."""
        given, answers = self._sides(part.relation, part.side)
        new_given, new_answers = self._newness(part.relation, part.side)
        given = given[new_given[given] == part.new_given]
        return given, answers[np.isin(new_answers[answers], part.new_answers)], new_answers

    def _newness(self, relation: int, side: Side) -> tuple[Ids, Ids]:
        """Which entities are new where queries give one, and where they ask for one: 0 or 1, `(num_entities,)`.

        Without prior_correction none is told apart.
        """
        found = []
        for column in (0, 2):
            new = np.full(self.candidate_filter.graph.shape.num_entities, int(self.prior_correction is not None))
            new[self.candidate_filter.train_triples(relation)[:, column]] = 0
            found.append(new)
        return (found[0], found[1]) if side == "tail" else (found[1], found[0])

    def _sides(self, relation: int, side: Side) -> tuple[Ids, Ids]:
        heads, tails = self.candidate_filter.heads_of(relation), self.candidate_filter.tails_of(relation)
        return (heads, tails) if side == "tail" else (tails, heads)

    def _of(self, relation: int) -> Iterator[Part]:
        heads, tails = self._sides(relation, "tail")
        if not len(heads) or not len(tails):
            return
        newness = self._newness(relation, "tail")
        counts = [np.bincount(new[ids], minlength=2) for new, ids in zip(newness, (heads, tails), strict=True)]
        side = self._cheaper(relation, int(counts[0][0]), int(counts[1][0]))
        other: Side = "head" if side == "tail" else "tail"
        yield self._part(relation, side, 0, EITHER, counts)
        if self.prior_correction is not None:
            yield self._part(relation, other, 0, (1,), counts)
            yield self._part(relation, side, 1, (1,), counts)

    def _cheaper(self, relation: int, num_heads: int, num_tails: int) -> Side:
        """What is asked for: by the fewer queries, or of as many by those with more answers in train.

        The more answers a query has, the less likely is each, and the fewer pass.
        """
        tails_a_head, heads_a_tail = self.candidate_filter.answers_per_query(relation)
        return "tail" if (num_heads, heads_a_tail) <= (num_tails, tails_a_head) else "head"

    def _part(self, relation: int, side: Side, new: int, answers: tuple[int, ...], counts: list[Ids]) -> Part:
        given, asked = counts if side == "tail" else counts[::-1]
        number = int(given[new]) if asked[list(answers)].any() else 0
        promise = 0.0
        if self.prior_correction is not None:
            shares = self.prior_correction.priors[relation].reshape(2, 2).T  # by head, then by tail
            promise = float((shares if side == "tail" else shares.T)[new, list(answers)].max())
        return Part(relation, side, new, answers, number, promise)


Column = npt.NDArray[Any]
SLACK = 1e-3  # of log_probability: more than rounding can take from a triple that is as good as the last


class TripleColumns(NamedTuple):
    """Triples by column, `(num_triples,)` each."""

    heads: Column  # ids in int64
    relations: Column
    tails: Column
    score: Column  # in float32
    log_probability: Column

    @classmethod
    def none(cls) -> TripleColumns:
        ids, numbers = np.empty(0, np.int64), np.empty(0, np.float32)
        return cls(ids, ids, ids, numbers, numbers)

    @property
    def number(self) -> int:
        return len(self.heads)

    def chosen(self, which: Column) -> TripleColumns:
        return TripleColumns(*(column[which] for column in self))


@dataclass(frozen=True, eq=False)
class TopTriples:
    """At most `top` triples, none less probable than `least`; of what has been seen, no better one is left out.

    Better is of larger probability, or without prior_correction of more log_probability; where these are the same, of more log_probability
    and at last of the smaller ids.
    """

    top: int
    prior_correction: PriorCorrection | None = None
    least: float = 0.0
    found: TripleColumns = field(default_factory=TripleColumns.none)
    known: Column | None = None  # what the found are rank_score, where that was asked before

    def rank_score(self, found: TripleColumns) -> Column:
        """What triples are ordered by: log odds, or log_probability without prior_correction."""
        if self.prior_correction is None:
            return found.log_probability.astype(np.float64)
        return self.prior_correction.log_odds(*self._judged(self.prior_correction, found)).numpy()

    @cached_property
    def _rank_score(self) -> Column:
        return self.rank_score(self.found) if self.known is None else self.known

    def probability(self, found: TripleColumns) -> Column | None:
        """None without prior_correction."""
        if self.prior_correction is None:
            return None
        return self.prior_correction.probability(*self._judged(self.prior_correction, found)).numpy()

    def answer_probability(self, found: TripleColumns) -> Column | None:
        """The probability of each if its questions are known to lack an answer."""
        if self.prior_correction is None:
            return None
        return self.prior_correction.calibration.probability(*self._judged(self.prior_correction, found)).numpy()

    @staticmethod
    def _judged(prior_correction: PriorCorrection, found: TripleColumns) -> tuple[Tensor, Tensor, Tensor]:
        """What is asked of triples: log_probability, relations and kinds."""
        kinds = prior_correction.domain_range(np.stack([found.heads, found.relations, found.tails], axis=1))
        return (
            torch.from_numpy(found.log_probability).double(),
            torch.from_numpy(found.relations),
            torch.from_numpy(kinds),
        )

    def needed(self, relation: int) -> Tensor:
        """The log_probability that triples of a relation need to be among the best, `(2, 2)`: by head, then tail, 1 if new."""
        rank_score = float(self._rank_score.min()) if self.found.number >= self.top else -inf
        if self.prior_correction is None:
            needed = torch.full((2, 2), rank_score, dtype=torch.float64)
        else:
            needed = self.prior_correction.required_log_probability(max(rank_score, self._least_worth), relation)
        return torch.where(needed.isfinite(), needed - SLACK * (1 + needed.abs()), needed)

    @property
    def _least_worth(self) -> float:
        """Of a triple that is probable enough."""
        return -inf if self.prior_correction is None else log_odds_of(self.least)

    def joined(self, others: TripleColumns) -> TopTriples:
        """The best of these and others."""
        if not others.number:
            return self
        both = TripleColumns(*map(np.concatenate, zip(self.found, others, strict=True)))
        rank_score = np.concatenate([self._rank_score, self.rank_score(others)])
        if self.least > 0 and (probability := self.probability(both)) is not None:
            enough = probability >= self.least
            both, rank_score = both.chosen(enough), rank_score[enough]
        if both.number > self.top:
            chosen = rank_score >= np.partition(rank_score, -self.top)[-self.top]
            both, rank_score = both.chosen(chosen), rank_score[chosen]
        if both.number > self.top:  # some are as good as the last
            chosen = _best_first(both, rank_score)[: self.top]
            both, rank_score = both.chosen(chosen), rank_score[chosen]
        return replace(self, found=both, known=rank_score)

    def ordered(self) -> TripleColumns:
        """The triples, best first."""
        return self.found.chosen(_best_first(self.found, self._rank_score))


def _best_first(found: TripleColumns, rank_score: Column) -> Column:
    return np.lexsort((found.tails, found.relations, found.heads, -found.log_probability, -rank_score))


# Scores that are held at once: on a CPU few enough to stay near it, on a GPU enough to keep it busy.
SCORES = {"cpu": 2**22, "cuda": 2**26}


class Queries:
    """All queries of a relation that ask for tails, or for heads; and how likely an answer is among all entities.

    log p(answer | query) is its score less the query's normalizer: the logarithm of the sum of exp(score) over all
    entities, which is found once.
    """

    def __init__(self, model: Model, relation: int, side: Side, *, asked: Tensor | None = None) -> None:
        self.model, self.relation, self.side = model, relation, side
        if asked is None:
            asked = torch.zeros(2, model.shape.num_entities)
            asked[0] = torch.nan
        # Of every query the normalizer, and the largest logarithm of a probability; before it is asked, NaN and 0.
        self.asked = asked.to(model.device)

    @property
    def normalizers(self) -> Tensor:
        return self.asked[0]

    @property
    def largest(self) -> Tensor:
        """What no answer's log-probability is above."""
        return self.asked[1]

    @property
    def at_once(self) -> int:
        """How many queries are asked together."""
        return max(1, SCORES[self.model.device.type] // self.model.shape.num_entities)

    def scores(self, given: Tensor) -> Tensor:
        """Of every entity as answer, `(batch, num_entities)`."""
        relations = torch.full_like(given, self.relation)
        if self.side == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = log_sums(scores)
        self.normalizers[given], self.largest[given] = normalizers, scores.amax(-1) - normalizers
        if not bool(normalizers.isfinite().all()):
            raise DivergedError(
                "The model scores NaN or infinity, so it cannot say which triples are plausible. Its training has "
                "diverged: lower the learning rate or raise the regularizer's weight."
            )
        return scores

    def ask(self, given: Tensor) -> None:
        """See that queries have their normalizers."""
        for fresh in torch.split(given[self.normalizers[given].isnan()], self.at_once):
            if len(fresh):
                self.scores(fresh)

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """Of some entities as answers, `(batch, num_answers)`."""
        parts = [self._some(part, answers) for part in torch.split(given, self._size(len(answers)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, given: Tensor, answers: Tensor) -> Tensor:
        model, relations = self.model, torch.full_like(given, self.relation)
        if self.side == "tail":
            return model.candidate_scores(model.factors(given, relations, None), answers, "tail")
        if model.reciprocal:
            inverse = relations + model.shape.num_relations
            return model.candidate_scores(model.factors(given, inverse, None), answers, "tail")
        return model.candidate_scores(model.factors(None, relations, given), answers, "head")

    def _size(self, num_answers: int) -> int:
        """How many queries are answered together: in some models a score takes as much memory as a vector."""
        bilinear = isinstance(self.model, BilinearModel)
        numbers = num_answers * (1 if bilinear else self.model.embedding.entities.shape[1])
        return max(1, SCORES[self.model.device.type] // max(1, numbers))


LEAST = -1e30  # less log_probability than any triple has, and more than −∞


@dataclass(frozen=True, eq=False)
class Asked:
    """The queries of a relation from both ends; which answers count, and which pairs do not."""

    first: Queries
    second: Queries
    answers: Tensor  # in order
    excluded_pairs: Tensor  # `(num_pairs, 2)`: what a query gives and an answer, in order of the first
    new_answers: Tensor  # whether an entity is new as an answer, 0 or 1, `(num_entities,)`


def best_of(asked: Asked, given: Tensor, *, needed: Tensor, top: int) -> TripleColumns:
    """The new triples of a block with as much log_probability as is needed: the best `top`, and what ties with the last.

    `needed` is for answers that train has on their side, and for new ones, `(2,)`; there are so many triples of either.
    `given` is in order.
    """
    needed = needed.clamp(min=LEAST).to(asked.answers.device)
    given, answers, scores = _likely(asked, given, needed)
    answers, scores, rotated = _from_the_other_end(asked, given, answers, scores, needed)
    if not scores.numel():
        return TripleColumns.none()
    log_probability = rotated - asked.second.normalizers[answers]
    log_probability.add_(scores).sub_(asked.first.normalizers[given, None]).div_(2)
    enough = _enough(log_probability, asked.new_answers[answers], needed, top)
    rows, columns = (log_probability >= enough).nonzero(as_tuple=True)
    ends, scored = (given[rows], answers[columns]), scores
    if asked.first.side == "head":
        ends, scored = (ends[1], ends[0]), rotated
    relations = torch.full_like(rows, asked.first.relation)
    found = (ends[0], relations, ends[1], scored[rows, columns], log_probability[rows, columns])
    return TripleColumns(*(column.cpu().numpy() for column in found))


def _likely(asked: Asked, given: Tensor, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and answers that share a triple with so much log_probability, as far as can be told yet; and all scores."""
    answers, scores = asked.answers, asked.first.scores(given)
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]
    _exclude(scores, asked, given)
    # Of the logarithm that the first query tells.
    first = 2 * needed[asked.new_answers[answers]] - asked.second.largest[answers]
    floor = asked.first.normalizers[given] + first.min()
    rows = scores.amax(1) >= floor
    given, scores = given[rows], scores[rows]
    columns = (scores >= floor[rows, None]).any(0)
    answers, scores, first = answers[columns], scores[:, columns], first[columns]
    if len(answers) and first.min() < first.max():  # some answers were asked about before, or are of the other kind
        enough = scores >= asked.first.normalizers[given, None] + first
        rows, columns = enough.any(1), enough.any(0)
        given, answers, scores = given[rows], answers[columns], scores[rows][:, columns]
    return given, answers, scores


def _exclude(scores: Tensor, asked: Asked, given: Tensor) -> None:
    """Write −∞ over pairs that do not count."""
    ends = torch.searchsorted(asked.excluded_pairs[:, 0].contiguous(), torch.stack([given[0], given[-1] + 1]))
    pairs = asked.excluded_pairs[ends[0] : ends[1]]
    rows, columns = (
        torch.searchsorted(ids, pairs[:, side].contiguous()).clamp_(max=len(ids) - 1)
        for side, ids in enumerate((given, asked.answers))
    )
    there = (given[rows] == pairs[:, 0]) & (asked.answers[columns] == pairs[:, 1])
    scores[rows[there], columns[there]] = -torch.inf


def _from_the_other_end(
    asked: Asked, given: Tensor, answers: Tensor, scores: Tensor, needed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The answers that are left once the second queries are asked, and the scores of their pairs from both ends.

    A normalizer is at least that of the block's own entities, and a query that this rules out is not asked in full.
    """
    if not scores.numel():
        return answers, scores, scores
    second, rotated = asked.second, scores
    if second.model.reciprocal:  # without inverse relations both ends have one score
        rotated = second.scores_of(answers, given).T.contiguous()  # what follows goes through it row by row
    floor = torch.where(second.normalizers[answers].isnan(), rotated.logsumexp(0), second.normalizers[answers])
    bound = scores - asked.first.normalizers[given, None]
    bound = bound.add_(rotated).sub_(floor)
    columns = (bound >= 2 * needed[asked.new_answers[answers]]).any(0)
    second.ask(answers[columns])
    return answers[columns], scores[:, columns], rotated[:, columns]


def _enough(log_probability: Tensor, new: Tensor, needed: Tensor, top: int) -> Tensor:
    """For each answer what is needed, or where more than `top` triples with its kind of answers have that: their best.

    Which of two kinds is more probable is not told by log_probability alone, so each is looked at for itself.
    """
    enough = needed[new]
    for kind in (0, 1):
        columns = (new == kind).nonzero().squeeze(1)
        of_kind = log_probability if len(columns) == len(new) else log_probability[:, columns]
        if int((of_kind >= needed[kind]).sum()) > top:
            last = float(of_kind.flatten().topk(top).values[-1])
            enough[columns] = enough[columns].clamp(min=last)
    return enough


@dataclass(frozen=True, eq=False)
class State:
    """How far a search is: all that going on needs."""

    pool: TopTriples
    num_done: int = 0  # of the first queries of all parts
    asked: Tensor | None = None  # of the second queries of the part that is under way


class Search:
    """A model asked about the triples of a candidate_filter."""

    def __init__(
        self, model: Model, candidate_filter: CandidateFilter, prior_correction: PriorCorrection | None = None
    ) -> None:
        self.model, self.candidate_filter = model, candidate_filter
        self._parts = Parts(candidate_filter, prior_correction)
        self._in_order = self._parts.in_order()

    @property
    def num_queries(self) -> int:
        """Of the sides that are asked first."""
        return sum(part.num_queries for part in self._in_order)

    def run(self, state: State) -> Iterator[State]:
        """Go on from a state; the states after each block of queries."""
        before = 0
        for part in self._in_order:
            if before + part.num_queries > state.num_done:
                state = yield from self._part(part, before, state)
            before += part.num_queries

    def _part(self, part: Part, before: int, state: State) -> Generator[State, None, State]:
        skipped = max(0, state.num_done - before)
        if not self._possible(part, state.pool).any():
            state = State(state.pool, before + part.num_queries)
            yield state
            return state
        given, asked = self._asked(part, state.asked if skipped else None)
        for block in torch.split(given[skipped:], asked.first.at_once):
            pool = state.pool.joined(self._best_of(part, asked, block, state.pool))
            skipped += len(block)
            state = State(pool, before + skipped, asked.second.asked.clone())
            yield state
        return state

    @staticmethod
    def _needed(part: Part, pool: TopTriples) -> Tensor:
        """The log_probability that triples of a part need, by whether their answers are new, `(2,)`."""
        needed = pool.needed(part.relation)
        return (needed if part.side == "tail" else needed.T)[part.new_given]

    def _possible(self, part: Part, pool: TopTriples) -> Tensor:
        """Whether answers that are new or not may make triples among the best: log_probability is never above 0."""
        asked_for = torch.zeros(2, dtype=torch.bool)
        asked_for[list(part.new_answers)] = True
        return asked_for & (self._needed(part, pool) <= 0)

    def _best_of(self, part: Part, asked: Asked, block: Tensor, pool: TopTriples) -> TripleColumns:
        """The triples of a block that may be among the best of all."""
        possible = self._possible(part, pool).to(block.device)
        answers = asked.answers[possible[asked.new_answers[asked.answers]]]
        if not len(answers):
            return TripleColumns.none()
        needed = self._needed(part, pool).float()
        return best_of(replace(asked, answers=answers), block, needed=needed, top=pool.top)

    def _asked(self, part: Part, already: Tensor | None) -> tuple[Tensor, Asked]:
        """What the first queries give, and what is asked of them."""
        other: Side = "head" if part.side == "tail" else "tail"
        excluded_pairs = self.candidate_filter.excluded_pairs(part.relation)
        if part.side == "head":
            excluded_pairs = excluded_pairs[np.argsort(excluded_pairs[:, 1], kind="stable"), ::-1].copy()
        given, answers, new, pairs = (
            torch.from_numpy(ids).to(self.model.device) for ids in (*self._parts.ends(part), excluded_pairs)
        )
        first = Queries(self.model, part.relation, part.side)
        second = Queries(self.model, part.relation, other, asked=already)
        return given, Asked(first, second, answers, pairs, new)
