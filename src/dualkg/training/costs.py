"""What a training costs in work: seconds on a nominal machine, the same wherever they are counted.

Budgets that choose something are counted in work, so that a busy machine chooses what a quiet one
does. `measure_speed` says how much work this machine does in a second, for those who wait.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dualkg.data.graph import Graph, GraphShape
from dualkg.models.base import Epoch, Work
from dualkg.training.batches import MAX_GROUP
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import Trainer

# What training does in a second on two CPU cores with AVX-512, and on one H200.
NOMINAL = {
    "cpu": Work(operations=1.0e11, bytes=8e9, calls=5e4),
    "cuda": Work(operations=4.0e14, bytes=3e12, calls=1e6),
}
SMALL = GraphShape(2, 1)  # of a model that is made to compute its work
MAX_MEASURED_BYTES = 2**31  # of tables that are made only to time some steps
NUM_STEPS = 3  # that are timed
# Steps in which kernels are compiled, and on a GPU a CUDA graph is captured.
WARM_UP_STEPS = {"cpu": 2, "cuda": 5}


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
        model = recipe.model.build(SMALL, seed=0)
        loss = recipe.loss
        shape = self.graph.shape
        sides = 1 if model.reciprocal else 2
        num_examples = len(self.graph.train) * (3 - sides)
        if loss.examples == "queries":
            num_examples = self.num_queries
        num_scored = sides * num_examples
        if recipe.training.order == "queries":
            num_scored = min(num_scored, self.num_queries)
        batch_size = min(recipe.training.batch_size, max(num_examples, 1))
        num_batches = -(-num_examples // batch_size)
        num_candidates = loss.num_candidates(batch_size)
        num_rows = None if num_candidates is None else loss.rows_per_batch(model, batch_size)
        epoch = Epoch(
            self.graph,
            num_examples=num_examples,
            num_queries=num_scored,
            num_candidates=shape.num_entities if num_candidates is None else num_candidates,
            num_steps=num_batches,
            num_rows=shape.num_entities if num_rows is None else min(num_rows, shape.num_entities),
            num_relations=shape.num_relations * (3 - sides) if loss.predicts_relations else 0,
        )
        share = recipe.training.num_steps(num_examples) / max(1, num_batches)
        return share * self._seconds(model.work(epoch, device=self.device))

    def ranking(self, recipe: Recipe, num_triples: int) -> float:
        """The work of ranking triples in both directions."""
        model = recipe.model.build(SMALL, seed=0)
        return self._seconds(model.ranking_work(2 * num_triples, self.graph, device=self.device))

    def _seconds(self, work: Work) -> float:
        """Seconds of some work on the nominal machine."""
        operations, num_bytes, calls = NOMINAL[self.device]
        return work.operations / operations + work.bytes / num_bytes + work.calls / calls

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

    For a large graph, which is not grouped, every answer counts as a group.
    """
    if graph.is_large:
        return 2 * len(graph.train)
    num_groups = 0
    train = np.asarray(graph.train, dtype=np.int64)
    for given in (0, 2):
        keys = train[:, given] * graph.shape.num_relations + train[:, 1]
        _, counts = np.unique(keys, return_counts=True)
        num_groups += int((-(-counts // MAX_GROUP)).sum())
    return num_groups


def measure_speed(trainer: Trainer, work: WorkEstimate) -> float:
    """Work a second that this machine does now, by three steps of a trainer, which is used up."""
    return work.epoch(trainer.recipe) / trainer.num_steps / measure_step(trainer)


def measure_step(trainer: Trainer) -> float:
    """Seconds of a step: the mean of three after the warm-up of a trainer, which is used up."""
    device = trainer.model.device
    learning_rate = trainer.recipe.optimizer.learning_rate
    batches = itertools.chain.from_iterable(map(trainer.batches, itertools.count()))

    def seconds_of(num_steps: int) -> float:
        started = time.perf_counter()
        for batch in itertools.islice(batches, num_steps):
            trainer.step(batch, learning_rate)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(time.perf_counter() - started, 1e-9)

    with trainer.computing():
        seconds_of(WARM_UP_STEPS[device.type])
        return seconds_of(NUM_STEPS) / NUM_STEPS
