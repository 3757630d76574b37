"""Fitting a calibration: weighted logistic regression, one line for all relations and one near it for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.beliefs.candidates import Candidates, Floats, draw_candidates
from dualkg.answers.beliefs.evidence import evidence_of
from dualkg.data.graph import Graph
from dualkg.models.base import Model

ENOUGH = 5  # valid triples that give a relation a line of its own
SLOPE_SPREAD = 0.25  # how far lines of relations lie from the shared one: their slopes, as a share of its slope
VALUE_SPREAD = 1.0  # and their values in the middle of the evidence, in log odds
LEAST_SLOPE = 1e-3  # more evidence never makes a triple less probable
RIDGE = 1e-3  # what keeps the shared line finite where evidence tells true from false without a mistake
NUM_STEPS = 100


def calibrate(model: Model, graph: Graph, *, seed: int = 0) -> Calibration:
    """Learn from the valid split how probable a candidate with so much evidence is; `seed` draws the false ones."""
    drawn = draw_candidates(model, graph, "valid", seed=seed)
    evidence = evidence_of(model, drawn.triples).double().cpu().numpy()
    slopes, offsets, own = fit_lines(evidence, drawn, graph.shape.num_relations)
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
        slopes=torch.from_numpy(slopes.astype(np.float32)),
        offsets=torch.from_numpy(offsets.astype(np.float32)),
        own=torch.from_numpy(own),
        about=about,
    )


def fit_lines(evidence: Floats, drawn: Candidates, num_relations: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Slope and offset of each relation, and whether it has its own, `(num_relations,)` each."""
    shared = fit_line(evidence, drawn.true, drawn.weights, centre=np.array([1.0, 0.0]), precision=RIDGE * np.eye(2))
    near = precision_around(shared, evidence, drawn.weights)
    lines = np.tile(shared, (num_relations, 1))
    num_valid = np.bincount(drawn.relations[drawn.true], minlength=num_relations) // 2  # each is asked from both ends
    own = num_valid >= ENOUGH
    for relation in np.flatnonzero(own):
        its = drawn.relations == relation
        lines[relation] = fit_line(evidence[its], drawn.true[its], drawn.weights[its], centre=shared, precision=near)
    return lines[:, 0], lines[:, 1], own


def precision_around(line: Floats, evidence: Floats, weights: Floats) -> Floats:
    """How strongly lines of relations are drawn to the shared one, `(2, 2)`: the inverse of how far they spread.

    Slope and value spread independently where the evidence decides: at its mean, each candidate counted by p (1 − p).
    """
    probability = _sigmoid(line[0] * evidence + line[1])
    matters = weights * probability * (1 - probability)
    middle = float((matters * evidence).sum() / max(matters.sum(), 1e-300))
    to_slope_and_value = np.array([[1.0, 0.0], [middle, 1.0]])
    spreads = np.array([SLOPE_SPREAD * line[0], VALUE_SPREAD])
    scaled = to_slope_and_value / spreads[:, None]
    precision: Floats = scaled.T @ scaled
    return precision


def fit_line(
    evidence: Floats, true: npt.NDArray[np.bool_], weights: Floats, *, centre: Floats, precision: Floats
) -> Floats:
    """The slope and offset whose p = σ(slope · evidence + offset) fits best, drawn to a centre by a Gaussian prior."""
    line = _newton(evidence, true, weights, centre, precision)
    if line[0] < LEAST_SLOPE:  # evidence says nothing, or the contrary: then all candidates are about as probable
        fixed = np.array([LEAST_SLOPE, centre[1]])
        line = _newton(evidence, true, weights, fixed, np.diag([1e12, RIDGE]))
        line[0] = LEAST_SLOPE
    return line


def _newton(
    evidence: Floats, true: npt.NDArray[np.bool_], weights: Floats, centre: Floats, precision: Floats
) -> Floats:
    design = np.stack([evidence, np.ones_like(evidence)], axis=1)

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
