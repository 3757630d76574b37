"""Models: what scores a triple. One file a model; `MODELS` is the one place where names become classes."""

from __future__ import annotations

from dualkg.models.base import BilinearModel, Factors, Model
from dualkg.models.complex import ComplEx
from dualkg.models.cp import CP
from dualkg.models.distmult import DistMult
from dualkg.models.dual import Dual
from dualkg.models.rescal import RESCAL

MODELS: dict[str, type[BilinearModel]] = {
    "CP": CP,
    "DistMult": DistMult,
    "ComplEx": ComplEx,
    "RESCAL": RESCAL,
}

__all__ = ["CP", "MODELS", "RESCAL", "BilinearModel", "ComplEx", "DistMult", "Dual", "Factors", "Model"]
