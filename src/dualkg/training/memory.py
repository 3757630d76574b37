"""How much memory a run will need, told before it starts."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from dualkg.errors import RequestError
from dualkg.evaluation.ranking import BLOCK_ELEMENTS
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.distance import DistanceModel
from dualkg.models.tucker import TuckER
from dualkg.training.engines import Engine
from dualkg.training.fused import rows_at_once
from dualkg.training.gpu_step import ALIGNED, TILE
from dualkg.training.recipe import Recipe

ID = 8  # bytes
HALF = 2
WHOLE_TABLE = 4  # copies of a table, where a regularizer looks at all of it and autograd takes its gradient
MADE_OF_MATRICES = 8  # copies of the matrices of a batch, while autograd and the optimizer work on them
THROUGH_CORE = 3  # numbers for each of those that a head becomes on its way through a core, and its gradient
OF_ANSWERS = 2  # arrays of batch × entities more, where scores are gathered at all answers of a question
DRAWN = 4  # whole numbers for each of an image's, while it is drawn which are dropped
# For each negative of a triple: its score and what autograd and the loss keep of it, and whole numbers it is drawn by.
NUMBERS_OF_NEGATIVE, IDS_OF_NEGATIVE = 6, 4
IDS_OF_SHARED = 2  # where they are scored for all triples at once, and only whether they count is of one alone
ARRAYS_OF_SHARED = 2  # for each array that scores by distances are made of: itself, and a gradient
# Copies of its vector, where it is scored for one triple alone: by a product, and in any other way.
VECTORS_OF_PRODUCT, VECTORS_OF_NEGATIVE = 3, 8
IDS_OF_ANSWER = 5  # for each answer of training, and each query, at most as many
LIBRARIES = 200 * 2**20  # that matrix products and compiled kernels keep for themselves


class Need(NamedTuple):
    """Bytes beside the model's own tables: those of every run, and those of each triple in a batch.

    A triple also has `scores`, but no more than so many triples have theirs at once.
    """

    fixed: float
    per_triple: float
    scores: float
    at_once: int

    def of(self, batch_size: int) -> float:
        return self.fixed + batch_size * self.per_triple + min(batch_size, self.at_once) * self.scores

    def largest_batch(self, available: float) -> int:
        """The largest batch that fits; 0 or less if none does."""
        if available < self.of(self.at_once):
            return math.floor((available - self.fixed) / (self.per_triple + self.scores))
        return math.floor((available - self.fixed - self.at_once * self.scores) / self.per_triple)


def check_memory(recipe: Recipe, model: Model, engine: Engine, *, num_examples: int) -> None:
    """Refuse a run that would not fit where the model is, and say which batch would."""
    need = predict(recipe, model, engine, num_examples=num_examples)
    available, size = available_memory(model.device), min(recipe.training.batch_size, num_examples)
    if need.of(size) <= available:
        return
    largest = need.largest_batch(available)
    advice = (
        f"A batch of up to {largest:,} fits: use --set training.batch_size={largest}."
        if largest >= 1
        else "Not even a batch of 1 fits: choose a smaller dim, or a device with more memory."
    )
    raise RequestError(
        f"Training in batches of {size:,} would need {_gib(need.of(size))} beside the model: {_gib(need.fixed)} for "
        f"gradients and optimizer, {_gib(need.of(size) - need.fixed)} for a batch. {_gib(available)} are free on "
        f"{model.device}. {advice}"
    )


def predict(recipe: Recipe, model: Model, engine: Engine, *, num_examples: int) -> Need:
    """The peak of a run; tests hold it against what runs do take."""
    held = model.embedding
    size = held.entities.element_size()
    tables = {name: table.numel() * size for name, table in held.named_parameters()}
    state = {"Adagrad": 1, "Adam": 2, "SGD": 0}[recipe.optimizer.name] * sum(tables.values())
    need = _kernels(model) if engine == "kernels" else _autograd(model, engine, tables, recipe.training.batch_size)
    if recipe.loss.samples:
        need = _sampled(need, recipe, model, num_examples=num_examples)
    if recipe.loss.kind == "all answers":
        need = need._replace(scores=need.scores + OF_ANSWERS * held.shape.num_entities * size)
    twice = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    kept = sum(tables.values()) if twice else 0
    # The triples, in their order and shuffled; keys to sort by; and a block of the ranking, with what it is counted by.
    common = num_examples * (6 + 4) * ID + BLOCK_ELEMENTS * 6
    libraries = LIBRARIES if model.device.type == "cuda" else 0
    looked_over = WHOLE_TABLE * max(tables.values()) if recipe.regularizer.name == "UnweightedDURA" else 0
    drawn = DRAWN * ID * held.entities.shape[1] * sum(map(bool, (recipe.loss.dropout, recipe.loss.head_dropout)))
    fixed = need.fixed + state + kept + common + libraries + looked_over
    return need._replace(fixed=fixed, per_triple=need.per_triple + drawn)


def _autograd(model: Model, engine: Engine, tables: dict[str, int], batch_size: int) -> Need:
    """A gradient for every table; scores, and what autograd or the softmax keep of them; vectors of the batch."""
    held, on_gpu = model.embedding, model.device.type == "cuda"
    size, width = held.entities.element_size(), held.entities.shape[1]
    num_entities, num_sides = held.shape.num_entities, 1 if model.reciprocal else 2
    autograd = engine in ("plain", "captured")
    gradients = sum(tables.values())
    if held.relations.shape[1] > width and not autograd:  # of matrices, only those of the batch
        present = min(held.num_relation_ids, batch_size) * held.relations.shape[1] * size
        gradients += MADE_OF_MATRICES * present - tables["relations"]
    vectors = 24 * num_sides * width * size
    if isinstance(held, TuckER) and on_gpu and held.batch_norm:  # where heads go through the core, rotated about
        gradients += 2 * held.core.numel() * size
        vectors += THROUGH_CORE * held.relation_dim * held.dim * size
    elif isinstance(held, TuckER):  # whose matrices are stored nowhere, and are formed for each batch
        gradients += MADE_OF_MATRICES * min(held.num_relation_ids, batch_size) * held.dim**2 * size
    if engine == "fused bf16":
        entities = sum(tables[name] for name in ("entities", "tails") if name in tables)
        fixed = gradients + 2 * entities * HALF / size
        return Need(fixed, vectors, num_entities * HALF, rows_at_once(held, HALF))
    passes = max(tables.values()) if on_gpu or autograd else 0  # of an optimizer that needs several
    at_once = rows_at_once(held, size)
    if autograd:
        arrays, at_once = num_sides * (held.score_arrays if model is held else 5), sys.maxsize
        gradients += max(tables.values())  # the same table's gradient from its products and from its rows
    else:
        arrays = 2 if on_gpu else 1
    return Need(gradients + passes, vectors, arrays * num_entities * size, at_once)


def _sampled(need: Need, recipe: Recipe, model: Model, *, num_examples: int) -> Need:
    """The same run with scores of negatives instead of all entities, and with the answers of training."""
    choice, held = recipe.loss, model.embedding
    size, width = held.entities.element_size(), held.entities.shape[1]
    num = min(recipe.training.batch_size, num_examples) if choice.negatives == "batch" else choice.num_negatives
    numbers, ids = VECTORS_OF_PRODUCT if isinstance(model, BilinearModel) else VECTORS_OF_NEGATIVE, IDS_OF_NEGATIVE
    numbers *= width
    if choice.negatives != "uniform" and _scores_for_all_at_once(model):
        # Candidates of all triples have one vector each; what is kept is what their scores are made of.
        numbers, ids = ARRAYS_OF_SHARED * model.score_arrays if isinstance(model, DistanceModel) else 0, IDS_OF_SHARED
    negative = (NUMBERS_OF_NEGATIVE + numbers) * size + ids * ID
    num *= 2 if choice.sides == "both" else 1
    answers = num_examples * (1 if model.reciprocal else 2) * IDS_OF_ANSWER * ID
    return need._replace(fixed=need.fixed + answers, scores=num * negative, at_once=sys.maxsize)


def _scores_for_all_at_once(model: Model) -> bool:
    """Whether the same candidates for all triples have one vector each, not one for every triple."""
    if isinstance(model, DistanceModel):
        return model.maps_both_sides or model.reciprocal or model.isometric
    return isinstance(model, BilinearModel)


def _kernels(model: Model) -> Need:
    """Rows of gradients for every table but matrices; a copy and a gradient in bfloat16 where all rows are scored."""
    held = model.embedding
    (num_entities, width), num_sides = held.entities.shape, 1 if model.reciprocal else 2
    padded = -(-num_entities // TILE) * TILE, -(-width // ALIGNED) * ALIGNED
    num_tables = 2 if held.two_entity_tables else 1
    num_scored = min(num_tables, num_sides)
    rows = num_tables * held.entities.numel() + (held.relations.numel() if held.diagonal else 0)
    if isinstance(held, TuckER):  # matrices of all relations and their gradients, and those of what they are made of
        rows += 2 * held.num_relation_ids * width**2 + held.core.numel() + held.relations.numel()
    fixed = 4 * rows + num_scored * padded[0] * padded[1] * 2 * HALF
    vectors = num_sides * padded[1] * (HALF + 4) + (0 if held.diagonal else 4 * 4 * width)
    return Need(fixed, vectors, num_sides * padded[0] * HALF, sys.maxsize)


def available_memory(device: torch.device) -> float:
    """Bytes that can still be had: on a GPU, what is free and what PyTorch holds unused; on a CPU, what Linux says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return min(_free_on_machine(), _free_in_group())


def _free_on_machine(description: Path = Path("/proc/meminfo")) -> float:
    if description.is_file():
        for line in description.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return math.inf


def _free_in_group(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What a container leaves, where it has a limit; files that it holds in memory would make room."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = float((folder / "memory.current").read_text())
        held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = float(held["inactive_file"]) + float(held["active_file"])
        return math.inf if limit == "max" else max(float(limit) - used + files, 0.0)
    except (OSError, ValueError, KeyError):
        return math.inf


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
