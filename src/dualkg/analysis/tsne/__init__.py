"""t-SNE (van der Maaten and Hinton, 2008) of many points, in PyTorch alone.

Points become places in the plane whose neighbours are the same. Each point is drawn to its nearest ones
(neighbours → affinities → attraction) and pushed off by all others (repulsion, on a grid), step by step (descent).
"""

from __future__ import annotations

from dualkg.analysis.tsne.affinities import Affinities, affinities_of
from dualkg.analysis.tsne.descent import divergence
from dualkg.analysis.tsne.placing import check_numbers, place

__all__ = ["Affinities", "affinities_of", "check_numbers", "divergence", "place"]
