"""The search for the most probable triples that a graph does not have: exact, resumable, in bounded memory.

The log-probability of a triple is the mean of log p(tail | head, relation) and log p(head | relation, tail), neither
above 0. So the scores of one query exclude most of its answers, and the query from the other end is scored only for
answers that may still be among the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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

MAX_SCORES = {"cpu": 2**22, "cuda": 2**26}  # of a block: few enough for a CPU's cache, enough to keep a GPU busy
MIN_SCORES_FOR_NUMBA = 2**20  # for fewer it is not worth loading
MIN_LOG_PROBABILITY = -1e30  # below that of any triple, and finite
SLACK = 1e-3  # relative; more than rounding can take from a triple that ties with the last one

Ids = npt.NDArray[np.int64]
Column = npt.NDArray[Any]
Names = Sequence[str | int]


# -- which triples are candidates -----------------------------------------------------------------------------


class TriplesByRelation:
    """The triples of each relation."""

    def __init__(self, triples: Triples, num_relations: int) -> None:
        self._triples = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
        self._starts = np.searchsorted(self._triples[:, 1], np.arange(num_relations + 1))

    def __getitem__(self, relation: int) -> Ids:
        return self._triples[self._starts[relation] : self._starts[relation + 1]]


@dataclass(frozen=True, eq=False)
class CandidateFilter:
    """The candidate triples: for each of `relations` all pairs of a head and a tail, except known triples.

    With `types`, a head or tail of a relation must be in its domain or range in train. Self-loops are excluded unless
    they are common among the relation's training triples and one of these has the entity: models of symmetric relations
    find them the most plausible triples of all.
    """

    graph: Graph
    relations: Ids
    heads: Ids | None  # None: all
    types: bool = False
    loops: bool = False  # whether to keep all self-loops
    known: tuple[str, ...] = SPLITS  # splits whose triples are excluded

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
        """A filter with relations and heads by name, label or id."""
        relation_ids = np.arange(graph.shape.num_relations) if relations is None else _ids(graph.relations, relations)
        head_ids = None if heads is None else _ids(graph.entities, heads)
        return cls(graph, relation_ids, head_ids, types, loops, tuple(known))

    @cached_property
    def train(self) -> TriplesByRelation:
        return TriplesByRelation(self.graph.train, self.graph.shape.num_relations)

    @cached_property
    def _known(self) -> TriplesByRelation:
        triples = np.concatenate([self.graph.split(name) for name in self.known])
        return TriplesByRelation(triples, self.graph.shape.num_relations)

    @cached_property
    def _with_self_loops(self) -> frozenset[int]:
        return relations_with_self_loops(self.graph)

    def heads_and_tails(self, relation: int) -> tuple[Ids, Ids]:
        """The candidate heads and tails of a relation, ascending."""
        if self.types:
            heads, tails = (np.unique(self.train[relation][:, column]) for column in (0, 2))
        else:
            heads = tails = np.arange(self.graph.shape.num_entities)
        return heads if self.heads is None else np.intersect1d(heads, self.heads), tails

    def excluded_pairs(self, relation: int) -> Ids:
        """The pairs of head and tail that are known or self-loops, `(num_pairs, 2)`, ascending."""
        num_entities = self.graph.shape.num_entities
        keys = self._known[relation][:, [0, 2]] @ np.array([num_entities, 1])
        if not self.loops:
            looped = np.arange(num_entities)
            if relation in self._with_self_loops:
                looped = np.setdiff1d(looped, self.train[relation][:, [0, 2]])
            keys = np.concatenate([keys, looped * (num_entities + 1)])
        return np.stack(np.divmod(np.unique(keys), num_entities), axis=1)


def _ids(vocabulary: Vocabulary, names: Names) -> Ids:
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))


# -- the best triples so far ----------------------------------------------------------------------------------


class TripleColumns(NamedTuple):
    """Triples by column, `(num_triples,)` each."""

    heads: Column  # ids in int64
    relations: Column
    tails: Column
    scores: Column  # in float32
    log_probabilities: Column
    sort_keys: Column  # in float64: log-odds, or log-probabilities without a calibration

    @classmethod
    def empty(cls) -> TripleColumns:
        ids, numbers = np.empty(0, np.int64), np.empty(0, np.float32)
        return cls(ids, ids, ids, numbers, numbers, np.empty(0, np.float64))

    def select(self, chosen: Column) -> TripleColumns:
        return TripleColumns(*(column[chosen] for column in self))

    def best_first(self) -> TripleColumns:
        """By decreasing sort key; ties by log-probability and then by ascending ids."""
        keys = (self.tails, self.relations, self.heads, -self.log_probabilities, -self.sort_keys)
        return self.select(np.lexsort(keys))


def calibration_inputs(columns: Sequence[Column], correction: PriorCorrection) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities, relations and domain/range patterns of triples."""
    heads, relations, tails, _, log_probabilities = columns[:5]
    patterns = correction.domain_range(np.stack([heads, relations, tails], axis=1))
    return tuple(map(torch.from_numpy, (log_probabilities.astype(np.float64), relations, patterns)))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class TopTriples:
    """The best `size` triples so far, none of them less probable than `min_probability`."""

    size: int
    prior_correction: PriorCorrection | None = None
    min_probability: float = 0.0
    columns: TripleColumns = field(default_factory=TripleColumns.empty)

    def required(self, relation: int) -> Tensor:
        """The log-probability that triples of a relation need, `(2, 2)`: by head and by tail, 1 if new to its side."""
        last = float(self.columns.sort_keys.min()) if len(self.columns.heads) >= self.size else -inf
        if self.prior_correction is None:
            required = torch.full((2, 2), last, dtype=torch.float64)
        else:
            last = max(last, log_odds_of(self.min_probability))
            required = self.prior_correction.required_log_probability(last, relation)
        return torch.where(required.isfinite(), required - SLACK * (1 + required.abs()), required)

    def merge(self, others: Sequence[Column]) -> TopTriples:
        """The best of these and other triples, which are given by the first five columns."""
        if not len(others[0]):
            return self
        if self.prior_correction is None:
            new = TripleColumns(*[*others, others[4].astype(np.float64)])
        else:
            inputs = calibration_inputs(others, self.prior_correction)
            new = TripleColumns(*[*others, self.prior_correction.log_odds(*inputs).numpy()])
            if self.min_probability > 0:
                new = new.select(self.prior_correction.probability(*inputs).numpy() >= self.min_probability)
        both = TripleColumns(*map(np.concatenate, zip(self.columns, new, strict=True)))
        if len(both.heads) > self.size:
            both = both.select(both.sort_keys >= np.partition(both.sort_keys, -self.size)[-self.size])
        if len(both.heads) > self.size:  # some tie with the last one
            both = both.best_first().select(np.arange(self.size))
        return replace(self, columns=both)


