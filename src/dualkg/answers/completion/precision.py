"""Fewer digits where that is faster: for telling what can be ruled out, never for a number that is shown."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs.evidence import evidence_of
from dualkg.answers.completion.block import Asked
from dualkg.answers.completion.pool import Found
from dualkg.answers.completion.queries import Queries
from dualkg.errors import RequestError
from dualkg.kernels.precision import products_in
from dualkg.models.base import Model

Precision = Literal["float32", "tf32"]
SAMPLE = 64  # queries that are asked in both precisions
CAUTION = 4  # times the largest difference seen is how far others may be off


def check_precision(precision: str, device: torch.device) -> None:
    if precision not in get_args(Precision):
        raise RequestError(f"Precision is one of {', '.join(get_args(Precision))}; '{precision}' came.")
    if precision == "tf32" and device.type != "cuda":
        raise RequestError(f"tf32 is for matrix products on a GPU; the model is on {device.type}. Leave it out.")


def margin_of(asked: Asked, given: Tensor, precision: Precision) -> float:
    """How far evidence may be off in a precision, by the log-probabilities of some of the queries."""
    if precision == "float32":
        return 0.0
    errors = []
    for queries, ids in ((asked.first, given), (asked.second, asked.answers)):
        sample = ids[:: max(1, len(ids) // SAMPLE)][:SAMPLE]
        exact = _logs(queries, sample)
        with products_in(precision):
            errors.append(float((_logs(queries, sample) - exact).abs().max()))
    return CAUTION * max(errors)


def _logs(queries: Queries, given: Tensor) -> Tensor:
    fresh = Queries(queries.model, queries.relation, queries.side)
    return fresh.scores(given) - fresh.normalizers[given, None]


def exactly(found: Found, model: Model) -> Found:
    """Triples that were found in less precision, with their scores and evidence in float32."""
    if not found.number:
        return found
    triples = np.stack([found.heads, found.relations, found.tails], axis=1)
    score = model.score(*torch.from_numpy(triples).to(model.device).unbind(1))
    return found._replace(score=score.cpu().numpy(), evidence=evidence_of(model, triples).cpu().numpy())
