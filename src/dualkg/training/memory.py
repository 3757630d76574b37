"""What a run will need: an upper bound of its memory, checked before it starts, and an estimate of
its time.
"""

import math
import re
import sys
import time
import timeit
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from dualkg.errors import RequestError
from dualkg.evaluation.ranking import BLOCK_ELEMENTS
from dualkg.models.base import Model
from dualkg.models.sharded import TABLES, ShardedModel
from dualkg.regularizers import Regularizer
from dualkg.training.engines import Engine
from dualkg.training.fused import rows_at_once
from dualkg.training.recipe import Recipe

OPTIMIZER_TABLES = {
    "Adagrad": 1,
    "Adam": 2,
    "SGD": 0,
}  # copies of the tables in the optimizer's state
LARGEST_TABLES = 2  # temporary copies of the largest table in an optimizer or a backward pass
WHOLE_TABLES = 6  # the same, where a regularizer reads whole tables
# Of the rows of a batch: gradients, their sums, Adagrad's sums, updates, and integers to sort by.
SPARSE_COPIES = 8
MATRIX_COPIES = 8  # of the relation matrices of a batch, in autograd and the optimizer
# Of an example and direction: rows, mapped rows, their gradients, and random numbers for dropout.
VECTORS = 40
EXAMPLE_BYTES = 160  # triples in two orders, sort keys, and the answers in train by query
MAPPED_BYTES = 12  # of an example of a graph larger than memory, on a GPU
ANSWER_BYTES = 24  # of such an example, where a loss reads the answers in train
RANKING_BYTES = 6 * BLOCK_ELEMENTS  # a block of scores and temporary arrays
LIBRARY_BYTES = 200 * 2**20  # that matrix products and compiled kernels allocate on a GPU


class Need(NamedTuple):
    """Bytes in addition to the tables: `fixed`, `per_example`, and `scores` of at most `at_once`
    examples.
    """

    fixed: float
    per_example: float
    scores: float
    at_once: int

    def of(self, batch_size: int) -> float:
        return (
            self.fixed + batch_size * self.per_example + min(batch_size, self.at_once) * self.scores
        )

    def largest_batch(self, available: float) -> int:
        """The largest batch that fits; 0 or less if none does."""
        return bisect_right(range(2**31), available, key=self.of) - 1


def check_memory(need: Need, model: Model, size: int) -> None:
    """Refuse batches of a size that would not fit on the device of the model, and name the largest
    that would.
    """
    available = available_memory(model.device)
    if need.of(size) <= available:
        return
    advice = "Not even a batch of 1 fits: choose a smaller dim, or a device with more memory."
    if (largest := need.largest_batch(available)) >= 1:
        advice = f"A batch of up to {largest:,} fits: use --set training.batch_size={largest}."
    if more := _processes_that_fit(need, model, size, available):
        advice += f" {more:,} devices as large would hold it: torchrun --nproc-per-node {more} -m dualkg …"
    raise RequestError(
        f"Training in batches of {size:,} would need {gib(need.of(size))} in addition to the "
        f"model: {gib(need.fixed)} for gradients and optimizer, {gib(need.of(size) - need.fixed)} "
        f"for a batch. {gib(available)} are free on {model.device}. {advice}"
    )


def _processes_that_fit(need: Need, model: Model, batch_size: int, available: float) -> int | None:
    """The number of processes among which this run could be split, each with a device like this
    one.
    """
    held = model.embedding
    here = model.shard.world_size if isinstance(model, ShardedModel) else 1
    entities, whole = (
        sum(table.numel() for table in one) for one in (held.entity_tables, held.parameters())
    )
    split = entities / whole * need.fixed + min(batch_size, need.at_once) * need.scores
    rest = need.of(batch_size) - split
    return here * math.ceil(split / (available - rest)) if rest < 0.9 * available else None


