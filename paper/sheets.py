"""A sheet: a small table of text with a title and notes, shown in a terminal, on a page, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dualkg.training.api import spread


@dataclass(frozen=True)
class Sheet:
    """Rows of text under columns; `facts` are the same for programs, unrounded."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    facts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_left: int = 1  # columns of words, which stand to the left

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": self.facts, "notes": self.notes}

    def as_markdown(self, *, level: int = 3) -> str:
        head = [f"{'#' * level} {self.title}", ""] if level else []
        ruler = ["---" if number < self.num_left else "--:" for number in range(len(self.columns))]
        lines = [_line(self.columns), f"|{'|'.join(ruler)}|", *map(_line, self.rows)]
        notes = [part for note in self.notes for part in ("", note)]
        return "\n".join([*head, *lines, *notes])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean_and_sd(value: tuple[float, float], num_values: int, *, digits: int = 4) -> str:
    """`0.4910 ± 0.0006`; a single value has no spread."""
    mean, sd = value
    return f"{mean:.{digits}f}" if num_values == 1 else f"{mean:.{digits}f} ± {sd:.{digits}f}"


def over_seeds(values: list[float], *, digits: int = 4) -> str:
    """The same of a value for each seed."""
    return mean_and_sd(spread(values), len(values), digits=digits)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
