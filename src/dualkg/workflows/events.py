"""Events of the workflows, in the order in which they occur, and who receives them.

A function of this package reports to `on_event`. The command line prints the events. Without a
subscriber, what a user should know is a line of the logger `dualkg`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualkg.data.graph import Graph
from dualkg.evaluation.report import Report
from dualkg.logs import logger
from dualkg.training.callbacks import Callback, TrainingInfo
from dualkg.training.recipe import Recipe
from dualkg.training.run import TrainedRun
from dualkg.training.trainer import ProgressEvent
from dualkg.tuning.automatic import AutomaticProgress
from dualkg.workflows.expectation import Expectation

__all__ = [
    "AutomaticProgress",
    "DefaultsDiffer",
    "Evaluated",
    "Event",
    "EventCallback",
    "GraphChecked",
    "GraphRead",
    "OnEvent",
    "ProgressEvent",
    "Saved",
    "TrainingPlanned",
    "TrainingStarted",
    "Tuned",
    "TuningSkipped",
    "TuningStarted",
    "log_event",
]


@dataclass(frozen=True)
class GraphRead:
    """The triples were read; `notes` are what the reader remarked, such as repeated triples."""

    graph: Graph
    notes: Sequence[str]


@dataclass(frozen=True)
class GraphChecked:
    """The splits were compared; `warnings` are of leakage and of unseen entities."""

    graph: Graph
    warnings: Sequence[str]


@dataclass(frozen=True)
class DefaultsDiffer:
    """A recipe leaves settings out, and without a recipe they have other values.

    `of_recipe` and `without_recipe` have the values by key.
    """

    source: str
    of_recipe: Mapping[str, object]
    without_recipe: Mapping[str, object]

    @property
    def text(self) -> str:
        left_out = ", ".join(f"{key} ({value})" for key, value in self.of_recipe.items())
        others = ", ".join(str(value) for value in self.without_recipe.values())
        return f"{self.source} leaves out {left_out}. Without a recipe the default is {others}."


@dataclass(frozen=True)
class TuningSkipped:
    """There are no validation triples to tune on, so the default hyperparameters are used."""

    graph: Graph

    @property
    def text(self) -> str:
        return (
            f"{self.graph.name} has no validation triples to tune on, so the default "
            "hyperparameters are used."
        )


@dataclass(frozen=True)
class TuningStarted:
    """The search for hyperparameters begins at a recipe. `AutomaticProgress` follows.

    `expect` measures how long it will take.
    """

    start: Recipe
    graph: Graph
    expect: Callable[[], Expectation]


@dataclass(frozen=True)
class Tuned:
    """The search has chosen a recipe, for the reason that `summary` gives."""

    recipe: Recipe
    summary: str


@dataclass(frozen=True)
class TrainingPlanned:
    """A recipe is about to be trained on a graph; `expect` measures how long it will take.

    Several processes report this when they have been started.
    """

    recipe: Recipe
    graph: Graph
    expect: Callable[[], Expectation] | None = None


@dataclass(frozen=True)
class TrainingStarted:
    """The first step is about to be computed by an engine. `ProgressEvent` follows.

    `expectation` is what each of several processes will need, in a sentence.
    """

    engine: str
    folder: Path | None = None
    expectation: str = ""


@dataclass(frozen=True)
class Evaluated:
    """The trained model was evaluated on the held-out splits."""

    reports: Mapping[str, Report]


@dataclass(frozen=True)
class Saved:
    """The run is complete in its folder."""

    folder: Path


Event = (
    GraphRead
    | GraphChecked
    | DefaultsDiffer
    | TuningSkipped
    | TuningStarted
    | AutomaticProgress
    | Tuned
    | TrainingPlanned
    | TrainingStarted
    | ProgressEvent
    | Evaluated
    | Saved
)
OnEvent = Callable[[Event], None]


def log_event(event: Event) -> None:
    """Log what a user should know about the data; this is the subscriber where none is given."""
    match event:
        case GraphRead(graph, sentences) | GraphChecked(graph, sentences):
            for sentence in sentences:
                logger.warning("%s: %s", graph.name, sentence)
        case DefaultsDiffer() | TuningSkipped():
            logger.warning("%s", event.text)


class EventCallback(Callback):
    """Reports the start and the end of a training as events."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event = on_event

    def on_start(self, training: TrainingInfo) -> None:
        self.on_event(TrainingStarted(training.engine, training.folder))

    def on_end(self, run: TrainedRun | None) -> None:
        if run is None:
            return
        self.on_event(Evaluated(run.reports))
        if run.folder:
            self.on_event(Saved(run.folder))