def predict(
    recipe: Recipe,
    model: Model,
    regularizer: Regularizer,
    engine: Engine,
    *,
    num_examples: int,
    mapped: bool = False,
) -> Need:
    """An upper bound of the peak of a run, which tests compare with measured peaks."""
    held = model.embedding
    on_gpu = model.device.type == "cuda"
    size, (num_entities, width) = held.entities.element_size(), held.entities.shape
    batch_size = min(recipe.training.batch_size, num_examples)
    num_sides = 1 if model.reciprocal else 2
    tables = {name: table.numel() * size for name, table in held.named_parameters()}
    entity_tables = sum(num_bytes for name, num_bytes in tables.items() if name in TABLES)
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    fixed: float = (OPTIMIZER_TABLES[recipe.optimizer.name] + keeps_two) * sum(tables.values())
    if recipe.optimizer.sums == "rows":
        fixed -= entity_tables - entity_tables / width
    rows = (
        recipe.loss.rows_per_batch(model, batch_size)
        if engine.step in ("sparse", "kernels")
        else None
    )
    lean = (
        2 if rows is not None and engine.fast else 1
    )  # kernels copy the rows of a sample half as often as autograd
    if rows is None:
        fixed += sum(tables.values())  # gradients
        fixed += (WHOLE_TABLES if regularizer.reads_whole_tables else LARGEST_TABLES) * max(
            tables.values()
        )
    else:
        others = [num_bytes for name, num_bytes in tables.items() if name not in TABLES]
        fixed += (
            sum(others) + LARGEST_TABLES * max(others) + SPARSE_COPIES * rows * width * size // lean
        )
    reads_answers = recipe.loss.examples == "queries" or getattr(recipe.loss, "filtered", False)
    example = (MAPPED_BYTES + ANSWER_BYTES * reads_answers) * on_gpu if mapped else EXAMPLE_BYTES
    fixed += num_examples * example + RANKING_BYTES + (LIBRARY_BYTES if on_gpu else 0)
    if (
        engine.precision == "bf16" and rows is None
    ):  # a copy and a gradient, each half as large as the table
        fixed += entity_tables
    per_example = VECTORS * num_sides * width * size // lean
    core = held.num_shared_parameters(held.dim)
    if core and engine.step == "captured":
        per_example += 3 * core // held.dim * size  # each head through every slice of the core
    elif (matrix := max(held.relations.shape[1], held.dim**2 if core else 0)) > width:
        fixed += MATRIX_COPIES * min(held.num_relation_ids, batch_size) * matrix * size
    if engine.fast:
        score = 2 if engine.precision == "bf16" else size
        arrays = num_sides if engine.step == "kernels" else 2 if on_gpu else 1
        candidates = num_entities if rows is None else recipe.loss.num_negatives  # type: ignore[attr-defined]
        return Need(fixed, per_example, arrays * candidates * score, rows_at_once(held, score))
    return Need(
        fixed, per_example, recipe.loss.numbers_per_example(model, batch_size) * size, sys.maxsize
    )


# -- time --------------------------------------------------------------------

SCORE_PASSES = 4
UPDATE_PASSES = 6  # over scores of a batch, and over tables, their gradients and Adagrad's sums
SMALL_OPERATIONS = 200  # of a step beside these, such as rows that are fetched
CAPTURED_CALLS = 5  # operations that a CUDA graph starts in the time of one
ALIGNED = 128  # products of other sizes may be slower, and tables are padded
# Of a measurement of rates: numbers in each array, calls that are timed together, because a GPU is
# asked to do the next before it has done the last, and how often this is repeated: an idle GPU has
# a low clock.
PROBES = {"cpu": (2**22, 1, 4), "cuda": (2**24, 10, 24)}


class Rates(NamedTuple):
    """What a device does in a second: operations of products, bytes read or written, and calls of
    small operations.
    """

    operations: float
    bytes: float
    calls: float = math.inf


