"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.training.run import Run


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1 (default: a GPU where there is one)")]
Split = Annotated[str, typer.Option(help="train, valid or test.")]
By = Annotated[str | None, typer.Option(help="Also by relation, direction or cardinality.")]
Columns = Annotated[str | None, typer.Option(help="Columns of head, relation, tail by name or number: s,p,o or 1,3,2.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (default: all cores)")]


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load_on(run: Path, device: str | None) -> Run:
    """A run with its model on a device."""
    from dualkg.training.api import choose_device
    from dualkg.training.run import load_run

    loaded = load_run(run)
    loaded.model.to(choose_device(device))
    return loaded


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise RequestError(f"{option} is one of {', '.join(choices)}; '{value}' came.")


def check_split(split: str) -> None:
    check_choice("--split", split, ("train", "valid", "test"))


def check_by(by: str | None) -> None:
    if by is not None:
        check_choice("--by", by, ("relation", "direction", "cardinality"))


def columns_of(text: str) -> list[str | int]:
    """`s,p,o` or `1,3,2` → the columns of head, relation and tail."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise RequestError(f"--columns names three columns, head,relation,tail; '{text}' came.")
    return [int(part) if part.isdecimal() else part for part in parts]


def numbers_of(option: str, text: str) -> list[float]:
    """`0,0.5,0.9` → those numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"{option} is a list of numbers such as 0,0.5,0.9; '{text}' came.") from None
