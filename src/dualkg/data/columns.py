"""What every format gives: blocks of triples whose three columns are dictionary-encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.errors import DataError, RequestError, did_you_mean

Columns = Sequence[str | int]
Indices = tuple[int, ...]

ROLES = ("head", "relation", "tail")
# Earlier words win, so that `head relation tail source` is read as it is meant.
WORDS = {
    "head": ("head", "subject", "source", "h", "s"),
    "relation": ("relation", "predicate", "property", "rel", "r", "p", "label"),
    "tail": ("tail", "object", "target", "t", "o"),
}


def recognise(header: Sequence[str]) -> Indices | None:
    """Where head, relation and tail stand in a header, or None where it is not one."""
    cells = [cell.strip().casefold() for cell in header]
    found = [next((cells.index(word) for word in WORDS[role] if word in cells), None) for role in ROLES]
    known = [index for index in found if index is not None]
    return tuple(known) if len(known) == len(ROLES) else None


def check_columns(columns: Columns | None) -> None:
    """Refuse a choice of columns that no file could satisfy."""
    if columns is None:
        return
    three = not isinstance(columns, str) and len(columns) == len(ROLES) == len(set(columns))
    if not three or not all(type(column) in (str, int) for column in columns):
        raise RequestError(
            "Columns are three different names or numbers, of head, relation and tail, such as "
            f"('subject', 'predicate', 'object') or (1, 2, 3); {columns!r} was given."
        )
    for column in columns:
        if isinstance(column, int) and column < 1:
            raise RequestError(f"Columns are counted from 1; {column} was given.")


def locate(columns: Columns, header: Sequence[str], name: str) -> Indices:
    """The places of the chosen columns in a header, or in a first line when all are numbers."""
    indices = tuple(
        _by_number(column, header, name) if isinstance(column, int) else _by_name(column, header, name)
        for column in columns
    )
    if len(set(indices)) < len(indices):
        raise RequestError(f"Three different columns are needed; {tuple(columns)} means one of {name} twice.")
    return indices


def _by_number(column: int, header: Sequence[str], name: str) -> int:
    if column > len(header):
        raise DataError(
            f"{name} has {len(header)} columns, and column {column} was asked for. "
            f"Choose numbers from 1 to {len(header)}."
        )
    return column - 1


def _by_name(column: str, header: Sequence[str], name: str) -> int:
    exact = [index for index, cell in enumerate(header) if cell == column]
    folded = column.strip().casefold()
    places = exact or [index for index, cell in enumerate(header) if cell.strip().casefold() == folded]
    if len(places) == 1:
        return places[0]
    if places:
        raise DataError(f"{name} has {len(places)} columns named '{column}'. Choose by number instead.")
    listed = ", ".join(f"'{cell}'" for cell in header[:20])
    raise DataError(f"{name} has no column named '{column}'. Its columns are {listed}.{did_you_mean(column, header)}")


NAMES = pa.dictionary(pa.int32(), pa.string())


class Reader(ABC):
    """Reads one source; `labels`, `remarks` and `header` are complete once its blocks are used up."""

    def __init__(self, source: Source, columns: Columns | None = None) -> None:
        self.source = source
        self.columns = columns
        self.labels: dict[str, str] = {}
        self.remarks: list[str] = []
        self.header = False

    @abstractmethod
    def blocks(self) -> Generator[pa.RecordBatch]:
        """Triples in the order of the file, as columns head, relation and tail of type `NAMES`."""


def empty_among(names: pa.Array) -> pa.BooleanArray:
    """Which names are empty."""
    import pyarrow.compute as pc  # long to load, and most graphs come from a cache or a run

    return pc.equal(pc.binary_length(names), 0)


def block_of(heads: pa.Array, relations: pa.Array, tails: pa.Array) -> pa.RecordBatch:
    """A block from three arrays of text."""
    encoded = [column.dictionary_encode() for column in (heads, relations, tails)]
    return pa.RecordBatch.from_arrays(encoded, names=list(ROLES))
