"""Triples of names become triples of ids: one growing vocabulary of entities and one of
relations.
"""

from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.archives import RDF_FORMATS, Source
from dualkg.data.readers import (
    ROLES,
    Columns,
    RdfReader,
    Reader,
    RowsReader,
    TableReader,
    check_columns,
)
from dualkg.data.spill import SpilledTriples, first_positions, slices
from dualkg.data.text import OpenKeReader, TextReader, read_openke_names
from dualkg.data.triples import NO_TRIPLES, Triples
from dualkg.errors import DataError, RequestError

READERS: dict[str, type[Reader]] = {".parquet": TableReader}  # others are text
READERS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), RowsReader) | dict.fromkeys(
    RDF_FORMATS, RdfReader
)
OPENKE = ("entity2id", "relation2id")
MIN_LINES = 4  # below a first line, for its names to be told from those of a triple
# Names waiting for ids; every merge hashes all known names again, so merges must be few.
MAX_WAITING = 1_000_000
MAX_NAMES = 2_000_000
MAX_TRIPLES = 12_000_000  # in memory; more are written to disk
POSITIONS = 1 << 20
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ReadTriples:
    """Names in the order of their ids, and the triples `(num_triples, 3)` of ids of each source.

    Ids follow the first appearance of a name, heads before tails, in every format.
    """

    entities: pa.Array
    relations: pa.Array
    triples: dict[str, Triples]
    labels: dict[str, str]
    remarks: list[str]


def read_triples(
    sources: Mapping[str, Source],
    *,
    columns: Columns | None = None,
    delimiter: str | None = None,
    find_headers: bool = False,
) -> ReadTriples:
    """Read the source of each split; `columns` are the names or numbers of head, relation and tail.

    `find_headers` also finds headers with unknown names. The names of OpenKE's ids are sources of
    their own.
    """
    check_columns(columns)
    names = {file: read_openke_names(sources[file]) for file in OPENKE if file in sources}
    readers: dict[str, Reader] = {}
    for split, source in sources.items():
        if split in OPENKE:
            continue
        if source.file_name.lower().endswith("2id.txt"):
            readers[split] = OpenKeReader(source, columns, names)
        elif source.suffix not in READERS:
            readers[split] = TextReader(source, columns, delimiter)
        elif delimiter is not None:
            raise RequestError(
                f"{source.name} has no delimiter, as {source.suffix} is no text of columns. Leave "
                "it out."
            )
        else:
            readers[split] = READERS[source.suffix](source, columns)
    return encode(readers, find_headers=find_headers)


def encode(
    readers: Mapping[str, Reader], *, find_headers: bool = False, optional: Container[str] = ()
) -> ReadTriples:
    """Read all triples of each split, of which those in `optional` may be empty, and give each name
    its id.
    """
    if not readers:
        raise DataError("There is no file of triples to read. Give at least one.")
    labels: dict[str, str] = {}
    remarks: list[str] = []
    with ThreadPoolExecutor(1, "dualkg-names") as worker:
        encoder = Encoder(worker)
        for split, reader in readers.items():
            num_triples = 0
            with closing(reader.blocks()) as blocks:
                for block in blocks:
                    encoder.add(split, block)
                    num_triples += block.num_rows
            if not num_triples and split not in optional:
                why = "".join(f" {remark}" for remark in reader.remarks)
                raise DataError(f"{reader.name} holds no triples; at least one is expected.{why}")
            labels = reader.labels | labels
            remarks += reader.remarks
            if reader.num_stripped:
                plural = "name was" if reader.num_stripped == 1 else "names were"
                remarks.append(
                    f"Blanks around {reader.num_stripped:,} {plural} removed in {reader.name}."
                )
        encoder.finish()
    spilled = encoder.spilled
    in_memory = encoder.ids
    found = (
        spilled.triples()
        if spilled
        else {split: np.concatenate(in_memory.pop(split)) for split in list(in_memory)}
    )
    triples = {split: found.get(split, NO_TRIPLES) for split in readers}
    headers, about_headers = _find_headers(readers, triples) if find_headers else ([], [])
    if spilled and headers:
        spilled.leave_out(np.stack([triples[split][0] for split in headers]))
        triples |= spilled.triples()
    triples |= {split: triples[split][1:] for split in headers}
    if spilled:
        entities, relations = spilled.names()
        pa.default_memory_pool().release_unused()
    else:
        entities = _renumber(encoder.entities, [ids[:, ::2] for ids in triples.values()])
        relations = _renumber(encoder.relations, [ids[:, 1:2] for ids in triples.values()])
    return ReadTriples(entities, relations, triples, labels, remarks + about_headers)


