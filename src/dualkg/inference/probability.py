"""Probabilities of triples, wherever one is shown, saved or sorted by.

1. The log-probability of a triple is ½ log p(tail | head, relation) + ½ log p(head | relation,
   tail), where each p is a softmax over the scores of all entities (`triple_log_probabilities`).
2. A `Calibration` maps it to the probability that the triple is true if its queries lack an answer:
   a line of log odds for each relation, with an offset for each domain/range pattern (`logistic`
   fits it to the validation split), and a map of log odds if it helps (`recalibration`).
3. The prior of a query is the probability that it lacks an answer, by the class of the query
   (`query_classes`). The odds of a triple are multiplied by it.

A symmetric relation (`Graph.symmetric_relations`) says the same by (h, r, t) and (t, r, h), which
have the same probability. Three functions see to it: `score_facts`, `tail_roles` and `patterns_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import Graph, Split
from dualkg.errors import DamagedFile, LockedError, RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.files import locked, read_json, write_json
from dualkg.inference.logistic import (
    NUM_PATTERNS,
    Examples,
    fit_relation_lines,
    line_values,
    max_supported_probability,
    sigmoid,
)
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.query_classes import (
    NUM_CLASSES,
    NUM_KNOWN,
    AssumedMissing,
    QueryClasses,
    answered_shares,
    check_missing_share,
)
from dualkg.inference.recalibration import CrossFit, Recalibration, recalibrate
from dualkg.inference.sampling import sample_candidates
from dualkg.inference.scoring import (
    Flags,
    Floats,
    Ids,
    check_finite,
    score_blocks,
    score_queries,
)
from dualkg.logs import ProgressLog
from dualkg.models.base import Model
from dualkg.tables.base import Side

if TYPE_CHECKING:
    from dualkg.training.run import Run

ROUNDING = 1e-9  # difference of log odds that counts as none
MAX_CACHED = 2**20  # normalizers in a cache, which take about 150 MB

Singles = npt.NDArray[np.float32]


# -- symmetric relations -----------------------------------------------------


def score_facts(model: Model, entities: Ids, relations: Ids, *, symmetric: Flags) -> Tensor:
    """Score all entities as answers to queries, `(num_queries, num_entities)`, in one block.

    The queries (h, r, ?) and (?, r, h) of a symmetric relation ask for the same facts, and their
    scores are the mean of both. `symmetric` are flags `(num_relations,)`.
    """
    scores = score_queries(model, entities, relations)
    num_relations = model.shape.num_relations
    rows = np.flatnonzero(symmetric[relations % num_relations])
    if len(rows):
        opposite = (relations[rows] + num_relations) % (2 * num_relations)
        places = torch.from_numpy(rows).to(scores.device)
        # Not in place, since a model may return a tensor that it keeps.
        both = scores[places] + score_queries(model, entities[rows], opposite)
        scores = scores.index_copy(0, places, both / 2)
    return scores


def tail_roles(symmetric: Flags) -> Ids:
    """The role of the tails of each relation; a symmetric relation has one role at both ends.

    The role of the heads of a relation is its id.
    """
    num_relations = len(symmetric)
    relations = np.arange(num_relations)
    roles: Ids = np.where(symmetric, relations, relations + num_relations)
    return roles


def patterns_of(new_heads: Any, new_tails: Any, *, symmetric: Any) -> Ids:
    """Domain/range patterns: 0, plus 1 if the head is new to the domain of the relation in train,
    plus 2 if the tail is new to its range.

    A triple of a symmetric relation with one new end has the pattern 1, whichever end it is. The
    arguments are flags, which broadcast.
    """
    patterns = 1 * new_heads + 2 * new_tails
    patterns_of_all: Ids = np.where(symmetric & (patterns == 2), 1, patterns)
    return patterns_of_all


# -- log-probabilities -------------------------------------------------------


def triple_log_probabilities(
    model: Model,
    triples: Ids,
    *,
    symmetric: Flags | None = None,
    max_scores: int | None = None,
) -> Tensor:
    """The log-probabilities of triples `(n, 3)`, `(n,)`.

    They are the means of log p(tail | head, relation) and log p(head | relation, tail), where each
    p is a softmax over all entities. Triples that share a query share its scores. Without
    `symmetric` no relation is.
    """
    heads, relations, tails = np.asarray(triples, dtype=np.int64).T
    inverse_relations = relations + model.shape.num_relations

    score = score_queries if symmetric is None else partial(score_facts, symmetric=symmetric)
    of_answers = partial(_answer_log_probabilities, model, score=score, max_scores=max_scores)
    of_tails = of_answers((heads, relations), tails)
    of_heads = of_answers((tails, inverse_relations), heads)
    log_probabilities = (of_tails + of_heads) / 2
    check_finite(log_probabilities)
    return log_probabilities


def _answer_log_probabilities(
    model: Model,
    queries: tuple[Ids, Ids],
    answers: Ids,
    *,
    score: Callable[[Model, Ids, Ids], Tensor],
    max_scores: int | None,
) -> Tensor:
    """log p(answer | query), `(n,)`, of queries as entities and relation ids, both `(n,)`."""
    entities, relations = queries
    num_entities = model.shape.num_entities
    keys, query_of_answer = np.unique(relations * num_entities + entities, return_inverse=True)

    # The answers in the order of their queries, so that those of a block are next to each other.
    order = np.argsort(query_of_answer, kind="stable")
    ordered_queries = query_of_answer[order]

    log_probabilities = torch.empty(len(answers), device=model.device)
    blocks = score_blocks(
        model, keys % num_entities, keys // num_entities, score=score, max_scores=max_scores
    )
    for block, scores in blocks:
        first, last = np.searchsorted(ordered_queries, [block.start, block.stop])
        in_block = order[first:last]
        rows = torch.from_numpy(query_of_answer[in_block] - block.start).to(model.device)
        columns = torch.from_numpy(answers[in_block]).to(model.device)
        places = torch.from_numpy(in_block).to(model.device)
        log_probabilities[places] = scores[rows, columns] - scores.logsumexp(-1)[rows]
    return log_probabilities


class CachedLogProbabilities:
    """`triple_log_probabilities` of one model, up to rounding, with a cache.

    The cache holds the log-normalizers of at most `max_size` queries.
    """

    def __init__(self, model: Model, *, symmetric: Flags, max_size: int = MAX_CACHED) -> None:
        self._model = model
        self._symmetric = symmetric
        self._max_size = max_size
        # By the key of a query. Entries are only added, since several threads may use the cache.
        self._normalizers: dict[int, float] = {}

    @property
    def num_cached(self) -> int:
        """The number of queries in the cache."""
        return len(self._normalizers)

    @torch.no_grad()
    def __call__(self, triples: Ids) -> Tensor:
        """Triples `(n, 3)` → log-probabilities `(n,)`."""
        model = self._model
        num_relations = model.shape.num_relations
        with full_precision(), eval_mode(model):
            tail_scores = self._tail_scores(triples)
            head_scores = tail_scores
            if model.reciprocal:
                head_scores = self._head_scores(triples)
            rows = np.flatnonzero(self._symmetric[triples[:, 1]])
            if len(rows):
                # The same means as those of `score_facts`.
                places = torch.from_numpy(rows).to(tail_scores.device)
                swapped = triples[rows][:, ::-1]
                of_tails = tail_scores[places] + self._head_scores(swapped)
                of_heads = head_scores[places] + self._tail_scores(swapped)
                tail_scores = tail_scores.index_copy(0, places, of_tails / 2)
                head_scores = head_scores.index_copy(0, places, of_heads / 2)

        of_tails = tail_scores - self._normalizers_of(triples[:, 0], triples[:, 1])
        of_heads = head_scores - self._normalizers_of(triples[:, 2], triples[:, 1] + num_relations)
        return (of_tails + of_heads) / 2

    def _tail_scores(self, triples: Ids) -> Tensor:
        """The scores of tails as answers to (head, relation, ?)."""
        ids = torch.from_numpy(np.ascontiguousarray(triples)).to(self._model.device)
        heads, relations, tails = ids.unbind(1)
        return self._model.score(heads, relations, tails)

    def _head_scores(self, triples: Ids) -> Tensor:
        """The scores of heads as answers to (?, relation, tail)."""
        if not self._model.reciprocal:
            return self._tail_scores(triples)
        ids = torch.from_numpy(np.ascontiguousarray(triples)).to(self._model.device)
        heads, relations, tails = ids.unbind(1)
        return self._model.score(tails, relations + self._model.shape.num_relations, heads)

    def _normalizers_of(self, entities: Ids, relations: Ids) -> Tensor:
        """log Σ exp of the scores of each query, `(n,)`."""
        num_entities, num_relations = self._model.shape
        # Both queries of a symmetric relation have the same scores, so they share an entry.
        is_symmetric = self._symmetric[relations % num_relations]
        relations = np.where(is_symmetric, relations % num_relations, relations)
        keys = (relations * num_entities + entities).tolist()

        normalizers = self._normalizers
        if len(normalizers) + len(keys) > self._max_size:
            normalizers = {}

        missing = np.array(
            [key for key in dict.fromkeys(keys) if key not in normalizers], dtype=np.int64
        )
        blocks = score_blocks(
            self._model,
            missing % num_entities,
            missing // num_entities,
            score=partial(score_facts, symmetric=self._symmetric),
        )
        for block, scores in blocks:
            sums = scores.logsumexp(-1).tolist()
            normalizers.update(zip(missing[block].tolist(), sums, strict=True))

        self._normalizers = normalizers
        return torch.tensor([normalizers[key] for key in keys], device=self._model.device)


# -- the classes of queries --------------------------------------------------


def query_classes(
    graph: Graph, *, split: Split = "train", types: EntityTypes | None = None
) -> QueryClasses:
    """The classes of queries on a graph: what they count of the triples of a split.

    Each triple counts as one answer to both of its queries.
    """
    heads, relations, tails = graph.split(split).astype(np.int64).T
    roles_of_tails = tail_roles(graph.symmetric_relations)
    return QueryClasses.of(
        graph.shape.num_entities,
        roles_of_tails,
        entities=np.concatenate([heads, tails]),
        roles=np.concatenate([relations, roles_of_tails[relations]]),
        types=types,
    )


# -- calibration -------------------------------------------------------------


class TripleProbabilities(NamedTuple):
    """What a calibration says about triples, each `(num_triples,)`.

    `probability` is the probability of the triple, and `log_odds` the log odds of it.
    `answer_probability` is the probability of the triple if each of its queries has an answer that
    is missing.
    """

    log_odds: Floats
    probability: Floats
    answer_probability: Floats


@dataclass(frozen=True, eq=False)
class Calibration:
    """Probabilities of the triples of a graph from their log-probabilities by a model.

    If its queries are known to lack an answer, the probability of a triple is σ(g(slope ·
    log-probability + offset)), at most `max_probability`, where g is the recalibration or the
    identity. Otherwise its odds are multiplied by the mean of the priors of its two queries.

    `prediction_sets` are fitted on the same split. `checks` are the reports on the test split that
    `dualkg.calibrate` makes, as plain data. `made_from` is the identity of the run that a saved
    calibration was fitted to.

    Attributes:
        graph: The graph.
        slopes: Slope of each relation, `(num_relations,)`, above 0.
        offsets: Offset of each relation and domain/range pattern, `(num_relations, 4)`.
        relation_specific: Whether a relation has a line of its own; others share one.
        max_probability: The largest probability that the validation split supports.
        recalibration: The map g; None for the identity.
        cross_fit: What a recalibration gains on valid.
        missing_share: Share of the true triples that the graph is said to lack; if it is None, the
            graph lacks as many triples as valid has.
        types: Types of entities, which the priors of queries take as evidence.
        prediction_sets: Conformal prediction sets.
        metadata: Graph, split and numbers of candidates of the fit.
        checks: Reports on the test split, as plain data.
        made_from: Identity of the run.

    Examples:
        >>> calibration = kg.calibrate(run)
        >>> 0 <= calibration.checks["calibration"]["likely"]["ece"] <= 1
        True
    """

    graph: Graph
    slopes: Singles
    offsets: Singles
    relation_specific: Flags
    max_probability: float = 1.0
    recalibration: Recalibration | None = None
    cross_fit: CrossFit | None = None
    missing_share: float | None = None
    types: EntityTypes | None = None
    prediction_sets: PredictionSets | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Any] = field(default_factory=dict)
    made_from: str | None = None

    def __post_init__(self) -> None:
        """Refuse lines that do not fit the relations of the graph."""
        num_relations = self.graph.shape.num_relations
        if self.slopes.shape != (num_relations,) or self.offsets.shape != (
            num_relations,
            NUM_PATTERNS,
        ):
            raise ValueError(
                f"it should have {num_relations:,} relations with {NUM_PATTERNS} offsets each"
            )
        if not (self.slopes > 0).all():
            raise ValueError("a slope is not above 0")
        if self.relation_specific.shape != (num_relations,):
            raise ValueError(
                f"it should say of {num_relations:,} relations which have their own line"
            )
        if not np.isfinite(self.offsets).all():
            raise ValueError("an offset is not finite")
        if self.cross_fit is not None and not np.isfinite(self.cross_fit).all():
            raise ValueError("the cross-fit of its recalibration is not finite")
        if self.missing_share is not None:
            check_missing_share(self.missing_share)

    @classmethod
    def fit(cls, model: Model, graph: Graph, *, seed: int = 0) -> Self:
        """Fit probabilities and prediction sets on valid; `seed` draws the false candidates."""
        progress = ProgressLog(f"Calibrating {graph.name}")
        progress(lambda: f"sampling candidates of the {len(graph.valid):,} validation triples")
        candidates = sample_candidates(model, graph, "valid", seed=seed)

        progress(lambda: f"scoring {len(candidates.true):,} candidates", last=True)
        symmetric = graph.symmetric_relations
        log_probabilities = triple_log_probabilities(model, candidates.triples, symmetric=symmetric)
        heads, relations, tails = candidates.triples.T
        train = query_classes(graph)
        examples = Examples(
            log_probability=log_probabilities.double().cpu().numpy(),
            patterns=patterns_of(
                train.num_answers(heads, relations) == 0,
                train.num_answers(tails, train.tail_roles[relations]) == 0,
                symmetric=symmetric[relations],
            ),
            true=candidates.true,
            weights=candidates.weights,
            relations=relations,
        )

        lines, relation_specific = fit_relation_lines(examples, graph.shape.num_relations)
        num_specific = int(relation_specific.sum())
        progress(
            lambda: f"{len(lines):,} relations are fitted, {num_specific:,} by their own line",
            last=True,
        )
        recalibration, cross_fit = recalibrate(
            examples, candidates.triples, graph.shape.num_relations, seed=seed
        )
        progress(
            lambda: (
                f"recalibration is {'used' if recalibration else 'not used'}: it gains "
                f"{cross_fit.gain:.4f} ± {cross_fit.standard_error:.4f} in log loss"
            ),
            last=True,
        )

        # The recalibration does not change the order, on which the maximum depends.
        log_odds = line_values(
            lines[examples.relations], examples.log_probability, examples.patterns
        )
        return cls(
            graph=graph,
            slopes=lines[:, 0].astype(np.float32),
            offsets=lines[:, 1:].astype(np.float32),
            relation_specific=relation_specific,
            max_probability=max_supported_probability(log_odds, examples.true, examples.weights),
            recalibration=recalibration,
            cross_fit=cross_fit,
            prediction_sets=PredictionSets.fit(model, graph),
            metadata={
                "graph": graph.name,
                "fingerprint": graph.fingerprint,
                "split": "valid",
                "seed": seed,
                "num_true": int(examples.true.sum()),
                "num_candidates": round(float(examples.weights.sum())),
                "num_drawn": len(examples.true),
            },
        )

    # -- probabilities --------------------------------------------------------

    def of_triples(self, triples: Ids, log_probabilities: Tensor) -> TripleProbabilities:
        """The probabilities of triples `(num_triples, 3)`, given their log-probabilities."""
        heads, relations, tails = np.ascontiguousarray(triples, dtype=np.int64).T
        values = log_probabilities.double().cpu().numpy()
        classes = self.query_classes
        head_classes = classes.of_pairs(heads, relations)
        tail_classes = classes.of_pairs(tails, classes.tail_roles[relations])

        patterns = self._patterns(relations, head_classes, tail_classes)
        if_missing: Floats = self.slopes[relations] * values + self.offsets[relations, patterns]
        if self.recalibration is not None:
            if_missing = self.recalibration(if_missing)
        head_priors, tail_priors = self._priors
        priors = (head_priors[relations, head_classes] + tail_priors[relations, tail_classes]) / 2
        log_odds = np.minimum(if_missing, log_odds_of(self.max_probability)) + np.log(priors)
        probability = sigmoid(log_odds)

        # To know that an answer is missing never makes a triple less probable.
        answer_probability = np.minimum(sigmoid(if_missing), self.max_probability)
        at_least = np.maximum(answer_probability, probability)
        answer_probability = np.where(priors > 1, at_least, answer_probability)
        return TripleProbabilities(log_odds, probability, answer_probability)

    def required_log_probability(self, log_odds: float, relation: int) -> Tensor:
        """The log-probability that reaches some log odds, or infinity if none does.

        It is `(NUM_CLASSES, NUM_CLASSES)`, by the class of the head and then by the class of the
        tail.
        """
        classes = np.arange(NUM_CLASSES)
        patterns = self._patterns(relation, classes[:, None], classes[None, :])
        required_log_odds = log_odds - np.log(self.priors(relation))
        by_line = required_log_odds
        if self.recalibration is not None:
            by_line = self.recalibration.inverse(required_log_odds)
        log_probability = (by_line - self.offsets[relation][patterns]) / self.slopes[relation]
        largest = log_odds_of(self.max_probability) + ROUNDING
        return torch.from_numpy(np.where(required_log_odds > largest, inf, log_probability))

    def priors(self, relation: int) -> Floats:
        """The priors of triples of a relation by the classes of head and tail."""
        head_priors, tail_priors = self._priors
        of_pairs: Floats = (head_priors[relation][:, None] + tail_priors[relation][None, :]) / 2
        return of_pairs

    def query_priors(self, entity: int, relations: Ids, side: Side) -> Floats:
        """The priors of queries that give an entity as head or as tail, `(num_queries,)`."""
        head_priors, tail_priors = self._priors
        priors = head_priors if side == "head" else tail_priors
        roles = relations if side == "head" else self.query_classes.tail_roles[relations]
        classes = self.query_classes.of_pairs(np.full(len(roles), entity), roles)
        return priors[relations, classes]

    def _patterns(self, relations: Any, head_classes: Ids, tail_classes: Ids) -> Ids:
        """The domain/range patterns of triples; an end without answers in train is new."""
        symmetric = self.graph.symmetric_relations[relations]
        return patterns_of(
            head_classes >= NUM_KNOWN, tail_classes >= NUM_KNOWN, symmetric=symmetric
        )

    @cached_property
    def query_classes(self) -> QueryClasses:
        """The classes of queries by the triples of train."""
        return query_classes(self.graph, types=self.types)

    @cached_property
    def _priors(self) -> tuple[Floats, Floats]:
        """The priors of queries (h, r, ?) and of queries (?, r, t) by relation and class.

        They are the shares of queries that valid answers, multiplied by the number of triples that
        the graph lacks for each of valid. With a given share of missing triples they are expected
        numbers of answers, and may be above 1.
        """
        heads, tails = answered_shares(self.query_classes, query_classes(self.graph, split="valid"))
        per_valid = self.assumed_missing.per_valid
        return heads * per_valid, tails * per_valid

    @property
    def assumed_missing(self) -> AssumedMissing:
        """How many triples the probabilities take the graph to lack."""
        return AssumedMissing.of(self.graph, self.missing_share)

    def warm_up(self) -> None:
        """Compute what the first triples would otherwise wait for."""
        _ = self._priors

    # -- variants -------------------------------------------------------------

    def on(self, graph: Graph) -> Self:
        """The same lines on another graph with the same relations, such as an extended one."""
        if graph is self.graph:
            return self
        return replace(self, graph=graph)

    @property
    def as_measured(self) -> Self:
        """The same without a given share of missing triples, to be compared with a split."""
        return self if self.missing_share is None else replace(self, missing_share=None)

    # -- files ----------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write `calibration.json` into the folder of the run that it was fitted for."""
        # Imported here, since it imports the whole training.
        from dualkg.training.run_folder import RunFolder

        assert self.prediction_sets is not None
        files = RunFolder(folder)
        content = {
            "made_from": files.known_identity(),
            "calibration": self.as_dict(),
            "prediction_sets": self.prediction_sets.as_dict(),
            "checks": self.checks,
        }
        write_json(files.calibration, content, indent=None)
        # Earlier versions also wrote the priors of queries.
        files.priors.unlink(missing_ok=True)

    def as_dict(self) -> dict[str, Any]:
        """The lines and what they were fitted to, for JSON."""
        return {
            "slopes": self.slopes.tolist(),
            "offsets": self.offsets.tolist(),
            "relation_specific": self.relation_specific.tolist(),
            "max_probability": self.max_probability,
            "recalibration": self.recalibration and self.recalibration.as_dict(),
            "cross_fit": self.cross_fit and self.cross_fit._asdict(),
            "missing_share": self.missing_share,
            "metadata": dict(self.metadata),
            "types": self.types and self.types.as_dict(),
        }

    @classmethod
    def load(cls, folder: str | Path, graph: Graph, *, identity: str | None = None) -> Self:
        """Read `calibration.json` from the folder of a run on this graph.

        A damaged file is refused, and a calibration that was fitted for another run. `identity` is
        the identity of the run, by default the one that the folder has now.
        """
        from dualkg.training.run_folder import RunFolder, check_source

        files = RunFolder(folder)
        path = files.calibration
        try:
            calibration = cls._parse(read_json(path, checksum=True), graph)
            check_source(path, calibration.made_from, identity or files.known_identity())
            return calibration
        except RequestError as error:
            reason = str(error)
        except KeyError as error:
            reason = str(DamagedFile(path, f"there is no {error}"))
        except (TypeError, ValueError, AttributeError) as error:
            reason = str(DamagedFile(path, str(error)))
        raise RequestError(
            f"{reason} Make it again with: dualkg calibrate {files.path} --overwrite"
        )

    @classmethod
    def _parse(cls, content: Any, graph: Graph) -> Self:
        saved = content["calibration"]
        types = saved["types"]
        if types is not None:
            types = EntityTypes.from_dict(types, graph.shape.num_entities)
        recalibration = saved["recalibration"]
        cross_fit = saved["cross_fit"]
        missing_share = saved["missing_share"]
        return cls(
            graph=graph,
            slopes=np.array(saved["slopes"], dtype=np.float32),
            offsets=np.array(saved["offsets"], dtype=np.float32),
            relation_specific=np.array(saved["relation_specific"], dtype=bool),
            max_probability=float(saved["max_probability"]),
            recalibration=recalibration and Recalibration.from_dict(recalibration),
            cross_fit=cross_fit and CrossFit(**cross_fit),
            missing_share=None if missing_share is None else float(missing_share),
            types=types,
            prediction_sets=PredictionSets.from_dict(
                content["prediction_sets"], graph.shape.num_relations
            ),
            metadata=saved["metadata"],
            checks=content["checks"],
            made_from=content["made_from"],
        )


def log_odds_of(probability: float) -> float:
    """Log odds; infinite for probabilities 0 and 1."""
    if probability <= 0:
        return -inf
    if probability >= 1:
        return inf
    return log(probability / (1 - probability))


# -- the calibration of a run ------------------------------------------------


def has_calibration(run: Run) -> bool:
    """Whether the folder of a run has a calibration, even one that cannot be read."""
    from dualkg.training.run_folder import RunFolder

    return run.folder is not None and RunFolder(run.folder).has_calibration


def calibration_for(run: Run, *, overwrite: bool = False) -> Calibration:
    """Read the calibration of a run from its folder, or fit it now.

    A calibration that is fitted now is saved if the run has a folder. The former one is there until
    then.
    """
    folder = run.folder
    if folder is not None and has_calibration(run) and not overwrite:
        return Calibration.load(folder, run.graph, identity=run.identity)

    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except LockedError:
            if overwrite:
                raise
            folder = None  # Another process is about to save one, and this one is used once.

        fitted = Calibration.fit(run.model, run.graph)
        if folder and run.is_current:
            fitted.save(folder)
    return fitted
