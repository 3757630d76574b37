"""Logistic regression under a Gaussian prior, by Newton's method."""

from collections.abc import Callable

import numpy as np

from dualkg.inference.scoring import Flags, Floats
from dualkg.without_torch.probabilities import sigmoid

MAX_STEPS = 100
MIN_STEP_LENGTH = 1e-10
MIN_RELATIVE_GAIN = 1e-12  # of the loss in a step; the fit ends when it gains less

# The logits `(n,)` of examples by some parameters, and their derivatives `(n, num_parameters)`.
Logits = Callable[[Floats], tuple[Floats, Floats]]


def fit_logistic(
    logits_of: Logits, true: Flags, weights: Floats, *, centre: Floats, precision: Floats
) -> Floats:
    """The most probable parameters `(num_parameters,)` of weighted examples.

    The prior has the mean `centre`. Steps are those of Newton's method for logits that are linear
    in their parameters, and of Fisher scoring otherwise; a step that does not help is halved.
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