# -- the order of the search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation for one side.

    The entities that they give are all new to their side of the relation in train, or all known there; `new_answers`
    says which answers are candidates: known ones (0), new ones (1), or both.
    """

    relation: int
    target: Side
    new_given: int  # 0 or 1
    new_answers: tuple[int, ...]
    num_queries: int
    prior: float  # of its most probable domain/range pattern


class SearchPlan:
    """The parts of a search, in the order in which they are searched.

    Without a calibration a relation is one part. With one, nearly all triples that can be among the best have an entity
    in the domain or range of their relation. So the few entities on one side are queried, then the few on the other
    side for answers that are new to the first, and at last the pairs in which both are new.
    """

    def __init__(self, candidates: CandidateFilter, prior_correction: PriorCorrection | None = None) -> None:
        self.candidates, self.prior_correction = candidates, prior_correction
        parts = (part for relation in candidates.relations.tolist() for part in self._parts(relation))
        # The better the first triples, the more their bound excludes: most probable parts first, then the cheapest.
        self.parts = sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))

    def entities(self, part: SearchPart) -> tuple[Ids, Ids, Ids]:
        """The entities that the queries give and their candidate answers, ascending; and which answers are new."""
        (given, answers), (new_given, new_answers) = self._sides(part.relation, part.target)
        given = given[new_given[given] == part.new_given]
        return given, answers[np.isin(new_answers[answers], part.new_answers)], new_answers

    def _sides(self, relation: int, target: Side) -> tuple[tuple[Ids, Ids], tuple[Ids, Ids]]:
        """Candidates for the given side and for the target, and whether each entity is new there, 0 or 1.

        Without a calibration no entity counts as new.
        """
        new = np.full((2, self.candidates.graph.shape.num_entities), int(self.prior_correction is not None))
        for side, column in enumerate((0, 2)):
            new[side, self.candidates.train[relation][:, column]] = 0
        heads, tails = self.candidates.heads_and_tails(relation)
        return ((heads, tails), (new[0], new[1])) if target == "tail" else ((tails, heads), (new[1], new[0]))

    def _parts(self, relation: int) -> Iterator[SearchPart]:
        (heads, tails), (new_heads, new_tails) = self._sides(relation, "tail")
        if not len(heads) or not len(tails):
            return
        counts = np.bincount(new_heads[heads], minlength=2), np.bincount(new_tails[tails], minlength=2)
        first = self._first_target(relation, int(counts[0][0]), int(counts[1][0]))
        kinds: list[tuple[Side, int, tuple[int, ...]]] = [(first, 0, (0, 1))]
        priors = torch.zeros(2, 2)  # by head, then by tail
        if self.prior_correction is not None:
            kinds += [("head" if first == "tail" else "tail", 0, (1,)), (first, 1, (1,))]
            priors = self.prior_correction.priors[relation].reshape(2, 2).T
        for target, new, new_answers in kinds:
            num_given, num_answers = counts if target == "tail" else counts[::-1]
            if num_given[new] and num_answers[list(new_answers)].any():
                prior = float((priors if target == "tail" else priors.T)[new, list(new_answers)].max())
                yield SearchPart(relation, target, new, new_answers, int(num_given[new]), prior)

    def _first_target(self, relation: int, num_heads: int, num_tails: int) -> Side:
        """The target with fewer queries; if equal, with more answers per query: each is less likely, and fewer pass."""
        train = self.candidates.train[relation]
        per_head, per_tail = (len(train) / max(1, len(np.unique(train[:, column]))) for column in (0, 2))
        return "tail" if (num_heads, per_tail) <= (num_tails, per_head) else "head"


# -- scores ---------------------------------------------------------------------------------------------------


def logsumexp(scores: Tensor) -> Tensor:
    """`scores.logsumexp(-1)`; several times faster on a CPU with numba."""
    if scores.numel() >= MIN_SCORES_FOR_NUMBA and scores.dtype == torch.float32 and scores.device.type == "cpu":
        from dualkg.kernels import cpu

        if cpu.HAS_NUMBA:
            return cpu.logsumexp_rows(scores.contiguous())
    return scores.logsumexp(-1)


class RelationQueries:
    """All queries of a relation for one side: log p(answer | query) is a score minus the query's log-normalizer.

    `cache` `(2, num_entities)` holds the log-normalizer of each query, and the largest log-probability of its answers;
    NaN and 0 before the query is scored.
    """

    def __init__(self, model: Model, relation: int, target: Side, *, cache: Tensor | None = None) -> None:
        self.model, self.relation, self.target = model, relation, target
        if cache is None:
            cache = torch.zeros(2, model.shape.num_entities)
            cache[0] = torch.nan
        self.cache = cache.to(model.device)

    @property
    def normalizers(self) -> Tensor:
        return self.cache[0]

    @property
    def max_log_probabilities(self) -> Tensor:
        return self.cache[1]

    @property
    def block_size(self) -> int:
        """The number of queries in a block."""
        return max(1, MAX_SCORES[self.model.device.type] // self.model.shape.num_entities)

    def scores(self, given: Tensor) -> Tensor:
        """The scores of all entities as answers, `(batch, num_entities)`; fills the cache."""
        relations = torch.full_like(given, self.relation)
        if self.target == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = logsumexp(scores)
        self.normalizers[given], self.max_log_probabilities[given] = normalizers, scores.amax(-1) - normalizers
        if not bool(normalizers.isfinite().all()):
            raise DivergedError(
                "The model scores NaN or infinity, so it cannot say which triples are plausible. Its training has "
                "diverged: lower the learning rate or raise the regularizer's weight."
            )
        return scores

    def fill_cache(self, given: Tensor) -> None:
        """Score the queries that are not in the cache."""
        for block in torch.split(given[self.normalizers[given].isnan()], self.block_size):
            if len(block):
                self.scores(block)

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """The scores of some entities as answers, `(batch, num_answers)`."""
        model, relation, target = self.model, self.relation, self.target
        if target == "head" and model.reciprocal:
            relation, target = relation + model.shape.num_relations, "tail"
        # Other models than bilinear ones hold a vector for each score.
        width = 1 if isinstance(model, BilinearModel) else model.embedding.entities.shape[1]
        blocks = []
        for block in torch.split(given, max(1, MAX_SCORES[model.device.type] // max(1, len(answers) * width))):
            relations = torch.full_like(block, relation)
            ends = (block, relations, None) if target == "tail" else (None, relations, block)
            blocks.append(model.candidate_scores(model.factors(*ends), answers, target))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


# -- the search -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PartSearch:
    """The queries of a part from both ends; the second ones are scored for promising answers only."""

    first: RelationQueries
    second: RelationQueries
    answers: Tensor  # candidates, ascending
    excluded: Tensor  # `(num_pairs, 2)`: given entity and answer, by ascending given entities
    new: Tensor  # whether an entity is new as an answer, 0 or 1, `(num_entities,)`

    def best(self, given: Tensor, *, required: Tensor, top: int) -> tuple[Column, ...]:
        """Columns of the triples of a block with the required log-probability: the best `top`, and ties of the last.

        `required` `(2,)` is for answers that are known on their side in train and for new ones; `top` triples of either
        are returned. `given` is ascending.
        """
        required = required.clamp(min=MIN_LOG_PROBABILITY).to(self.answers.device)
        given, answers, scores = self._promising(given, required)
        answers, scores, reverse = self._score_from_other_end(given, answers, scores, required)
        if not scores.numel():
            return TripleColumns.empty()[:5]
        log_probabilities = reverse - self.second.normalizers[answers]
        log_probabilities.add_(scores).sub_(self.first.normalizers[given, None]).div_(2)
        bounds = self._bounds(log_probabilities, answers, required, top)
        rows, columns = (log_probabilities >= bounds).nonzero(as_tuple=True)
        heads, tails = given[rows], answers[columns]
        if self.first.target == "head":
            heads, tails, scores = tails, heads, reverse
        relations = torch.full_like(rows, self.first.relation)
        triples = (heads, relations, tails, scores[rows, columns], log_probabilities[rows, columns])
        return tuple(column.cpu().numpy() for column in triples)

    def _promising(self, given: Tensor, required: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and answers with a pair that the first query does not exclude, and the scores of all pairs."""
        answers, scores = self.answers, self.first.scores(given)
        if len(answers) < scores.shape[1]:
            scores = scores[:, answers]
        self._exclude(scores, given)
        # Required of the first query's log-probability, if the second query's is as large as it can be.
        first = 2 * required[self.new[answers]] - self.second.max_log_probabilities[answers]
        floor = self.first.normalizers[given] + first.min()
        rows = scores.amax(1) >= floor
        given, scores = given[rows], scores[rows]
        columns = (scores >= floor[rows, None]).any(0)
        answers, scores, first = answers[columns], scores[:, columns], first[columns]
        if len(answers) and first.min() < first.max():
            passing = scores >= self.first.normalizers[given, None] + first
            rows, columns = passing.any(1), passing.any(0)
            given, answers, scores = given[rows], answers[columns], scores[rows][:, columns]
        return given, answers, scores

    def _exclude(self, scores: Tensor, given: Tensor) -> None:
        """Write −∞ over the scores of excluded pairs."""
        ends = torch.searchsorted(self.excluded[:, 0].contiguous(), torch.stack([given[0], given[-1] + 1]))
        pairs = self.excluded[ends[0] : ends[1]]
        rows, columns = (
            torch.searchsorted(ids, pairs[:, side].contiguous()).clamp_(max=len(ids) - 1)
            for side, ids in enumerate((given, self.answers))
        )
        present = (given[rows] == pairs[:, 0]) & (self.answers[columns] == pairs[:, 1])
        scores[rows[present], columns[present]] = -torch.inf

    def _score_from_other_end(
        self, given: Tensor, answers: Tensor, scores: Tensor, required: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The answers that remain after scoring the second queries, and the scores of all pairs from both ends.

        A normalizer is at least that of the block's entities; queries that this bound excludes are not scored in full.
        """
        if not scores.numel():
            return answers, scores, scores
        second, reverse = self.second, scores
        if second.model.reciprocal:  # without reciprocal relations both ends have the same score
            reverse = second.scores_of(answers, given).T.contiguous()  # it is read row by row from here on
        floor = torch.where(second.normalizers[answers].isnan(), reverse.logsumexp(0), second.normalizers[answers])
        bound = scores - self.first.normalizers[given, None]
        bound = bound.add_(reverse).sub_(floor)
        columns = (bound >= 2 * required[self.new[answers]]).any(0)
        second.fill_cache(answers[columns])
        return answers[columns], scores[:, columns], reverse[:, columns]

    def _bounds(self, log_probabilities: Tensor, answers: Tensor, required: Tensor, top: int) -> Tensor:
        """The required log-probability of each answer, raised to that of the `top`-th triple where there are more.

        Known and new answers are counted apart: their log-probabilities do not compare.
        """
        new = self.new[answers]
        bounds = required[new]
        for pattern in (0, 1):
            columns = (new == pattern).nonzero().squeeze(1)
            chosen = log_probabilities if len(columns) == len(new) else log_probabilities[:, columns]
            if int((chosen >= required[pattern]).sum()) > top:
                bounds[columns] = bounds[columns].clamp(min=float(chosen.flatten().topk(top).values[-1]))
        return bounds


@dataclass(frozen=True, eq=False)
class SearchState:
    """The progress of a search; it resumes from here."""

    top: TopTriples
    num_done: int = 0  # of the first queries of all parts
    cache: Tensor | None = None  # of the second queries of the current part


class Search:
    """A search for the best candidate triples of a model."""

    def __init__(
        self, model: Model, candidates: CandidateFilter, prior_correction: PriorCorrection | None = None
    ) -> None:
        self.model, self.plan = model, SearchPlan(candidates, prior_correction)

    @property
    def num_queries(self) -> int:
        """The number of first queries of all parts."""
        return sum(part.num_queries for part in self.plan.parts)

    def run(self, state: SearchState) -> Iterator[SearchState]:
        """The states after each block of queries, from a state on."""
        start = 0
        for part in self.plan.parts:
            if start + part.num_queries > state.num_done:
                for new_state in self._run_part(part, start, state):
                    state = new_state
                    yield state
            start += part.num_queries

    def _run_part(self, part: SearchPart, start: int, state: SearchState) -> Iterator[SearchState]:
        if not _possible(part, state.top).any():
            yield SearchState(state.top, start + part.num_queries)
            return
        num_done, top = max(0, state.num_done - start), state.top
        given, search = self._prepare(part, state.cache if num_done else None)
        for block in torch.split(given[num_done:], search.first.block_size):
            possible = _possible(part, top).to(block.device)
            answers = search.answers[possible[search.new[search.answers]]]
            if len(answers):
                required = _required(part, top).float()
                top = top.merge(replace(search, answers=answers).best(block, required=required, top=top.size))
            num_done += len(block)
            yield SearchState(top, start + num_done, search.second.cache.clone())

    def _prepare(self, part: SearchPart, cache: Tensor | None) -> tuple[Tensor, PartSearch]:
        """The entities that the first queries give, and the search of their answers."""
        excluded = self.plan.candidates.excluded_pairs(part.relation)
        if part.target == "head":
            excluded = excluded[np.argsort(excluded[:, 1], kind="stable"), ::-1].copy()
        given, answers, new, pairs = (
            torch.from_numpy(ids).to(self.model.device) for ids in (*self.plan.entities(part), excluded)
        )
        first = RelationQueries(self.model, part.relation, part.target)
        other: Side = "head" if part.target == "tail" else "tail"
        second = RelationQueries(self.model, part.relation, other, cache=cache)
        return given, PartSearch(first, second, answers, pairs, new)


def _required(part: SearchPart, top: TopTriples) -> Tensor:
    """The log-probability that triples of a part need, by whether the answer is new, `(2,)`."""
    required = top.required(part.relation)
    return (required if part.target == "tail" else required.T)[part.new_given]


def _possible(part: SearchPart, top: TopTriples) -> Tensor:
    """Whether known and new answers can make triples among the best, `(2,)`: log-probabilities are never above 0."""
    candidates = torch.zeros(2, dtype=torch.bool)
    candidates[list(part.new_answers)] = True
    return candidates & (_required(part, top) <= 0)
