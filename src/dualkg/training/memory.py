"""The memory that a training needs, as an upper bound, and the memory that is free."""

import math
import re
import resource
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualkg.errors import PYTHON, RequestError, Words
from dualkg.evaluation.ranking import BLOCK_ELEMENTS
from dualkg.models.base import Model
from dualkg.models.paths import MAX_QUERIES
from dualkg.regularizers import Regularizer
from dualkg.tables.gradients import rows_at_once
from dualkg.tables.lookup import TABLE_NAMES
from dualkg.training.engines import Engine
from dualkg.training.recipe import Recipe

LARGEST_TABLES = 2  # temporary copies of the largest table in an optimizer or a backward pass
WHOLE_TABLES = 6  # the same, where a regularizer reads whole tables
# Copies of the rows of a batch: gradients, their sums, Adagrad's sums, updates, and sort keys.
SPARSE_COPIES = 8
MATRIX_COPIES = 8  # copies of the relation matrices of a batch, in autograd and the optimizer
# Vectors of an example and direction: rows, mapped rows, their gradients, and random numbers for
# dropout.
VECTORS = 40
EXAMPLE_BYTES = 160  # triples in two orders, sort keys, and the answers in train by query
ON_DISK_BYTES = 12  # bytes on a GPU of an example of a graph larger than memory
ANSWER_BYTES = 24  # bytes of such an example, where a loss reads the answers in train
RANKING_BYTES = 6 * BLOCK_ELEMENTS  # a block of scores and temporary arrays
# Arrays of entities × dim of a query of a path network: those of each step, those of the step whose
# gradient is computed and of the score, and those of a query that is ranked. Arrays of edges × dim
# where messages are written.
PATH_ARRAYS = {"cpu": 6, "cuda": 5}
MORE_PATH_ARRAYS = {"cpu": 24, "cuda": 18}
RANKED_PATH_ARRAYS = {"cpu": 24, "cuda": 10}
MESSAGE_ARRAYS = 16
CHECKPOINT_BYTES = 64 * 2**20  # bytes of the library that writes checkpoints of several processes
COPIES_ON_HOST = 2  # buffers for rows on their way to a device and back, for each on the device
LIBRARY_BYTES = 200 * 2**20  # bytes that matrix products and compiled kernels allocate on a GPU


class Need(NamedTuple):
    """Bytes in addition to the tables.

    They are `fixed`, `per_example`, and `scores` of at most `at_once` examples.
    """

    fixed: float
    per_example: float
    scores: float
    at_once: int

    def of(self, batch_size: int) -> float:
        scores = min(batch_size, self.at_once) * self.scores
        return self.fixed + batch_size * self.per_example + scores

    def largest_batch(self, available: float) -> int:
        """The largest batch that fits; 0 or less if none does."""
        return bisect_right(range(2**31), available, key=self.of) - 1


class NotEnoughHostMemory(RequestError):
    """The state of entity tables in host memory does not fit there."""

    def __init__(self, *, needed: float, available: float) -> None:
        super().__init__()
        self.needed = needed
        self.available = available

    def message(self, words: Words = PYTHON) -> str:
        rows = words.key("optimizer.sums", "rows")
        return (
            f"Adagrad's sums and copies of rows would need {gib(self.needed)} of the memory of "
            f"this machine in addition to the entity tables, and {gib(self.available)} are free. "
            f"Choose a smaller dim, or {rows}, which needs less."
        )


def bytes_of_copies(recipe: Recipe, model: Model, batch_size: int) -> float:
    """Bytes of copies of the rows of batches, where steps are taken on these."""
    tables = model.tables
    rows = recipe.loss.rows_per_batch(model, batch_size)
    if not tables.copies_rows or rows is None:
        return 0
    row_bytes = 0
    for table in model.entity_tables:
        numbers = table.shape[1]
        numbers += 1 if recipe.optimizer.sums_by_row else recipe.optimizer.state_tables * numbers
        row_bytes += numbers * table.element_size()
    return tables.bytes_of_copies(min(rows, tables.num_entities), row_bytes)


