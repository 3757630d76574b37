"""The process that trains for a server: it reports to its standard output as lines of JSON.

A training would leave no core to requests in the server's own process, and could not be stopped.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dualkg.errors import DualkgError
from dualkg.inference.api import calibrate
from dualkg.inference.scoring import MissingTriples
from dualkg.serve.errors import reason_of
from dualkg.training.errors import InterruptedRunError
from dualkg.workflows import events
from dualkg.workflows.train import train_source

REPORT_INTERVAL = 0.25  # seconds
MAX_NOTE = 1000  # characters
NICENESS = 5  # requests come first


class Reporter:
    """Sends events as lines for `TrainingState.receive`; progress at most four times a second."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._last_progress = 0.0

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.GraphRead(graph, notes):
                self._send(kind="notes", notes=_short(notes), counts=graph.counts)
            case events.GraphChecked(_, warnings):
                self._send(kind="notes", notes=_short(warnings))
            case events.TuningStarted():
                self._send(kind="stage", stage="tuning")
            case events.Tuned():
                self._send(kind="notes", notes=[event.summary])
            case events.AutomaticProgress() if self._is_due():
                share = event.spent / event.budget if event.budget else None
                self._send(kind="progress", text=event.text, share=share, time_left=event.time_left)
            case events.TrainingPlanned():
                self._send(kind="stage", stage="training")
            case events.ProgressEvent() if self._is_due() or event.step == event.steps:
                epoch = event.epoch - 1 + event.step / event.steps
                self._send(
                    kind="progress",
                    text=event.text,
                    share=event.share_done,
                    time_left=event.time_left,
                    point={"epoch": epoch, "loss": event.loss, "valid_mrr": event.mrr},
                )

    def _is_due(self) -> bool:
        now = time.monotonic()
        is_due = now >= self._last_progress + REPORT_INTERVAL
        if is_due:
            self._last_progress = now
        return is_due


def _short(notes: Iterable[object]) -> list[str]:
    """Notes whose names may be longer than the server reads a line."""
    return [str(note)[:MAX_NOTE] for note in notes]


def calibrate_result(run: Path, send: Callable[..., None]) -> None:
    """Calibrate the run of a training, since its pages show probabilities.

    A graph without validation triples has none, and is served without.
    """
    send(kind="stage", stage="calibrating")
    try:
        calibrate(run)
    except MissingTriples as error:
        send(kind="notes", notes=_short([error]))


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: str) -> int:
    """Train what the arguments, as JSON, say: source, out, changes and tune."""
    os.nice(NICENESS)
    given = json.loads(arguments)
    try:
        train_source(
            given["source"],
            changes=given["changes"],
            tune=given["tune"],
            out=given["out"],
            on_event=Reporter(_print),
        )
        calibrate_result(Path(given["out"]), _print)
    except InterruptedRunError:
        return 130
    except (DualkgError, OSError) as error:
        _print(kind="error", error=reason_of(error))
        return 1
    _print(kind="stage", stage="finished")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
