"""Calibration: probabilities of triples from their log-probabilities, fitted on the valid split.

The probability that a candidate (see `sampling`) is true is a logistic function of its
log-probability, with a slope for its relation and an offset for its relation and domain/range
pattern. Where the valid split supports it, the log odds are mapped once more (see
`recalibration`).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import Graph, GraphShape
from dualkg.errors import (
    PYTHON,
    DamagedFile,
    DualkgError,
    LockedError,
    RequestError,
    Words,
)
from dualkg.files import (
    atomic_write,
    file_damage,
    file_record,
    locked,
    read_json,
    write_json,
)
from dualkg.inference.logistic import fit_logistic
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.recalibration import (
    RECALIBRATION,
    CrossFit,
    Recalibration,
    cross_fit_recalibration,
    draw_folds,
    fit_recalibration,
)
from dualkg.inference.sampling import Candidates, sample_candidates
from dualkg.inference.scoring import Flags, Floats, Ids, triple_log_probabilities
from dualkg.logs import ProgressLog, logger
from dualkg.models.base import Model
from dualkg.tables.lookup import Side
from dualkg.training.run import Run, RunFolder, check_source
from dualkg.without_torch.domain_range import DomainRange
from dualkg.without_torch.priors import (
    AssumedMissing,
    QueryPriors,
    assumed_missing,
    check_missing_share,
)
from dualkg.without_torch.probabilities import (
    NUM_PATTERNS,
    TripleCalibration,
    TripleProbabilities,
    check_lines,
    line_log_odds,
    log_odds_of,
    offsets_by_pattern,
    sigmoid,
)
from dualkg.without_torch.query_classes import NUM_CLASSES, NUM_KNOWN, QueryClasses

MIN_TRIPLES = 5  # valid triples that a relation needs for parameters of its own

# The parameters of a line are a slope and the offsets of the patterns. The prior mean of the shared
# line is a calibrated softmax.
PRIOR_MEAN = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
# Prior standard deviations of the shared line: of the slope, of the value, of the effects of a new
# head and of a new tail, and of their interaction.
SHARED_SPREADS = (1.0, 5.0, 1.0, 1.0, 2.0)
# Prior standard deviations of the difference between the line of a relation and the shared line, in
# the same order. The first is a fraction of the shared slope.
RELATION_SPREADS = (0.25, 1.0, 1.0, 1.0, 1.0)
# The effects that each pattern has: that of a new head, that of a new tail, and their interaction.
NEW_ENDS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])

MIN_SLOPE = 1e-3  # above 0, so that a larger log-probability never lowers the probability
FIXED = 1e12  # the prior precision of a parameter that is not fitted
ROUNDING = 1e-9  # difference of log odds that counts as none
NOT_BOUND = (
    "an earlier version wrote it, and it does not say which run it was made from; calibrate the "
    "run again to be sure"
)


@dataclass(frozen=True)
class Calibration:
    """p = σ(g(slope · log-probability + offset)), at most `max_probability`, with slope > 0.

    A relation has a slope in `slopes` `(num_relations,)`, and an offset for each domain/range
    pattern in `offsets` `(num_relations, 4)`. They are fitted for it if it has enough valid
    triples, and otherwise shared with other relations; `relation_specific` `(num_relations,)` says
    which. The map g is the `recalibration`, or the identity if it is None; `cross_fit` says what it
    gains or would have gained. `missing_share` is the share of the true triples that the graph is
    said to lack; if it is None, the graph lacks as many triples as valid has. `metadata` has the
    graph, the split and the numbers of candidates of the fit. The priors of queries take the
    `types` of entities as evidence (see `QueryClasses`).
    """

    slopes: Tensor
    offsets: Tensor
    relation_specific: Tensor
    max_probability: float = 1.0
    recalibration: Recalibration | None = None
    cross_fit: CrossFit | None = None
    missing_share: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    types: EntityTypes | None = None

    def log_odds(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Log odds before they are clamped.

        Log-probabilities, relation ids of the graph and patterns broadcast.
        """
        slopes = self.slopes.to(log_probability.device)
        offsets = self.offsets.to(log_probability.device)
        log_odds: Tensor = line_log_odds(slopes, offsets, log_probability, relations, patterns)
        return log_odds if self.recalibration is None else self.recalibration(log_odds)

    def required_log_probability(self, log_odds: Tensor, relation: int) -> Tensor:
        """The log-probability with which a triple of each pattern has some log odds, `(4,)`.

        It inverts `log_odds`, which are `(4,)` too.
        """
        if self.recalibration is not None:
            log_odds = self.recalibration.inverse(log_odds)
        return (log_odds - self.offsets[relation]) / self.slopes[relation]

    def probability(self, log_probability: Tensor, relations: Tensor, patterns: Tensor) -> Tensor:
        """Calibrated probabilities, which never decrease with the log-probability.

        The arguments are those of `log_odds`.
        """
        log_odds = self.log_odds(log_probability, relations, patterns)
        return torch.sigmoid(log_odds).clamp(max=self.max_probability)

    @property
    def as_measured(self) -> Self:
        """The same without a given share of missing triples, to be compared with a split."""
        return replace(self, missing_share=None)

    def assumed_missing(self, graph: Graph) -> AssumedMissing:
        """How many triples the probabilities take the graph to lack."""
        return assumed_missing(graph, self.missing_share)

    def as_dict(self) -> dict[str, Any]:
        return {
            "slopes": self.slopes.tolist(),
            "offsets": self.offsets.tolist(),
            "relation_specific": self.relation_specific.tolist(),
            "max_probability": self.max_probability,
            "recalibration": self.recalibration and self.recalibration.as_dict(),
            "cross_fit": self.cross_fit and asdict(self.cross_fit),
            "missing_share": self.missing_share,
            "metadata": self.metadata,
            "types": self.types and self.types.as_dict(),
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        slopes = torch.tensor(saved["slopes"], dtype=torch.float32)
        # Files of earlier versions have no recalibration, no cross-fit and no missing share.
        recalibration = saved.get("recalibration")
        if recalibration is not None:
            recalibration = Recalibration.from_dict(recalibration)
        cross_fit = saved.get("cross_fit")
        if cross_fit is not None:
            cross_fit = CrossFit.from_dict(cross_fit)
        missing_share = saved.get("missing_share")
        if missing_share is not None:
            missing_share = float(missing_share)
            check_missing_share(missing_share)
        return cls(
            slopes=slopes,
            offsets=torch.tensor(saved["offsets"], dtype=torch.float32),
            relation_specific=torch.tensor(saved["relation_specific"], dtype=torch.bool),
            max_probability=float(saved["max_probability"]),
            recalibration=recalibration,
            cross_fit=cross_fit,
            missing_share=missing_share,
            metadata=saved.get("metadata", {}),
        )


# -- fit ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Examples:
    """Candidates that lines are fitted to, as columns `(n,)`."""

    log_probability: Floats
    patterns: Ids
    true: Flags
    weights: Floats
    relations: Ids

    def where(self, chosen: Flags) -> Self:
        """The examples of some rows."""
        return type(self)(
            self.log_probability[chosen],
            self.patterns[chosen],
            self.true[chosen],
            self.weights[chosen],
            self.relations[chosen],
        )


def calibrate(model: Model, graph: Graph, *, seed: int = 0) -> Calibration:
    """Fit a calibration on the valid split; `seed` draws the false candidates."""
    progress = ProgressLog(f"Calibrating {graph.name}")
    progress(lambda: f"sampling candidates of the {len(graph.valid):,} validation triples")
    candidates = sample_candidates(model, graph, "valid", seed=seed)

    progress(lambda: f"scoring {len(candidates.true):,} candidates", last=True)
    symmetric = graph.symmetric_relations
    log_probabilities = triple_log_probabilities(model, candidates.triples, symmetric=symmetric)
    examples = Examples(
        log_probability=log_probabilities.double().cpu().numpy(),
        patterns=DomainRange.of(graph, symmetric=symmetric)(candidates.triples),
        true=candidates.true,
        weights=candidates.weights,
        relations=candidates.relations,
    )

    lines, relation_specific = fit_relation_lines(examples, graph.shape.num_relations)
    num_specific = int(relation_specific.sum())
    progress(
        lambda: f"{len(lines):,} relations are fitted, {num_specific:,} by their own line",
        last=True,
    )

    recalibration, cross_fit = _recalibrate(examples, candidates, graph.shape, seed=seed)
    progress(
        lambda: (
            f"recalibration is {'used' if recalibration else 'not used'}: it gains "
            f"{cross_fit.gain:.4f} ± {cross_fit.standard_error:.4f} in log loss"
        ),
        last=True,
    )

    # The recalibration does not change the order, on which the maximum depends.
    log_odds = line_values(lines[examples.relations], examples.log_probability, examples.patterns)
    return Calibration(
        slopes=torch.from_numpy(lines[:, 0].astype(np.float32)),
        offsets=torch.from_numpy(lines[:, 1:].astype(np.float32)),
        relation_specific=torch.from_numpy(relation_specific),
        max_probability=max_supported_probability(log_odds, examples.true, examples.weights),
        recalibration=recalibration,
        cross_fit=cross_fit,
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


def _recalibrate(
    examples: Examples, candidates: Candidates, shape: GraphShape, *, seed: int
) -> tuple[Recalibration | None, CrossFit]:
    """The map of log odds, or None if cross-fitting does not support one; and its gain."""
    _, inverse = np.unique(candidates.triples, axis=0, return_inverse=True)
    triple_ids = inverse.reshape(-1)
    folds = draw_folds(triple_ids, num_folds=RECALIBRATION.num_folds, seed=seed)
    log_odds = cross_fitted_log_odds(examples, folds, shape.num_relations)
    cross_fit = cross_fit_recalibration(
        log_odds, examples.true, examples.weights, triple_ids=triple_ids, folds=folds
    )
    if not cross_fit.supported:
        return None, cross_fit
    return fit_recalibration(log_odds, examples.true, examples.weights), cross_fit


def cross_fitted_log_odds(examples: Examples, folds: Ids, num_relations: int) -> Floats:
    """The log odds of examples `(n,)` by lines that are fitted to the other folds."""
    log_odds = np.empty(len(folds))
    for fold in np.unique(folds).tolist():
        held_out = folds == fold
        lines, _ = fit_relation_lines(examples.where(~held_out), num_relations)
        of_fold = examples.where(held_out)
        log_odds[held_out] = line_values(
            lines[of_fold.relations], of_fold.log_probability, of_fold.patterns
        )
    return log_odds


def fit_relation_lines(examples: Examples, num_relations: int) -> tuple[Floats, Flags]:
    """The lines of all relations, and whether each is fitted for its relation.

    A line is a slope and the offsets of the patterns, so lines are
    `(num_relations, 1 + NUM_PATTERNS)`.
    """
    shared = fit_line(
        examples, centre=PRIOR_MEAN, covariance=_covariance(SHARED_SPREADS, middle=0.0)
    )
    slope_spread = RELATION_SPREADS[0] * shared[0]
    covariance = _covariance(
        (slope_spread, *RELATION_SPREADS[1:]), middle=_informative_middle(shared, examples)
    )

    # A true triple is a candidate twice, since it is queried in both directions.
    relations_of_true = examples.relations[examples.true]
    num_valid = np.bincount(relations_of_true, minlength=num_relations) // 2
    relation_specific = num_valid >= MIN_TRIPLES

    lines = np.tile(shared, (num_relations, 1))
    for relation in np.flatnonzero(relation_specific).tolist():
        lines[relation] = fit_line(
            examples.where(examples.relations == relation), centre=shared, covariance=covariance
        )
    return lines, relation_specific


def _informative_middle(line: Floats, examples: Examples) -> float:
    """The mean log-probability of the examples, weighted by what each says about a line."""
    values = line_values(line, examples.log_probability, examples.patterns)
    probability = sigmoid(values)
    information = examples.weights * probability * (1 - probability)
    total = max(information.sum(), 1e-300)
    return float((information * examples.log_probability).sum() / total)


def max_supported_probability(log_odds: Floats, true: Flags, weights: Floats) -> float:
    """The largest (k + 1) / (n + 2) over the n best candidates with k true ones.

    Both directions of a triple count as one.
    """
    order = np.argsort(-log_odds, kind="stable")
    num_best = np.cumsum(weights[order]) / 2
    num_true = np.cumsum((weights * true)[order]) / 2
    return float(((num_true + 1) / (num_best + 2)).max())


def line_values(lines: Floats, log_probability: Floats, patterns: Ids) -> Floats:
    """Log odds of candidates `(n,)`, by one line or by a line for each."""
    slopes = lines[..., 0]
    offsets = np.broadcast_to(lines[..., 1:], (len(patterns), NUM_PATTERNS))
    offset_of_pattern = np.take_along_axis(offsets, patterns[:, None], axis=1).squeeze(1)
    log_odds: Floats = slopes * log_probability + offset_of_pattern
    return log_odds


def _covariance(spreads: Sequence[float], *, middle: float) -> Floats:
    """The prior covariance of lines, `(1 + NUM_PATTERNS, 1 + NUM_PATTERNS)`.

    The slope, the value at the middle and the effects of new ends are independent, with the
    standard deviations `spreads`.
    """
    causes = np.zeros((1 + NUM_PATTERNS, 2 + NEW_ENDS.shape[1]))
    causes[0, 0] = 1.0
    causes[1:, 0] = -middle
    causes[1:, 1] = 1.0
    causes[1:, 2:] = NEW_ENDS
    causes *= np.asarray(spreads)
    covariance: Floats = causes @ causes.T
    return covariance


def fit_line(examples: Examples, *, centre: Floats, covariance: Floats) -> Floats:
    """The most probable slope and offsets, `(1 + NUM_PATTERNS,)`, under a Gaussian prior."""
    precision = np.linalg.inv(covariance).astype(np.float64)
    line = _fit_line(examples, centre=centre, precision=precision)
    if line[0] >= MIN_SLOPE:
        return line

    # The slope is fixed, and the offsets are fitted alone.
    fixed_centre = centre.copy()
    fixed_centre[0] = MIN_SLOPE
    fixed_precision = np.zeros_like(covariance)
    fixed_precision[0, 0] = FIXED
    fixed_precision[1:, 1:] = np.linalg.inv(covariance[1:, 1:])
    line = _fit_line(examples, centre=fixed_centre, precision=fixed_precision)
    line[0] = MIN_SLOPE
    return line


def _fit_line(examples: Examples, *, centre: Floats, precision: Floats) -> Floats:
    pattern_columns = np.eye(NUM_PATTERNS)[examples.patterns]
    design = np.concatenate([examples.log_probability[:, None], pattern_columns], axis=1)
    return fit_logistic(
        lambda line: (design @ line, design),
        examples.true,
        examples.weights,
        centre=centre,
        precision=precision,
    )


# -- prior correction --------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PriorCorrection:
    """Probabilities of any triples.

    All that shows, saves or sorts by the probability of a triple has it from `of_triples`.

    A calibration assumes that a query has a missing answer. The prior of a query is the probability
    that it has one, by its class (see `query_classes`): `heads` `(num_relations, NUM_CLASSES)` are
    the priors of queries (h, r, ?), and `tails` those of (?, r, t). If the graph is said to lack
    more triples than valid has, they are expected numbers of answers, and may be above 1.
    """

    calibration: Calibration
    domain_range: DomainRange
    query_classes: QueryClasses
    heads: Tensor
    tails: Tensor

    @classmethod
    def of(cls, calibration: Calibration, graph: Graph) -> Self:
        priors = priors_of(calibration, graph)
        symmetric = graph.symmetric_relations
        offsets = offsets_by_pattern(calibration.offsets.numpy(), symmetric)
        return cls(
            replace(calibration, offsets=torch.from_numpy(offsets)),
            priors.domain_range,
            priors.query_classes,
            torch.from_numpy(priors.heads),
            torch.from_numpy(priors.tails),
        )

    def of_triples(self, triples: Ids, log_probabilities: Tensor) -> TripleProbabilities:
        """The probabilities of triples `(num_triples, 3)`, given their log-probabilities."""
        return self._arrays.of_triples(triples, log_probabilities.double().cpu().numpy())

    def priors_of(self, triples: Ids) -> Floats:
        """The priors of triples `(num_triples, 3)`: the means of those of their two queries."""
        return self._arrays.priors.of_triples(triples)

    @property
    def _arrays(self) -> TripleCalibration:
        """The same as arrays, which share its memory."""
        recalibration = self.calibration.recalibration
        knots = None
        if recalibration is not None:
            knots = (recalibration.knots.numpy(), recalibration.values.numpy())
        return TripleCalibration(
            self.calibration.slopes.numpy(),
            self.calibration.offsets.numpy(),
            self.calibration.max_probability,
            knots,
            QueryPriors(
                self.domain_range, self.query_classes, self.heads.numpy(), self.tails.numpy()
            ),
        )

    def priors(self, relation: int) -> Tensor:
        """The priors of triples of a relation by the classes of head and tail."""
        return (self.heads[relation][:, None] + self.tails[relation][None, :]) / 2

    def required_log_probability(self, log_odds: float, relation: int) -> Tensor:
        """The log-probability that reaches some log odds, or infinity if none does.

        It is indexed by the class of the head and then by that of the tail.
        """
        is_new = (torch.arange(NUM_CLASSES) >= NUM_KNOWN).long()
        patterns = is_new[:, None] + 2 * is_new[None, :]
        required_log_odds = log_odds - self.priors(relation).log()
        by_pattern = self.calibration.required_log_probability(
            required_log_odds[..., None].expand(-1, -1, NUM_PATTERNS), relation
        )
        log_probability = by_pattern.gather(-1, patterns[..., None])[..., 0].double()

        largest = log_odds_of(self.calibration.max_probability) + ROUNDING
        return torch.where(required_log_odds > largest, inf, log_probability)

    def query_priors(self, entity: int, relations: Tensor, side: Side) -> Tensor:
        """The priors of queries that give an entity as head or as tail, `(num_queries,)`."""
        priors = self.heads if side == "head" else self.tails
        roles = self.query_classes.roles(relations.numpy(), tails=side == "tail")
        classes = self.query_classes.of_pairs(np.full(len(roles), entity), roles)
        return priors[relations, torch.from_numpy(classes)]


def priors_of(calibration: Calibration, graph: Graph) -> QueryPriors:
    """The priors of queries on a graph, by what the calibration knows of it."""
    return QueryPriors.of(graph, types=calibration.types, missing_share=calibration.missing_share)


# -- the calibration of a run ------------------------------------------------


class UnusableCalibration(RequestError):
    """The calibration of a run cannot be used; `cause` is the error that says why."""

    def __init__(self, run: Path, cause: DualkgError) -> None:
        super().__init__()
        self.run = run
        self.cause = cause

    def message(self, words: Words = PYTHON) -> str:
        call = words.call("calibrate", self.run, overwrite=True)
        return f"{self.cause.message(words)} Make it again: {call}"


@dataclass(frozen=True, eq=False)
class SavedCalibration:
    """Calibration and prediction sets of a model, both fitted on the valid split.

    `checks` are the reports of their evaluation on test, which `dualkg.calibrate` makes.
    `made_from` is the identity of the run in a file that was read; earlier versions wrote none.
    """

    calibration: Calibration
    prediction_sets: PredictionSets
    checks: dict[str, Any] = field(default_factory=dict)
    made_from: str | None = None


def save_calibration(saved: SavedCalibration, folder: str | Path, graph: Graph) -> None:
    """Write `calibration.json` into the folder of the run that it was fitted for.

    The priors of its queries are written before. A query that finds others computes its own.
    """
    files = RunFolder(folder)
    arrays = priors_of(saved.calibration, graph).as_arrays()
    with atomic_write(files.priors) as fresh:
        save_file(arrays, fresh)
    content = {
        "made_from": files.known_identity(),
        "calibration": saved.calibration.as_dict(),
        "prediction_sets": saved.prediction_sets.as_dict(),
        "checks": saved.checks,
        "priors": file_record(files.priors),
    }
    write_json(files.calibration, content, indent=None)


def priors_damage(folder: RunFolder) -> str | None:
    """What is wrong with the saved priors of a calibration; None if nothing is."""
    record = read_json(folder.calibration, checksum=True).get("priors")
    if record is None:
        return "the calibration does not name it"
    return file_damage(folder.priors, record)


def load_calibration(
    folder: str | Path, graph: Graph, *, identity: str | None = None
) -> SavedCalibration:
    """Read `calibration.json` from the folder of a run on this graph.

    A damaged file is refused, and one that was fitted for another run; `identity` is that of the
    run, by default what the folder has now.
    """
    folder = Path(folder)
    path = RunFolder(folder).calibration
    try:
        content = read_json(path, checksum=True)
        saved = _parse_calibration(content, graph.shape)
        identity = identity or RunFolder(folder).known_identity()
        check_source(path, saved.made_from, identity)
        if saved.made_from is None and identity is not None:
            logger.warning("%s: %s", path, NOT_BOUND)
        return saved
    except RequestError as error:
        raise UnusableCalibration(folder, error) from None
    except KeyError as error:
        damage = DamagedFile(path, f"there is no {error}")
        raise UnusableCalibration(folder, damage) from None
    except (TypeError, ValueError, AttributeError) as error:
        damage = DamagedFile(path, str(error))
        raise UnusableCalibration(folder, damage) from None


def _parse_calibration(content: Any, shape: GraphShape) -> SavedCalibration:
    num_relations = shape.num_relations
    calibration = Calibration.from_dict(content["calibration"])
    types = content["calibration"].get("types")
    if types is not None:
        types = EntityTypes.from_dict(types, shape.num_entities)
        calibration = replace(calibration, types=types)
    check_lines(calibration.slopes.numpy(), calibration.offsets.numpy(), num_relations)
    if calibration.relation_specific.shape != (num_relations,):
        raise ValueError(f"it should say of {num_relations:,} relations which have their own line")

    prediction_sets = PredictionSets.from_dict(content["prediction_sets"], num_relations)
    checks = dict(content.get("checks", {}))
    return SavedCalibration(calibration, prediction_sets, checks, content.get("made_from"))


def fit_calibration(run: Run) -> SavedCalibration:
    """Fit probabilities and prediction sets of a run, and save nothing."""
    return SavedCalibration(
        calibrate(run.model, run.graph), PredictionSets.fit(run.model, run.graph)
    )


def calibration_for(run: Run, *, overwrite: bool = False) -> SavedCalibration:
    """Read the calibration of a run from its folder, or fit it now.

    A calibration that is fitted now is saved if the run has a folder. The former one is there until
    then.
    """
    folder = run.folder
    if folder and RunFolder(folder).has_calibration and not overwrite:
        return load_calibration(folder, run.graph, identity=run.identity)

    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except LockedError:
            if overwrite:
                raise
            folder = None  # Another process is about to save one, and this one is used once.

        fitted = fit_calibration(run)
        if folder and run.is_current:
            save_calibration(fitted, folder, run.graph)
    return fitted
