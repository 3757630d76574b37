"""Which step trains a model: the plain one, the fused one, or on a GPU the one in kernels, captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.cpu.processor import has_bf16_products
from dualkg.losses import CrossEntropy
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.fused import FusedStep
from dualkg.training.gpu.graphed import GraphedStep
from dualkg.training.gpu.step import HalfStep
from dualkg.training.optimizers import AnyOptimizer, is_adagrad
from dualkg.training.recipe import Recipe
from dualkg.training.step import PlainStep

Step = Callable[[Tensor, float], Tensor]


def is_fused(recipe: Recipe, model: Model) -> bool:
    """Whether the fused engine is asked for, or left to us and applies."""
    engine, precision = recipe.training.engine, recipe.training.precision
    if FusedStep.applies_to(model):
        if engine == "plain" and precision == "bf16":
            raise RequestError("The plain engine trains in float32; bf16 was asked for. Use --engine fused.")
        return engine != "plain"
    if engine == "fused" or precision == "bf16":
        raise RequestError(
            f"The fused engine needs a bilinear model whose scores are one product; {type(model).__name__} is none. "
            f"Use --engine plain and float32."
        )
    return False


def build_step(
    recipe: Recipe, model: Model, loss: CrossEntropy, regularizer: Regularizer, optimizer: AnyOptimizer
) -> Step:
    """The step that a recipe asks for; with precision "auto", in bfloat16 where the machine multiplies that faster."""
    if not is_fused(recipe, model):
        return PlainStep(model, loss, regularizer, optimizer)
    precision = recipe.training.precision
    obstacle = _obstacle_to_bf16(model, loss, regularizer, optimizer)
    if precision == "bf16" and obstacle:
        raise RequestError(f"bf16 {obstacle}. Use --set training.precision=float32.")
    if precision == "float32" or obstacle or (precision == "auto" and not _gains_from_bf16(model)):
        return FusedStep(model, loss, regularizer, optimizer)
    if model.device.type == "cpu":
        return FusedStep(model, loss, regularizer, optimizer, half=True)
    return GraphedStep(HalfStep(model, loss, regularizer, optimizer))  # type: ignore[arg-type]


def _obstacle_to_bf16(
    model: Model, loss: CrossEntropy, regularizer: Regularizer, optimizer: AnyOptimizer
) -> str | None:
    """Why products cannot be in bfloat16, as the end of a sentence."""
    if not is_adagrad(optimizer):
        return f"is for training with Adagrad; {type(optimizer).__name__} was asked for"
    if model.bilinear.entities.dtype != torch.float32:
        return "is for tables of float32"
    if model.device.type == "cpu":
        return None
    if find_spec("triton") is None:
        return "on a GPU needs Triton, which is not installed"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "is not what this GPU multiplies"
    if not HalfStep.applies_to(model, loss, regularizer, optimizer):
        return "on a GPU is for the models and regularizers of dualkg, and for RESCAL without relation prediction"
    return None


def _gains_from_bf16(model: Model) -> bool:
    """A GPU always does; a CPU only where its matrix units know bfloat16."""
    return model.device.type == "cuda" or has_bf16_products()