def bytes_on_host(recipe: Recipe, model: Model) -> float:
    """Bytes of host memory besides the entity tables there, for a training on a GPU."""
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    needed = COPIES_ON_HOST * bytes_of_copies(recipe, model, recipe.training.batch_size)
    for table in model.entity_tables:
        state = recipe.optimizer.state_tables * table.nbytes
        if recipe.optimizer.sums_by_row:
            state = len(table) * table.element_size()
        needed += state + keeps_two * table.nbytes
    return needed


def check_host_memory(recipe: Recipe, model: Model) -> None:
    """Refuse entity tables in host memory whose optimizer state does not fit there, too."""
    if not model.tables.copies_rows or model.device.type == "cpu":
        return
    needed = bytes_on_host(recipe, model)
    available = available_memory(torch.device("cpu"))
    if needed > available:
        raise NotEnoughHostMemory(needed=needed, available=available)


def checkpoint_copies(recipe: Recipe, model: Model, num_copies: int) -> float:
    """Bytes of so many copies of weights and optimizer that a checkpoint makes."""
    if not num_copies:
        return 0.0
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    num_tables = 1 + recipe.optimizer.state_tables + keeps_two
    copied = num_tables * sum(table.nbytes for table in model.parameters())
    return CHECKPOINT_BYTES + num_copies * copied


class NotEnoughMemory(RequestError):
    """Batches of this size do not fit on the device of the model.

    `largest_batch` is the largest that would, or 0. `num_devices` is how many devices as large
    would hold the training, or None.
    """

    def __init__(
        self,
        need: Need,
        batch_size: int,
        *,
        available: float,
        device: torch.device,
        largest_batch: int,
        num_devices: int | None,
    ) -> None:
        super().__init__()
        self.need = need
        self.batch_size = batch_size
        self.available = available
        self.device = device
        self.largest_batch = largest_batch
        self.num_devices = num_devices

    def message(self, words: Words = PYTHON) -> str:
        total = self.need.of(self.batch_size)
        advice = "Not even a batch of 1 fits: choose a smaller dim, or a device with more memory."
        if self.largest_batch >= 1:
            setting = words.key("training.batch_size", self.largest_batch)
            advice = f"A batch of up to {self.largest_batch:,} fits: use {setting}."
        if self.num_devices:
            command = f"torchrun --nproc-per-node {self.num_devices} -m dualkg …"
            advice += f" {self.num_devices:,} devices as large would hold it: {command}"
        return (
            f"Training in batches of {self.batch_size:,} would need {gib(total)} in addition to "
            f"the model: {gib(self.need.fixed)} for gradients and optimizer, "
            f"{gib(total - self.need.fixed)} for a batch. {gib(self.available)} are free on "
            f"{self.device}. {advice}"
        )


def check_memory(need: Need, model: Model, batch_size: int, *, num_sharing: int = 1) -> None:
    """Refuse batches of a size that would not fit on the device of the model.

    `num_sharing` is how many processes share the memory of the device.
    """
    available = available_memory(model.device, num_sharing=num_sharing)
    if need.of(batch_size) > available:
        raise NotEnoughMemory(
            need,
            batch_size,
            available=available,
            device=model.device,
            largest_batch=need.largest_batch(available),
            num_devices=_devices_that_fit(need, model, batch_size, available),
        )


def _devices_that_fit(need: Need, model: Model, batch_size: int, available: float) -> int | None:
    """The number of devices like this one over which this run could be divided."""
    entities = sum(table.numel() for table in model.entity_tables)
    if not entities:
        return None
    whole = sum(table.numel() for table in model.embedding.parameters())
    divided = entities / whole * need.fixed + min(batch_size, need.at_once) * need.scores
    rest = need.of(batch_size) - divided
    if rest >= 0.9 * available:
        return None
    return model.tables.num_holders * math.ceil(divided / (available - rest))


def predict(
    recipe: Recipe,
    model: Model,
    regularizer: Regularizer,
    engine: Engine,
    *,
    num_examples: int,
    on_disk: bool = False,
) -> Need:
    """An upper bound of the peak of a run, which tests compare with measured peaks.

    The examples may be `on_disk`, as those of a graph larger than memory are.
    """
    if model.reads_graph:
        return _predict_paths(recipe, model, engine, num_examples)
    return _Prediction(recipe, model, regularizer, engine, num_examples, on_disk).need()


