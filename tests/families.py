"""The registered models by family; `EMBEDDINGS` has all that have embeddings of entities."""

from dualkg.models import MODELS, BilinearModel, DistanceModel, EmbeddingModel

EMBEDDINGS: dict[str, type[EmbeddingModel]] = {}
BILINEAR: dict[str, type[BilinearModel]] = {}
DISTANCE: dict[str, type[DistanceModel]] = {}
for _name, _kind in MODELS.items():
    if issubclass(_kind, EmbeddingModel):
        EMBEDDINGS[_name] = _kind
    if issubclass(_kind, BilinearModel):
        BILINEAR[_name] = _kind
    elif issubclass(_kind, DistanceModel):
        DISTANCE[_name] = _kind

__all__ = ["BILINEAR", "DISTANCE", "EMBEDDINGS", "EmbeddingModel"]
