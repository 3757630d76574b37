"""Where the entity tables of a training are: on the device that computes, or in host memory."""

from __future__ import annotations

import torch

from dualkg.data.graph import GraphShape
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.tables.base import TABLE_NAMES, EntityTables, local_tables
from dualkg.tables.host import HostTables
from dualkg.training.engines import Job, Requirement, obstacle, unavailable
from dualkg.training.memory import RANKING_BYTES, available_memory
from dualkg.training.recipe import Recipe

WHAT = "Entity tables in host memory"
SMALL = GraphShape(2, 1)  # of a model that is made to see the sizes of its tables
USED_SHARE = 0.95  # of the free memory that weights and optimizer may take

HOST = (
    Requirement(
        lambda job: job.model.entity_tables,
        lambda job: f"are for models with embeddings, and {job.model_name} has none",
    ),
    Requirement(
        lambda job: job.loss.rows_per_batch(job.model, 2) is not None,
        lambda job: (
            "are for losses over sampled entities, which read few rows; "
            f"{type(job.loss).__name__} reads all"
        ),
    ),
    Requirement(
        lambda job: not job.has_rejected,
        lambda job: (
            "are for losses over sampled entities, and rejected triples of `data.decisions` are "
            "compared with all"
        ),
    ),
    Requirement(
        lambda job: job.optimizer == "Adagrad",
        lambda job: (
            "are for Adagrad, which leaves rows without a gradient as they are; `optimizer.name` "
            f"is {job.optimizer}"
        ),
    ),
    Requirement(
        lambda job: not job.regularizer.reads_whole_tables,
        lambda job: (
            "are for regularizers of the rows of a batch, and "
            f"{type(job.regularizer).__name__} reads whole tables"
        ),
    ),
)


def choose_tables(
    recipe: Recipe,
    shape: GraphShape,
    *,
    device: torch.device,
    available: float | None = None,
    has_rejected: bool = False,
) -> EntityTables:
    """Tables of the kind that the recipe requests, or in host memory if they do not fit a GPU.

    `available` are free bytes there, which are asked for if they are left out.
    """
    requested = recipe.training.entity_tables
    on_gpu = device.type == "cuda"
    # Made on a GPU, block by block: the memory of the host may be smaller than they are.
    local = local_tables(shape.num_entities, device=device if on_gpu else None)
    if requested == "device" or (requested == "auto" and not on_gpu):
        return local
    small = recipe.model.build(SMALL, seed=0)
    job = _job(recipe, small, recipe.regularizer.build(), has_rejected=has_rejected)
    not_on_host = obstacle(HOST, job)
    if requested == "host":
        if not_on_host:
            raise unavailable(WHAT, not_on_host, {"training.entity_tables": "device"})
        return HostTables(shape.num_entities)
    free = available_memory(device) if available is None else available
    is_small = bytes_of_weights(recipe, small, shape) <= USED_SHARE * free
    return local if not_on_host or is_small else HostTables(shape.num_entities)


def bytes_of_weights(recipe: Recipe, small: Model, shape: GraphShape) -> float:
    """Bytes of weights and optimizer state, by a model of the shape `SMALL`, and of a ranking."""
    numbers = 0.0
    keeps_two = recipe.validation.keep == "best" or recipe.optimizer.average_from < 1
    state_tables = recipe.optimizer.state_tables
    for name, table in small.named_parameters():
        of_row = table.numel() / len(table)
        num_rows = len(table)
        if name.rpartition(".")[2] in TABLE_NAMES:
            num_rows = shape.num_entities
        elif num_rows == small.num_relation_ids:
            num_rows = num_rows // SMALL.num_relations * shape.num_relations
        of_state = state_tables * of_row
        if recipe.optimizer.sums_by_row and name.rpartition(".")[2] in TABLE_NAMES:
            of_state = state_tables
        numbers += num_rows * ((1 + keeps_two) * of_row + of_state)
    return 4 * numbers + RANKING_BYTES


def check_placement(
    recipe: Recipe, model: Model, regularizer: Regularizer, *, has_rejected: bool = False
) -> None:
    """Refuse tables in host memory that this training cannot have."""
    if not model.tables.on_host:
        if recipe.training.entity_tables == "host":
            reason = "are for one process, and each of several has a part of the tables"
            raise unavailable(WHAT, reason, {"training.entity_tables": "device"})
        return
    job = _job(recipe, model, regularizer, has_rejected=has_rejected)
    not_on_host = obstacle(HOST, job)
    if not_on_host:
        raise unavailable(WHAT, not_on_host, {"training.entity_tables": "device"})


def _job(recipe: Recipe, model: Model, regularizer: Regularizer, *, has_rejected: bool) -> Job:
    return Job(model, recipe.loss, regularizer, recipe.optimizer.name, has_rejected=has_rejected)
