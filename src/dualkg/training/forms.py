"""What a fused step must know of a model's scores."""

from __future__ import annotations

from typing import Literal

from dualkg.models.base import EmbeddingModel, Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.distance import NormModel
from dualkg.models.dual import Dual

Form = Literal["products", "squared distances"]
INHERITED = ("tail_scores", "head_scores", "head_table", "tail_table", "factors")


def scores_are(model: Model) -> Form | None:
    """Of all scores of a query: products of its image with a table, or squared distances from it; or something else."""
    held = model.embedding
    if isinstance(held, BilinearModel) and _inherits(held, BilinearModel):
        if model is held:
            return "products"
        # Heads of relations without an inverse would be asked for by the norms of their images.
        fits = type(model) is Dual and model.side == "tail" and model.reciprocal
        return "squared distances" if fits else None
    if isinstance(held, NormModel) and model is held and _inherits(held, NormModel):
        fits = held.norm == "squared" and not held.meets_between and (held.reciprocal or held.isometric)
        return "squared distances" if fits else None
    return None


def _inherits(model: EmbeddingModel, base: type) -> bool:
    """Whether a model scores as its base does, and not in a way of its own."""
    return all(getattr(type(model), name) is getattr(base, name) for name in INHERITED)
