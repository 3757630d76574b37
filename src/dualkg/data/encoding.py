"""Triples of names become triples of ids: one growing vocabulary of entities and one of relations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.graph import Triples
from dualkg.data.rdf import RdfReader
from dualkg.data.readers import ROLES, Columns, ParquetReader, Reader, check_columns
from dualkg.data.text import TextReader
from dualkg.errors import DataError

READERS: dict[str, type[Reader]] = {".parquet": ParquetReader, ".nt": RdfReader, ".ttl": RdfReader}  # others are text
MAX_WAITING = 1_000_000  # names waiting for ids; every merge hashes all known names again, so merges must be few
POSITIONS = 1 << 20
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ReadTriples:
    """Names in the order of their ids, and the triples `(num_triples, 3)` of ids of each source.

    Ids follow the first appearance of a name, heads before tails, in every format.
    """

    entities: pa.StringArray
    relations: pa.StringArray
    triples: dict[str, Triples]
    labels: dict[str, str]
    remarks: list[str]


def read_triples(sources: Mapping[str, Source], *, columns: Columns | None = None) -> ReadTriples:
    """Read the source of each split; `columns` are the names or numbers of head, relation and tail."""
    check_columns(columns)
    readers = {split: READERS.get(source.suffix, TextReader)(source, columns) for split, source in sources.items()}
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
            if not num_triples:
                why = "".join(f" {remark}" for remark in reader.remarks)
                raise DataError(f"{reader.source.name} holds no triples; at least one is expected.{why}")
            labels = reader.labels | labels
            remarks += reader.remarks
        return ReadTriples(*encoder.finish(), labels, remarks)


class Encoder:
    """Takes blocks in the order of reading, and numbers names by their first appearance.

    The worker merges the names of each block into the vocabulary while the next blocks are parsed.
    """

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self._entities = pa.array([], pa.string())
        self._relations = pa.array([], pa.string())
        self._ids: dict[str, list[tuple[Ids, Ids, Ids]]] = {}
        self._waiting: list[tuple[str, pa.RecordBatch]] = []
        self._num_waiting = 0
        self._worker = worker
        self._merging: Future[None] | None = None

    def add(self, split: str, block: pa.RecordBatch) -> None:
        """Take a block of dictionary-encoded head, relation and tail names."""
        self._waiting.append((split, block))
        self._num_waiting += sum(len(block.column(role).dictionary) for role in ROLES)
        enough = max(MAX_WAITING, 2 * len(self._entities))
        idle = self._merging is None or self._merging.done()
        # Parsing that is faster than merging must wait, or the blocks would fill the memory.
        if self._num_waiting > (enough if idle else 2 * enough):
            self._start_merging()

    def finish(self) -> tuple[pa.StringArray, pa.StringArray, dict[str, Triples]]:
        """Entities, relations and the triples of each split; ids do not depend on the size of the blocks."""
        self._start_merging()
        if self._merging:
            self._merging.result()
        triples = {split: _concatenate(self._ids, split) for split in list(self._ids)}
        pa.default_memory_pool().release_unused()
        splits = list(triples.values())
        entities = _renumber(self._entities, [ids[:, ::2] for ids in splits])
        relations = _renumber(self._relations, [ids[:, 1:2] for ids in splits])
        return entities, relations, triples

    def _start_merging(self) -> None:
        if self._merging:
            self._merging.result()
        blocks, self._waiting, self._num_waiting = self._waiting, [], 0
        self._merging = self._worker.submit(self._merge, blocks) if blocks else None

    def _merge(self, blocks: list[tuple[str, pa.RecordBatch]]) -> None:
        ends = [block.column(role) for _, block in blocks for role in ("head", "tail")]
        self._entities, entity_ids = _extend_vocabulary(self._entities, ends)
        links = [block.column("relation") for _, block in blocks]
        self._relations, relation_ids = _extend_vocabulary(self._relations, links)
        merged = zip(blocks, entity_ids[::2], relation_ids, entity_ids[1::2], strict=True)
        for (split, _), head, relation, tail in merged:
            self._ids.setdefault(split, []).append((head, relation, tail))


def _extend_vocabulary(
    known: pa.StringArray, columns: Sequence[pa.DictionaryArray]
) -> tuple[pa.StringArray, list[Ids]]:
    """The known names followed by the new ones, and each column as ids."""
    # The known names come first, in a chunk without rows, so that they keep their ids.
    before = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), known)
    chunks = pa.chunked_array([before, *columns]).unify_dictionaries().chunks
    return chunks[0].dictionary, [chunk.indices.to_numpy() for chunk in chunks[1:]]


def _concatenate(ids: dict[str, list[tuple[Ids, Ids, Ids]]], split: str) -> Triples:
    """The triples of a split as one array; its blocks are freed one by one."""
    blocks = ids.pop(split)
    triples: Triples = np.empty((sum(len(heads) for heads, _, _ in blocks), 3), np.int32)
    start = 0
    while blocks:
        block = blocks.pop(0)
        end = start + len(block[0])
        for column, values in enumerate(block):
            triples[start:end, column] = values
        start = end
    return triples


def _renumber(names: pa.StringArray, columns: Sequence[Ids]) -> pa.StringArray:
    """Renumber the ids in `columns`, in place, by first appearance, and return the names in that order."""
    first = np.empty(len(names), np.int64)
    position = sum(ids.size for ids in columns)
    # From the last to the first, so that the earliest position of each id is written last.
    for ids in reversed(columns):
        for start in reversed(range(0, len(ids), POSITIONS)):
            backwards = ids[start : start + POSITIONS].reshape(-1)[::-1]
            first[backwards] = np.arange(position - 1, position - 1 - len(backwards), -1)
            position -= len(backwards)
    order = np.argsort(first)
    renumbered = np.empty(len(names), np.int32)
    renumbered[order] = np.arange(len(names), dtype=np.int32)
    for ids in columns:
        for start in range(0, len(ids), POSITIONS):
            ids[start : start + POSITIONS] = renumbered[ids[start : start + POSITIONS]]
    return names.take(pa.array(order))