def _predict_paths(recipe: Recipe, model: Any, engine: Engine, num_examples: int) -> Need:
    """The memory of a path network: vectors and statistics of every step, entity and query."""
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    copies = 2 + recipe.optimizer.state_tables + keeps_two
    of_parameters = 4 * copies * sum(table.numel() for table in model.parameters())
    num_entities = model.shape.num_entities
    num_edges = num_examples
    # Without compiled kernels, PyTorch has more temporary arrays on any device.
    kind = model.device.type if engine.passes_messages else "cpu"
    vectors = PATH_ARRAYS[kind] * model.steps + MORE_PATH_ARRAYS[kind]
    numbers = num_entities * vectors
    if not engine.passes_messages:
        # Messages are written.
        numbers += num_edges * MESSAGE_ARRAYS * model.steps
    size = 2 if engine.precision == "bf16" else 4
    per_example = float(size * numbers * model.dim)
    score_numbers = recipe.loss.numbers_per_example(model, recipe.training.batch_size)
    fixed = of_parameters + num_examples * EXAMPLE_BYTES + RANKING_BYTES + LIBRARY_BYTES
    # Queries that are ranked need no gradients, but are answered more at a time.
    fixed += MAX_QUERIES * size * model.dim * num_entities * RANKED_PATH_ARRAYS[kind]
    return Need(fixed, per_example, 4.0 * score_numbers, sys.maxsize)


