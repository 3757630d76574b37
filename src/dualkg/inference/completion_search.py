"""The search for the most probable triples that a graph does not have: exact, resumable, in bounded memory.

The log-probability of a triple is the mean of log p(tail | head, relation) and log p(head | relation, tail), neither
above 0. So the scores of one query exclude most of its answers, and the query from the other end is scored only for
answers that may still be among the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Triples, relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.inference.calibration import PriorCorrection, log_odds_of
from dualkg.inference.scoring import Ids, check_finite
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.ensemble import EnsembleModel

MAX_SCORES = {"cpu": 2**22, "cuda": 2**26}  # of a block: few enough for a CPU's cache, enough to keep a GPU busy
MIN_SCORES_FOR_NUMBA = 2**20  # for fewer it is not worth loading
MIN_LOG_PROBABILITY = -1e30  # below that of any triple, and finite
SLACK = 1e-3  # relative; more than rounding can take from a triple that ties with the last one

Names = Sequence[str | int]
# One new triple; its sort key is the log odds, or without a calibration the log-probability.
NEW_TRIPLE = np.dtype(
    [("head", "i8"), ("relation", "i8"), ("tail", "i8"), ("score", "f4"), ("log_probability", "f4"), ("sort_key", "f8")]
)
NewTriples = npt.NDArray[Any]


# -- which triples are candidates -----------------------------------------------------------------------------


class CandidateFilter:
    """The candidate triples: for each of `relations` all pairs of a head and a tail, except known triples.

    Relations and heads are given by name, label or id. With `types`, a head or tail of a relation must be in its domain
    or range in train. Self-loops are excluded, without `loops`, unless they are common among the relation's training
    triples and one of these has the entity: models of symmetric relations find them the most plausible triples of all.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        relations: Names | None = None,
        heads: Names | None = None,
        types: bool = False,
        loops: bool = False,
        known: Sequence[str] = SPLITS,
    ) -> None:
        self.graph, self.types, self.loops, self.known = graph, types, loops, known
        self.relations = np.arange(graph.shape.num_relations) if relations is None else _ids(graph.relations, relations)
        self.heads = None if heads is None else _ids(graph.entities, heads)
        self.train = _by_relation(graph.train, graph.shape.num_relations)
        self._known = _by_relation(np.concatenate([graph.split(name) for name in known]), graph.shape.num_relations)
        self._with_self_loops = relations_with_self_loops(graph)

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

    def new_to(self, relation: int) -> Ids:
        """Whether entities are new (1) to the domain and to the range of a relation in train, `(2, num_entities)`."""
        new = np.ones((2, self.graph.shape.num_entities), dtype=np.int64)
        for side, column in enumerate((0, 2)):
            new[side, self.train[relation][:, column]] = 0
        return new


def _ids(vocabulary: Vocabulary, names: Names | str) -> Ids:
    names = [names] if isinstance(names, str) else names
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))


def _by_relation(triples: Triples, num_relations: int) -> list[Ids]:
    """The triples of each relation."""
    ordered = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
    return np.split(ordered, np.searchsorted(ordered[:, 1], np.arange(1, num_relations)))


# -- the parts of a search ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation from one side and candidate answers, each by whether it is new (1) to its side in train."""

    relation: int
    given: int  # 0: heads, to find tails; 1: tails, to find heads
    new_given: tuple[int, ...]
    new_answers: tuple[int, ...]
    num_queries: int
    prior: float  # of its most probable domain/range pattern

    def entities(self, candidates: CandidateFilter) -> tuple[Ids, Ids, Ids]:
        """The entities that the queries give and their candidate answers, ascending; and which answers are new."""
        ends, new = candidates.heads_and_tails(self.relation), candidates.new_to(self.relation)
        given, answers = ends[self.given], ends[1 - self.given]
        new_given, new_answers = new[self.given], new[1 - self.given]
        given = given[np.isin(new_given[given], self.new_given)]
        return given, answers[np.isin(new_answers[answers], self.new_answers)], new_answers


def plan_search(candidates: CandidateFilter, prior_correction: PriorCorrection | None = None) -> list[SearchPart]:
    """The parts of a search, the most probable first and then the cheapest: good triples raise the bound for others.

    Without a calibration a relation is one part. With one, nearly all triples that can be among the best have an entity
    in the domain or range of their relation. So the few entities on one side are queried, then the few on the other
    side for answers that are new to the first, and at last the pairs in which both are new.
    """
    parts = []
    first_given = (0, 1) if prior_correction is None else (0,)
    for relation in candidates.relations.tolist():
        ends, new = candidates.heads_and_tails(relation), candidates.new_to(relation)
        counts = np.stack([np.bincount(is_new[ids], minlength=2) for ids, is_new in zip(ends, new, strict=True)])
        # Fewer queries first. If equal, those with more answers each: these are less likely, and fewer pass.
        num_queries, num_known = counts[:, first_given].sum(1).tolist(), (new == 0).sum(1).tolist()
        first = 0 if (num_queries[0], num_known[0]) <= (num_queries[1], num_known[1]) else 1
        choices: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(first, first_given, (0, 1))]
        priors = torch.zeros(2, 2)  # by head, then by tail
        if prior_correction is not None:
            choices += [(1 - first, (0,), (1,)), (first, (1,), (1,))]
            priors = prior_correction.priors[relation].reshape(2, 2).T
        for given, new_given, new_answers in choices:
            number = int(counts[given, new_given].sum())
            if number and counts[1 - given, new_answers].any():
                prior = float((priors.T if given else priors)[new_given[0], list(new_answers)].max())
                parts.append(SearchPart(relation, given, new_given, new_answers, number, prior))
    return sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))


