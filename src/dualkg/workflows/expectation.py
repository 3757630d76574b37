"""What is about to be done, and how long it will take on this machine: told before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualkg.data.graph import Graph
from dualkg.logs import describe_seconds
from dualkg.training.costs import MAX_MEASURED_BYTES, WorkEstimate, measure_speed
from dualkg.training.memory import gib
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import Trainer, peak_mib
from dualkg.tuning.automatic import AutomaticTuner
from dualkg.tuning.plan import LONG

# The part of its budget that a search usually spends.
SPENT_SHARE = 0.9
NAMES = {
    "regularizer.weight": "λ",
    "loss.relation_weight": "relation weight",
    "loss.frequency_weight": "frequency weight",
    "optimizer.learning_rate": "learning rate",
    "training.batch_size": "batch size",
}


@dataclass(frozen=True)
class Expectation:
    """Seconds of tuning, training and ranking, and bytes of memory, on this machine.

    Memory is the peak of the first steps. `network` are the seconds of the last training if it is
    the training of a path network.
    """

    tuning: float
    training: float
    ranking: float
    memory: float | None
    tuned: Sequence[str] = ()
    num_trials: int = 0
    network: float | None = None

    @property
    def seconds(self) -> float:
        return self.tuning + self.training + self.ranking

    @property
    def text(self) -> str:
        parts = []
        if self.num_trials:
            names = ", ".join(NAMES.get(key, key.rpartition(".")[2]) for key in self.tuned)
            parts.append(
                f"Tuning of {names} in up to {self.num_trials} trials takes about "
                f"{describe_seconds(self.tuning)}, "
            )
        parts.append(f"training about {describe_seconds(self.training)}, ")
        if self.network is not None:
            parts.append(f"or {describe_seconds(self.network)} of a path network, ")
        parts.append(f"ranking about {describe_seconds(self.ranking)}")
        if self.memory is None:
            parts.append(" on a machine with two CPU cores or one H200; this one was not measured.")
        else:
            parts.append(f"; it needs about {gib(self.memory)} of memory.")
        text = "".join(parts)
        return text[0].upper() + text[1:]


def expect_training(
    recipe: Recipe, graph: Graph, device: torch.device, *, work: WorkEstimate | None = None
) -> Expectation:
    """What a training will take, by some of its steps.

    Tables that take long to initialize are not made only to measure this.
    """
    work = work or WorkEstimate.of(graph, device)
    memory = None
    speed = 1.0
    if 4 * graph.shape.num_entities * recipe.model.dim <= MAX_MEASURED_BYTES:
        speed = measure_speed(Trainer.of_recipe(recipe, graph, device=device), work)
        memory = 2**20 * peak_mib(device)
    num_held_out = len(graph.valid) + len(graph.test)
    ranking = work.ranking(recipe, num_held_out)
    return Expectation(
        tuning=0.0,
        training=(work.training(recipe) - ranking) / speed,
        ranking=ranking / speed,
        memory=memory,
    )


def expect_tuning(tuner: AutomaticTuner) -> Expectation:
    """What a search and the training after it will take, by some steps of the first trial."""
    assert tuner.work is not None
    assert tuner.plan is not None
    final = expect_training(tuner.start, tuner.graph, tuner.device, work=tuner.work)
    trial_recipe = tuner.trial_recipe({})
    of_trials = final
    if trial_recipe != tuner.start:
        of_trials = expect_training(trial_recipe, tuner.graph, tuner.device, work=tuner.work)
    seconds = max(of_trials.training + of_trials.ranking, 1e-9)
    speed = tuner.work.training(trial_recipe) / seconds
    tuning = SPENT_SHARE * tuner.budget / speed
    network = None
    if tuner.affords_network() and tuner.network is not None and tuner.device.type == "cpu":
        # Its speed is another one. On a GPU, it would first be compiled.
        of_network = expect_training(tuner.network, tuner.graph, tuner.device, work=tuner.work)
        network = of_network.training
        if tuner.seconds is None:
            num_trained = tuner.plan.rungs[LONG]
            tuning = SPENT_SHARE * tuner.plan.budget / speed + num_trained * network
    if tuner.seconds is not None:
        tuning = min(tuning, tuner.seconds)
    return Expectation(
        tuning=tuning,
        training=final.training,
        ranking=final.ranking,
        memory=final.memory,
        tuned=list(tuner.dimensions),
        num_trials=tuner.most_trials(),
        network=network,
    )
