"""Which step trains a model: the plain one, the fused one, or the fused one captured as a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.losses import CrossEntropy
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training.fused import FusedStep
from dualkg.training.graphed import GraphedStep
from dualkg.training.recipe import Recipe
from dualkg.training.step import PlainStep

Step = Callable[[Tensor, float], Tensor]


def is_fused(recipe: Recipe, model: Model) -> bool:
    """Whether the fused step is asked for, or left to us and applies."""
    engine, precision = recipe.training.engine, recipe.training.precision
    if FusedStep.applies_to(model):
        if engine == "plain" and precision != "float32":
            raise RequestError(f"The plain engine trains in float32; {precision} was asked for. Use --engine fused.")
        return engine != "plain"
    if engine == "fused" or precision != "float32":
        raise RequestError(
            f"The fused engine needs a bilinear model whose scores are one product; {type(model).__name__} is none. "
            f"Use --engine plain and float32."
        )
    return False


def one_pass(recipe: Recipe, model: Model) -> bool:
    """Whether the optimizer can go over each table once: PyTorch's own such form is for the CPU."""
    return is_fused(recipe, model) and model.device.type == "cpu"


def build_step(
    recipe: Recipe, model: Model, loss: CrossEntropy, regularizer: Regularizer, optimizer: torch.optim.Optimizer
) -> Step:
    """The step that a recipe asks for."""
    if not is_fused(recipe, model):
        return PlainStep(model, loss, regularizer, optimizer)
    half = recipe.training.precision == "bf16"
    if half and (model.device.type != "cuda" or not isinstance(optimizer, torch.optim.Adagrad)):
        raise RequestError("bf16 is for training with Adagrad on a GPU. Use --set training.precision=float32.")
    step = FusedStep(model, loss, regularizer, optimizer, half=half)
    return GraphedStep(step) if GraphedStep.applies_to(step) else step
