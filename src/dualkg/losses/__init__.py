"""Losses: cross entropy over all entities, of triples or of questions, and those that sample negatives."""

from __future__ import annotations

from dualkg.losses.dropout import Dropout, Dropouts
from dualkg.losses.negative_sampling import (
    BatchSampler,
    MarginRanking,
    NegativeSampling,
    SampledLoss,
    Sampler,
    SharedSampler,
    Sides,
    UniformSampler,
)
from dualkg.losses.softmax import AllAnswers, CrossEntropy, TrainingAnswers, cross_entropy, frequency_weights

AnyLoss = CrossEntropy | AllAnswers | SampledLoss

__all__ = [
    "AllAnswers",
    "AnyLoss",
    "BatchSampler",
    "CrossEntropy",
    "Dropout",
    "Dropouts",
    "MarginRanking",
    "NegativeSampling",
    "SampledLoss",
    "Sampler",
    "SharedSampler",
    "Sides",
    "TrainingAnswers",
    "UniformSampler",
    "cross_entropy",
    "frequency_weights",
]
