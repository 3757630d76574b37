"""Models of link prediction; `MODELS` maps names in recipes to classes."""

from dualkg.models.base import MODELS, EmbeddingModel, Model
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.diagonal import CP, ComplEx, DistMult, QuatE, SimplE
from dualkg.models.distance import HAKE, SE, DistanceModel, ModE, MuRP, RotatE, TransE
from dualkg.models.ensemble import EnsembleModel
from dualkg.models.matrix import RESCAL, TuckER
from dualkg.models.partial import PartialModel

__all__ = ["MODELS", "BilinearModel", "DistanceModel", "Dual", "EmbeddingModel", "EnsembleModel"]
__all__ += ["CP", "RESCAL", "ComplEx", "DistMult", "QuatE", "SimplE", "TuckER"]
__all__ += ["HAKE", "SE", "ModE", "Model", "MuRP", "PartialModel", "RotatE", "TransE"]
