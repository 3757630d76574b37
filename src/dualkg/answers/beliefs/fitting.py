"""Fitting a calibration: weighted logistic regression, one line for all relations and one near it for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.candidates import Candidates, Floats, draw_candidates
from dualkg.answers.beliefs.evidence import Ids, evidence_of
from dualkg.answers.beliefs.kinds import NUM_KINDS, Kinds
from dualkg.data.graph import Graph
from dualkg.models.base import Model

Marks = npt.NDArray[np.bool_]

ENOUGH = 5  # valid triples that give a relation a line of its own
# A line is a slope and the offsets of the kinds. Before any data a softmax is believed: p ≈ exp(evidence).
CENTRE = np.array([1.0, *[0.0] * NUM_KINDS])
# How far the shared line may lie from that (one standard deviation each): its slope, its value, what a new head and a
# new tail add to it, and what both add beyond the sum of the two.
SHARED_SPREADS = (1.0, 5.0, 1.0, 1.0, 2.0)
# How far lines of relations lie from the shared one, their slopes as a share of its slope.
SPREADS = (0.25, 1.0, 1.0, 1.0, 1.0)
NEW_ENDS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]])  # of each kind: a new head, a new tail, both
LEAST_SLOPE = 1e-3  # more evidence never makes a triple less probable
NUM_STEPS = 100


def calibrate(model: Model, graph: Graph, *, seed: int = 0) -> Calibration:
    """Learn from the valid split how probable a candidate with so much evidence is; `seed` draws the false ones."""
    drawn = draw_candidates(model, graph, "valid", seed=seed)
    evidence = evidence_of(model, drawn.triples).double().cpu().numpy()
    kinds = Kinds.of(graph)(drawn.triples)
    lines, own = fit_lines(evidence, kinds, drawn, graph.shape.num_relations)
    about = {
        "graph": graph.name,
        "fingerprint": graph.fingerprint,
        "split": "valid",
        "seed": seed,
        "num_true": int(drawn.true.sum()),
        "num_candidates": round(float(drawn.weights.sum())),
        "num_drawn": len(drawn.true),
    }
    return Calibration(
        slopes=torch.from_numpy(lines[:, 0].astype(np.float32)),
        offsets=torch.from_numpy(lines[:, 1:].astype(np.float32)),
        own=torch.from_numpy(own),
        ceiling=ceiling_of(values_of(lines[drawn.relations], evidence, kinds), drawn.true, drawn.weights),
        about=about,
    )


def fit_lines(evidence: Floats, kinds: Ids, drawn: Candidates, num_relations: int) -> tuple[Floats, Marks]:
    """The line of each relation, `(num_relations, 1 + NUM_KINDS)`, and whether it has its own, `(num_relations,)`."""
    spread = _spread(SHARED_SPREADS, middle=0.0)
    shared = fit_line(evidence, kinds, drawn.true, drawn.weights, centre=CENTRE, spread=spread)
    near = _spread((SPREADS[0] * shared[0], *SPREADS[1:]), middle=middle_of(shared, evidence, kinds, drawn.weights))
    lines = np.tile(shared, (num_relations, 1))
    num_valid = np.bincount(drawn.relations[drawn.true], minlength=num_relations) // 2  # each is asked from both ends
    own = num_valid >= ENOUGH
    for relation in np.flatnonzero(own):
        its = drawn.relations == relation
        parts = (evidence[its], kinds[its], drawn.true[its], drawn.weights[its])
        lines[relation] = fit_line(*parts, centre=shared, spread=near)
    return lines, own


def ceiling_of(values: Floats, true: Marks, weights: Floats) -> float:
    """The largest share of true ones that the candidates can vouch for: k of the n best, counted as (k + 1) / (n + 2).

    A valid triple is asked about from both its ends, and counts once.
    """
    order = np.argsort(-values, kind="stable")
    num_best, num_true = (np.cumsum(counted[order]) / 2 for counted in (weights, weights * true))
    return float(((num_true + 1) / (num_best + 2)).max())


def values_of(lines: Floats, evidence: Floats, kinds: Ids) -> Floats:
    """Log odds of candidates `(n,)`, by a line or by one for each."""
    found: Floats = lines[..., 0] * evidence + np.take_along_axis(
        np.broadcast_to(lines[..., 1:], (len(kinds), NUM_KINDS)), kinds[:, None], axis=1
    ).squeeze(1)
    return found


def middle_of(line: Floats, evidence: Floats, kinds: Ids, weights: Floats) -> float:
    """Where the evidence decides: its mean, each candidate counted by p (1 − p)."""
    probability = _sigmoid(values_of(line, evidence, kinds))
    matters = weights * probability * (1 - probability)
    return float((matters * evidence).sum() / max(matters.sum(), 1e-300))


def _spread(spreads: Sequence[float], *, middle: float) -> Floats:
    """The covariance of lines whose slope, value at the middle and what new ends add to it spread independently."""
    causes = np.zeros((1 + NUM_KINDS, 2 + NEW_ENDS.shape[1]))
    causes[0, 0], causes[1:, 0] = 1.0, -middle
    causes[1:, 1], causes[1:, 2:] = 1.0, NEW_ENDS
    causes *= np.asarray(spreads)
    covariance: Floats = causes @ causes.T
    return covariance


def fit_line(evidence: Floats, kinds: Ids, true: Marks, weights: Floats, *, centre: Floats, spread: Floats) -> Floats:
    """The line that fits best, drawn to a centre by a Gaussian prior with this covariance."""
    precision = np.linalg.inv(spread).astype(np.float64)
    line = _newton(evidence, kinds, true, weights, centre, precision)
    if line[0] < LEAST_SLOPE:  # evidence says nothing, or the contrary: then all candidates of a kind are as probable
        fixed, precision = centre.copy(), np.zeros_like(spread)
        fixed[0], precision[0, 0] = LEAST_SLOPE, 1e12
        precision[1:, 1:] = np.linalg.inv(spread[1:, 1:])
        line = _newton(evidence, kinds, true, weights, fixed, precision)
        line[0] = LEAST_SLOPE
    return line


def _newton(evidence: Floats, kinds: Ids, true: Marks, weights: Floats, centre: Floats, precision: Floats) -> Floats:
    design = np.concatenate([evidence[:, None], np.eye(NUM_KINDS)[kinds]], axis=1)

    def loss(line: Floats) -> float:
        logits, away = design @ line, line - centre
        return float((weights * (np.logaddexp(0, logits) - true * logits)).sum() + away @ precision @ away / 2)

    line, now = centre.copy(), loss(centre)
    for _ in range(NUM_STEPS):
        probability = _sigmoid(design @ line)
        slope = design.T @ (weights * (probability - true)) + precision @ (line - centre)
        curvature = (design * (weights * probability * (1 - probability))[:, None]).T @ design + precision
        step, length = np.linalg.solve(curvature, slope), 1.0
        while (after := loss(line - length * step)) > now and length > 1e-10:
            length /= 2
        line, gained, now = line - length * step, now - after, after
        if gained <= 1e-12 * abs(now):
            break
    return line


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = np.exp(-np.logaddexp(0, -logits))
    return found
