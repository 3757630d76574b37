"""The events of a training on a terminal: sentences, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer

import dualkg as kg
from dualkg.cli.common import command_line, note, progress_bar
from dualkg.errors import DualkgError

if TYPE_CHECKING:
    from dualkg.training.trainer import ProgressEvent
    from dualkg.tuning.automatic import AutomaticProgress
    from dualkg.workflows.events import Event
    from dualkg.workflows.expectation import Expectation

MAX_UNASKED_SECONDS = 30 * 60
EXIT_INTERRUPTED = 130


def not_started(exit_code: int) -> DualkgError:
    """The error when a person at a terminal has declined to start, or ended the question."""
    error = DualkgError(
        "Not started. Fewer epochs (`training.epochs`) and less tuning (`tune`) take less time."
    )
    error.exit_code = exit_code
    return error


def ask_to_start() -> None:
    """Ask a person at a terminal whether to start; a program is not asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    try:
        is_accepted = typer.confirm("Start?", default=True, err=True)
    except typer.Abort:
        typer.echo(err=True)  # the line of the question ends
        raise not_started(EXIT_INTERRUPTED) from None
    if not is_accepted:
        raise not_started(1)


class TrainingDisplay:
    """A subscriber of the events of a training, which prints them on stderr.

    The bar of automatic tuning is of its budget, that of a training counts its steps. Before
    what will take longer than `MAX_UNASKED_SECONDS`, `ask` is called, which may stop the command.
    """

    def __init__(self, title: str = "", *, ask: Callable[[], object] | None = None) -> None:
        self.title = title
        self.ask = ask
        self._is_announced = False
        self._bars = ExitStack()
        self._update: Callable[..., None] | None = None

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_bar()

    def __call__(self, event: Event) -> None:
        from dualkg.workflows import events

        match event:
            case events.ProgressEvent():
                self._show_training(event)
            case events.AutomaticProgress():
                self._show_tuning(event)
            case events.GraphRead(_, notes):
                for sentence in notes:
                    note(sentence)
            case events.GraphChecked(graph, warnings):
                inspect = command_line("inspect", graph.source)
                for sentence in warnings:
                    note(f"{sentence} See: {inspect}", style="yellow")
            case events.DefaultsDiffer() | events.TuningSkipped():
                note(event.text)
            case events.TuningStarted(recipe, graph, _):
                self.title = _title(recipe, graph)
                note(describe_tuning(recipe, graph))
                self._announce(event.expect())
            case events.Tuned(_, summary):
                self._end_bar()
                note(summary)
            case events.TrainingPlanned(recipe, graph, expect):
                self.title = _title(recipe, graph)
                note(describe_training(recipe, graph))
                # One announcement is for the search and for all seeds.
                if expect is not None and not self._is_announced:
                    self._announce(expect())
            case events.TrainingStarted(engine, _, expectation):
                if engine:
                    note(f"Engine: {engine}.")
                if expectation:
                    note(expectation)
            case events.Evaluated():
                self._end_bar()

    def _announce(self, expectation: Expectation) -> None:
        """Say how long it will take, and ask a person before long work."""
        self._is_announced = True
        note(expectation.text)
        if self.ask is not None and expectation.seconds > MAX_UNASKED_SECONDS:
            self.ask()

    def _show_tuning(self, event: AutomaticProgress) -> None:
        update = self._bar(f"Tuning {self.title}")
        percent = min(99, round(100 * event.spent / event.budget))
        update(percent, 100, f"{percent} %  {event.text}", event.time_left)

    def _show_training(self, event: ProgressEvent) -> None:
        update = self._bar(self.title)
        num_done = (event.epoch - 1) * event.steps + event.step
        update(num_done, event.epochs * event.steps, event.text, event.time_left)

    def _bar(self, title: str) -> Callable[..., None]:
        if self._update is None:
            self._update = self._bars.enter_context(progress_bar(title))
        return self._update

    def _end_bar(self) -> None:
        """Remove the bar: two cannot be drawn at once."""
        self._bars.close()
        self._update = None


def _title(recipe: kg.Recipe, graph: kg.Graph) -> str:
    return f"{graph.name} {recipe.model.name}"


def describe_training(recipe: kg.Recipe, graph: kg.Graph) -> str:
    """What is about to be trained, in a line."""
    model = recipe.model
    regularizer = recipe.regularizer
    epochs = recipe.training.epochs
    dual = "" if model.dual == "none" else f", dual of the {model.dual} side"
    if regularizer.name == "none":
        penalty = "no regularizer"
    elif regularizer.weight is None:
        # Such a recipe is refused when the regularizer is built.
        penalty = regularizer.name
    else:
        penalty = f"{regularizer.name} {regularizer.weight:g}"
    plural = "s" if epochs > 1 else ""
    return (
        f"Training {model.name} (dim {model.dim}{dual}) with {penalty} on the "
        f"{len(graph.train):,} triples of {graph.name}: {epochs} epoch{plural}, batch size "
        f"{recipe.training.batch_size}."
    )


def describe_tuning(recipe: kg.Recipe, graph: kg.Graph) -> str:
    """What is about to be tuned, in a line."""
    model = recipe.model
    return (
        f"Tuning {model.name} (dim {model.dim}) on the {len(graph.train):,} triples of "
        f"{graph.name}, then training for {recipe.training.epochs} epochs."
    )
