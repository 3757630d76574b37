"""Calibration: probabilities of triples from their log-probabilities, fitted on the valid split.

A candidate is an answer to a query of a split that no other split contains. Its probability of
being true is a logistic function of its log-probability, with a slope for its relation and an
offset for its relation and domain/range pattern.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, occur, with_reciprocals
from dualkg.data.graph import SPLITS, Graph, GraphShape, Split, distinct_triples
from dualkg.data.triples import is_among
from dualkg.errors import LockedError, RequestError
from dualkg.files import locked, read_json, write_json
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.scoring import (
    Floats,
    Ids,
    check_finite,
    score_blocks,
    triple_log_probabilities,
)
from dualkg.logs import ProgressLog
from dualkg.models.base import Model, Side
from dualkg.training.run import Run, RunFolder

Flags = npt.NDArray[np.bool_]

# Sampling of candidates
NUM_QUERIES = 4000  # from which false candidates are drawn
MIN_QUERIES = 200
MAX_SCORES = 2**32  # computed for all candidates; a graph with many entities gets fewer queries
NUM_BEST = 10  # false candidates of a query that are all taken
DRAWS_PER_BAND = 2  # from each band of lower ranks
BAND_FACTOR = 4  # between the ranks at which one band and the next begin

# Fit
NUM_PATTERNS = 4
MIN_TRIPLES = 5  # valid triples for parameters of a relation
# Parameters are a slope and the offsets of the patterns. The prior mean of the shared ones is a
# calibrated softmax.
PRIOR_MEAN = np.array([1.0, *[0.0] * NUM_PATTERNS])
# Prior standard deviations of the shared slope, of the value, of the effects of a new head and of a
# new tail, and of their interaction.
SHARED_SPREADS = (1.0, 5.0, 1.0, 1.0, 2.0)
# The same for the deviation of a relation from the shared parameters; the slope relative to the
# shared slope.
RELATION_SPREADS = (0.25, 1.0, 1.0, 1.0, 1.0)
NEW_ENDS = np.array(
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]]
)  # by pattern: new head, new tail, both
MIN_SLOPE = 1e-3  # a larger log-probability never lowers the probability
MAX_STEPS = 100
ROUNDING = 1e-9  # difference of log odds that counts as none


@dataclass(frozen=True)
class Calibration:
    """p = σ(slope · log-probability + offset), at most `max_probability`, with slope > 0.

    A relation has a slope, and an offset for each domain/range pattern: fitted for it if it has
    enough valid triples, otherwise shared with other relations.
    """

    slopes: Tensor  # `(num_relations,)`
    offsets: Tensor  # `(num_relations, 4)`, by pattern
    relation_specific: (
        Tensor  # whether the parameters are fitted for the relation, `(num_relations,)`
    )
    max_probability: float = 1.0
    metadata: dict[str, Any] = field(
        default_factory=dict
    )  # graph, split and numbers of candidates of the fit

    def log_odds(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Log odds of log-probabilities, relation ids of the graph and patterns, which broadcast;
        not clamped.
        """
        slopes, offsets = (one.to(log_probability.device) for one in (self.slopes, self.offsets))
        return slopes[relations] * log_probability + offsets[relations, patterns]

    def probability(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Calibrated probabilities of the same arguments; they never decrease with the
        log-probability.
        """
        return torch.sigmoid(self.log_odds(log_probability, relations, patterns)).clamp(
            max=self.max_probability
        )

    def as_dict(self) -> dict[str, Any]:
        tables = {
            name: getattr(self, name).tolist()
            for name in ("slopes", "offsets", "relation_specific")
        }
        return {**tables, "max_probability": self.max_probability, "metadata": self.metadata}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        slopes, offsets = (
            torch.tensor(saved[name], dtype=torch.float32) for name in ("slopes", "offsets")
        )
        relation_specific = torch.tensor(saved["relation_specific"], dtype=torch.bool)
        return cls(
            slopes,
            offsets,
            relation_specific,
            float(saved["max_probability"]),
            saved.get("metadata", {}),
        )


@dataclass(frozen=True, eq=False)
class DomainRange:
    """The entities that the triples of a split have as head and as tail of each relation, as sorted
    keys.

    Called with triples `(n, 3)`, it returns their patterns `(n,)`: 0, plus 1 if the head is new to
    the domain of the relation, plus 2 if the tail is new to its range.
    """

    num_entities: int
    heads: Ids
    tails: Ids

    @classmethod
    def of(cls, graph: Graph, split: Split = "train") -> Self:
        triples = graph.split(split)
        num_entities = graph.shape.num_entities
        relations = triples[:, 1].astype(np.int64) * num_entities
        return cls(num_entities, *(np.unique(relations + triples[:, column]) for column in (0, 2)))

    def __call__(self, triples: Ids) -> Ids:
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        keys = relations * self.num_entities
        return 1 * ~is_among(keys + heads, self.heads) + 2 * ~is_among(keys + tails, self.tails)


# -- sampling of candidates --------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sampled candidates `(n, 3)`, whether each is in the split, and the number of candidates it
    represents.
    """

    triples: Ids
    true: Flags
    weights: Floats

    @property
    def relations(self) -> Ids:
        return self.triples[:, 1]


@torch.no_grad()
def sample_candidates(model: Model, graph: Graph, split: Split, *, seed: int = 0) -> Candidates:
    """Draw candidates for the queries of a split in both directions: all true ones, and false ones
    by their rank.
    """
    model.check_shape(graph.shape)
    distinct = distinct_triples(graph.split(split), graph.shape)
    num_relations = graph.shape.num_relations
    only = distinct[
        ~occur(distinct, (graph.split(name) for name in SPLITS if name != split), graph.shape)
    ]
    if not len(only):
        raise RequestError(
            f"Calibration needs held-out triples, and {graph.name} has no {split} triples that "
            f"are not in another split too. Split the graph so that {split} has some."
        )
    true = with_reciprocals(only, num_relations).astype(np.int64)
    false, weights = _sample_false(model, true, KnownAnswers.of(graph), np.random.default_rng(seed))
    triples = np.concatenate([true, false])
    backward = triples[:, 1] >= num_relations
    triples[backward] = triples[backward][:, [2, 1, 0]] - [0, num_relations, 0]
    return Candidates(
        triples, np.arange(len(triples)) < len(true), np.concatenate([np.ones(len(true)), weights])
    )


def _sample_false(
    model: Model, true: Ids, known: KnownAnswers, random: np.random.Generator
) -> tuple[Ids, Floats]:
    """False candidates as rows of (entity, relation, answer), and their weights; `true` are such
    rows.
    """
    num_entities = known.shape.num_entities
    keys = np.unique(known.keys(true[:, 0], true[:, 1]))
    entities, relations = np.divmod(keys, 2 * known.shape.num_relations)
    first, last = known.on(torch.device("cpu")).ranges(torch.from_numpy(keys))
    num_false = num_entities - (last - first).numpy()
    bands = [NUM_BEST]  # the first ranks of the bands below the best, and the end of the last band
    while bands[-1] * BAND_FACTOR < num_entities:
        bands.append(bands[-1] * BAND_FACTOR)
    bands.append(num_entities)
    per_query = num_entities * (NUM_BEST + DRAWS_PER_BAND * (len(bands) - 1))
    chosen = _balanced(
        relations, min(NUM_QUERIES, max(MIN_QUERIES, MAX_SCORES // per_query)), random
    )
    drawn = []
    parts = []
    for block, scores in score_blocks(model, entities[chosen], relations[chosen]):
        check_finite(scores)
        given = entities[chosen[block]]
        queried = relations[chosen[block]]
        places = tuple(torch.from_numpy(ids).to(model.device) for ids in known(given, queried))
        ranked = scores.index_put(places, scores.new_tensor(-torch.inf)).argsort(
            dim=1, descending=True
        )
        ranks, represented = _draw_ranks(num_false[chosen[block]], bands, random)
        answers = ranked.gather(1, torch.from_numpy(ranks).to(model.device)).cpu().numpy()
        rows, columns = np.nonzero(represented)
        drawn.append(np.stack([given[rows], queried[rows], answers[rows, columns]], axis=1))
        parts.append(represented[rows, columns])
    false = np.concatenate(drawn)
    weights = np.concatenate(parts)
    # The drawn candidates of a relation and direction represent those of all its queries.
    number = int(relations.max()) + 1
    total = np.bincount(relations, num_false, minlength=number)
    sampled = np.bincount(false[:, 1], weights, minlength=number)
    return false, weights * (total / np.maximum(sampled, 1e-300))[false[:, 1]]


def _balanced(relations: Ids, limit: int, random: np.random.Generator) -> Ids:
    """Rows of at most about `limit` queries: all of each relation, or an equal number if those are
    too many.
    """
    order = random.permutation(len(relations))
    order = order[np.argsort(relations[order], kind="stable")]
    counts = np.bincount(relations)
    within = np.arange(len(relations)) - (np.cumsum(counts) - counts)[relations[order]]
    each = np.searchsorted(np.cumsum(np.bincount(within)), limit, side="right")
    return np.sort(order[within < max(1, each)])


def _draw_ranks(
    num_false: Ids, bands: list[int], random: np.random.Generator
) -> tuple[Ids, Floats]:
    """Ranks `(batch, n)` of false candidates and the number each represents; equally spaced within
    a band.
    """
    ranks = [np.broadcast_to(np.arange(NUM_BEST), (len(num_false), NUM_BEST))]
    weights = [ranks[0] < num_false[:, None]]
    for start, stop in pairwise(bands):
        size = (np.minimum(stop, num_false) - start).clip(0)[:, None]
        steps = np.arange(DRAWS_PER_BAND) + random.random((len(num_false), 1))
        ranks.append(start + (steps * size / DRAWS_PER_BAND).astype(np.int64))
        weights.append(np.broadcast_to(size / DRAWS_PER_BAND, ranks[-1].shape))
    return np.concatenate(ranks, 1).clip(max=bands[-1] - 1), np.concatenate(weights, 1).astype(
        np.float64
    )


# -- fit ---------------------------------------------------------------------


def calibrate(model: Model, graph: Graph, *, seed: int = 0) -> Calibration:
    """Fit a calibration on the valid split; `seed` draws the false candidates."""
    log = ProgressLog(f"Calibrating {graph.name}")
    log(lambda: f"sampling candidates of the {len(graph.valid):,} validation triples")
    drawn = sample_candidates(model, graph, "valid", seed=seed)
    log(lambda: f"scoring {len(drawn.true):,} candidates", last=True)
    log_probability = triple_log_probabilities(model, drawn.triples).double().cpu().numpy()
    patterns = DomainRange.of(graph)(drawn.triples)
    lines, relation_specific = fit_relation_lines(
        log_probability, patterns, drawn, graph.shape.num_relations
    )
    log(
        lambda: (
            f"{len(lines):,} relations are fitted, {int(relation_specific.sum()):,} by their own "
            "line"
        ),
        last=True,
    )
    log_odds = line_values(lines[drawn.relations], log_probability, patterns)
    return Calibration(
        slopes=torch.from_numpy(lines[:, 0].astype(np.float32)),
        offsets=torch.from_numpy(lines[:, 1:].astype(np.float32)),
        relation_specific=torch.from_numpy(relation_specific),
        max_probability=max_supported_probability(log_odds, drawn.true, drawn.weights),
        metadata={
            "graph": graph.name,
            "fingerprint": graph.fingerprint,
            "split": "valid",
            "seed": seed,
            "num_true": int(drawn.true.sum()),
            "num_candidates": round(float(drawn.weights.sum())),
            "num_drawn": len(drawn.true),
        },
    )


def fit_relation_lines(
    log_probability: Floats, patterns: Ids, drawn: Candidates, num_relations: int
) -> tuple[Floats, Flags]:
    """Slope and offsets of each relation, `(num_relations, 1 + NUM_PATTERNS)`, and whether they are
    fitted for it.
    """
    shared_spread = _covariance(SHARED_SPREADS, middle=0.0)
    shared = fit_line(
        log_probability,
        patterns,
        drawn.true,
        drawn.weights,
        centre=PRIOR_MEAN,
        covariance=shared_spread,
    )
    probability = _sigmoid(line_values(shared, log_probability, patterns))
    information = drawn.weights * probability * (1 - probability)
    middle = float((information * log_probability).sum() / max(information.sum(), 1e-300))
    covariance = _covariance(
        (RELATION_SPREADS[0] * shared[0], *RELATION_SPREADS[1:]), middle=middle
    )
    lines = np.tile(shared, (num_relations, 1))
    num_valid = (
        np.bincount(drawn.relations[drawn.true], minlength=num_relations) // 2
    )  # queried in both directions
    relation_specific = num_valid >= MIN_TRIPLES
    for relation in np.flatnonzero(relation_specific):
        its = drawn.relations == relation
        parts = (log_probability[its], patterns[its], drawn.true[its], drawn.weights[its])
        lines[relation] = fit_line(*parts, centre=shared, covariance=covariance)
    return lines, relation_specific


def max_supported_probability(log_odds: Floats, true: Flags, weights: Floats) -> float:
    """The largest (k + 1) / (n + 2) over the n best candidates with k true ones; both directions
    count as one.
    """
    order = np.argsort(-log_odds, kind="stable")
    num_best, num_true = (np.cumsum(counted[order]) / 2 for counted in (weights, weights * true))
    return float(((num_true + 1) / (num_best + 2)).max())


def line_values(lines: Floats, log_probability: Floats, patterns: Ids) -> Floats:
    """Log odds of candidates `(n,)`, by one line or by a line for each."""
    offsets = np.broadcast_to(lines[..., 1:], (len(patterns), NUM_PATTERNS))
    found: Floats = lines[..., 0] * log_probability + np.take_along_axis(
        offsets, patterns[:, None], axis=1
    ).squeeze(1)
    return found


def _covariance(spreads: Sequence[float], *, middle: float) -> Floats:
    """The prior covariance of lines whose slope, value at the middle and effects of new ends are
    independent.
    """
    causes = np.zeros((1 + NUM_PATTERNS, 2 + NEW_ENDS.shape[1]))
    causes[0, 0], causes[1:, 0] = 1.0, -middle
    causes[1:, 1], causes[1:, 2:] = 1.0, NEW_ENDS
    causes *= np.asarray(spreads)
    covariance: Floats = causes @ causes.T
    return covariance


def fit_line(
    log_probability: Floats,
    patterns: Ids,
    true: Flags,
    weights: Floats,
    *,
    centre: Floats,
    covariance: Floats,
) -> Floats:
    """The most probable slope and offsets, `(1 + NUM_PATTERNS,)`, under a Gaussian prior."""
    design = np.concatenate([log_probability[:, None], np.eye(NUM_PATTERNS)[patterns]], axis=1)
    line = _newton(design, true, weights, centre, np.linalg.inv(covariance).astype(np.float64))
    if line[0] < MIN_SLOPE:  # fit the offsets alone
        fixed = centre.copy()
        precision = np.zeros_like(covariance)
        fixed[0], precision[0, 0] = MIN_SLOPE, 1e12
        precision[1:, 1:] = np.linalg.inv(covariance[1:, 1:])
        line = _newton(design, true, weights, fixed, precision)
        line[0] = MIN_SLOPE
    return line


def _newton(
    design: Floats, true: Flags, weights: Floats, centre: Floats, precision: Floats
) -> Floats:
    def loss(line: Floats) -> float:
        logits = design @ line
        away = line - centre
        return float(
            (weights * (np.logaddexp(0, logits) - true * logits)).sum()
            + away @ precision @ away / 2
        )

    line = centre.copy()
    now = loss(centre)
    for _ in range(MAX_STEPS):
        probability = _sigmoid(design @ line)
        gradient = design.T @ (weights * (probability - true)) + precision @ (line - centre)
        hessian = (
            design * (weights * probability * (1 - probability))[:, None]
        ).T @ design + precision
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while (after := loss(line - length * step)) > now and length > 1e-10:
            length /= 2
        line = line - length * step
        gained = now - after
        now = after
        if gained <= 1e-12 * abs(now):
            break
    return line


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = np.exp(-np.logaddexp(0, -logits))
    return found


# -- prior correction --------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PriorCorrection:
    """Probabilities of any triples: a calibration, which assumes a missing answer, and priors that
    there is one.
    """

    calibration: Calibration
    domain_range: DomainRange
    heads: (
        Tensor  # of queries (h, r, ?), `(num_relations, 2)`: h in the domain of r, and h new to it
    )
    tails: Tensor  # of queries (?, r, t), by the range of r

    @classmethod
    def of(cls, calibration: Calibration, graph: Graph) -> Self:
        train = DomainRange.of(graph)
        valid = DomainRange.of(graph, "valid")
        heads = _query_priors(train.heads, valid.heads, graph.shape)
        return cls(calibration, train, heads, _query_priors(train.tails, valid.tails, graph.shape))

    @cached_property
    def priors(self) -> Tensor:
        """By relation and pattern, `(num_relations, 4)`."""
        patterns = torch.arange(NUM_PATTERNS)
        return (self.heads[:, patterns % 2] + self.tails[:, patterns // 2]) / 2

    def log_odds(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Log odds of triples; log-probabilities, relation ids of the graph and patterns
        broadcast.
        """
        odds = self.calibration.log_odds(log_probability, relations, patterns).double()
        odds = odds.clamp(max=log_odds_of(self.calibration.max_probability))
        return odds + self.priors[relations, patterns].log()

    def probability(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        return self.log_odds(log_probability, relations, patterns).sigmoid()

    def required_log_probability(self, log_odds: float, relation: int) -> Tensor:
        """The log-probability that reaches some log odds, `(2, 2)`: by head, then by tail, 1 if
        new; or infinity.
        """
        required = log_odds - self.priors[relation].log()
        found = (required - self.calibration.offsets[relation]) / self.calibration.slopes[relation]
        largest = log_odds_of(self.calibration.max_probability) + ROUNDING
        return torch.where(required > largest, inf, found.double()).reshape(2, 2).T

    def query_priors(self, entity: int, relations: Tensor, side: Side) -> Tensor:
        """The priors of queries that give an entity as head or as tail, `(num_queries,)`."""
        train = self.domain_range
        priors, given = (self.heads, train.heads) if side == "head" else (self.tails, train.tails)
        new = ~is_among(relations.numpy() * train.num_entities + entity, given)
        return priors[relations, torch.from_numpy(new).long()]


def log_odds_of(probability: float) -> float:
    """Log odds; infinite for probabilities 0 and 1."""
    return (
        log(probability / (1 - probability))
        if 0 < probability < 1
        else inf
        if probability
        else -inf
    )


def _query_priors(train: Ids, valid: Ids, shape: GraphShape) -> Tensor:
    """The share of queries with a valid answer, `(num_relations, 2)`: given an entity of train, and
    given a new one.

    Additive smoothing towards the share of all relations: one answered query is added to 1 / share
    queries. If no relation has an answered query, one is assumed.
    """

    def by_relation(keys: Ids) -> Ids:
        return np.bincount(keys // shape.num_entities, minlength=shape.num_relations)

    new = ~np.isin(valid, train)
    answered = np.stack([by_relation(valid[which]) for which in (~new, new)])
    in_train = by_relation(train)
    number = np.stack([in_train, shape.num_entities - in_train])
    pooled = np.maximum(answered.sum(1), 1) / np.maximum(number.sum(1), 1)
    return torch.from_numpy(
        np.minimum((answered + 1) / (number + 1 / pooled[:, None]), 1.0).T.copy()
    )


# -- the calibration of a run ------------------------------------------------


@dataclass(frozen=True, eq=False)
class SavedCalibration:
    """Calibration and prediction sets of a model, both fitted on the valid split, and their
    evaluation on test.
    """

    calibration: Calibration
    prediction_sets: PredictionSets
    checks: dict[str, Any] = field(default_factory=dict)  # the reports of `dualkg calibrate`


def save_calibration(saved: SavedCalibration, folder: str | Path) -> None:
    """Write `calibration.json` into a run folder."""
    parts = {
        "calibration": saved.calibration.as_dict(),
        "prediction_sets": saved.prediction_sets.as_dict(),
    }
    write_json(RunFolder(folder).calibration, {**parts, "checks": saved.checks}, indent=None)


def load_calibration(folder: str | Path, graph: Graph) -> SavedCalibration:
    """Read `calibration.json` from the folder of a run on this graph; a damaged file is refused."""
    path = RunFolder(folder).calibration
    num_relations = graph.shape.num_relations
    again = f"Make it again: dualkg calibrate {Path(folder)} --overwrite"
    try:
        found = read_json(path, checksum=True)
        calibration = Calibration.from_dict(found["calibration"])
        expected = (num_relations,), (num_relations, NUM_PATTERNS), (num_relations,)
        tables = calibration.slopes, calibration.offsets, calibration.relation_specific
        if tuple(tuple(table.shape) for table in tables) != expected:
            raise ValueError(
                f"it should have {num_relations:,} relations with {NUM_PATTERNS} offsets each"
            )
        if not bool((calibration.slopes > 0).all()):
            raise ValueError("a slope is not above 0")
        prediction_sets = PredictionSets.from_dict(found["prediction_sets"], num_relations)
        return SavedCalibration(calibration, prediction_sets, dict(found.get("checks", {})))
    except RequestError as error:
        raise RequestError(f"{error} {again}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"{path} is damaged: {reason}. {again}") from None


def calibration_for(run: Run, *, overwrite: bool = False) -> SavedCalibration:
    """Read the calibration of a run from its folder, or fit it now and save it if the run has a
    folder.
    """
    if run.folder and RunFolder(run.folder).calibration.exists() and not overwrite:
        return load_calibration(run.folder, run.graph)
    with ExitStack() as stack:
        folder = run.folder
        try:
            stack.enter_context(locked(folder))
        except LockedError:
            if overwrite:
                raise
            folder = None  # another process is about to save one, and this one is used once
        made = SavedCalibration(
            calibrate(run.model, run.graph), PredictionSets.fit(run.model, run.graph)
        )
        if folder and run.is_current:
            save_calibration(made, folder)
    return made
