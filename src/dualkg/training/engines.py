"""Which step trains a model: the plain one, the fused one, or on a GPU the one in kernels, captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.hardware import gpu_kernels_unavailable, has_bf16_products
from dualkg.losses import AnyLoss
from dualkg.losses.softmax import CrossEntropy
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.cuda_graphs import CudaGraphStep
from dualkg.training.fused import FusedStep, scores_are
from dualkg.training.gpu_step import Bf16Step
from dualkg.training.optimizers import AnyOptimizer
from dualkg.training.recipe import Recipe
from dualkg.training.reference_step import CapturedStep, ReferenceStep

Step = Callable[[Tensor, float], Tensor]
# On a GPU there is the plain one captured as a graph, and one all in kernels, with products in bfloat16.
Engine = Literal["plain", "captured", "fused", "fused bf16", "kernels"]


def choose_engine(recipe: Recipe, model: Model, regularizer: Regularizer) -> Engine:
    """What the recipe asks for; what it leaves open is what is fastest on the model's device."""
    engine, precision = recipe.training.engine, recipe.training.precision
    without_fusing: Engine = "plain"
    if engine == "auto" and CapturedStep.applies_to(recipe, model, regularizer):
        without_fusing = "captured"
    if not FusedStep.applies_to(model):
        if engine == "fast" or precision == "bf16":
            raise RequestError(
                f"The fast engine needs a model whose scores are one product, as those of bilinear models and squared "
                f"distances are, and whose tables are all trained; this {type(model).__name__} is none. Use --engine "
                f"reference and float32."
            )
        return without_fusing
    if plain_alone := _loss_of_plain_engine(recipe):
        if engine == "fast" or precision == "bf16":
            raise RequestError(
                f"The fast engine is for cross entropy of triples, each against one whole answer; {plain_alone} was "
                f"asked for. Use --engine reference and float32."
            )
        return without_fusing
    if engine == "reference":
        if precision == "bf16":
            raise RequestError("The reference engine trains in float32; bf16 was asked for. Use --engine fast.")
        return "plain"
    on_gpu = model.device.type == "cuda"
    reason = _obstacle_to_bf16(recipe, model, regularizer)
    if precision == "bf16" and reason:
        raise RequestError(f"bf16 {reason}. Use --set training.precision=float32.")
    if reason or precision in ("float32", "tf32"):
        return "fused"
    return "kernels" if on_gpu else "fused bf16"


def build_step(engine: Engine, model: Model, loss: AnyLoss, regularizer: Regularizer, optimizer: AnyOptimizer) -> Step:
    if engine == "plain":
        return ReferenceStep(model, loss, regularizer, optimizer)
    if engine == "captured":
        return CudaGraphStep(CapturedStep(model, loss, regularizer, optimizer))
    if not isinstance(loss, CrossEntropy) or loss.label_smoothing or loss.dropouts.heads:
        raise ValueError(f"the engine '{engine}' is for cross entropy without label smoothing and dropout of heads")
    if engine == "kernels":
        return CudaGraphStep(Bf16Step(model, loss, regularizer, optimizer))  # type: ignore[arg-type]
    return FusedStep(model, loss, regularizer, optimizer, half=engine == "fused bf16")


def _loss_of_plain_engine(recipe: Recipe) -> str | None:
    """What of a loss the fused engines do not know, where there is such."""
    if recipe.loss.kind != "cross entropy":
        return f"loss.kind = '{recipe.loss.kind}'"
    keys = ("label_smoothing", "head_dropout")
    return next((f"loss.{key}" for key in keys if getattr(recipe.loss, key)), None)


def _obstacle_to_bf16(recipe: Recipe, model: Model, regularizer: Regularizer) -> str | None:
    """Why products cannot be in bfloat16, as the end of a sentence."""
    if scores_are(model) != "products":
        return "is for models that score by products"
    if recipe.optimizer.name != "Adagrad":
        return f"is for training with Adagrad; {recipe.optimizer.name} was asked for"
    if model.embedding.entities.dtype != torch.float32:
        return "is for tables of float32"
    if model.device.type == "cpu":
        return None if has_bf16_products() else "is not what this processor multiplies, and would be slow"
    if missing := gpu_kernels_unavailable():
        return f"on a GPU {missing}"
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return "is not what this GPU multiplies"
    if not Bf16Step.applies_to(model, regularizer, predicts_relations=bool(recipe.loss.relation_weight)):
        return (
            "on a GPU is for the models and regularizers of dualkg, other than UnweightedDURA and QuatE with "
            "normalized relations; for RESCAL and TuckER without relation prediction, for SimplE with sums of squares"
        )
    return None
