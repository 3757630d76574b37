"""Graphs larger than memory: names, triples and splits on disk, a part in memory at a time.

All of it is one scheme. Rows are written in chunks, each sorted by partition. A partition, which is
a piece of each chunk, is small enough to be sorted in memory; the result is written back and read
again by chunk.

DuckDB and Polars were tried instead, with the same ids and orders as a result: see
benchmarks/larger_than_memory.py and its saved measurements.
"""

import mmap
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.archives import temporary_file
from dualkg.data.triples import NO_TRIPLES, GraphShape, Notes, Triples, count_repeated_keys
from dualkg.errors import Sentence

NUM_PARTITIONS = 256  # at most, as their numbers are bytes
ROWS = 1 << 20  # that are in memory at a time
HASHED_NAMES = 1 << 12  # whose products stay in the processor's cache
# Odd, with bits all over the word, so that the high bits of a hash depend on all letters.
MULTIPLIER = 0x9E3779B97F4A7C15
Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def is_mapped(triples: Triples) -> bool:
    """Whether triples are in a file, as those of a graph larger than memory."""
    return isinstance(triples, np.memmap)


def slices(size: int, step: int = 0) -> Iterator[slice]:
    """The rows of a large array, a part at a time."""
    step = step or ROWS
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def release(array: Array) -> None:
    """Give up the memory of a mapped file; its pages are read again when they are needed."""
    mapped_file = getattr(array, "_mmap", None)
    if isinstance(mapped_file, mmap.mmap):
        mapped_file.madvise(mmap.MADV_DONTNEED)


# -- files -------------------------------------------------------------------


class Column:
    """An array in a file without a name, which no killed process leaves behind."""

    def __init__(self, dtype: npt.DTypeLike, size: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.size = size
        self._file, self._folder = temporary_file()
        weakref.finalize(self, self._file.close)
        if size:
            self._call(os.posix_fallocate, 0, size * self.dtype.itemsize)

    def append(self, values: Array) -> None:
        self.write(self.size, values)
        self.size += len(values)

    def write(self, start: int, values: Array) -> None:
        content = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        position = start * self.dtype.itemsize
        while content:
            num_written = self._call(os.pwrite, content, position)
            content = content[num_written:]
            position += num_written

    def read(self, start: int, stop: int) -> Array:
        values = np.empty(stop - start, self.dtype)
        num_read = self._call(os.preadv, [values], start * self.dtype.itemsize)
        if num_read < values.nbytes:
            raise EOFError("a temporary file has been cut short")
        return values

    def map(self, *, writable: bool = False) -> Array:
        """The array as a memory-mapped file; an empty one has no file.

        Changes reach the file only if it is `writable`.
        """
        if not self.size:
            return np.empty(0, self.dtype)
        mode: Any = "r+" if writable else "c"
        return np.memmap(self._file, self.dtype, mode, shape=(self.size,))

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self._file.fileno(), *arguments)
        except OSError as error:
            reason = (
                f"{error.strerror} for temporary files of a graph larger than memory; DUALKG_CACHE "
                "may name another folder"
            )
            raise OSError(error.errno, reason, self._folder) from None