# -- the best triples so far ----------------------------------------------------------------------------------


def best_first(triples: NewTriples) -> NewTriples:
    """By decreasing sort key; ties by log-probability and then by ascending ids."""
    ids = (triples["tail"], triples["relation"], triples["head"])
    return triples[np.lexsort((*ids, -triples["log_probability"], -triples["sort_key"]))]


def calibration_inputs(triples: NewTriples, correction: PriorCorrection) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities, relations and domain/range patterns of triples."""
    ids = np.stack([triples[name] for name in ("head", "relation", "tail")], axis=1)
    columns = triples["log_probability"].astype(np.float64), ids[:, 1], correction.domain_range(ids)
    return tuple(map(torch.from_numpy, columns))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class TopTriples:
    """The best `size` triples so far, none of them less probable than `min_probability`."""

    size: int
    prior_correction: PriorCorrection | None = None
    min_probability: float = 0.0
    triples: NewTriples = field(default_factory=lambda: np.empty(0, NEW_TRIPLE))

    def required(self, part: SearchPart) -> Tensor:
        """The log-probability that triples need, `(2,)`, by whether the answer is new; infinite without candidates."""
        last = float(self.triples["sort_key"].min()) if len(self.triples) >= self.size else -inf
        required = torch.full((2, 2), last, dtype=torch.float64)  # by head, then by tail
        if self.prior_correction is not None:
            last = max(last, log_odds_of(self.min_probability))
            required = self.prior_correction.required_log_probability(last, part.relation)
        required = torch.where(required.isfinite(), required - SLACK * (1 + required.abs()), required)
        found = (required.T if part.given else required)[part.new_given[0]].clone()
        found[[pattern for pattern in (0, 1) if pattern not in part.new_answers]] = inf
        return found

    def merge(self, others: NewTriples) -> Self:
        """The best of these and other triples, whose sort keys are not set yet."""
        if not len(others):
            return self
        others["sort_key"] = others["log_probability"]
        if self.prior_correction is not None:
            inputs = calibration_inputs(others, self.prior_correction)
            others["sort_key"] = self.prior_correction.log_odds(*inputs).numpy()
            if self.min_probability > 0:
                others = others[self.prior_correction.probability(*inputs).numpy() >= self.min_probability]
        both = np.concatenate([self.triples, others])
        if len(both) > self.size:
            both = both[both["sort_key"] >= np.partition(both["sort_key"], -self.size)[-self.size]]
        if len(both) > self.size:  # some tie with the last one
            both = best_first(both)[: self.size]
        return replace(self, triples=both)


# -- scores ---------------------------------------------------------------------------------------------------


def logsumexp(scores: Tensor) -> Tensor:
    """`scores.logsumexp(-1)`; several times faster on a CPU with numba."""
    if scores.numel() >= MIN_SCORES_FOR_NUMBA and scores.dtype == torch.float32 and scores.device.type == "cpu":
        from dualkg.kernels import cpu

        if cpu.HAS_NUMBA:
            return cpu.logsumexp_rows(scores.contiguous())
    return scores.logsumexp(-1)


def _numbers_per_score(model: Model) -> int:
    """Numbers held for each score of candidates: other models than bilinear ones hold a vector."""
    if isinstance(model, EnsembleModel):
        return max(map(_numbers_per_score, model.members))
    return 1 if isinstance(model, BilinearModel) else model.embedding.entities.shape[1]


class RelationQueries:
    """All queries of a relation for one side: log p(answer | query) is a score minus the query's log-normalizer.

    `cache` `(2, num_entities)` holds the log-normalizer of each query, and the largest log-probability of its answers;
    NaN and 0 before the query is scored.
    """

    def __init__(self, model: Model, relation: int, target: Side, *, cache: Tensor | None = None) -> None:
        self.model, self.relation, self.target = model, relation, target
        if cache is None:
            cache = torch.tensor([torch.nan, 0.0])[:, None].repeat(1, model.shape.num_entities)
        self.cache = cache.to(model.device)
        self.normalizers, self.max_log_probabilities = self.cache
        self.block_size = max(1, MAX_SCORES[model.device.type] // model.shape.num_entities)  # of queries

    def scores(self, given: Tensor) -> Tensor:
        """The scores of all entities as answers, `(batch, num_entities)`; fills the cache."""
        relations = torch.full_like(given, self.relation)
        if self.target == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = logsumexp(scores)
        self.normalizers[given], self.max_log_probabilities[given] = normalizers, scores.amax(-1) - normalizers
        check_finite(normalizers)
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
        blocks = []
        numbers = len(answers) * _numbers_per_score(model)
        for block in torch.split(given, max(1, MAX_SCORES[model.device.type] // max(1, numbers))):
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

    def best(self, given: Tensor, *, required: Tensor, top: int) -> NewTriples:
        """The triples of a block with the required log-probability: the best `top`, and ties of the last.

        `required` `(2,)` is for answers that are known on their side in train and for new ones; `top` triples of either
        are returned. `given` is ascending.
        """
        required = required.clamp(min=MIN_LOG_PROBABILITY).to(self.answers.device)
        given, answers, scores = self._promising(given, required)
        answers, scores, reverse = self._score_from_other_end(given, answers, scores, required)
        if not scores.numel():
            return np.empty(0, NEW_TRIPLE)
        log_probabilities = reverse - self.second.normalizers[answers]
        log_probabilities.add_(scores).sub_(self.first.normalizers[given, None]).div_(2)
        new = self.new[answers]
        for pattern in (0, 1):  # counted apart, since their log-probabilities do not compare
            chosen = log_probabilities[:, new == pattern]
            if int((chosen >= required[pattern]).sum()) > top:
                required[pattern] = chosen.flatten().topk(top).values[-1]
        rows, columns = (log_probabilities >= required[new]).nonzero(as_tuple=True)
        heads, tails = given[rows], answers[columns]
        if self.first.target == "head":
            heads, tails, scores = tails, heads, reverse
        found = np.empty(len(rows), NEW_TRIPLE)
        found["head"], found["tail"], found["relation"] = heads.cpu(), tails.cpu(), self.first.relation
        found["score"], found["log_probability"] = (one[rows, columns].cpu() for one in (scores, log_probabilities))
        return found

    def _promising(self, given: Tensor, required: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and answers with a pair that the first query does not exclude, and the scores of all pairs."""
        answers, scores = self.answers, self.first.scores(given)
        self._exclude(scores, given)
        if len(answers) < scores.shape[1]:
            scores = scores[:, answers]
        # Required of the first query's log-probability, if the second query's is as large as it can be.
        first = 2 * required[self.new[answers]] - self.second.max_log_probabilities[answers]
        rows = scores.amax(1) >= self.first.normalizers[given] + first.min()
        given, scores = given[rows], scores[rows]
        passing = scores >= self.first.normalizers[given, None] + first
        rows, columns = passing.any(1), passing.any(0)
        return given[rows], answers[columns], scores[rows][:, columns]

    def _exclude(self, scores: Tensor, given: Tensor) -> None:
        """Write −∞ over the scores of excluded pairs."""
        ends = torch.searchsorted(self.excluded[:, 0].contiguous(), torch.stack([given[0], given[-1] + 1]))
        entities, answers = self.excluded[ends[0] : ends[1]].T.contiguous()
        rows = torch.searchsorted(given, entities)
        present = given[rows] == entities
        scores[rows[present], answers[present]] = -torch.inf

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


