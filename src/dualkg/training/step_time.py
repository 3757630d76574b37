"""The time of a training step, estimated from the rates of a device without training."""

import math
import time
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dualkg.models.base import SCORE_PASSES, SMALL_OPERATIONS, UPDATE_PASSES, Model
from dualkg.training.engines import Engine
from dualkg.training.recipe import Recipe
from dualkg.training.steps import ReferenceStep

CAPTURED_CALLS = 5  # operations that a CUDA graph starts in the time of one
ALIGNED = 128  # products of other sizes may be slower, and tables are padded


class Probe(NamedTuple):
    """How rates are measured.

    Calls are timed together, because a GPU is asked to do the next before it has done the last.
    They are repeated, because an idle GPU has a low clock.
    """

    num_numbers: int
    num_calls: int
    num_rounds: int


PROBES = {"cpu": Probe(2**22, 1, 4), "cuda": Probe(2**24, 10, 24)}


class Rates(NamedTuple):
    """What a device does in a second.

    It has operations of products, bytes read or written, and calls of small operations.
    """

    operations: float
    bytes: float
    calls: float = math.inf


def step_seconds(
    rates: Rates, *, batch_size: int, candidates: int, rows: int, width: int, score_bytes: int
) -> float:
    """The time of a step without communication.

    It is that of the operations of three products, and of passes over memory.
    """
    operations = 6 * batch_size * candidates * width
    of_scores = SCORE_PASSES * batch_size * candidates * score_bytes
    of_tables = UPDATE_PASSES * 4 * rows * width
    seconds = operations / rates.operations + (of_scores + of_tables) / rates.bytes
    return seconds + SMALL_OPERATIONS / rates.calls


def measure_rates(
    device: torch.device, dtype: torch.dtype, *, batch_size: int, width: int
) -> Rates:
    """Rates of this device in some milliseconds, by products of the shape of a step and copies."""
    most = PROBES[device.type].num_numbers
    batch_size = max(1, min(batch_size, most // width, 4096))
    candidates = max(ALIGNED, most // max(width, batch_size) // ALIGNED * ALIGNED)
    mapped = torch.rand(batch_size, width, device=device).to(dtype)
    table = torch.rand(candidates, width, device=device).to(dtype)
    scores = mapped @ table.T
    numbers, copy = torch.zeros(2, most, device=device)
    of_product = _seconds(lambda: torch.mm(mapped, table.T, out=scores), device)
    of_copy = _seconds(lambda: copy.copy_(numbers), device)
    of_call = _seconds(lambda: mapped[:1].add_(1), device)
    operations = 2 * batch_size * candidates * width
    return Rates(operations / of_product, 2 * numbers.nbytes / of_copy, 1 / of_call)


def estimate_step(
    recipe: Recipe, model: Model, engine: Engine, *, rates: Rates | None = None
) -> float:
    """Seconds of a step on this process, with the all-reduces by which several communicate.

    Without `rates`, they are measured. Nothing is trained.
    """
    entities = model.embedding.entities
    tables = model.tables
    batch_size = recipe.training.batch_size
    width = entities.shape[1]
    score_type = torch.bfloat16 if engine.precision == "bf16" else entities.dtype
    num_sides = 1 if model.reciprocal else 2
    rows = tables.num_rows
    candidates = tables.num_rows
    sampled_rows = recipe.loss.rows_per_batch(model, batch_size)
    if sampled_rows is not None:
        rows = math.ceil(sampled_rows / tables.num_holders)
        candidates = math.ceil((recipe.loss.num_candidates(batch_size) or 0) / tables.num_holders)
    if rates is None:
        rates = measure_rates(model.device, score_type, batch_size=batch_size, width=width)
    if engine.step in ("captured", "kernels"):
        # In a CUDA graph, the host does not start each operation.
        rates = rates._replace(calls=CAPTURED_CALLS * rates.calls)
    seconds = step_seconds(
        rates,
        batch_size=batch_size,
        candidates=num_sides * candidates,
        rows=rows,
        width=width,
        score_bytes=score_type.itemsize,
    )
    if tables.num_holders == 1:
        return seconds
    sent = torch.zeros(batch_size, width, device=model.device)
    of_exchange = _seconds(lambda: tables.all_reduce(sent), model.device)
    return seconds + (2 + num_sides) * of_exchange


def measure_gradients(step: ReferenceStep, batch: Tensor) -> float:
    """Seconds of the gradients of a batch in autograd, with its collectives; no weight changes.

    Autograd writes the result of every operation, how often is known to the loss and the model
    alone, and processes wait for each other: none of this is in `step_seconds`.
    """

    def compute() -> None:
        step.gradients(batch)
        step.optimizer.zero_grad(set_to_none=True)

    return _seconds(compute, batch.device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of some measurements after the first.

    Every process makes as many, because the call may be a collective.
    """
    probe = PROBES[device.type]

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = timeit.repeat(call, timer=clock, repeat=probe.num_rounds, number=probe.num_calls)
    return max(min(times[1:]) / probe.num_calls, 1e-9)
