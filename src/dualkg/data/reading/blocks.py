"""What every format gives: blocks of triples whose three columns are dictionary-encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

import pyarrow as pa

from dualkg.data.reading.columns import ROLES, Columns
from dualkg.data.reading.sources import Source

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