class PartitionedRows:
    """Columns of rows that are written in chunks, each sorted by partition."""

    def __init__(self, **dtypes: npt.DTypeLike) -> None:
        self._columns = {name: Column(dtype) for name, dtype in dtypes.items()}
        self._starts = np.zeros((0, NUM_PARTITIONS + 1), np.int64)

    def append(self, sizes: Ids, **columns: Array) -> None:
        """Add a chunk whose partitions have these numbers of rows.

        A column that is not given is written later.
        """
        start = self._starts[-1, -1] if len(self._starts) else 0
        starts = start + np.append(0, np.cumsum(sizes))
        for name, values in columns.items():
            self._columns[name].write(start, values)
        self._starts = np.concatenate([self._starts, starts[None]])

    def append_by_key(self, bounds: Ids, key: Ids, **columns: Array) -> None:
        """Add a chunk whose partitions are ranges of keys."""
        order, sizes = _by_partition(np.searchsorted(bounds, key, side="right"))
        in_order = {name: column[order] for name, column in columns.items()}
        self.append(sizes, key=key[order], **in_order)

    def partition(self, name: str, number: int) -> Array:
        """The rows of a partition, in the order they were added."""
        column = self._columns[name]
        pieces = [column.read(*piece) for piece in self._pieces(number)]
        return np.concatenate([np.empty(0, column.dtype), *pieces])

    def write(self, name: str, number: int, values: Array) -> None:
        """Write a column of a partition."""
        num_written = 0
        for start, stop in self._pieces(number):
            size = stop - start
            self._columns[name].write(start, values[num_written : num_written + size])
            num_written += size

    def chunk(self, name: str, number: int) -> Array:
        """A column of a chunk, in the order of its partitions."""
        return self._columns[name].read(self._starts[number, 0], self._starts[number, -1])

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        """Where a partition begins and ends in each chunk that has rows of it."""
        limits = self._starts[:, number : number + 2].tolist()
        return [(start, stop) for start, stop in limits if stop > start]


def _by_partition(partitions: Array) -> tuple[Ids, Ids]:
    """The rows in the order of their partitions, and the number of rows of each."""
    order = np.argsort(partitions.astype(np.uint8), kind="stable")
    sizes = np.bincount(partitions, minlength=NUM_PARTITIONS)
    return order, sizes


