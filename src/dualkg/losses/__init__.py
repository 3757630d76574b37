"""Losses: softmax over all entities (1-vs-all, K-vs-all) or a sample, and sampled negatives."""

from dualkg.losses.base import LOSSES, Loss
from dualkg.losses.negative_sampling import MarginRanking, NegativeSampling
from dualkg.losses.softmax import KvsAll, OneVsAll, SampledSoftmax

__all__ = ["LOSSES", "Loss"]
__all__ += ["KvsAll", "MarginRanking", "NegativeSampling", "OneVsAll", "SampledSoftmax"]
