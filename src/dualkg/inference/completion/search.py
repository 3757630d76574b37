"""The search for the best new triples, which is exact and in bounded memory.

The log-probability of a triple is the mean of log p(tail | head, relation) and log p(head |
relation, tail), neither above 0. So the scores of one query exclude most of its answers, and the
query from the other end is scored only for answers that may still be among the best.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import InvalidValue, RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.inference.completion.candidates import CandidateFilter, Names
from dualkg.inference.completion.result import NEW_TRIPLE, BestTriples, Completion, NewTriples
from dualkg.inference.probability import Calibration, log_odds_of
from dualkg.inference.query_classes import NUM_CLASSES, NUM_KNOWN
from dualkg.inference.scoring import Ids, check_finite
from dualkg.logs import ProgressLog
from dualkg.models.base import Model
from dualkg.tables.base import Side

# Scores of a block: few enough for a CPU's cache, enough to keep a GPU busy.
MAX_SCORES = {"cpu": 2**22, "cuda": 2**26}
MIN_SCORES_FOR_NUMBA = 2**20  # for fewer scores it is not worth loading
# All scores of a relation of this many are kept, 256 MiB, if some of a query cost as much as all.
MAX_KEPT_SCORES = 2**26
MIN_LOG_PROBABILITY = -1e30  # below that of any triple, and finite
# Relative; more than rounding can take from a triple that ties with the last one.
SLACK = 1e-3
FIRST_BLOCK = 8  # queries
HEADS = 0
TAILS = 1
# Classes of queries; without a calibration all are of the first.
KNOWN = tuple(range(NUM_KNOWN))
NEW = tuple(range(NUM_KNOWN, NUM_CLASSES))
KNOWN_OR_NEW = (*KNOWN, *NEW)


@dataclass(frozen=True)
class CompletionSettings:
    """Settings of a search on which its result does not depend.

    `max_scores` is the size of a block of scores, by default what suits the device.
    `report_interval` are the seconds after which progress is reported even within a block, and
    `best_after` those until the best triples so far are reported, and again after twice the time.
    """

    max_scores: int | None = None
    best_after: float = 0.5
    report_interval: float = 0.1


DEFAULT_SETTINGS = CompletionSettings()


@torch.no_grad()
def complete(
    model: Model,
    graph: Graph,
    *,
    top: int = 10_000,
    calibration: Calibration | None = None,
    relations: Names | None = None,
    heads: Names | None = None,
    min_probability: float = 0.0,
    types: bool = False,
    loops: bool = False,
    known: Sequence[str] = SPLITS,
    on_progress: Callable[[int, int], None] | None = None,
    on_best: Callable[[Completion], None] | None = None,
    settings: CompletionSettings = DEFAULT_SETTINGS,
) -> Completion:
    """Find the `top` most probable triples that no split of `known` has.

    They are ordered by prior-corrected probability, or without a calibration by log-probability;
    both are among all entities, whatever the filters (see `CandidateFilter`).
    `on_progress` is called with the number of queries that are done, and of all, and what it raises
    ends the search. `on_best` is called now and then with the best triples so far.
    """
    model.check_shape(graph.shape)
    _check_request(top, min_probability, calibration, graph=graph)
    if calibration is not None:
        calibration = calibration.on(graph)
    candidates = CandidateFilter(
        graph,
        relations=relations,
        heads=heads,
        types=types,
        loops=loops,
        known=known,
        query_classes=calibration.query_classes if calibration else None,
    )
    parts = search_parts(candidates, calibration)
    reports = _Reports(
        graph,
        sum(part.num_queries for part in parts),
        on_progress=on_progress,
        on_best=on_best,
        settings=settings,
    )
    best = BestTriples(top, calibration, min_probability)
    with full_precision(), eval_mode(model):
        for part in parts:
            if not bool((required_log_probability(best, part) <= 0).any()):
                reports.count(part.num_queries, best)
                continue
            best = _search_part(model, candidates, part, best=best, reports=reports)
    return Completion.of(graph, best)


def _check_request(
    top: int, min_probability: float, calibration: Calibration | None, *, graph: Graph
) -> None:
    if not isinstance(top, (int, np.integer)) or top < 1:
        raise InvalidValue("top", expected="a whole number of at least 1", found=top)
    if not 0 <= min_probability <= 1:
        raise InvalidValue("min_probability", expected="between 0 and 1", found=min_probability)
    if calibration is None:
        if min_probability > 0:
            raise RequestError(
                "`min_probability` needs a calibration: without one there are no probabilities."
            )
        return
    num_calibrated = len(calibration.slopes)
    num_relations = graph.shape.num_relations
    if num_calibrated != num_relations:
        raise RequestError(
            f"The calibration of {num_calibrated:,} relations does not fit the graph {graph.name}, "
            f"which has {num_relations:,}. Calibrate the model on this graph."
        )


class _Reports:
    """Progress, and the best triples so far: after some seconds, and again after twice the time."""

    def __init__(
        self,
        graph: Graph,
        num_queries: int,
        *,
        on_progress: Callable[[int, int], None] | None,
        on_best: Callable[[Completion], None] | None,
        settings: CompletionSettings,
    ) -> None:
        self.settings = settings
        self.num_done = 0
        self._graph = graph
        self._num_queries = num_queries
        self._on_progress = on_progress
        self._on_best = on_best
        self._log = ProgressLog(f"Completing {graph.name}")
        self._started_at = time.monotonic()
        self._reported_at = self._started_at
        self._best_after = settings.best_after

    def work(self) -> None:
        """Report progress within a block, which may take long, if it is time."""
        if time.monotonic() >= self._reported_at + self.settings.report_interval:
            self._report_progress()

    def count(self, num_queries: int, best: BestTriples) -> None:
        """Report that some queries are done, with the best triples if it is time."""
        self.num_done += num_queries
        self._log.count(self.num_done, self._num_queries, "queries")
        self._report_progress()
        seconds = time.monotonic() - self._started_at
        is_due = seconds >= self._best_after and self.num_done < self._num_queries
        if self._on_best and is_due and len(best.triples):
            self._on_best(Completion.of(self._graph, best))
            self._best_after = 2 * max(seconds, self._best_after)

    def _report_progress(self) -> None:
        if self._on_progress:
            self._on_progress(self.num_done, self._num_queries)
        self._reported_at = time.monotonic()


# -- queries of a relation ---------------------------------------------------


def logsumexp(scores: Tensor, *, min_size: int = MIN_SCORES_FOR_NUMBA) -> Tensor:
    """`scores.logsumexp(-1)`; several times faster on a CPU with numba.

    Fewer scores than `min_size` are left to PyTorch.
    """
    is_float32_on_cpu = scores.dtype == torch.float32 and scores.device.type == "cpu"
    if is_float32_on_cpu and scores.numel() >= min_size:
        from dualkg.kernels import cpu

        if cpu.HAS_NUMBA:
            return cpu.logsumexp_rows(scores.contiguous())
    return scores.logsumexp(-1)


def warm_up_kernels() -> None:
    """Load numba, which takes a second."""
    logsumexp(torch.zeros(1, 1), min_size=1)


class RelationQueries:
    """All queries of a relation for one side.

    log p(answer | query) is a score minus the log-normalizer of the query. `normalizers` and
    `max_log_probabilities` `(num_entities,)` have the log-normalizer of each query and the largest
    log-probability of its answers; NaN and 0 before the query is scored. If the relation is
    `symmetric`, each score is the mean of the scores of both sides, as in `scoring`. The scores of
    queries that were asked for some answers are kept where another answer would cost as much as all
    of them.
    """

    def __init__(
        self,
        model: Model,
        relation: int,
        target: Side,
        *,
        symmetric: bool = False,
        max_scores: int | None = None,
        on_block: Callable[[], None] | None = None,
    ) -> None:
        num_entities = model.shape.num_entities
        if max_scores is None:
            max_scores = MAX_SCORES[model.device.type]
        self.model = model
        self.relation = relation
        self.target = target
        self.symmetric = symmetric
        self.normalizers = torch.full((num_entities,), torch.nan, device=model.device)
        self.max_log_probabilities = torch.zeros(num_entities, device=model.device)
        self.max_scores = max_scores
        self._on_block = on_block  # after each block of second queries
        self.block_size = max(1, max_scores // num_entities)  # queries
        self._keeps = model.scores_all_at_once and num_entities**2 <= MAX_KEPT_SCORES
        self._kept: Tensor | None = None
        self._is_kept = torch.zeros(num_entities, dtype=torch.bool, device=model.device)

    def scores(self, given: Tensor) -> Tensor:
        """The scores of all entities as answers, `(batch, num_entities)`; keeps the normalizers."""
        relations = torch.full_like(given, self.relation)
        if self.symmetric:
            scores = self.model.predict_tails(given, relations)
            scores = (scores + self.model.predict_heads(relations, given)) / 2
        elif self.target == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = logsumexp(scores)
        self.normalizers[given] = normalizers
        self.max_log_probabilities[given] = scores.amax(-1) - normalizers
        check_finite(normalizers)
        return scores

    def fill_normalizers(self, given: Tensor) -> None:
        """Score the queries whose normalizers are not known yet."""
        missing = given[self.normalizers[given].isnan()]
        for block in torch.split(missing, self.block_size):
            if len(block):
                self.scores(block)
                if self._on_block:
                    self._on_block()

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """The scores of some entities as answers, `(batch, num_answers)`."""
        if self._keeps:
            return self._kept_scores(given, answers)
        numbers_per_query = max(1, len(answers) * self.model.numbers_per_score)
        block_size = max(1, self.max_scores // numbers_per_query)

        blocks = []
        for block in torch.split(given, block_size):
            relations = torch.full_like(block, self.relation)
            sides: tuple[Side, ...] = ("tail", "head") if self.symmetric else (self.target,)
            of_sides = [
                self.model.predict_candidates(block, relations, answers, side) for side in sides
            ]
            blocks.append(of_sides[0] if len(of_sides) == 1 else (of_sides[0] + of_sides[1]) / 2)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _kept_scores(self, given: Tensor, answers: Tensor) -> Tensor:
        """`scores_of`, for which no query is scored twice."""
        for block in torch.split(given[~self._is_kept[given]], self.block_size):
            if not len(block):
                continue
            scores = self.scores(block)
            if self._kept is None:
                self._kept = scores.new_empty(scores.shape[1], scores.shape[1])
            self._kept[block] = scores
            self._is_kept[block] = True
            if self._on_block:
                self._on_block()
        assert self._kept is not None, "some query is given"
        return self._kept[given[:, None], answers]


# -- the parts of a search ---------------------------------------------------


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation from one side, and their candidate answers.

    `given` is the side that the queries give: 0 for heads, to find tails, and 1 for tails, to find
    heads. The entities of both sides have the classes `given_classes` and `answer_classes`.
    `prior` is the largest prior of a pair of these classes.
    """

    relation: int
    given: int
    given_classes: tuple[int, ...]
    answer_classes: tuple[int, ...]
    num_queries: int
    prior: float

    def entities(
        self, candidates: CandidateFilter, calibration: Calibration | None
    ) -> tuple[dict[int, Ids], Ids, Ids]:
        """The given entities by class, the candidate answers, and the classes of all answers."""
        ends = candidates.heads_and_tails(self.relation)
        classes = _classes_of(self.relation, candidates, calibration)
        of_given = classes[self.given][ends[self.given]]
        given = {number: ends[self.given][of_given == number] for number in self.given_classes}
        answers = ends[1 - self.given]
        of_answers = classes[1 - self.given]
        answers = answers[np.isin(of_answers[answers], self.answer_classes)]
        return given, answers, of_answers


