"""Graphs larger than memory: names, triples and splits on disk, of which only a part is in memory at a time.

Arrays are temporary files, written in parts and memory-mapped. Keys are sorted in their file. Names are written by
partition, a range of hashes, of which each is small enough to be read into memory.
"""

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.archives import temporary_file
from dualkg.data.triples import NO_TRIPLES, Triples

NUM_PARTITIONS = 256  # of names
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
    if isinstance(found := getattr(array, "_mmap", None), mmap.mmap):
        found.madvise(mmap.MADV_DONTNEED)


# -- files --------------------------------------------------------------------------------------------------


class Column:
    """An array in a file without a name, which no killed process leaves behind."""

    def __init__(self, dtype: npt.DTypeLike, size: int = 0) -> None:
        self.dtype, self.size = np.dtype(dtype), size
        self._file, self._folder = temporary_file()
        weakref.finalize(self, self._file.close)
        if size:
            self._call(os.posix_fallocate, 0, size * self.dtype.itemsize)

    def append(self, values: Array) -> None:
        values = np.ascontiguousarray(values, self.dtype).reshape(-1)
        left, start = values.view(np.uint8).data, self.size * self.dtype.itemsize
        while left:
            written = self._call(os.pwrite, left, start)
            left, start = left[written:], start + written
        self.size += len(values)

    def map(self, *, writable: bool = False) -> Array:
        """The array as a memory-mapped file, which no change of a copy reaches; an empty one has no file."""
        if not self.size:
            return np.empty(0, self.dtype)
        return np.memmap(self._file, self.dtype, "r+" if writable else "c", shape=(self.size,))

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self._file.fileno(), *arguments)
        except OSError as error:
            hint = "for temporary files of a graph larger than memory; DUALKG_CACHE may name another folder"
            raise OSError(error.errno, f"{error.strerror} {hint}", self._folder) from None


def spilled(parts: Iterable[Array], dtype: npt.DTypeLike) -> Array:
    """An array on disk, of its parts."""
    column = Column(dtype)
    for part in parts:
        column.append(part)
    return column.map()


def mapped_triples(column: Column) -> Triples:
    return column.map().reshape(-1, 3) if column.size else NO_TRIPLES


def sorted_on_disk(parts: Iterable[Ids]) -> Ids:
    """The distinct keys of some arrays, sorted, on disk; keys are at least 0."""
    column, distinct, last = Column(np.int64), Column(np.int64), -1
    for keys in parts:
        column.append(keys)
    ordered = column.map(writable=True)
    ordered.sort()  # in the file, of which it reads and writes neighbouring pages
    for part in slices(len(ordered)):
        keys = ordered[part]
        distinct.append(keys[np.diff(keys, prepend=last) > 0])
        last = keys[-1]
    return distinct.map()


def find_keys(table: Ids, keys: Ids) -> Ids:
    """The position of each key in a sorted table on disk, which is read from its beginning to its end."""
    order = np.argsort(keys)
    found = np.empty(len(keys), np.int64)
    found[order] = np.searchsorted(table, keys[order])
    return found


# -- names --------------------------------------------------------------------------------------------------


def hash_names(names: pa.Array) -> Hashes:
    """A polynomial hash of each name."""
    ends, letters = text_of(names)
    lengths = np.diff(ends)
    powers = np.cumprod(np.full(lengths.max(initial=0), MULTIPLIER, np.uint64))
    found = np.empty(len(names), np.uint64)
    for part in slices(len(names), HASHED_NAMES):
        at = ends[part.start : part.stop + 1]
        within = np.arange(at[0], at[-1]) - np.repeat(at[:-1], lengths[part])
        terms = (letters[at[0] : at[-1]] + np.uint64(1)) * powers[within]
        found[part] = np.diff(np.append(np.uint64(0), np.cumsum(terms))[at - at[0]])
    return found


