"""The fit of a calibration: a line of log odds over log-probabilities for each relation.

It is a logistic regression under a Gaussian prior, in float64 by Newton's method. The lines of
relations have a line as their prior that is fitted to all relations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NUM_PATTERNS = 4  # domain/range patterns, see `probability.patterns_of`
# Valid triples that a relation needs for parameters of its own. The number was chosen on world,
# UMLS, Kinship and FB15k-237; see docs/calibration.md.
MIN_TRIPLES = 5

# The parameters of a line are a slope and the offsets of the patterns. The prior mean of the shared
# line is a calibrated softmax.
PRIOR_MEAN = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
# Prior standard deviations of the shared line: of the slope, of the value, of the effects of a new
# head and of a new tail, and of their interaction. They were chosen by the likelihood of validation
# triples that were left out; see docs/calibration.md.
SHARED_SPREADS = (1.0, 5.0, 1.0, 1.0, 2.0)
# Prior standard deviations of the difference between the line of a relation and the shared line, in
# the same order. The first is a fraction of the shared slope.
RELATION_SPREADS = (0.25, 1.0, 1.0, 1.0, 1.0)
# The effects in each pattern: of a new head, of a new tail, and of their interaction.
NEW_ENDS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])

MIN_SLOPE = 1e-3  # above 0, so that a larger log-probability never lowers the probability
FIXED = 1e12  # the prior precision of a parameter that is not fitted

MAX_STEPS = 100  # of Newton's method, which usually takes about ten
MIN_STEP_LENGTH = 1e-10
MIN_RELATIVE_GAIN = 1e-12  # of the loss in a step; the fit ends when it gains less

# The logits `(n,)` of examples by some parameters, and their derivatives `(n, num_parameters)`.
Logits = Callable[[Floats], tuple[Floats, Floats]]


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


# -- Newton's method ---------------------------------------------------------


def fit_logistic(
    logits_of: Logits, true: Flags, weights: Floats, *, centre: Floats, precision: Floats
) -> Floats:
    """The most probable parameters `(num_parameters,)` of weighted examples.

    The prior has the mean `centre`. A step is Newton's if the logits are linear in their
    parameters, and otherwise Fisher scoring; a step that does not help is halved.
    """

    def loss_of(parameters: Floats) -> float:
        logits, _ = logits_of(parameters)
        deviation = parameters - centre
        return float(
            (weights * log_loss(logits, true)).sum() + deviation @ precision @ deviation / 2
        )

    parameters = centre.copy()
    loss = loss_of(centre)
    for _ in range(MAX_STEPS):
        logits, design = logits_of(parameters)
        probability = sigmoid(logits)
        gradient = design.T @ (weights * (probability - true)) + precision @ (parameters - centre)
        curvature = weights * probability * (1 - probability)
        hessian = (design * curvature[:, None]).T @ design + precision
        step = np.linalg.solve(hessian, gradient)

        length = 1.0
        new_loss = loss_of(parameters - length * step)
        while new_loss > loss and length > MIN_STEP_LENGTH:
            length /= 2
            new_loss = loss_of(parameters - length * step)

        parameters = parameters - length * step
        gain = loss - new_loss
        loss = new_loss
        if gain <= MIN_RELATIVE_GAIN * abs(loss):
            break
    return parameters


def log_loss(logits: Floats, true: Flags) -> Floats:
    """−log of the probability of each label, `(n,)`."""
    losses: Floats = np.logaddexp(0, logits) - true * logits
    return losses


def sigmoid(logits: Floats) -> Floats:
    probability: Floats = np.exp(-np.logaddexp(0, -logits))
    return probability