class _Prediction:
    """The terms of `predict`, in bytes."""

    def __init__(
        self,
        recipe: Recipe,
        model: Model,
        regularizer: Regularizer,
        engine: Engine,
        num_examples: int,
        on_disk: bool,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.embedding = model.embedding
        self.regularizer = regularizer
        self.engine = engine
        self.num_examples = num_examples
        self.on_disk = on_disk
        self.on_gpu = model.device.type == "cuda"
        self.batch_size = min(recipe.training.batch_size, num_examples)
        self.num_sides = 1 if model.reciprocal else 2
        self.size = self.embedding.entities.element_size()
        self.width = self.embedding.entities.shape[1]
        self.tables: dict[str, int] = {}
        for name, table in self.embedding.named_parameters():
            if table.device == model.device:
                self.tables[name] = table.numel() * self.size
        # The rows that a batch reads, where only these have gradients.
        self.rows: int | None = None
        if engine.step in ("sparse", "sampled", "kernels"):
            self.rows = recipe.loss.rows_per_batch(model, self.batch_size)
        # Kernels copy the rows of a sample half as often as autograd.
        self.lean = 2 if self.rows is not None and engine.fast else 1

    def need(self) -> Need:
        fixed = self.optimizer() + self.gradients() + self.examples() + RANKING_BYTES
        if self.on_gpu:
            fixed += LIBRARY_BYTES
        copies = bytes_of_copies(self.recipe, self.model, self.batch_size)
        fixed += copies if self.on_gpu else COPIES_ON_HOST * copies + copies
        if self.engine.precision == "bf16" and self.rows is None:
            # A copy and a gradient, each half as large as the table.
            fixed += self.entity_tables
        per_example: float = VECTORS * self.num_sides * self.width * self.size // self.lean
        if self.rows is not None:
            per_example += self.rows_per_example() * self.row_copies()
        core = self.embedding.num_shared_parameters(self.embedding.dim)
        if core and self.engine.step == "captured":
            # Each head goes through every slice of the core.
            per_example += 3 * core // self.embedding.dim * self.size
        else:
            fixed += self.matrices(core)
        scores, at_once = self.scores()
        return Need(fixed, per_example, scores, at_once)

    @property
    def entity_tables(self) -> int:
        return sum(self.tables.get(name, 0) for name in TABLE_NAMES)

    def optimizer(self) -> float:
        """The state of the optimizer, and a second set of weights if one is kept."""
        recipe = self.recipe
        keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
        copies = recipe.optimizer.state_tables + keeps_two
        num_bytes: float = copies * sum(self.tables.values())
        if recipe.optimizer.sums_by_row:
            num_bytes -= self.entity_tables - self.entity_tables / self.width
        return num_bytes

    def gradients(self) -> float:
        """The gradients of the tables, and temporary copies."""
        if self.rows is None:
            copies = WHOLE_TABLES if self.regularizer.reads_whole_tables else LARGEST_TABLES
            return sum(self.tables.values()) + copies * max(self.tables.values())
        others = [size for name, size in self.tables.items() if name not in TABLE_NAMES]
        rows = self.rows - self.batch_size * self.rows_per_example()
        return sum(others) + LARGEST_TABLES * max(others) + rows * self.row_copies()

    def row_copies(self) -> float:
        """The copies of a row that a batch reads, where only such rows have gradients."""
        return SPARSE_COPIES * self.width * self.size // self.lean

    def rows_per_example(self) -> int:
        """The rows by which a batch grows with each example: its heads, tails and negatives."""
        loss = self.recipe.loss
        rows_of_one = loss.rows_per_batch(self.model, 1)
        rows_of_two = loss.rows_per_batch(self.model, 2)
        return 0 if rows_of_one is None or rows_of_two is None else rows_of_two - rows_of_one

    def examples(self) -> float:
        if not self.on_disk:
            return self.num_examples * EXAMPLE_BYTES
        if not self.on_gpu:
            return 0
        loss = self.recipe.loss
        of_answers = 0 if loss.num_candidates(1) is None else ANSWER_BYTES
        return self.num_examples * (ON_DISK_BYTES + of_answers)

    def matrices(self, core: int) -> float:
        """The relation matrices of a batch, where relations are larger than vectors."""
        embedding = self.embedding
        matrix = max(embedding.relations.shape[1], embedding.dim**2 if core else 0)
        if matrix <= self.width:
            return 0
        num_matrices = min(embedding.num_relation_ids, self.batch_size)
        return MATRIX_COPIES * num_matrices * matrix * self.size

    def scores(self) -> tuple[float, int]:
        """Bytes of the scores of an example, and how many examples are scored at once."""
        loss = self.recipe.loss
        if not self.engine.fast:
            numbers = loss.numbers_per_example(self.model, self.batch_size)
            return numbers * self.size, sys.maxsize
        bytes_of_score = 2 if self.engine.precision == "bf16" else self.size
        if self.engine.step == "kernels":
            arrays = self.num_sides
        else:
            arrays = 2 if self.on_gpu else 1
        num_candidates = self.model.tables.num_rows
        if self.rows is not None:
            num_candidates = loss.num_candidates(self.batch_size) or num_candidates
        at_once = rows_at_once(self.model.tables.num_rows, bytes_of_score, self.model.device)
        return arrays * num_candidates * bytes_of_score, at_once


# -- free memory -------------------------------------------------------------


def available_memory(device: torch.device, *, num_sharing: int = 1) -> float:
    """Free bytes: on a GPU with what PyTorch has reserved, on a CPU as Linux reports them.

    Each of several processes that share the device has its part of what is free.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] / num_sharing + unused
    of_all = min(_free_on_machine(), _free_in_group())
    return min(of_all / num_sharing, _free_in_process())


def _free_on_machine(description: Path = Path("/proc/meminfo")) -> float:
    text = description.read_text() if description.is_file() else ""
    match = re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)
    return float(match[1]) * 1024 if match else math.inf


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Free bytes in a container with a limit; its page cache would be given up."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = float((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        cached = float(statistics["inactive_file"]) + float(statistics["active_file"])
        return math.inf if limit == "max" else max(float(limit) - used + cached, 0.0)
    except (OSError, ValueError, KeyError):
        return math.inf


def _free_in_process(description: Path = Path("/proc/self/statm")) -> float:
    """Bytes of addresses up to the limit of the process (`ulimit -v`)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or not description.exists():
        return math.inf
    num_pages = int(description.read_text().split()[0])
    return float(max(limit - num_pages * resource.getpagesize(), 0))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