def text_of(names: pa.Array) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Where each name starts, and the last one ends, in the bytes of all; both without a copy if names are large."""
    _, offsets, content = names.buffers()
    kind = np.int64 if names.type == pa.large_string() else np.int32
    ends = np.frombuffer(offsets, kind)[names.offset : names.offset + len(names) + 1] if len(names) else np.zeros(1)
    return ends.astype(np.int64, copy=False), np.frombuffer(content or b"", np.uint8)


class NameIndex:
    """The ids of very many names, by the hashes of the names: 12 bytes each."""

    def __init__(self, names: pa.Array) -> None:
        self._names = names
        hashes = np.concatenate([np.empty(0, np.uint64), *(hash_names(names[part]) for part in slices(len(names)))])
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._ids, self._hashes = order, hashes[order]

    def get(self, name: object, default: Any = None) -> Any:
        if not isinstance(name, str):
            return default
        try:
            wanted = hash_names(pa.array([name], pa.string()))[0]
        except UnicodeEncodeError:  # half of a surrogate pair is no name
            return default
        first, last = (int(np.searchsorted(self._hashes, wanted, side=side)) for side in ("left", "right"))
        found = (int(id) for id in self._ids[first:last])
        return next((id for id in found if self._names[id].as_py() == name), default)

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None


def first_positions(num_names: int, parts: Sequence[npt.NDArray[np.int32]], start: int = 0) -> Ids:
    """Where each name, given by its number, occurs first in some parts, counted from `start`; −1 if it does not."""
    first, end = np.full(num_names, -1, np.int64), start + sum(part.size for part in parts)
    for part in reversed(parts):  # so that the earliest position of each name is written last
        first[part.reshape(-1)[::-1]] = np.arange(end - 1, end - 1 - part.size, -1)
        end -= part.size
    return first


def inverse(order: Ids) -> npt.NDArray[np.int32]:
    """The place of each number in a permutation."""
    found = np.empty(len(order), np.int32)
    found[order] = np.arange(len(order), dtype=np.int32)
    return found


class TextColumn:
    """Names in two files, of their ends and of their letters."""

    def __init__(self) -> None:
        self._ends, self._letters = Column(np.int64), Column(np.uint8)
        self._ends.append(np.zeros(1))

    def append(self, names: pa.Array) -> None:
        ends, letters = text_of(names)
        self._ends.append(ends[1:] - ends[0] + self._letters.size)
        self._letters.append(letters[ends[0] : ends[-1]])

    def map(self) -> pa.Array:
        buffers = [None, pa.py_buffer(self._ends.map()), pa.py_buffer(self._letters.map())]
        return pa.Array.from_buffers(pa.large_string(), self._ends.size - 1, buffers)


class SpilledNames:
    """Names of many units with their first positions, of which every distinct one gets an id in that order.

    The names of a unit are rows, sorted by partition and then by position.
    """

    def __init__(self) -> None:
        self._rows, self._first, self._distinct = TextColumn(), Column(np.int64), TextColumn()
        self._starts: list[Ids] = []  # where the partitions of each unit begin, and the last one ends

    def add(self, names: pa.Array, first: Ids) -> npt.NDArray[np.int32]:
        """Write the names of a unit, and return their new numbers in it."""
        partitions = (hash_names(names) >> np.uint64(32)) * np.uint64(NUM_PARTITIONS) >> np.uint64(32)
        order = np.lexsort((first, partitions))
        sizes = np.bincount(partitions.astype(np.int64), minlength=NUM_PARTITIONS)
        self._starts.append(self._first.size + np.append(0, np.cumsum(sizes)))
        for part in slices(len(order)):
            self._rows.append(names.take(pa.array(order[part])))
        self._first.append(first[order])
        return inverse(order)

    def number(self) -> None:
        """Give each distinct name its id: how many names occur before it."""
        rows, first, starts = self._rows.map(), self._first.map(), np.stack(self._starts)
        self._distinct_of_row = Column(np.int32, len(rows)).map(writable=True)
        positions = Column(np.int64)  # where each distinct name occurs first
        for number in range(NUM_PARTITIONS):
            at = np.concatenate([np.arange(*piece) for piece in starts[:, number : number + 2]])
            encoded = rows.take(pa.array(at)).dictionary_encode()
            indices = encoded.indices.to_numpy()
            self._distinct_of_row[at] = positions.size + indices
            # A name appears first where its number is the next one.
            appears = np.flatnonzero(np.diff(np.maximum.accumulate(indices), prepend=-1))
            positions.append(first[at[appears]])
            self._distinct.append(encoded.dictionary)
        self._order = np.argsort(positions.map())
        self._ids = inverse(self._order)

    def leave_out(self, ids: Ids) -> None:
        """Leave out the names of some ids, sorted, and shift the ids after them."""
        self._order = np.delete(self._order, ids)
        self._ids -= np.searchsorted(ids, self._ids).astype(np.int32)

    def ids_of_unit(self, number: int) -> npt.NDArray[np.int32]:
        start, *_, stop = self._starts[number]
        return self._ids[self._distinct_of_row[start:stop]]

    def names(self) -> pa.Array:
        """All names in the order of their ids, on disk."""
        names, distinct = TextColumn(), self._distinct.map()
        for part in slices(len(self._order)):
            names.append(distinct.take(pa.array(self._order[part])))
        return names.map()


# -- triples of names ---------------------------------------------------------------------------------------


class SpilledTriples:
    """Triples of a vocabulary too large for memory: units with a vocabulary each, which are joined at the end."""

    def __init__(self) -> None:
        self._names = SpilledNames(), SpilledNames()  # of entities, of relations
        self._local: dict[str, Column] = {}
        self._units: list[list[tuple[str, int]]] = []  # the rows of each split
        self._num_rows = 0

    def add(self, names: Sequence[pa.Array], blocks: Mapping[str, Sequence[Triples]]) -> None:
        """Write a unit: the names of entities and relations, and blocks of triples by split."""
        rows = [block for found in blocks.values() for block in found]
        renumbered = []
        for known, unit, column in zip(self._names, names, (0, 1), strict=True):
            parts = [block[:, column::2] for block in rows]
            first = first_positions(len(unit), parts, self._num_rows * (2 - column))
            renumbered.append(known.add(unit, first))
        for split, found in blocks.items():
            for block in found:
                self._local.setdefault(split, Column(np.int32)).append(_translated(block, *renumbered))
        self._units.append([(split, sum(map(len, found))) for split, found in blocks.items()])
        self._num_rows += sum(map(len, rows))

    def number(self) -> None:
        """Give each name its id, once all units are written."""
        for known in self._names:
            known.number()

    def leave_out(self, headers: Triples) -> None:
        """Leave out the names of headers, which occur nowhere else."""
        self._names[0].leave_out(np.unique(headers[:, ::2]))
        self._names[1].leave_out(np.unique(headers[:, 1]))

    def triples(self) -> dict[str, Triples]:
        """The triples of each split as ids, on disk."""
        local = {split: mapped_triples(column) for split, column in self._local.items()}
        found = {split: Column(np.int32) for split in local}
        for number, unit in enumerate(self._units):
            ids = [known.ids_of_unit(number) for known in self._names]
            for split, size in unit:
                start = found[split].size // 3
                for part in slices(size):
                    found[split].append(_translated(local[split][start:][part], *ids))
        return {split: mapped_triples(column) for split, column in found.items()}

    def names(self) -> list[pa.Array]:
        return [known.names() for known in self._names]


def _translated(triples: Triples, entity: Array, relation: Array) -> Array:
    """Triples with other ids."""
    return np.stack([entity[triples[:, 0]], relation[triples[:, 1]], entity[triples[:, 2]]], axis=1)