def step_seconds(
    rates: Rates, *, batch_size: int, candidates: int, rows: int, width: int, score_bytes: int
) -> float:
    """The time of a step without communication: operations of three products, and passes over
    memory.
    """
    operations = 6 * batch_size * candidates * width
    passes = SCORE_PASSES * batch_size * candidates * score_bytes + UPDATE_PASSES * 4 * rows * width
    return operations / rates.operations + passes / rates.bytes + SMALL_OPERATIONS / rates.calls


def measure_rates(
    device: torch.device, dtype: torch.dtype, *, batch_size: int, width: int
) -> Rates:
    """Rates of this device in some milliseconds, by products of the shape of a step and by
    copies.
    """
    most = PROBES[device.type][0]
    batch_size = max(1, min(batch_size, most // width, 4096))
    candidates = max(ALIGNED, most // max(width, batch_size) // ALIGNED * ALIGNED)
    images, table = (
        torch.rand(rows, width, device=device).to(dtype) for rows in (batch_size, candidates)
    )
    scores, (numbers, copy) = images @ table.T, torch.zeros(2, most, device=device)
    calls = (
        lambda: torch.mm(images, table.T, out=scores),
        lambda: copy.copy_(numbers),
        lambda: images[:1].add_(1),
    )
    product, copied, called = (_seconds(call, device) for call in calls)
    return Rates(
        2 * batch_size * candidates * width / product, 2 * numbers.nbytes / copied, 1 / called
    )


def estimate_step(recipe: Recipe, model: ShardedModel, engine: Engine) -> float:
    """Seconds of a step on this process, with those of the all-reduces by which several
    communicate.
    """
    held = model.embedding
    shard = model.shard
    batch_size = recipe.training.batch_size
    width = held.entities.shape[1]
    score = torch.bfloat16 if engine.precision == "bf16" else held.entities.dtype
    sides = 1 if model.reciprocal else 2
    sampled = recipe.loss.rows_per_batch(model, batch_size)
    rows = candidates = shard.size
    if sampled is not None:
        negatives = getattr(recipe.loss, "num_negatives", 0)
        rows, candidates = (math.ceil(num / shard.world_size) for num in (sampled, negatives))
    rates = measure_rates(model.device, score, batch_size=batch_size, width=width)
    if engine.step in (
        "captured",
        "kernels",
    ):  # a CUDA graph, in which the host does not start each operation
        rates = rates._replace(calls=CAPTURED_CALLS * rates.calls)
    sizes = {
        "batch_size": batch_size,
        "candidates": sides * candidates,
        "rows": rows,
        "width": width,
    }
    seconds = step_seconds(rates, **sizes, score_bytes=score.itemsize)
    if shard.world_size == 1:
        return seconds
    sent = torch.zeros(batch_size, width, device=model.device)
    return seconds + (2 + sides) * _seconds(lambda: shard.all_reduce(sent), model.device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of some measurements after the first: of as many in each process, for
    collectives.
    """
    _, num_calls, rounds = PROBES[device.type]

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    found = timeit.repeat(call, timer=clock, repeat=rounds, number=num_calls)
    return max(min(found[1:]) / num_calls, 1e-9)


# -- free memory -------------------------------------------------------------


def available_memory(device: torch.device) -> float:
    """Free bytes: on a GPU with what PyTorch has reserved and not allocated, on a CPU as Linux
    reports them.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return min(_free_on_machine(), _free_in_group())


def _free_on_machine(description: Path = Path("/proc/meminfo")) -> float:
    found = re.search(
        r"^MemAvailable:\s*(\d+)",
        description.read_text() if description.is_file() else "",
        re.MULTILINE,
    )
    return float(found[1]) * 1024 if found else math.inf


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Free bytes in a container with a limit; its page cache would be given up."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = float((folder / "memory.current").read_text())
        held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = float(held["inactive_file"]) + float(held["active_file"])
        return math.inf if limit == "max" else max(float(limit) - used + files, 0.0)
    except (OSError, ValueError, KeyError):
        return math.inf


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
