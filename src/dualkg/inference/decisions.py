"""What people decided on new facts, kept with a run as lines of JSON: one for each triple, by its names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dualkg.errors import RequestError
from dualkg.files import write_text

if sys.platform != "win32":
    import fcntl

Verdict = Literal["accepted", "rejected"]
Triple = tuple[str, str, str]
COLUMNS = ("head", "relation", "tail", "probability", "decided")
BREAKS = "\t\n\r"  # what a TSV file has no way to hold inside a name


@dataclass(frozen=True)
class Decision:
    """A new fact that was accepted or rejected; names, so that it holds for another model of the same graph."""

    head: str
    relation: str
    tail: str
    verdict: Verdict
    probability: float | None  # that it had then
    decided: str  # when, as ISO 8601 in UTC

    @property
    def triple(self) -> Triple:
        return self.head, self.relation, self.tail


class Decisions:
    """The decisions of one file, in the order they were made. The file is written whole or not at all.

    Several processes may write it: each waits until the one before it has written, and adds to what it finds then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, int, int] | None = None
        self._kept: dict[Triple, Decision] = {}

    def load(self) -> dict[Triple, Decision]:
        """By triple. A file that has changed meanwhile, by hand or by another server, is read again."""
        stamp = self._stamp()
        if stamp != self._read:
            self._kept = {one.triple: one for one in self._lines()} if stamp else {}
            self._read = stamp
        return dict(self._kept)

    def change(self, made: Iterable[Decision], *, undone: Iterable[Triple] = ()) -> dict[Triple, Decision]:
        """Add decisions, those that came later in place of earlier ones, and take back others; all there are then."""
        with alone_in(self.path.parent):
            kept = self.load()
            for triple in undone:
                kept.pop(triple, None)
            for one in made:
                kept.pop(one.triple, None)
                kept[one.triple] = one
            lines = (f"{json.dumps(asdict(one), ensure_ascii=False)}\n" for one in kept.values())
            write_text(self.path, "".join(lines))
            self._kept, self._read = kept, self._stamp()
        return dict(kept)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _lines(self) -> list[Decision]:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        return [self._decision(line, number) for number, line in enumerate(lines, 1) if line.strip()]

    def _decision(self, line: str, number: int) -> Decision:
        try:
            found: dict[str, Any] = json.loads(line)
            one = Decision(**{field.name: found[field.name] for field in fields(Decision)})
        except (ValueError, KeyError, TypeError):
            raise RequestError(f"Line {number:,} of {self.path} is no decision. Mend it, or remove it.") from None
        if one.verdict not in get_args(Verdict):
            raise RequestError(
                f"Line {number:,} of {self.path}: a verdict is 'accepted' or 'rejected'; '{one.verdict}' came."
            )
        return one


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in a block of this kind for the folder; one that is killed no longer is.

    The folder itself is locked: a file for that would have to stay, and a run's folder has only files of the run.
    Where folders cannot be locked, as on Windows, nothing waits.
    """
    if sys.platform == "win32":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system that knows no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def as_tsv(decisions: Iterable[Decision]) -> str:
    """A line each, after the names of the columns; a name that would break a line is refused."""
    lines = ["\t".join(COLUMNS)]
    for one in decisions:
        for name in one.triple:
            if any(sign in name for sign in BREAKS):
                raise RequestError(
                    f"The name {name!r} has a tab or a line end, which a TSV file has no way to hold. "
                    f"/api/decisions has all decisions as JSON."
                )
        sure = "" if one.probability is None else f"{one.probability:.6g}"
        lines.append("\t".join((*one.triple, sure, one.decided)))
    return "\n".join(lines) + "\n"
