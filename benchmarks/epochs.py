"""Measure training in the process that calls it: the ordinary loop, or that of a tutorial."""

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
NUM_COUNTED_BATCHES = 50  # batches whose distinct heads and relations are counted


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
    """The same graph with some of its training triples.

    An epoch is shorter, and a step takes as long as before.
    """
    chosen = np.random.default_rng(0).permutation(len(graph.train))[:num_triples]
    return dataclasses.replace(graph, train=graph.train[chosen])


def train_epochs(
    recipe: Any, graph: Any, device: str, steps: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Train by the ordinary loop; return the trainer and the costs of an epoch.

    The first epoch is the warm-up. With `steps`, an epoch ends after that number of steps, in the
    same order.
    """
    from dualkg.training.api import choose_device
    from dualkg.training.trainer import Trainer

    measurement.forget_peak(device)
    model = recipe.model.build(graph.shape, seed=recipe.training.seed).to(choose_device(device))
    started = time.perf_counter()
    trainer = Trainer(model, graph, recipe, recipe.regularizer.build())
    if steps is not None:
        all_batches = trainer.batches
        trainer.num_steps = min(steps, trainer.num_steps)
        trainer.batches = lambda epoch: islice(  # type: ignore[method-assign]
            all_batches(epoch), trainer.num_steps
        )
    building = time.perf_counter() - started
    trainer.run()
    first, *measured = (entry["seconds"] for entry in trainer.progress.history)
    seconds_per_epoch = statistics.median(measured)
    warm_up = building + trainer.warm_up.seconds + first - seconds_per_epoch
    return trainer, {
        "epoch_seconds": measured,
        "seconds_per_epoch": seconds_per_epoch,
        "warm_up_seconds": max(warm_up, 0.0),
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
    num_measured = min(steps or num_steps, num_steps)
    if order == "triples":
        part = part_of(graph, math.ceil(num_measured * spec.batch / 2))
        trainer, costs = train_epochs(recipe, part, device)
    else:
        # A part of the triples would have fewer answers per query, so the graph stays whole.
        trainer, costs = train_epochs(recipe, graph, device, num_measured)
    costs["seconds_per_epoch"] *= num_steps / trainer.num_steps
    return {
        **costs,
        "steps_per_epoch": num_steps,
        "steps_measured": trainer.num_steps,
        **sizes(trainer),
    }


def sizes(trainer: Any) -> dict[str, Any]:
    """The sizes that the limits of a step depend on."""
    model = trainer.model.embedding
    batches = [batch.cpu() for batch in islice(trainer.batches(0), NUM_COUNTED_BATCHES)]
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

    results: list[dict[str, Any]] = []
    for task in tasks:
        arguments = {name: value for name, value in task.items() if name != "what"}
        try:
            results.append(measure_dualkg(**arguments))
        except (DualkgError, RuntimeError, MemoryError) as error:
            results.append({"failed": str(error).splitlines()[0][:300]})
    return {"found": results}


def prepare(job: dict[str, Any], *, arrays: str) -> dict[str, Any]:
    """Read the graph once, and write it as arrays for the peers.

    So no measurement pays for unpacking it.
    """
    import dualkg as kg

    peers.write_arrays(Path(arrays), kg.load_graph(job["graph"]))
    return {}