def _find_headers(
    readers: Mapping[str, Reader], triples: dict[str, Triples]
) -> tuple[list[str], list[str]]:
    """The splits whose first lines are headers of unknown names; and a remark on each, or on what
    may be one.

    The names of a header occur nowhere else in their columns. So may those of a triple: a first
    line is a header only if it is the only such line, if neither end occurs in the other's column,
    and if other relations have two triples on average.
    """
    headers: list[str] = []
    remarks = []
    firsts = {split: reader.first_line for split, reader in readers.items() if len(triples[split])}
    for cells in sorted(
        {
            cells
            for cells in firsts.values()
            if cells and not any(cell.isdecimal() for cell in cells)
        }
    ):
        splits = [split for split, first in firsts.items() if first == cells]
        names = triples[splits[0]][0].tolist()
        rest = _without_headers(triples, headers)
        if any(
            sum(int((ids[:, i] == names[i]).sum()) for ids in rest) > len(splits) for i in (1, 0, 2)
        ):
            continue
        rest = _without_headers(triples, [*headers, *splits])
        num_ids = [1 + max((int(ids[:, i].max()) for ids in rest), default=0) for i in range(3)]
        counts = [np.zeros(num, np.int64) for num in num_ids]
        for ids in rest:
            for i, count in enumerate(counts):
                np.add.at(count, ids[:, i], 1)
        if sum(map(len, rest)) < max(MIN_LINES, 2 * int(np.count_nonzero(counts[1]))):
            continue
        single = np.concatenate([ids[counts[1][ids[:, 1]] == 1] for ids in rest])
        similar = (counts[0][single[:, 0]] == 1) & (counts[2][single[:, 2]] == 1)
        crossed = names[0] == names[2] or any(
            (ids[:, 2] == names[0]).any() or (ids[:, 0] == names[2]).any() for ids in rest
        )
        line = f"The first line of {' and of '.join(readers[split].name for split in splits)} ({', '.join(cells)})"
        if similar.any() or crossed or any(readers[split].columns is not None for split in splits):
            remarks.append(
                f"{line} was read as a triple. If it is a header, use columns={cells!r}."
            )
            continue
        headers += splits
        remarks.append(
            f"{line} was read as a header: its names occur nowhere else in their columns. If it "
            "is a triple, use columns=(1, 2, 3)."
        )
    return headers, remarks


def _without_headers(triples: Mapping[str, Triples], headers: Container[str]) -> list[Triples]:
    """The triples of all splits without the first one of some; of large ones, a part at a time."""
    rest = [ids[int(split in headers) :] for split, ids in triples.items()]
    return [ids[part] for ids in rest for part in slices(len(ids), POSITIONS)]


class Encoder:
    """Takes blocks in the order of reading, and numbers their names in an order that depends on the
    blocks.

    The worker merges the names of each block into the vocabulary while the next blocks are parsed.
    A vocabulary or triples too large for memory are written to disk, and the next block begins
    another vocabulary.
    """

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self.entities = self.relations = pa.array([], pa.string())
        self.spilled: SpilledTriples | None = None
        self.ids: dict[str, list[Triples]] = {}
        self._waiting: list[tuple[str, pa.RecordBatch]] = []
        self._num_waiting = self._num_triples = 0
        self._worker = worker
        self._merging: Future[None] | None = None

    def add(self, split: str, block: pa.RecordBatch) -> None:
        """Take a block of dictionary-encoded head, relation and tail names."""
        self._waiting.append((split, block))
        self._num_waiting += sum(len(block.column(role).dictionary) for role in ROLES)
        enough = max(MAX_WAITING, 0 if self.spilled else min(2 * len(self.entities), MAX_NAMES))
        idle = self._merging is None or self._merging.done()
        # Parsing that is faster than merging must wait, or the blocks would fill the memory.
        if self._num_waiting > (enough if idle else 2 * enough):
            self._start_merging()

    def finish(self) -> None:
        """Wait until all blocks are merged."""
        self._start_merging()
        if self._merging:
            self._merging.result()
        if self.spilled:
            self._spill(self.spilled)
            self.spilled.number()
        pa.default_memory_pool().release_unused()

    def _start_merging(self) -> None:
        if self._merging:
            self._merging.result()
        blocks = self._waiting
        self._waiting = []
        self._num_waiting = 0
        self._merging = self._worker.submit(self._merge, blocks) if blocks else None

    def _merge(self, blocks: list[tuple[str, pa.RecordBatch]]) -> None:
        ends = [block.column(role) for _, block in blocks for role in ("head", "tail")]
        self.entities, entity_ids = _extend_vocabulary(self.entities, ends)
        links = [block.column("relation") for _, block in blocks]
        self.relations, relation_ids = _extend_vocabulary(self.relations, links)
        merged = zip(blocks, entity_ids[::2], relation_ids, entity_ids[1::2], strict=True)
        for (split, _), *columns in merged:
            self.ids.setdefault(split, []).append(np.stack(columns, axis=1))
            self._num_triples += len(columns[0])
        if (
            max(len(self.entities), len(self.relations)) > MAX_NAMES
            or self._num_triples > MAX_TRIPLES
        ):
            self.spilled = self.spilled or SpilledTriples()
            self._spill(self.spilled)

    def _spill(self, spilled: SpilledTriples) -> None:
        spilled.add((self.entities, self.relations), self.ids)
        self.entities = self.relations = pa.array([], pa.string())
        self.ids = {}
        self._num_triples = 0
        pa.default_memory_pool().release_unused()


def _extend_vocabulary(
    known: pa.StringArray, columns: Sequence[pa.DictionaryArray]
) -> tuple[pa.StringArray, list[Ids]]:
    """The known names followed by the new ones, and each column as ids."""
    # The known names come first, in a chunk without rows, so that they keep their ids.
    before = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), known)
    chunks = pa.chunked_array([before, *columns]).unify_dictionaries().chunks
    return chunks[0].dictionary, [chunk.indices.to_numpy() for chunk in chunks[1:]]


def _renumber(names: pa.StringArray, columns: Sequence[Ids]) -> pa.StringArray:
    """Renumber the ids in `columns`, in place, by first appearance, and return the names that occur
    in that order.
    """
    parts = [ids[part] for ids in columns for part in slices(len(ids), POSITIONS)]
    first = first_positions(len(names), parts)
    order = np.argsort(first)
    order = order[np.count_nonzero(first < 0) :]  # a header's names are left out
    renumbered = np.empty(len(names), np.int32)
    renumbered[order] = np.arange(len(order), dtype=np.int32)
    for part in parts:
        part[:] = renumbered[part]
    return names.take(pa.array(order))
