"""Losses: cross entropy over all entities, of triples or of questions, and those that sample negatives."""

from __future__ import annotations

from dualkg.losses.all_answers import AllAnswers
from dualkg.losses.cross_entropy import CrossEntropy, cross_entropy, frequency_weights
from dualkg.losses.dropout import Dropout, Dropouts
from dualkg.losses.sampled import MarginRanking, NegativeSampling, SampledLoss
from dualkg.losses.sampling import BatchSampler, Sampler, SharedSampler, Sides, UniformSampler
from dualkg.losses.training_answers import TrainingAnswers

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