def _classes_of(relation: int, candidates: CandidateFilter, calibration: Calibration | None) -> Ids:
    """The classes of all entities as heads and as tails, `(2, num_entities)`."""
    if calibration is None:
        return np.zeros((2, candidates.graph.shape.num_entities), dtype=np.int64)
    return calibration.query_classes.of_relation(relation)


def search_parts(
    candidates: CandidateFilter, calibration: Calibration | None = None
) -> list[SearchPart]:
    """The parts of a search, the most probable first and then the cheapest.

    Good triples that are found early raise the bound for all others. Without a calibration a
    relation is one part. With one, nearly all triples that can be among the best have an entity in
    the domain or range of their relation. So the few entities on one side are queried, then the few
    on the other side for answers that are new to the first, and at last the pairs in which both are
    new.
    """
    parts = []
    for relation in candidates.relations.tolist():
        parts += _parts_of_relation(relation, candidates, calibration)
    return sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))


def _parts_of_relation(
    relation: int, candidates: CandidateFilter, calibration: Calibration | None
) -> list[SearchPart]:
    priors = torch.zeros(NUM_CLASSES, NUM_CLASSES)  # by head, then by tail
    first_given = KNOWN_OR_NEW
    if calibration is not None:
        priors = torch.from_numpy(calibration.priors(relation))
        first_given = KNOWN

    # The numbers of candidates of each class, by side.
    ends = candidates.heads_and_tails(relation)
    classes = _classes_of(relation, candidates, calibration)
    counts = np.stack(
        [
            np.bincount(of_side[entities], minlength=NUM_CLASSES)
            for of_side, entities in zip(classes, ends, strict=True)
        ]
    )

    # The side with fewer queries is given first. If both have as many, it is the side whose queries
    # have more answers: these are less likely each, and fewer pass.
    num_queries = counts[:, first_given].sum(1).tolist()
    num_known = (candidates.new_to(relation) == 0).sum(1).tolist()
    first = HEADS
    if (num_queries[TAILS], num_known[TAILS]) < (num_queries[HEADS], num_known[HEADS]):
        first = TAILS

    choices = [(first, first_given, KNOWN_OR_NEW)]
    if calibration is not None:
        choices += [(1 - first, KNOWN, NEW), (first, NEW, NEW)]
    parts = []
    for given, given_classes, answer_classes in choices:
        num_given = int(counts[given, given_classes].sum())
        if num_given and counts[1 - given, answer_classes].any():
            by_given = priors.T if given == TAILS else priors
            prior = float(by_given[list(given_classes)][:, list(answer_classes)].max())
            parts.append(
                SearchPart(relation, given, given_classes, answer_classes, num_given, prior)
            )
    return parts


