"""What a training tells on a terminal: before it starts, and while it runs."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Abort

from dualkg.cli import common, training_display
from dualkg.cli.training_display import TrainingDisplay, ask_to_start
from dualkg.errors import DualkgError
from dualkg.training.trainer import ProgressEvent
from dualkg.tuning.automatic import AutomaticProgress
from dualkg.workflows.expectation import Expectation
from tests.processes import COMMAND, LIMIT
from tests.raising import refused

HOUR = Expectation(tuning=2400, training=1100, ranking=100, memory=2**30)
MINUTE = Expectation(tuning=40, training=15, ranking=5, memory=2**30)


def test_a_person_is_asked_before_long_work_alone(capsys):
    questions = []
    display = TrainingDisplay(ask=lambda: questions.append("Start?"))
    display._announce(MINUTE)
    assert questions == []
    display._announce(HOUR)
    assert questions == ["Start?"]
    assert "Training about 18 min, ranking about 2 min" in capsys.readouterr().err


def test_a_program_is_not_asked():
    assert not sys.stdin.isatty()
    ask_to_start()


@pytest.fixture
def at_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)


def test_who_declines_is_told_what_takes_less_time(at_terminal, monkeypatch):
    monkeypatch.setattr(training_display.typer, "confirm", lambda *words, **options: False)
    with refused(DualkgError, exit_code=1) as caught:
        ask_to_start()
    assert str(caught.value).startswith("Not started. Fewer epochs (`training.epochs`) ")


def test_ctrl_c_at_the_question_is_an_interruption(at_terminal, monkeypatch):
    def confirm(*words: object, **options: object) -> bool:
        raise Abort

    monkeypatch.setattr(training_display.typer, "confirm", confirm)
    with refused(DualkgError, exit_code=130):
        ask_to_start()


@pytest.mark.parametrize("tuning", [pytest.param(("--no-tune",), marks=pytest.mark.slow), ()])
def test_no_at_a_terminal_starts_nothing(tmp_path, tuning):
    """A pseudo-terminal, and the command as a person types it."""
    (tmp_path / "mine.tsv").write_text("\n".join(f"{i % 20}\t{i % 3}\t{i % 7}" for i in range(200)))
    ours, theirs = pty.openpty()
    options = ["--dim", "4", "--epochs", "1000000000", *tuning]
    with (
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "train", "mine.tsv", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=tmp_path,
        ) as process,
        os.fdopen(ours, "r+b", buffering=0) as terminal,
    ):
        os.close(theirs)
        try:
            shown = read_until(terminal, b"Start? [Y/n]:")
            assert b" of memory." in shown
            terminal.write(b"n\n")
            shown = read_until(terminal, b"Not started.")
            assert process.wait(LIMIT) == 1
        finally:
            process.kill()
    assert not (Path(tmp_path) / "runs" / "mine").exists()


def read_until(terminal: io.RawIOBase, text: bytes) -> bytes:
    """What a terminal shows up to some text."""
    shown = b""
    while text not in shown:
        is_readable, _, _ = select.select([terminal], [], [], LIMIT)
        assert is_readable, shown
        shown += terminal.read(4096) or b""
    return shown


EVENTS = [
    ProgressEvent(3, 12, 100, 154, 4.141, 0.4643, seconds_left=200.0),
    AutomaticProgress("weight 0.016", 2, 0.452, spent=20.0, budget=100.0, seconds_left=200.0),
]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("event", EVENTS, ids=["training", "tuning"])
def test_a_bar_has_one_line_and_says_the_time_left(monkeypatch, event, width):
    file = io.StringIO()
    console = common.SafeConsole(file=file, force_terminal=True, width=width, highlight=False)
    monkeypatch.setattr(common, "stderr", console)
    with TrainingDisplay("world ComplEx") as display:
        display(event)
    # The bar is drawn for the last time when it ends.
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    shown = [frame.rstrip() for frame in frames if frame.strip()]
    assert all("world ComplEx" in frame and len(frame) <= width for frame in shown)
    assert f" {event.time_left} " in shown[-1]
    if width == 200:
        assert shown[-1].endswith(event.text)


def test_a_bar_without_a_text_says_what_is_done(monkeypatch):
    file = io.StringIO()
    console = common.SafeConsole(file=file, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(common, "stderr", console)
    with common.progress_bar("Completing world") as update:
        update(1000, 5000)
    assert "1,000 of 5,000" in file.getvalue()
