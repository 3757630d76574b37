"""Models of link prediction; `MODELS` maps names in recipes to classes."""

from dualkg.models.base import EmbeddingModel, Model
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.diagonal import CP, ComplEx, DistMult, QuatE, SimplE
from dualkg.models.distance import HAKE, SE, DistanceModel, ModE, MuRP, RotatE, TransE
from dualkg.models.ensemble import EnsembleModel
from dualkg.models.matrix import RESCAL, TuckER

BILINEAR: dict[str, type[BilinearModel]] = {
    model.__name__: model for model in (CP, DistMult, ComplEx, RESCAL, SimplE, QuatE, TuckER)
}
DISTANCE: dict[str, type[DistanceModel]] = {
    model.__name__: model for model in (TransE, RotatE, ModE, SE, HAKE, MuRP)
}
MODELS: dict[str, type[EmbeddingModel]] = {**BILINEAR, **DISTANCE}

__all__ = ["BILINEAR", "DISTANCE", "MODELS"]
__all__ += ["BilinearModel", "DistanceModel", "Dual", "EmbeddingModel", "EnsembleModel", "Model"]
__all__ += ["CP", "RESCAL", "ComplEx", "DistMult", "QuatE", "SimplE", "TuckER"]
__all__ += ["HAKE", "SE", "ModE", "MuRP", "RotatE", "TransE"]
