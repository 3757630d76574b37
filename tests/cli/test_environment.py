"""A system that refuses memory, and names that are no text: sentences in place of tracebacks."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import typer

import dualkg as kg
from dualkg.cli.main import REPORT_SECONDS, main
from dualkg.errors import DataError, DualkgError, OutOfMemory, out_of_memory
from dualkg.tables.liveness import OtherProcessFailed
from dualkg.training.errors import InterruptedRunError
from tests.conftest import CommandResult
from tests.raising import check_error

NOT_TEXT = "o\udcffx"  # the byte 0xff, as Python reads it from a command line
SMALL = ["--no-tune", "--epochs", "1", "--dim", "2"]
OF_PYTORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 3112000000 bytes. Error code 12 (Cannot allocate memory)"
)
Command = Callable[..., CommandResult]


@pytest.mark.parametrize(
    ("error", "num_bytes"),
    [
        (RuntimeError(OF_PYTORCH), 3112000000),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), None),
        (MemoryError(), None),
        (pa.ArrowMemoryError("malloc of size 64 failed"), None),
        (pa.ArrowException("Unknown error: Failed to launch worker thread: Resource"), None),
        (RuntimeError("can't start new thread"), None),
    ],
)
def test_errors_of_libraries_that_are_about_memory(error: Exception, num_bytes: int | None) -> None:
    shortage = out_of_memory(error)
    assert shortage is not None
    check_error(shortage, OutOfMemory, num_bytes=num_bytes)


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory(RuntimeError("shapes cannot be multiplied")) is None
    assert out_of_memory(ValueError("memory")) is None


def failing(error: Exception) -> typer.Typer:
    commands = typer.Typer(pretty_exceptions_enable=False)

    @commands.command()
    def fail() -> None:
        raise error

    return commands


def test_a_command_that_is_refused_memory_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dualkg"])
    with pytest.raises(SystemExit) as end:
        main(failing(RuntimeError(OF_PYTORCH)))
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        "dualkg: There is not enough memory: 2.90 GiB were refused. Use a smaller --dim or "
        "--batch-size, or allow more memory.\n"
    )
    with pytest.raises(RuntimeError, match="a mistake"):
        main(failing(RuntimeError("a mistake")))


@pytest.mark.parametrize(
    ("launcher", "error", "waits"),
    [
        ("TORCHELASTIC_RUN_ID", OtherProcessFailed(), True),
        ("TORCHELASTIC_RUN_ID", InterruptedRunError("Stopped."), False),
        ("SLURM_JOB_ID", OtherProcessFailed(), False),
    ],
)
def test_a_process_under_torchrun_lets_another_report_the_error(
    monkeypatch: pytest.MonkeyPatch, launcher: str, error: DualkgError, waits: bool
) -> None:
    """torchrun ends all processes when the first has ended."""
    waited = []
    monkeypatch.setattr(error, "silent", True)
    monkeypatch.setenv(launcher, "1")
    monkeypatch.setattr("sys.argv", ["dualkg"])
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit) as end:
        main(failing(error))
    assert end.value.code == error.exit_code
    assert waited == ([REPORT_SECONDS] if waits else [])


def test_a_file_of_triples_has_a_name_that_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / f"{NOT_TEXT}.tsv"
    path.write_text("a\tr\tb\n")
    with pytest.raises(DataError, match="not UTF-8"):
        kg.load_graph(path)
