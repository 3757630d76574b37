"""Losses: softmax over all entities (1-vs-all, K-vs-all) or a sample, and losses over sampled
negatives.
"""

from dualkg.losses.base import Loss
from dualkg.losses.negative_sampling import MarginRanking, NegativeSampling
from dualkg.losses.softmax import KvsAll, OneVsAll, SampledSoftmax

LOSSES: dict[str, type[Loss]] = {
    loss.__name__: loss
    for loss in (OneVsAll, KvsAll, SampledSoftmax, NegativeSampling, MarginRanking)
}

__all__ = [
    "LOSSES",
    "KvsAll",
    "Loss",
    "MarginRanking",
    "NegativeSampling",
    "OneVsAll",
    "SampledSoftmax",
]