@dataclass(frozen=True, eq=False)
class SearchState:
    """The progress of a search; it resumes from here."""

    top: TopTriples
    num_done: int = 0  # of the first queries of all parts
    cache: Tensor | None = None  # of the second queries of the current part


def run_search(
    model: Model, candidates: CandidateFilter, parts: Sequence[SearchPart], state: SearchState
) -> Iterator[SearchState]:
    """The states after each block of queries, from a state on."""
    end = 0
    for part in parts:
        start, end = end, end + part.num_queries
        if end <= state.num_done:
            continue
        if not bool((state.top.required(part) <= 0).any()):
            state = SearchState(state.top, end)
            yield state
            continue
        within = state.num_done - start
        given, search = _prepare(model, candidates, part, state.cache if within else None)
        for block in torch.split(given[within:], search.first.block_size):
            top, required = state.top, state.top.required(part)
            answers = search.answers[(required <= 0).to(block.device)[search.new[search.answers]]]
            if len(answers):
                found = replace(search, answers=answers).best(block, required=required.float(), top=top.size)
                top = top.merge(found)
            state = SearchState(top, state.num_done + len(block), search.second.cache.clone())
            yield state


def _prepare(
    model: Model, candidates: CandidateFilter, part: SearchPart, cache: Tensor | None
) -> tuple[Tensor, PartSearch]:
    """The entities that the first queries give, and the search of their answers."""
    excluded = candidates.excluded_pairs(part.relation)
    if part.given == 1:
        excluded = excluded[np.argsort(excluded[:, 1], kind="stable"), ::-1].copy()
    arrays = (*part.entities(candidates), excluded)
    given, answers, new, pairs = (torch.from_numpy(ids).to(model.device) for ids in arrays)
    sides: tuple[Side, Side] = ("head", "tail")
    first = RelationQueries(model, part.relation, sides[1 - part.given])
    second = RelationQueries(model, part.relation, sides[part.given], cache=cache)
    return given, PartSearch(first, second, answers, pairs, new)
