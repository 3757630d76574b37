"""The registered models by family."""

from dualkg.models import MODELS, BilinearModel, DistanceModel, EmbeddingModel

BILINEAR: dict[str, type[BilinearModel]] = {}
DISTANCE: dict[str, type[DistanceModel]] = {}
for _name, _kind in MODELS.items():
    if issubclass(_kind, BilinearModel):
        BILINEAR[_name] = _kind
    elif issubclass(_kind, DistanceModel):
        DISTANCE[_name] = _kind

__all__ = ["BILINEAR", "DISTANCE", "MODELS", "EmbeddingModel"]
