"""Reading files of triples, of any format, into one vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import pyarrow as pa

from dualkg.data.graph import Triples
from dualkg.data.reading.blocks import Reader
from dualkg.data.reading.columns import Columns, check_columns
from dualkg.data.reading.encoding import Encoder
from dualkg.data.reading.rdf import RdfReader
from dualkg.data.reading.sources import Source
from dualkg.data.reading.tables import TableReader
from dualkg.data.reading.text import TextReader
from dualkg.errors import DataError

# Every other file is taken for TSV.
READERS: dict[str, type[Reader]] = {".parquet": TableReader, ".nt": RdfReader, ".ttl": RdfReader}


@dataclass(frozen=True, eq=False)
class ReadTriples:
    """Names in the order of their ids, and for each source its triples `(num_triples, 3)` of ids.

    Ids follow the first appearance of a name, heads before tails, whatever the format.
    """

    entities: pa.StringArray
    relations: pa.StringArray
    triples: dict[str, Triples]
    labels: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_triples(sources: Mapping[str, Source], *, columns: Columns | None = None) -> ReadTriples:
    """Read each split's source; `columns` are the names or numbers of head, relation and tail."""
    check_columns(columns)
    readers = {split: READERS.get(source.suffix, TextReader)(source, columns) for split, source in sources.items()}
    if not readers:
        raise DataError("There is no file of triples to read. Give at least one.")
    with Encoder() as encoder:
        for split, reader in readers.items():
            _encode(encoder, split, reader)
        encoded = encoder.finish()
    labels: dict[str, str] = {}
    remarks = _header_remarks(readers.values())
    for reader in readers.values():
        labels = reader.labels | labels
        remarks += reader.remarks
    return ReadTriples(*encoded, labels, remarks)


def _encode(encoder: Encoder, split: str, reader: Reader) -> None:
    num_triples = 0
    with closing(reader.blocks()) as blocks:
        for block in blocks:
            encoder.add(split, block)
            num_triples += block.num_rows
    if not num_triples:
        why = " ".join(reader.remarks)
        raise DataError(f"{reader.source.name} holds no triples; at least one is expected.{' ' + why if why else ''}")


def _header_remarks(readers: Iterable[Reader]) -> list[str]:
    """Say which first lines were not read as triples: `s r t` could be either."""
    names = [reader.source.name for reader in readers if reader.header]
    if not names:
        return []
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return [f"The first line of {listed} was read as a header."]
