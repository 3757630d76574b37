"""What DURA costs (Appendix C): a training step with it, with the Frobenius norm, and with neither, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.training.recipe import Recipe, RegularizerConfig
from dualkg.training.registry import build_model, build_regularizer
from dualkg.training.run import describe_device
from dualkg.training.trainer import Trainer
from paper.sheets import Sheet

COMPARED = ("none", "Frobenius", "DURA")
ROUNDS, WARM_UP = 7, 8


def measure_cost(
    recipe: Recipe, graph: Graph, *, device: torch.device, steps: int = 30, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Seconds a step with each regularizer, in rounds in which each has its turn; the median of the rounds.

    The recipe is one with DURA; its weight serves for the others too, for a step takes as long with any weight.
    """
    trainers = {name: _trainer(_with_regularizer(recipe, name), graph, device) for name in COMPARED}
    times: dict[str, list[float]] = {name: [] for name in COMPARED}
    for trainer in trainers.values():
        _seconds_per_step(trainer, WARM_UP)
    for _ in range(rounds):
        for name, trainer in trainers.items():
            times[name].append(_seconds_per_step(trainer, steps))
    return {
        "graph": graph.name,
        "model": recipe.model.name,
        "dim": recipe.model.dim,
        "batch": recipe.training.batch_size,
        "device": describe_device(device),
        "engine": trainers["DURA"].engine,
        "seconds_per_step": {name: statistics.median(found) for name, found in times.items()},
    }


def cost_sheet(found: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row a model: milliseconds of a step, and how much more than without a regularizer."""
    columns = ("", "dim", "batch", *(f"{name}, ms a step" for name in COMPARED), "Frobenius adds", "DURA adds")
    rows = []
    for one in found:
        step = one["seconds_per_step"]
        more = [f"{step[name] / step['none'] - 1:+.1%}" for name in COMPARED[1:]]
        rows.append(
            [
                one["model"],
                str(one["dim"]),
                str(one["batch"]),
                *(f"{1000 * step[name]:.3f}" for name in COMPARED),
                *more,
            ]
        )
    first = found[0]
    title = f"What DURA costs (Appendix C): {first['graph']} on {first['device']}"
    return Sheet(title, columns, rows, [dict(one) for one in found])


def _with_regularizer(recipe: Recipe, name: str) -> Recipe:
    if name == "DURA":
        return recipe
    weight = None if name == "none" else recipe.regularizer.weight
    return recipe.model_copy(update={"regularizer": RegularizerConfig(name=name, weight=weight)})


def _trainer(recipe: Recipe, graph: Graph, device: torch.device) -> Trainer:
    model = build_model(recipe.model, graph.shape, seed=recipe.training.seed).to(device)
    return Trainer(model, graph, recipe, build_regularizer(recipe.regularizer))


def _seconds_per_step(trainer: Trainer, steps: int) -> float:
    """Of full batches alone: the last of an epoch may be short."""
    size = trainer.recipe.training.batch_size
    full = [batch for batch in islice(trainer.batches(0), steps) if len(batch) == min(size, len(trainer.examples))]
    _wait(trainer)
    started = time.perf_counter()
    for batch in islice(cycle(full), steps):
        trainer.step(batch, 1e-3)
    _wait(trainer)
    return (time.perf_counter() - started) / steps


def _wait(trainer: Trainer) -> None:
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize(trainer.model.device)