def key_ranges(samples: Sequence[Ids]) -> Ids:
    """Where the partitions of keys begin, all but the first, so that their sizes are similar."""
    in_order = np.sort(np.concatenate(samples))
    return in_order[np.arange(1, NUM_PARTITIONS) * len(in_order) // NUM_PARTITIONS]


def spilled(parts: Iterable[Array], dtype: npt.DTypeLike) -> Array:
    """An array on disk, of its parts."""
    column = Column(dtype)
    for part in parts:
        column.append(part.reshape(-1))
    return column.map()


# -- names -------------------------------------------------------------------


def hash_names(names: pa.Array, *, at_once: int | None = None) -> Hashes:
    """A polynomial hash of each name; `at_once` are hashed together, or as many as are fast."""
    ends, letters = text_of(names)
    lengths = np.diff(ends)
    powers = np.cumprod(np.full(lengths.max(initial=0), MULTIPLIER, np.uint64))
    hashes = np.empty(len(names), np.uint64)
    for part in slices(len(names), at_once or HASHED_NAMES):
        limits = ends[part.start : part.stop + 1]
        first = limits[0]
        last = limits[-1]
        position_in_name = np.arange(first, last) - np.repeat(limits[:-1], lengths[part])
        terms = (letters[first:last] + np.uint64(1)) * powers[position_in_name]
        sums = np.append(np.uint64(0), np.cumsum(terms))
        hashes[part] = np.diff(sums[limits - first])
    return hashes


def text_of(names: pa.Array) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Where each name starts, and the last one ends, in the bytes of all; and these bytes.

    Both are views of an array of large strings.
    """
    _, offsets, content = names.buffers()
    letters = np.frombuffer(content or b"", np.uint8)
    if not len(names):
        return np.zeros(1, np.int64), letters
    offset_type = np.int64 if names.type == pa.large_string() else np.int32
    ends = np.frombuffer(offsets, offset_type)[names.offset : names.offset + len(names) + 1]
    return ends.astype(np.int64, copy=False), letters


def names_of(ends: Ids, letters: Array) -> pa.Array:
    """Names of their text, without a copy."""
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.large_string(), len(ends) - 1, buffers)


class NameIndex:
    """The ids of very many names, by the hashes of the names: 12 bytes each."""

    def __init__(self, names: pa.Array) -> None:
        self._names = names
        parts = [hash_names(names[part]) for part in slices(len(names))]
        hashes = np.concatenate([np.empty(0, np.uint64), *parts])
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._ids = order
        self._hashes = hashes[order]

    def get(self, name: object, default: Any = None) -> Any:
        if not isinstance(name, str):
            return default
        try:
            hashed = hash_names(pa.array([name], pa.string()))[0]
        except UnicodeEncodeError:  # half of a surrogate pair is no name
            return default
        first = np.searchsorted(self._hashes, hashed, side="left")
        last = np.searchsorted(self._hashes, hashed, side="right")
        for id in self._ids[first:last].tolist():
            if self._names[id].as_py() == name:
                return id
        return default

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None


def first_positions(num_names: int, parts: Sequence[npt.NDArray[np.int32]], start: int = 0) -> Ids:
    """Where each name, by its number, occurs first in some parts; −1 if it does not.

    Positions are counted from `start`.
    """
    first = np.full(num_names, -1, np.int64)
    end = start + sum(part.size for part in parts)
    for part in reversed(parts):  # so that the earliest position of each name is written last
        first[part.reshape(-1)[::-1]] = np.arange(end - 1, end - 1 - part.size, -1)
        end -= part.size
    return first


def inverse(order: Ids) -> npt.NDArray[np.int32]:
    """The position of each number in a permutation."""
    positions = np.empty(len(order), np.int32)
    positions[order] = np.arange(len(order), dtype=np.int32)
    return positions


class SpilledNames:
    """Names of many units, of which every distinct one gets an id by its first position."""

    def __init__(self) -> None:
        self._rows = PartitionedRows(
            length=np.int32, first=np.int64, distinct=np.int32, id=np.int32
        )
        self._text = PartitionedRows(text=np.uint8)
        self._first = Column(np.int64)
        self._ends = Column(np.int64)
        self._letters = Column(np.uint8)
        self._ids = Column(np.int32)
        self._starts = [0]  # the first distinct name of each partition
        # Ids of names that are left out; the ids above them are lowered.
        self.left_out = np.empty(0, np.int64)

    def add(self, names: pa.Array, first: Ids) -> npt.NDArray[np.int32]:
        """Write the names of a unit, and return their new numbers in it."""
        partitions = (hash_names(names) >> np.uint64(32)) * NUM_PARTITIONS >> np.uint64(32)
        order, sizes = _by_partition(partitions.astype(np.int64))
        parts = [text_of(names.take(pa.array(order[part]))) for part in slices(len(order))]
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(ends) for ends, _ in parts)])
        letters = np.concatenate(
            [np.empty(0, np.uint8), *(text[ends[0] : ends[-1]] for ends, text in parts)]
        )
        self._rows.append(sizes, length=lengths, first=first[order])
        ends = np.append(0, np.cumsum(lengths))[np.append(0, np.cumsum(sizes))]
        self._text.append(np.diff(ends), text=letters)
        return inverse(order)

    def number(self, num_positions: int) -> None:
        """Give each name of a unit its id: how many names occur before it."""
        # A bit for each position where a name occurs first.
        marks = np.zeros(num_positions // 64 + 1, np.uint64)
        for number in range(NUM_PARTITIONS):
            ends = np.append(0, np.cumsum(self._rows.partition("length", number), dtype=np.int64))
            encoded = names_of(ends, self._text.partition("text", number)).dictionary_encode()
            indices = encoded.indices.to_numpy()
            appears = np.flatnonzero(np.diff(np.maximum.accumulate(indices), prepend=-1))
            first = self._rows.partition("first", number)[appears]
            order = np.argsort(first)
            self._rows.write("distinct", number, inverse(order)[indices])
            first = first[order]
            np.add.at(marks, first >> 6, _bit_of(first))
            self._first.append(first)
            _append_text(encoded.dictionary.take(pa.array(order)), self._ends, self._letters)
            self._starts.append(self._first.size)
        before = np.cumsum(np.bitwise_count(marks), dtype=np.int64)
        for number in range(NUM_PARTITIONS):
            first = self._first.read(*self._starts[number : number + 2])
            words = marks[first >> 6]
            below = words & (_bit_of(first) - np.uint64(1))
            ids = before[first >> 6] - np.bitwise_count(words) + np.bitwise_count(below)
            self._ids.append(ids)
            self._rows.write("id", number, ids[self._rows.partition("distinct", number)])

    def ids_of_unit(self, number: int) -> npt.NDArray[np.int32]:
        ids = self._rows.chunk("id", number)
        return ids - np.searchsorted(self.left_out, ids).astype(np.int32)

    def names(self) -> pa.Array:
        """All names in the order of their ids, on disk."""
        ends = Column(np.int64)
        letters = Column(np.uint8)
        ends.append(np.zeros(1))
        ids = self._ids.map()
        starts = self._starts[:-1]
        for part in slices(self._first.size):
            limits = zip(starts, self._starts[1:], strict=True)
            stops = [
                start + int(np.searchsorted(ids[start:stop], part.stop)) for start, stop in limits
            ]
            pieces = list(zip(starts, stops, strict=True))
            ids_of_part = np.concatenate([self._ids.read(*piece) for piece in pieces])
            order = np.argsort(ids_of_part)
            order = order[~np.isin(ids_of_part[order], self.left_out)]
            names = pa.concat_arrays([self._names_between(*piece) for piece in pieces])
            _append_text(names.take(pa.array(order)), ends, letters)
            starts = stops
        return names_of(ends.map(), letters.map())

    def _names_between(self, start: int, stop: int) -> pa.Array:
        """Some distinct names of a partition."""
        first = self._ends.read(start - 1, start) if start else 0
        ends = np.append(first, self._ends.read(start, stop))
        return names_of(ends - ends[0], self._letters.read(ends[0], ends[-1]))


def _bit_of(positions: Ids) -> Hashes:
    """The bit of a position in its word of 64."""
    return np.uint64(1) << (positions & 63).astype(np.uint64)


def _append_text(names: pa.Array, ends: Column, letters: Column) -> None:
    limits, text = text_of(names)
    ends.append(limits[1:] - limits[0] + letters.size)
    letters.append(text[limits[0] : limits[-1]])


# -- triples of names --------------------------------------------------------


class SpilledTriples:
    """Triples too many for memory: units with a vocabulary each, which are joined at the end."""

    def __init__(self) -> None:
        self._entities = SpilledNames()
        self._relations = SpilledNames()
        self._local: dict[str, Column] = {}  # triples of numbers in the vocabulary of their unit
        self._units: list[list[tuple[str, int]]] = []  # the splits of each unit and their rows
        self._num_rows = 0

    def add(self, names: Sequence[pa.Array], blocks: Mapping[str, Sequence[Triples]]) -> None:
        """Write a unit: the names of entities and relations, and blocks of triples by split."""
        entities, relations = names
        all_blocks = [block for split_blocks in blocks.values() for block in split_blocks]
        ends = [block[:, ::2] for block in all_blocks]
        links = [block[:, 1::2] for block in all_blocks]
        first_ends = first_positions(len(entities), ends, 2 * self._num_rows)
        first_links = first_positions(len(relations), links, self._num_rows)
        entity_numbers = self._entities.add(entities, first_ends)
        relation_numbers = self._relations.add(relations, first_links)

        unit = []
        for split, split_blocks in blocks.items():
            column = self._local.setdefault(split, Column(np.int32))
            for block in split_blocks:
                column.append(_translated(block, entity_numbers, relation_numbers))
            num_rows = sum(len(block) for block in split_blocks)
            unit.append((split, num_rows))
            self._num_rows += num_rows
        self._units.append(unit)

    def number(self) -> None:
        """Give each name its id, once all units are written."""
        self._entities.number(2 * self._num_rows)
        self._relations.number(self._num_rows)

    def leave_out(self, headers: Triples) -> None:
        """Leave out the names of headers, which occur nowhere else."""
        self._entities.left_out = np.unique(headers[:, ::2])
        self._relations.left_out = np.unique(headers[:, 1])

    def triples(self) -> dict[str, Triples]:
        """The triples of each split as ids, on disk."""
        columns = {split: Column(np.int32) for split in self._local}
        for number, unit in enumerate(self._units):
            entity_ids = self._entities.ids_of_unit(number)
            relation_ids = self._relations.ids_of_unit(number)
            for split, num_rows in unit:
                start = columns[split].size
                for part in slices(num_rows):
                    flat = self._local[split].read(start + 3 * part.start, start + 3 * part.stop)
                    triples = flat.reshape(-1, 3)
                    columns[split].append(_translated(triples, entity_ids, relation_ids))
        return {split: mapped_triples(column) for split, column in columns.items()}

    def names(self) -> list[pa.Array]:
        """The names of entities and of relations."""
        return [self._entities.names(), self._relations.names()]


def _translated(triples: Triples, entity_ids: Array, relation_ids: Array) -> Array:
    """Triples with other ids, in one dimension."""
    heads, relations, tails = triples.T
    columns = [entity_ids[heads], relation_ids[relations], entity_ids[tails]]
    return np.stack(columns, axis=1).reshape(-1)


def mapped_triples(column: Column) -> Triples:
    return column.map().reshape(-1, 3) if column.size else NO_TRIPLES


# -- splits ------------------------------------------------------------------


class PairedTriples:
    """The triples of several arrays by pair of entities.

    A partition has all triples of its pairs, in their order. The pairs of a partition come before
    those of the next one, as they are sorted.
    """

    def __init__(self, arrays: Sequence[Triples], shape: GraphShape) -> None:
        self._num_entities = shape.num_entities
        self.table = PartitionedRows(
            key=np.int64, kind=np.uint32, array=np.uint8, row=np.int32, pair=np.int64
        )
        samples = [triples[:: max(1, len(triples) >> 16)] for triples in arrays]
        bounds = key_ranges([self._keys(sample) for sample in samples])
        for number, triples in enumerate(arrays):
            for part in slices(len(triples)):
                chunk = np.array(triples[part])
                is_swapped = chunk[:, 0] > chunk[:, 2]
                self.table.append_by_key(
                    bounds,
                    self._keys(chunk),
                    kind=2 * chunk[:, 1].astype(np.uint32) + is_swapped,
                    array=np.full(len(chunk), number, np.uint8),
                    row=np.arange(len(chunk)),
                )
            release(triples)

    def _keys(self, triples: Triples) -> Ids:
        heads = triples[:, 0].astype(np.int64)
        tails = triples[:, 2].astype(np.int64)
        keys: Ids = np.minimum(heads, tails) * self._num_entities + np.maximum(heads, tails)
        return keys

    def partitions(self) -> Iterator[tuple[int, Ids, Ids]]:
        """The number of each partition; and for each of its triples, the pair and a key.

        Pairs are numbered within a partition. Equal triples have equal keys.
        """
        for number in range(NUM_PARTITIONS):
            _, pairs = np.unique(self.table.partition("key", number), return_inverse=True)
            keys = (pairs << 32) + self.table.partition("kind", number)
            yield number, pairs, keys


def count_repeats_on_disk(
    splits: Mapping[str, Triples], shape: GraphShape, remarks: Iterable[Sentence] = ()
) -> Notes:
    """`count_repeats` of splits larger than memory."""
    paired = PairedTriples(list(splits.values()), shape)
    duplicates = Counter[str]()
    overlaps = Counter[str]()
    for number, _, keys in paired.partitions():
        array_numbers = paired.table.partition("array", number)
        keys_by_split = {split: keys[array_numbers == array] for array, split in enumerate(splits)}
        counts = count_repeated_keys(keys_by_split)
        duplicates.update(counts.duplicates)
        overlaps.update(counts.overlaps)
    return Notes(dict(duplicates), dict(overlaps), tuple(remarks))
