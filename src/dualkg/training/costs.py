"""What a training costs in work: seconds on a nominal machine, the same wherever they are counted.

Budgets that choose something are counted in work, so that a busy machine chooses what a quiet one
does. `measure_speed` says how much work this machine does in a second, for those who wait.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dualkg.data.graph import Graph, GraphShape
from dualkg.models.base import EmbeddingModel
from dualkg.models.paths import PathNetwork
from dualkg.training.batches import MAX_GROUP
from dualkg.training.recipe import Recipe
from dualkg.training.step_time import SCORE_PASSES, SMALL_OPERATIONS, UPDATE_PASSES, Rates
from dualkg.training.trainer import Trainer

# Two CPU cores with AVX-512, and one H200: what training reaches there, not what a product does.
NOMINAL = {
    "cpu": Rates(operations=1.0e11, bytes=8e9, calls=5e4),
    "cuda": Rates(operations=4.0e14, bytes=3e12, calls=1e6),
}
VECTOR_PASSES = 20  # passes over the vectors of a batch: maps, penalties and their gradients
# Passes over the messages of a path network: forward and backward, and without a gradient.
PATH_PASSES = {"cpu": 1.5, "cuda": 4.0}
PATH_RANKING_PASSES = {"cpu": 0.5, "cuda": 1.5}
PATH_STEP_SECONDS = {"cpu": 0.015, "cuda": 0.0}  # of a step, whatever the size of the graph
# What the dense layers of an entity take on a CPU, in messages for each of its numbers.
DENSE_MESSAGES = 1.25
RANKING_PASSES = 3  # passes over the scores of a query that is ranked
MAX_MEASURED_BYTES = 2**31  # of tables that are made or copied only to time some steps
SECONDS_TO_MEASURE = 1.0
MAX_MEASURED_STEPS = 20
# Steps in which kernels are compiled, and on a GPU a CUDA graph is captured.
WARM_UP_STEPS = {"cpu": 2, "cuda": 5}
Clock = Callable[[], float]


@dataclass(frozen=True)
class WorkEstimate:
    """The work of a graph's trainings on one kind of device."""

    graph: Graph
    device: str

    @classmethod
    def of(cls, graph: Graph, device: torch.device) -> WorkEstimate:
        return cls(graph, device.type)

    @cached_property
    def num_queries(self) -> int:
        """Queries with at most `MAX_GROUP` answers each, in both directions."""
        return count_query_groups(self.graph)

    def epoch(self, recipe: Recipe) -> float:
        """The work of one epoch."""
        whole = recipe.model.build(GraphShape(2, 1), seed=0)
        sides = 1 if whole.reciprocal else 2
        num_examples = len(self.graph.train) * (3 - sides)
        if recipe.loss.examples == "queries":
            num_examples = self.num_queries
        num_batches = -(-num_examples // recipe.training.batch_size)
        num_steps = recipe.training.num_steps(num_examples)
        share = num_steps / max(1, num_batches)
        if isinstance(whole, PathNetwork):
            if recipe.training.order == "queries" and self.device == "cpu":
                num_examples = self.num_queries
            of_messages = share * self._of_paths(whole, num_examples, PATH_PASSES[self.device])
            return of_messages + num_steps * PATH_STEP_SECONDS[self.device]
        return share * self._of_embeddings(recipe, whole.embedding, num_examples)

    def _of_embeddings(self, recipe: Recipe, model: EmbeddingModel, num_examples: int) -> float:
        """The work of all examples."""
        loss = recipe.loss
        shape = self.graph.shape
        rates = NOMINAL[self.device]
        width = model.entities.shape[1]
        sides = 1 if model.reciprocal else 2
        batch_size = min(recipe.training.batch_size, max(num_examples, 1))
        num_steps = -(-num_examples // batch_size)

        rows = shape.num_entities
        candidates = shape.num_entities
        rows_of_batch = loss.rows_per_batch(model, batch_size)
        if rows_of_batch is not None:
            rows = min(rows_of_batch, shape.num_entities)
            candidates = int(getattr(loss, "num_negatives", batch_size))
        num_scored = sides * num_examples
        if recipe.training.order == "queries":
            num_scored = min(num_scored, self.num_queries)

        operations = 6.0 * num_scored * candidates * width
        num_relation_ids = shape.num_relations * (3 - sides)
        if getattr(loss, "relation_weight", 0):
            operations += 6.0 * num_examples * num_relation_ids * width
        relation_width = model.relations.shape[1]
        if relation_width > width:
            operations += 6.0 * num_examples * relation_width
        num_bytes = 4.0 * (
            SCORE_PASSES * num_scored * candidates
            + VECTOR_PASSES * num_examples * width
            + UPDATE_PASSES * num_steps * rows * width
        )
        seconds = operations / rates.operations + num_bytes / rates.bytes
        return seconds + num_steps * SMALL_OPERATIONS / rates.calls

    def ranking(self, recipe: Recipe, num_triples: int) -> float:
        """The work of ranking triples in both directions."""
        rates = NOMINAL[self.device]
        whole = recipe.model.build(GraphShape(2, 1), seed=0)
        if isinstance(whole, PathNetwork):
            return self._of_paths(whole, 2 * num_triples, PATH_RANKING_PASSES[self.device])
        model = whole.embedding
        num_scores = 2.0 * num_triples * self.graph.shape.num_entities
        operations = 2 * num_scores * model.entities.shape[1]
        return operations / rates.operations + RANKING_PASSES * 4 * num_scores / rates.bytes

    def _of_paths(self, model: PathNetwork, num_queries: int, num_passes: float) -> float:
        """The work of a path network: every query passes messages along all edges."""
        num_edges = 2 * len(self.graph.train)
        per_entity = DENSE_MESSAGES * model.dim if self.device == "cpu" else 1
        num_messages = num_edges + per_entity * self.graph.shape.num_entities
        numbers = num_queries * num_messages * model.dim
        num_bytes = 2.0 if self.device == "cuda" else 4.0
        return model.steps * num_passes * num_bytes * numbers / NOMINAL[self.device].bytes

    def training(self, recipe: Recipe) -> float:
        """The work of a training, with its validations and the ranking of held-out triples."""
        graph = self.graph
        work = recipe.training.epochs * self.epoch(recipe)
        if recipe.validation.every:
            num_validations = recipe.training.epochs // recipe.validation.every
            num_triples = _num_ranked(len(graph.valid), recipe.validation.queries)
            work += num_validations * self.ranking(recipe, num_triples)
        for held_out in (graph.valid, graph.test):
            num_triples = _num_ranked(len(held_out), recipe.validation.final_queries)
            work += self.ranking(recipe, num_triples)
        return work


def _num_ranked(num_triples: int, num_queries: int | None) -> int:
    """The triples that are ranked of a split, if so many queries are."""
    return num_triples if num_queries is None else min(num_triples, -(-num_queries // 2))


def count_query_groups(graph: Graph) -> int:
    """Groups of at most `MAX_GROUP` answers of one query, in both directions.

    For a graph on disk, which is not grouped, every answer counts as a group.
    """
    if graph.is_mapped:
        return 2 * len(graph.train)
    num_groups = 0
    train = np.asarray(graph.train, dtype=np.int64)
    for given in (0, 2):
        keys = train[:, given] * graph.shape.num_relations + train[:, 1]
        _, counts = np.unique(keys, return_counts=True)
        num_groups += int((-(-counts // MAX_GROUP)).sum())
    return num_groups


def measure_speed(trainer: Trainer, work: WorkEstimate) -> float:
    """Work a second that this machine does now, by some steps of a trainer, which is used up."""
    return work.epoch(trainer.recipe) / trainer.num_steps / measure_step(trainer)


def measure_step(trainer: Trainer, *, clock: Clock = time.perf_counter) -> float:
    """Seconds of a step, by some steps of a trainer, which is used up.

    Several processes call it together, and take the same number of steps.
    """
    device = trainer.model.device
    learning_rate = trainer.recipe.optimizer.learning_rate
    batches = itertools.chain.from_iterable(map(trainer.batches, itertools.count()))

    def seconds_of(num_steps: int) -> float:
        started = clock()
        for batch in itertools.islice(batches, num_steps):
            trainer.step(batch, learning_rate)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(clock() - started, 1e-9)

    with trainer.computing():
        seconds_of(WARM_UP_STEPS[device.type])
        (longest,) = trainer.group.largest(seconds_of(1))
        num_steps = int(SECONDS_TO_MEASURE / longest)
        num_steps = max(1, min(num_steps, MAX_MEASURED_STEPS))
        return seconds_of(num_steps) / num_steps
