"""A measurement of training, in the process that calls it: an epoch of the ordinary loop, or of a
tutorial's.
"""

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import measurement
import peers

LEARNING_RATE = 0.1
BATCHES_LOOKED_AT = 50


@dataclass(frozen=True)
class Job:
    """A model to train on a graph, with DURA and Adagrad."""

    graph: str
    model: str
    dim: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.graph} {self.model} dim {self.dim} batch {self.batch}"


def recipe_for(
    job: Job, *, engine: str, precision: str, epochs: int, order: str = "triples"
) -> Any:
    """The recipe that `dualkg train` would be given."""
    import dualkg as kg

    return kg.Recipe().with_changes(
        {
            "data.graph": job.graph,
            "model.name": job.model,
            "model.dim": job.dim,
            "regularizer.name": "DURA",
            "regularizer.weight": 0.05,
            "regularizer.plain": 0.5,
            "regularizer.mapped": 1.5,
            "optimizer.learning_rate": LEARNING_RATE,
            "training.batch_size": job.batch,
            "training.engine": engine,
            "training.order": order,
            "training.precision": precision,
            "training.epochs": epochs,
        }
    )


def part_of(graph: Any, num_triples: int) -> Any:
    """The same graph with some of its training triples, so that an epoch is short and a step is
    what it was.
    """
    chosen = np.random.default_rng(0).permutation(len(graph.train))[:num_triples]
    return dataclasses.replace(graph, train=graph.train[chosen])


def train_epochs(
    recipe: Any, graph: Any, device: str, steps: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Train by the ordinary loop; the trainer, and what an epoch took. The first epoch is the
    warm-up.

    With `steps` an epoch ends after that number of steps, in the same order.
    """
    from dualkg.training.api import choose_device
    from dualkg.training.trainer import Trainer

    measurement.forget_peak(device)
    model = recipe.model.build(graph.shape, seed=recipe.training.seed).to(choose_device(device))
    started = time.perf_counter()
    trainer = Trainer(model, graph, recipe, recipe.regularizer.build())
    if steps is not None:
        whole = trainer.batches
        trainer.num_steps = min(steps, trainer.num_steps)
        trainer.batches = lambda epoch: islice(whole(epoch), trainer.num_steps)  # type: ignore[method-assign]
    building = time.perf_counter() - started
    trainer.run()
    first, *others = (entry["seconds"] for entry in trainer.progress.history)
    usual = statistics.median(others)
    return trainer, {
        "epoch_seconds": others,
        "seconds_per_epoch": usual,
        "warm_up_seconds": max(building + trainer.warm_up.seconds + first - usual, 0.0),
        "peak_mib": measurement.peak_mib(device),
    }


def measure_dualkg(
    job: dict[str, Any],
    *,
    device: str,
    engine: str,
    precision: str,
    epochs: int,
    steps: int | None,
    order: str = "triples",
) -> dict[str, Any]:
    """Time an epoch of a job, or some of its steps, scaled to an epoch."""
    from dualkg.training.api import load_recipe_graph

    spec = Job(**job)
    recipe = recipe_for(spec, engine=engine, precision=precision, epochs=epochs, order=order)
    graph = load_recipe_graph(recipe)
    num_steps = math.ceil(2 * len(graph.train) / spec.batch)  # every triple has two queries
    measured = min(steps or num_steps, num_steps)
    if order == "triples":
        trainer, found = train_epochs(
            recipe, part_of(graph, math.ceil(measured * spec.batch / 2)), device
        )
    else:  # a part of the triples would have fewer answers per query
        trainer, found = train_epochs(recipe, graph, device, measured)
    found["seconds_per_epoch"] *= num_steps / trainer.num_steps
    return {
        **found,
        "steps_per_epoch": num_steps,
        "steps_measured": trainer.num_steps,
        **sizes(trainer),
    }


def sizes(trainer: Any) -> dict[str, Any]:
    """What the limits of a step depend on."""
    model = trainer.model.embedding
    batches = [batch.cpu() for batch in islice(trainer.batches(0), BATCHES_LOOKED_AT)]
    return {
        "num_entities": model.shape.num_entities,
        "width": model.head_table.shape[1],
        "relation_width": model.relations.shape[1],
        "two_entity_tables": model.two_entity_tables,
        "present_heads": statistics.fmean(len(batch[:, 0].unique()) for batch in batches),
        "present_relations": statistics.fmean(len(batch[:, 1].unique()) for batch in batches),
    }


def measure_tutorial(
    *, arrays: str, dim: int, batch: int, steps: int, warm_up: int, device: str
) -> dict[str, Any]:
    """The same steps by the loop of a tutorial."""
    import torch

    import tutorial

    if device != "cpu":
        raise ValueError("the tutorial's loop is for a CPU")
    saved = np.load(arrays)
    triples = torch.from_numpy(saved["train"])
    shape = saved["shape"].tolist()
    torch.set_flush_denormal(True)  # as dualkg does, and as PyKEEN is measured
    started = time.perf_counter()
    seconds, _ = tutorial.train_steps(
        triples, *shape, dim, batch, steps, torch.get_num_threads(), warm_up=warm_up
    )
    num_steps = math.ceil(2 * len(triples) / batch)
    return {
        "seconds_per_epoch": seconds * num_steps,
        "steps_per_epoch": num_steps,
        "steps_measured": steps,
        "warm_up_seconds": time.perf_counter() - started - seconds * steps,
        "peak_mib": measurement.peak_mib(device),
    }


def measure_several(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """One measurement after the other; one that fails leaves the others as they are."""
    from dualkg.errors import DualkgError

    found: list[dict[str, Any]] = []
    for task in tasks:
        try:
            found.append(
                measure_dualkg(**{key: value for key, value in task.items() if key != "what"})
            )
        except (DualkgError, RuntimeError, MemoryError) as error:
            found.append({"failed": str(error).splitlines()[0][:300]})
    return {"found": found}


def prepare(job: dict[str, Any], *, arrays: str) -> dict[str, Any]:
    """Read the graph once, so that no measurement pays for unpacking it, and leave it to the peers
    as arrays.
    """
    import dualkg as kg

    peers.write_arrays(Path(arrays), kg.load_graph(job["graph"]))
    return {}
