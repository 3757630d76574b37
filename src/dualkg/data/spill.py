"""Graphs larger than memory: names, triples and splits on disk, of which only a part is in memory
at a time.

All of it is one scheme. Rows are written in chunks, each sorted by partition. A partition, which is
a piece of each chunk, is small enough to be sorted in memory; what was found is written back and
read again by chunk.
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
    if isinstance(found := getattr(array, "_mmap", None), mmap.mmap):
        found.madvise(mmap.MADV_DONTNEED)


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
        left = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        start *= self.dtype.itemsize
        while left:
            written = self._call(os.pwrite, left, start)
            left = left[written:]
            start = start + written

    def read(self, start: int, stop: int) -> Array:
        found = np.empty(stop - start, self.dtype)
        if self._call(os.preadv, [found], start * self.dtype.itemsize) < found.nbytes:
            raise EOFError("a temporary file has been cut short")
        return found

    def map(self, *, writable: bool = False) -> Array:
        """The array as a memory-mapped file, which no change of a copy reaches; an empty one has no
        file.
        """
        if not self.size:
            return np.empty(0, self.dtype)
        return np.memmap(self._file, self.dtype, "r+" if writable else "c", shape=(self.size,))

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self._file.fileno(), *arguments)
        except OSError as error:
            hint = "for temporary files of a graph larger than memory; DUALKG_CACHE may name another folder"
            raise OSError(error.errno, f"{error.strerror} {hint}", self._folder) from None


class PartitionedRows:
    """Columns of rows that are written in chunks, each sorted by partition."""

    def __init__(self, **dtypes: npt.DTypeLike) -> None:
        self._columns = {name: Column(dtype) for name, dtype in dtypes.items()}
        self._starts = np.zeros((0, NUM_PARTITIONS + 1), np.int64)

    def append(self, sizes: Ids, **columns: Array) -> None:
        """Add a chunk whose partitions have these numbers of rows; a column that is not given is
        written later.
        """
        start = self._starts[-1, -1] if len(self._starts) else 0
        starts = start + np.append(0, np.cumsum(sizes))
        for name, values in columns.items():
            self._columns[name].write(start, values)
        self._starts = np.concatenate([self._starts, starts[None]])

    def append_by_key(self, bounds: Ids, key: Ids, **columns: Array) -> None:
        """Add a chunk whose partitions are ranges of keys."""
        order, sizes = _by_partition(np.searchsorted(bounds, key, side="right"))
        self.append(
            sizes, key=key[order], **{name: column[order] for name, column in columns.items()}
        )

    def partition(self, name: str, number: int) -> Array:
        """The rows of a partition, in the order they were added."""
        column = self._columns[name]
        pieces = [column.read(*piece) for piece in self._pieces(number)]
        return np.concatenate([np.empty(0, column.dtype), *pieces])

    def write(self, name: str, number: int, values: Array) -> None:
        """Write a column of a partition."""
        done = 0
        for start, stop in self._pieces(number):
            self._columns[name].write(start, values[done : done + stop - start])
            done += stop - start

    def chunk(self, name: str, number: int) -> Array:
        return self._columns[name].read(self._starts[number, 0], self._starts[number, -1])

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        return [
            (start, stop)
            for start, stop in self._starts[:, number : number + 2].tolist()
            if stop > start
        ]


def _by_partition(partitions: Array) -> tuple[Ids, Ids]:
    """The rows in the order of their partitions, and the number of rows of each."""
    return np.argsort(partitions.astype(np.uint8), kind="stable"), np.bincount(
        partitions, minlength=NUM_PARTITIONS
    )


def key_ranges(samples: Sequence[Ids]) -> Ids:
    """Where the partitions of keys begin, all but the first, so that they have about as many
    keys.
    """
    ordered = np.sort(np.concatenate(samples))
    return ordered[np.arange(1, NUM_PARTITIONS) * len(ordered) // NUM_PARTITIONS]


def spilled(parts: Iterable[Array], dtype: npt.DTypeLike) -> Array:
    """An array on disk, of its parts."""
    column = Column(dtype)
    for part in parts:
        column.append(part.reshape(-1))
    return column.map()


# -- names -------------------------------------------------------------------


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
    """Where each name starts, and the last one ends, in the bytes of all; both without a copy if
    names are large.
    """
    _, offsets, content = names.buffers()
    kind = np.int64 if names.type == pa.large_string() else np.int32
    ends = (
        np.frombuffer(offsets, kind)[names.offset : names.offset + len(names) + 1]
        if len(names)
        else np.zeros(1)
    )
    return ends.astype(np.int64, copy=False), np.frombuffer(content or b"", np.uint8)


def names_of(ends: Ids, letters: Array) -> pa.Array:
    """Names of their text, without a copy."""
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.large_string(), len(ends) - 1, buffers)


class NameIndex:
    """The ids of very many names, by the hashes of the names: 12 bytes each."""

    def __init__(self, names: pa.Array) -> None:
        self._names = names
        hashes = np.concatenate(
            [np.empty(0, np.uint64), *(hash_names(names[part]) for part in slices(len(names)))]
        )
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._ids = order
        self._hashes = hashes[order]

    def get(self, name: object, default: Any = None) -> Any:
        if not isinstance(name, str):
            return default
        try:
            wanted = hash_names(pa.array([name], pa.string()))[0]
        except UnicodeEncodeError:  # half of a surrogate pair is no name
            return default
        first, last = (
            int(np.searchsorted(self._hashes, wanted, side=side)) for side in ("left", "right")
        )
        found = (int(id) for id in self._ids[first:last])
        return next((id for id in found if self._names[id].as_py() == name), default)

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None


def first_positions(num_names: int, parts: Sequence[npt.NDArray[np.int32]], start: int = 0) -> Ids:
    """Where each name, given by its number, occurs first in some parts, counted from `start`; −1 if
    it does not.
    """
    first = np.full(num_names, -1, np.int64)
    end = start + sum(part.size for part in parts)
    for part in reversed(parts):  # so that the earliest position of each name is written last
        first[part.reshape(-1)[::-1]] = np.arange(end - 1, end - 1 - part.size, -1)
        end -= part.size
    return first


def inverse(order: Ids) -> npt.NDArray[np.int32]:
    """The place of each number in a permutation."""
    found = np.empty(len(order), np.int32)
    found[order] = np.arange(len(order), dtype=np.int32)
    return found


class SpilledNames:
    """Names of many units with their first positions, of which every distinct one gets an id in
    that order.
    """

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
        self.left_out = np.empty(0, np.int64)  # ids of names that are left out; others are shifted

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
        marks = np.zeros(
            num_positions // 64 + 1, np.uint64
        )  # a bit for each position where a name occurs first
        for number in range(NUM_PARTITIONS):
            ends = np.append(0, np.cumsum(self._rows.partition("length", number), dtype=np.int64))
            encoded = names_of(ends, self._text.partition("text", number)).dictionary_encode()
            indices = encoded.indices.to_numpy()
            appears = np.flatnonzero(np.diff(np.maximum.accumulate(indices), prepend=-1))
            first = self._rows.partition("first", number)[appears]
            order = np.argsort(first)
            self._rows.write("distinct", number, inverse(order)[indices])
            first = first[order]
            np.add.at(marks, first >> 6, np.uint64(1) << (first & 63).astype(np.uint64))
            self._first.append(first)
            _append_text(encoded.dictionary.take(pa.array(order)), self._ends, self._letters)
            self._starts.append(self._first.size)
        before = np.cumsum(np.bitwise_count(marks), dtype=np.int64)
        for number in range(NUM_PARTITIONS):
            first = self._first.read(*self._starts[number : number + 2])
            words = marks[first >> 6]
            below = words & ((np.uint64(1) << (first & 63).astype(np.uint64)) - np.uint64(1))
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
            found = np.concatenate([self._ids.read(*piece) for piece in pieces])
            order = np.argsort(found)
            order = order[~np.isin(found[order], self.left_out)]
            names = pa.concat_arrays([self._names_between(*piece) for piece in pieces])
            _append_text(names.take(pa.array(order)), ends, letters)
            starts = stops
        return names_of(ends.map(), letters.map())

    def _names_between(self, start: int, stop: int) -> pa.Array:
        """Some distinct names of a partition."""
        ends = np.append(
            self._ends.read(start - 1, start) if start else 0, self._ends.read(start, stop)
        )
        return names_of(ends - ends[0], self._letters.read(ends[0], ends[-1]))


def _append_text(names: pa.Array, ends: Column, letters: Column) -> None:
    at, text = text_of(names)
    ends.append(at[1:] - at[0] + letters.size)
    letters.append(text[at[0] : at[-1]])


# -- triples of names --------------------------------------------------------


class SpilledTriples:
    """Triples of a vocabulary too large for memory: units with a vocabulary each, which are joined
    at the end.
    """

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
                self._local.setdefault(split, Column(np.int32)).append(
                    _translated(block, *renumbered)
                )
        self._units.append([(split, sum(map(len, found))) for split, found in blocks.items()])
        self._num_rows += sum(map(len, rows))

    def number(self) -> None:
        """Give each name its id, once all units are written."""
        for known, width in zip(self._names, (2, 1), strict=True):
            known.number(width * self._num_rows)

    def leave_out(self, headers: Triples) -> None:
        """Leave out the names of headers, which occur nowhere else."""
        self._names[0].left_out = np.unique(headers[:, ::2])
        self._names[1].left_out = np.unique(headers[:, 1])

    def triples(self) -> dict[str, Triples]:
        """The triples of each split as ids, on disk."""
        found = {split: Column(np.int32) for split in self._local}
        for number, unit in enumerate(self._units):
            ids = [known.ids_of_unit(number) for known in self._names]
            for split, size in unit:
                start = found[split].size
                for part in slices(size):
                    local = (
                        self._local[split]
                        .read(start + 3 * part.start, start + 3 * part.stop)
                        .reshape(-1, 3)
                    )
                    found[split].append(_translated(local, *ids))
        return {split: mapped_triples(column) for split, column in found.items()}

    def names(self) -> list[pa.Array]:
        return [known.names() for known in self._names]


def _translated(triples: Triples, entity: Array, relation: Array) -> Array:
    """Triples with other ids, as one row."""
    return np.stack(
        [entity[triples[:, 0]], relation[triples[:, 1]], entity[triples[:, 2]]], axis=1
    ).reshape(-1)


def mapped_triples(column: Column) -> Triples:
    return column.map().reshape(-1, 3) if column.size else NO_TRIPLES


# -- splits ------------------------------------------------------------------


class PairedTriples:
    """The triples of several arrays by pair of entities: a partition has all triples of its pairs,
    in their order.

    The pairs of a partition come before those of the next one, as they are sorted.
    """

    def __init__(self, arrays: Sequence[Triples], shape: GraphShape) -> None:
        self._num_entities = shape.num_entities
        self.table = PartitionedRows(
            key=np.int64, kind=np.uint32, array=np.uint8, row=np.int32, pair=np.int64
        )
        bounds = key_ranges(
            [self._keys(triples[:: max(1, len(triples) >> 16)]) for triples in arrays]
        )
        for number, triples in enumerate(arrays):
            for part in slices(len(triples)):
                chunk = np.array(triples[part])
                self.table.append_by_key(
                    bounds,
                    self._keys(chunk),
                    kind=2 * chunk[:, 1].astype(np.uint32) + (chunk[:, 0] > chunk[:, 2]),
                    array=np.full(len(chunk), number, np.uint8),
                    row=np.arange(len(chunk)),
                )
            release(triples)

    def _keys(self, triples: Triples) -> Ids:
        heads = triples[:, 0].astype(np.int64)
        tails = triples[:, 2].astype(np.int64)
        found: Ids = np.minimum(heads, tails) * self._num_entities + np.maximum(heads, tails)
        return found

    def partitions(self) -> Iterator[tuple[int, Ids, Ids]]:
        """The number of each partition; for each of its triples, the number of the pair in it, and
        of the triple.
        """
        for number in range(NUM_PARTITIONS):
            _, pairs = np.unique(self.table.partition("key", number), return_inverse=True)
            yield number, pairs, (pairs << 32) + self.table.partition("kind", number)


def count_repeats_on_disk(
    splits: Mapping[str, Triples], shape: GraphShape, remarks: Iterable[Sentence] = ()
) -> Notes:
    """`count_repeats` of splits larger than memory."""
    paired = PairedTriples(list(splits.values()), shape)
    duplicates = Counter[str]()
    overlaps = Counter[str]()
    for number, _, keys in paired.partitions():
        of_array = paired.table.partition("array", number)
        found = count_repeated_keys(
            {split: keys[of_array == place] for place, split in enumerate(splits)}
        )
        duplicates.update(found.duplicates)
        overlaps.update(found.overlaps)
    return Notes(dict(duplicates), dict(overlaps), tuple(remarks))
