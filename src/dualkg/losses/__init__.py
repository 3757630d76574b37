"""Losses: softmax over all entities (1-vs-all, K-vs-all) or a sample, and sampled negatives.

Every name in the `__all__` of a module is exported here and is public in `dualkg`.
"""

from dualkg.losses import base, negative_sampling, softmax
from dualkg.losses.base import *  # noqa: F403
from dualkg.losses.base import LOSSES
from dualkg.losses.negative_sampling import *  # noqa: F403
from dualkg.losses.softmax import *  # noqa: F403

__all__ = ["LOSSES"]
__all__ += base.__all__
__all__ += negative_sampling.__all__
__all__ += softmax.__all__