# -- a part ------------------------------------------------------------------


def required_log_probability(best: BestTriples, part: SearchPart) -> Tensor:
    """The log-probability that triples of a part need, `(NUM_CLASSES, NUM_CLASSES)`.

    It is indexed by the class of the given entity and then by the class of the answer, and infinite
    where the part has no candidates.
    """
    # By head, then by tail.
    required = torch.full((NUM_CLASSES, NUM_CLASSES), best.last_sort_key, dtype=torch.float64)
    if best.calibration is not None:
        log_odds = max(best.last_sort_key, log_odds_of(best.min_probability))
        required = best.calibration.required_log_probability(log_odds, part.relation)
    with_slack = required - SLACK * (1 + required.abs())
    required = torch.where(required.isfinite(), with_slack, required)

    by_given = required.T if part.given == TAILS else required
    has_candidates = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.bool)
    has_candidates[np.ix_(part.given_classes, part.answer_classes)] = True
    return torch.where(has_candidates, by_given, inf)


def _search_part(
    model: Model,
    candidates: CandidateFilter,
    part: SearchPart,
    *,
    best: BestTriples,
    reports: _Reports,
) -> BestTriples:
    """The best triples after the queries of a part."""
    excluded = candidates.excluded_pairs(part.relation)
    if part.given == TAILS:
        by_tail = np.argsort(excluded[:, 1], kind="stable")
        excluded = excluded[by_tail, ::-1].copy()
    excluded_pairs = torch.from_numpy(excluded).to(model.device)

    given_by_class, *of_answers = part.entities(candidates, best.calibration)
    answers, classes = (torch.from_numpy(array).to(model.device) for array in of_answers)

    symmetric = bool(candidates.symmetric[part.relation])
    max_scores = reports.settings.max_scores
    targets: tuple[Side, Side] = ("head", "tail") if part.given == TAILS else ("tail", "head")
    first, second = (
        RelationQueries(
            model,
            part.relation,
            target,
            symmetric=symmetric,
            max_scores=max_scores,
            on_block=reports.work,
        )
        for target in targets
    )

    for given_class, given in given_by_class.items():
        rest = torch.from_numpy(given).to(model.device)
        while len(rest):
            # The first blocks are small: what they find is a bound for all others.
            size = min(first.block_size, max(FIRST_BLOCK, reports.num_done))
            block, rest = rest[:size], rest[size:]
            required = required_log_probability(best, part)[given_class].float()
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
                    top=best.top,
                )
                best = best.merge(new)
            reports.count(len(block), best)
    return best


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
    both, by ascending given entities. `classes` `(num_entities,)` are the classes of answers, and
    `required` `(NUM_CLASSES,)` is for answers of each class. `top` triples of each are returned.
    """
    required = required.clamp(min=MIN_LOG_PROBABILITY).to(answers.device)
    scores = first.scores(given)
    _exclude(scores, given, excluded)
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]

    # The log-probability that the first query needs if the second one has the largest possible.
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
    known = second.normalizers[answers]
    least_normalizers = torch.where(known.isnan(), reverse.logsumexp(0), known)
    bound = (scores - first.normalizers[given, None]).add_(reverse).sub_(least_normalizers)
    columns = (bound >= 2 * required[classes[answers]]).any(0)
    answers = answers[columns]
    scores = scores[:, columns]
    reverse = reverse[:, columns]
    if not len(answers):
        return np.empty(0, NEW_TRIPLE)

    second.fill_normalizers(answers)
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
