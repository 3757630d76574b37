"""The search for the best new triples, which is exact, resumable and in bounded memory.

The log-probability of a triple is the mean of log p(tail | head, relation) and log p(head |
relation, tail), neither above 0. So the scores of one query exclude most of its answers, and the
query from the other end is scored only for answers that may still be among the best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.plan import TAILS, SearchPart
from dualkg.inference.completion.queries import RelationQueries
from dualkg.models.base import Model
from dualkg.without_torch.probabilities import TripleProbabilities, log_odds_of
from dualkg.without_torch.query_classes import NUM_CLASSES

MIN_LOG_PROBABILITY = -1e30  # below that of any triple, and finite
# Relative; more than rounding can take from a triple that ties with the last one.
SLACK = 1e-3
FIRST_BLOCK = 8  # queries

# One new triple. Its sort key is the log odds, or without a calibration the log-probability.
NEW_TRIPLE = np.dtype(
    [
        ("head", "i8"),
        ("relation", "i8"),
        ("tail", "i8"),
        ("score", "f4"),
        ("log_probability", "f4"),
        ("sort_key", "f8"),
    ]
)
NewTriples = npt.NDArray[Any]


@dataclass(frozen=True)
class CompletionSettings:
    """Settings of a search on which its result does not depend.

    `look_scores` are the scores of a first look at a large graph, 0 for none. `max_scores` is the
    size of a block of scores, by default what suits the device. `save_interval` are the seconds
    between two checkpoints, `report_interval` those after which progress is reported within
    a block, too, and `best_after` those until the best triples so far are reported, and again after
    twice the time.
    """

    max_scores: int | None = None
    save_interval: float = 5.0
    best_after: float = 0.5
    report_interval: float = 0.1
    look_scores: int = 2**24


# -- the best triples so far -------------------------------------------------


def best_first(triples: NewTriples) -> NewTriples:
    """By decreasing sort key; ties by log-probability and then by ascending ids."""
    ids = (triples["tail"], triples["relation"], triples["head"])
    return triples[np.lexsort((*ids, -triples["log_probability"], -triples["sort_key"]))]


def probabilities_of(triples: NewTriples, correction: PriorCorrection) -> TripleProbabilities:
    ids = np.stack([triples["head"], triples["relation"], triples["tail"]], axis=1)
    return correction.of_triples(ids, torch.from_numpy(triples["log_probability"].copy()))


@dataclass(frozen=True, eq=False)
class SearchState:
    """The best `top` triples so far, none less probable than `min_probability`.

    `least_sort_key` is known to be reached by `top` triples. A search resumes from its state:
    `num_done` counts the first queries of all parts, and `cache` is that of the second queries of
    the current part.
    """

    top: int
    prior_correction: PriorCorrection | None
    min_probability: float
    triples: NewTriples = field(default_factory=lambda: np.empty(0, NEW_TRIPLE))
    num_done: int = 0
    least_sort_key: float = -inf
    cache: Tensor | None = None

    @property
    def last_sort_key(self) -> float:
        """That of the last triple, once there are `top`."""
        return float(self.triples["sort_key"].min()) if len(self.triples) >= self.top else -inf

    def required(self, part: SearchPart) -> Tensor:
        """The log-probability that triples need, `(NUM_CLASSES, NUM_CLASSES)`.

        It is indexed by the class of the given entity and then by that of the answer, and infinite
        where the part has no candidates.
        """
        last_sort_key = max(self.least_sort_key, self.last_sort_key)

        # By head, then by tail.
        required = torch.full((NUM_CLASSES, NUM_CLASSES), last_sort_key, dtype=torch.float64)
        if self.prior_correction is not None:
            log_odds = max(last_sort_key, log_odds_of(self.min_probability))
            required = self.prior_correction.required_log_probability(log_odds, part.relation)
        with_slack = required - SLACK * (1 + required.abs())
        required = torch.where(required.isfinite(), with_slack, required)

        by_given = required.T if part.given == TAILS else required
        has_candidates = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.bool)
        has_candidates[np.ix_(part.given_classes, part.answer_classes)] = True
        return torch.where(has_candidates, by_given, inf)

    def merge(self, new: NewTriples) -> Self:
        """The state with the best of its triples and of new ones, whose sort keys are not set."""
        if not len(new):
            return self
        triples = np.concatenate([self.triples, self._with_sort_keys(new)])
        if len(triples) > self.top:
            sort_keys = triples["sort_key"]
            last_sort_key = np.partition(sort_keys, -self.top)[-self.top]
            triples = triples[sort_keys >= last_sort_key]
        if len(triples) > self.top:  # Some tie with the last one.
            triples = best_first(triples)[: self.top]
        return replace(self, triples=triples)

    def _with_sort_keys(self, new: NewTriples) -> NewTriples:
        """A copy with sort keys, without triples that are less probable than the minimum."""
        new = new.copy()
        if self.prior_correction is None:
            new["sort_key"] = new["log_probability"]
            return new

        probabilities = probabilities_of(new, self.prior_correction)
        new["sort_key"] = probabilities.log_odds
        return new[probabilities.probability >= self.min_probability]


# -- the search --------------------------------------------------------------


def search_block(
    first: RelationQueries,
    second: RelationQueries,
    given: Tensor,
    *,
    answers: Tensor,
    excluded: Tensor,
    classes: Tensor,
    required: Tensor,
    top: int,
) -> NewTriples:
    """The triples of a block with the required log-probability: the best `top`, and ties of the
    last.

    `given` and the candidate `answers` are ascending ids; `excluded` `(num_pairs, 2)` are pairs of
    both, by ascending given entities. `classes` `(num_entities,)` are those of answers, and
    `required` `(NUM_CLASSES,)` is for answers of each class. `top` triples of each are returned.
    """
    required = required.clamp(min=MIN_LOG_PROBABILITY).to(answers.device)
    scores = first.scores(given)
    _exclude(scores, given, excluded)
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]

    # The log-probability that the first query needs if that of the second is as large as possible.
    bound = 2 * required[classes[answers]] - second.max_log_probabilities[answers]
    rows = scores.amax(1) >= first.normalizers[given] + bound.min()
    given = given[rows]
    scores = scores[rows]
    passing = scores >= first.normalizers[given, None] + bound
    rows = passing.any(1)
    columns = passing.any(0)
    given = given[rows]
    answers = answers[columns]
    scores = scores[rows][:, columns]
    if not scores.numel():
        return np.empty(0, NEW_TRIPLE)

    # The scores of the second queries for the same pairs. Without reciprocal relations both ends
    # have the same score.
    reverse = scores
    if second.model.reciprocal:
        # Contiguous, since it is read row by row from here on.
        reverse = second.scores_of(answers, given).T.contiguous()

    # The normalizer over all entities is at least that over the block. Second queries that fail
    # with this lower bound need not be scored in full.
    cached = second.normalizers[answers]
    least_normalizers = torch.where(cached.isnan(), reverse.logsumexp(0), cached)
    bound = (scores - first.normalizers[given, None]).add_(reverse).sub_(least_normalizers)
    columns = (bound >= 2 * required[classes[answers]]).any(0)
    answers = answers[columns]
    scores = scores[:, columns]
    reverse = reverse[:, columns]
    if not len(answers):
        return np.empty(0, NEW_TRIPLE)

    second.fill_cache(answers)
    log_probabilities = reverse - second.normalizers[answers]
    log_probabilities.add_(scores).sub_(first.normalizers[given, None]).div_(2)

    classes = classes[answers]
    # Counted apart, since the log-probabilities of classes do not compare.
    for answer_class in sorted(set(classes.tolist())):
        of_class = log_probabilities[:, classes == answer_class]
        if int((of_class >= required[answer_class]).sum()) > top:
            required[answer_class] = of_class.flatten().topk(top).values[-1]
    rows, columns = (log_probabilities >= required[classes]).nonzero(as_tuple=True)

    # The score of a triple is that of its tail query.
    finds_tails = first.target == "tail"
    heads = given[rows] if finds_tails else answers[columns]
    tails = answers[columns] if finds_tails else given[rows]
    if first.symmetric:  # Both matrices have means of two scores.
        relations = torch.full_like(heads, first.relation)
        triple_scores = first.model.score(heads, relations, tails)
    else:
        triple_scores = (scores if finds_tails else reverse)[rows, columns]

    triples = np.empty(len(rows), NEW_TRIPLE)
    triples["head"] = heads.cpu()
    triples["tail"] = tails.cpu()
    triples["relation"] = first.relation
    triples["score"] = triple_scores.cpu()
    triples["log_probability"] = log_probabilities[rows, columns].cpu()
    return triples


def _exclude(scores: Tensor, given: Tensor, excluded: Tensor) -> None:
    """Set the scores `(batch, num_entities)` of the excluded pairs of a block to −∞, in place."""
    first_and_end = torch.stack([given[0], given[-1] + 1])
    start, stop = torch.searchsorted(excluded[:, 0].contiguous(), first_and_end)
    entities, answers = excluded[start:stop].T.contiguous()

    rows = torch.searchsorted(given, entities)
    in_block = given[rows] == entities
    scores[rows[in_block], answers[in_block]] = -torch.inf


def run_search(
    model: Model,
    candidates: CandidateFilter,
    parts: Sequence[SearchPart],
    *,
    start: SearchState,
    settings: CompletionSettings,
    on_work: Callable[[], None] | None = None,
) -> Iterator[SearchState]:
    """The states after each block of queries, from a state on.

    `on_work` is called within a block too, which may take long; what it raises ends the search.
    """
    state = start
    end_of_part = 0
    for part in parts:
        end_of_part += part.num_queries
        if end_of_part <= state.num_done:
            continue
        if not bool((state.required(part) <= 0).any()):
            state = replace(state, num_done=end_of_part, cache=None)
            yield state
            continue
        num_done_of_part = state.num_done - (end_of_part - part.num_queries)
        states = _search_part(
            model,
            candidates,
            part,
            start=state,
            num_done_of_part=num_done_of_part,
            settings=settings,
            on_work=on_work,
        )
        for state in states:
            yield state


def excluded_of_part(candidates: CandidateFilter, part: SearchPart) -> Tensor:
    """The excluded pairs of a relation, of a given entity and an answer, `(num_pairs, 2)`."""
    excluded = candidates.excluded_pairs(part.relation)
    if part.given == TAILS:
        by_tail = np.argsort(excluded[:, 1], kind="stable")
        excluded = excluded[by_tail, ::-1].copy()
    return torch.from_numpy(excluded)


def _search_part(
    model: Model,
    candidates: CandidateFilter,
    part: SearchPart,
    *,
    start: SearchState,
    num_done_of_part: int,
    settings: CompletionSettings,
    on_work: Callable[[], None] | None,
) -> Iterator[SearchState]:
    """The states after each block of queries of a part, of which some may be done."""
    excluded_pairs = excluded_of_part(candidates, part).to(model.device)

    entities = part.entities(candidates, start.prior_correction)
    answers = torch.from_numpy(entities.answers).to(model.device)
    classes = torch.from_numpy(entities.answer_classes).to(model.device)

    first = RelationQueries(
        model,
        part.relation,
        "head" if part.given == TAILS else "tail",
        symmetric=bool(candidates.symmetric[part.relation]),
        max_scores=settings.max_scores,
    )
    second = RelationQueries(
        model,
        part.relation,
        "tail" if part.given == TAILS else "head",
        symmetric=bool(candidates.symmetric[part.relation]),
        cache=start.cache if num_done_of_part else None,
        max_scores=settings.max_scores,
        on_block=on_work,
    )

    state = start
    num_before = 0
    for given_class, given in zip(entities.given_classes, entities.given, strict=True):
        num_done_of_class = min(max(num_done_of_part - num_before, 0), len(given))
        num_before += len(given)
        rest = torch.from_numpy(given[num_done_of_class:]).to(model.device)
        while len(rest):
            # The first blocks are small: what they find is a bound for all others.
            size = min(first.block_size, max(FIRST_BLOCK, state.num_done))
            block, rest = rest[:size], rest[size:]
            required = state.required(part)[given_class].float()
            reachable = (required <= 0).to(block.device)
            promising = answers[reachable[classes[answers]]]
            if len(promising):
                new = search_block(
                    first,
                    second,
                    block,
                    answers=promising,
                    excluded=excluded_pairs,
                    classes=classes,
                    required=required,
                    top=state.top,
                )
                state = state.merge(new)
            state = replace(state, num_done=state.num_done + len(block), cache=second.cache.clone())
            yield state
