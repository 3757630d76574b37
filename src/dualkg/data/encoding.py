"""Triples of names become triples of ids, by a vocabulary of entities and one of relations."""

from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES, Columns, check_columns
from dualkg.data.formats.delimited import TextReader
from dualkg.data.formats.openke import read_names
from dualkg.data.readers import Reader, ReadOptions, open_reader, unclear_columns
from dualkg.data.triples import NO_TRIPLES, Triples, slices
from dualkg.data.vocabulary import text_of
from dualkg.errors import DataError

# Files without triples, whose names are those of their sources.
COMPANIONS = ("entity2id", "relation2id")
MIN_LINES = 4  # below a first line, for its names to be told from those of a triple
# Names waiting for ids; every merge hashes all known names again, so merges must be few.
MAX_WAITING = 1_000_000
MAX_TEXT = 2**31 - 1  # bytes of all names that 32 bits can address
TAILS_PER_RELATION = (
    2  # in files that begin with the number of triples, for their order to be clear
)
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
    notes: list[str]


def read_triples(
    sources: Mapping[str, Source],
    *,
    columns: Columns | None = None,
    delimiter: str | None = None,
    find_headers: bool = False,
    optional: Container[str] = (),
) -> ReadTriples:
    """Read the source of each split; `columns` are names or numbers of head, relation and tail.

    `find_headers` also finds headers with unknown names. The splits in `optional` may be empty. The
    names of OpenKE's ids are sources of their own.
    """
    check_columns(columns)
    names_of_ids = {file: read_names(sources[file]) for file in COMPANIONS if file in sources}
    options = ReadOptions(columns=columns, delimiter=delimiter, names_of_ids=names_of_ids)
    readers = {
        split: open_reader(source, options, default=TextReader)
        for split, source in sources.items()
        if split not in COMPANIONS
    }
    return encode(readers, find_headers=find_headers, optional=optional)


def encode(
    readers: Mapping[str, Reader], *, find_headers: bool = False, optional: Container[str] = ()
) -> ReadTriples:
    """Read all triples of each split, and give each name its id.

    The splits in `optional` may be empty.
    """
    if not readers:
        raise DataError("There is no file of triples to read. Give at least one.")

    with ThreadPoolExecutor(1, "dualkg-names") as worker:
        encoder = Encoder(worker)
        notes: list[str] = []
        for split, reader in readers.items():
            counts = _add_blocks(encoder, split, reader)
            notes_of_reader = _notes_of(reader, counts)
            if not counts.num_triples and split not in optional:
                text = f"{reader.name} holds no triples; at least one is expected."
                raise DataError(" ".join([text, *notes_of_reader]))
            notes += notes_of_reader
        encoder.finish()

    triples = dict.fromkeys(readers, NO_TRIPLES) | encoder.triples()
    _check_order(readers, triples)
    headers = _find_headers(readers, triples) if find_headers else Headers([], [])
    triples |= {split: triples[split][1:] for split in headers.splits}
    entities = _renumber(encoder.entities, [ids[:, ::2] for ids in triples.values()])
    relations = _renumber(encoder.relations, [ids[:, 1:2] for ids in triples.values()])

    labels: dict[str, str] = {}
    for reader in readers.values():
        labels = reader.labels | labels  # the first label of a name counts
    return ReadTriples(entities, relations, triples, labels, notes + headers.notes)


class BlockCounts(NamedTuple):
    """The number of triples in the blocks of a reader, and of names that contain a NUL."""

    num_triples: int
    num_with_nul: int


def _add_blocks(encoder: "Encoder", split: str, reader: Reader) -> BlockCounts:
    """Add all blocks of a reader."""
    num_triples = 0
    num_with_nul = 0
    with closing(reader.blocks()) as blocks:
        for block in blocks:
            encoder.add(split, block)
            num_triples += block.num_rows
            num_with_nul += sum(_count_with_nul(block.column(role)) for role in ROLES)
    return BlockCounts(num_triples, num_with_nul)


def _count_with_nul(column: pa.DictionaryArray) -> int:
    """The number of rows whose name contains a NUL character."""
    ends, letters = text_of(column.dictionary)
    used = letters[ends[0] : ends[-1]]
    if not len(used) or used.min() > 0:
        return 0
    has_nul = np.array(["\0" in name for name in column.dictionary.to_pylist()])
    return int(has_nul[column.indices.to_numpy()].sum())


def _notes_of(reader: Reader, counts: BlockCounts) -> list[str]:
    texts = []
    if reader.num_comments:
        lines = "1 line that begins with # was"
        if reader.num_comments > 1:
            lines = f"{reader.num_comments:,} lines that begin with # were"
        texts.append(f"{lines} skipped ({reader.name}).")
    if reader.num_stripped:
        names = "name was" if reader.num_stripped == 1 else "names were"
        texts.append(f"Blanks around {reader.num_stripped:,} {names} removed ({reader.name}).")
    if counts.num_with_nul:
        names = "1 name contains"
        if counts.num_with_nul > 1:
            names = f"{counts.num_with_nul:,} names contain"
        texts.append(f"{names} a NUL character ({reader.name}). Is it text in UTF-8?")
    return [*reader.notes, *texts]


def _check_order(readers: Mapping[str, Reader], triples: Mapping[str, Triples]) -> None:
    """Refuse head, tail and relation if there are not far fewer relations than tails."""
    splits = [split for split, reader in readers.items() if reader.is_openke_order]
    parts = _without_headers({split: triples[split] for split in splits}, headers=())
    if not parts:
        return
    num_relations = int(np.count_nonzero(_counts_in_column(parts, 1)))
    num_tails = int(np.count_nonzero(_counts_in_column(parts, 2)))
    if num_tails < TAILS_PER_RELATION * num_relations:
        raise unclear_columns(readers[splits[0]].name)


# -- headers of unknown names ------------------------------------------------


class Headers(NamedTuple):
    """The splits whose first lines are headers, and a note on each header or possible header."""

    splits: list[str]
    notes: list[str]


def _find_headers(readers: Mapping[str, Reader], triples: Mapping[str, Triples]) -> Headers:
    """Find headers of unknown names among the first lines.

    The names of a header occur nowhere else in their columns. So may those of a triple: a first
    line is a header only if it is the only such line, if neither end occurs in the other's column,
    and if other relations have two triples on average.
    """
    headers = Headers([], [])
    first_lines = {
        split: reader.first_line for split, reader in readers.items() if len(triples[split])
    }
    candidates = {cells for cells in first_lines.values() if cells and not _has_number(cells)}
    for cells in sorted(candidates):
        splits = [split for split, first_line in first_lines.items() if first_line == cells]
        first_triple = triples[splits[0]][0].tolist()
        others = _without_headers(triples, headers.splits)
        if _occurs_again(first_triple, others, len(splits)):
            continue
        others = _without_headers(triples, [*headers.splits, *splits])
        if not _has_repeated_relations(others):
            continue

        names = " and of ".join(readers[split].name for split in splits)
        line = f"The first line of {names} ({', '.join(cells)})"
        has_columns = any(readers[split].columns is not None for split in splits)
        if has_columns or _is_ambiguous(first_triple, others):
            headers.notes.append(
                f"{line} was read as a triple. If it is a header, use `columns={cells}`."
            )
            continue
        headers.splits.extend(splits)
        headers.notes.append(
            f"{line} was read as a header: its names occur nowhere else in their columns. If it is "
            "a triple, use `columns=(1, 2, 3)`."
        )
    return headers


def _has_number(cells: Iterable[str]) -> bool:
    return any(cell.isdecimal() for cell in cells)


def _without_headers(triples: Mapping[str, Triples], headers: Container[str]) -> list[Triples]:
    """The triples of all splits in parts, without the first triple of the splits in `headers`."""
    parts = []
    for split, ids in triples.items():
        rest = ids[1:] if split in headers else ids
        parts += [rest[rows] for rows in slices(len(rest))]
    return parts


def _occurs_again(triple: Sequence[int], parts: Sequence[Triples], num_lines: int) -> bool:
    """Whether a name of a triple occurs in its column more often than on `num_lines` lines."""
    for column in (1, 0, 2):
        number = sum(int((part[:, column] == triple[column]).sum()) for part in parts)
        if number > num_lines:
            return True
    return False


def _has_repeated_relations(parts: Sequence[Triples]) -> bool:
    """Whether there are enough triples, and relations have two of them on average."""
    num_triples = sum(len(part) for part in parts)
    if num_triples < MIN_LINES:
        return False
    num_relations = int(np.count_nonzero(_counts_in_column(parts, 1)))
    return num_triples >= 2 * num_relations


def _is_ambiguous(triple: Sequence[int], parts: Sequence[Triples]) -> bool:
    """Whether an end of a first line is in the other's column, or another line is as single."""
    head, _, tail = triple
    if head == tail:
        return True
    for part in parts:
        if (part[:, 2] == head).any() or (part[:, 0] == tail).any():
            return True

    head_counts, relation_counts, tail_counts = (
        _counts_in_column(parts, column) for column in range(3)
    )
    for part in parts:
        heads, relations, tails = part.T
        is_single = relation_counts[relations] == 1
        is_single &= (head_counts[heads] == 1) & (tail_counts[tails] == 1)
        if is_single.any():
            return True
    return False


def _counts_in_column(parts: Sequence[Triples], column: int) -> npt.NDArray[np.int64]:
    """How often each id occurs in a column."""
    largest = max((int(part[:, column].max()) for part in parts), default=0)
    counts = np.zeros(largest + 1, np.int64)
    for part in parts:
        np.add.at(counts, part[:, column], 1)
    return counts


# -- the vocabulary ----------------------------------------------------------


class Encoder:
    """Takes blocks in the order of reading, and numbers their names.

    The worker merges the names of each block into the vocabulary while the next blocks are parsed,
    so that the numbers depend on the blocks.
    """

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self.entities = pa.array([], pa.string())
        self.relations = pa.array([], pa.string())
        self._parts: dict[str, list[Triples]] = {}  # of each split
        self._waiting: list[tuple[str, pa.RecordBatch]] = []
        self._num_waiting = 0
        self._worker = worker
        self._merging: Future[None] | None = None

    def add(self, split: str, block: pa.RecordBatch) -> None:
        """Take a block of dictionary-encoded head, relation and tail names."""
        self._waiting.append((split, block))
        self._num_waiting += sum(len(block.column(role).dictionary) for role in ROLES)

        enough = max(MAX_WAITING, 2 * len(self.entities))
        # Parsing that is faster than merging must wait, or the blocks would fill the memory.
        is_idle = self._merging is None or self._merging.done()
        if self._num_waiting > (enough if is_idle else 2 * enough):
            self._start_merging()

    def finish(self) -> None:
        """Wait until all blocks are merged."""
        self._start_merging()
        if self._merging:
            self._merging.result()
        pa.default_memory_pool().release_unused()

    def triples(self) -> dict[str, Triples]:
        """The triples of each split that has any; to be called once, as it gives up the parts."""
        # Each split is given up once it is joined, so that only one is in memory twice.
        return {split: np.concatenate(self._parts.pop(split)) for split in list(self._parts)}

    def _start_merging(self) -> None:
        if self._merging:
            self._merging.result()
        blocks = self._waiting
        self._waiting = []
        self._num_waiting = 0
        self._merging = self._worker.submit(self._merge, blocks) if blocks else None

    def _merge(self, blocks: list[tuple[str, pa.RecordBatch]]) -> None:
        ends = [block.column(role) for _, block in blocks for role in ("head", "tail")]
        links = [block.column("relation") for _, block in blocks]
        self.entities, entity_ids = _extend_vocabulary(self.entities, ends)
        self.relations, relation_ids = _extend_vocabulary(self.relations, links)
        columns = zip(entity_ids[::2], relation_ids, entity_ids[1::2], strict=True)
        for (split, _), ids in zip(blocks, columns, strict=True):
            self._parts.setdefault(split, []).append(np.stack(ids, axis=1))


def _extend_vocabulary(
    known: pa.Array, columns: Sequence[pa.DictionaryArray]
) -> tuple[pa.Array, list[Ids]]:
    """The known names followed by the new ones, and each column as ids."""
    names = [known, *(column.dictionary for column in columns)]
    name_type = known.type
    if sum(part.nbytes for part in names) > MAX_TEXT:
        name_type = pa.large_string()
    names = [part.cast(name_type) for part in names]

    # The known names come first, in a chunk without rows, so that they keep their ids.
    indices = [pa.array([], pa.int32()), *(column.indices for column in columns)]
    chunks = [
        pa.DictionaryArray.from_arrays(rows, part)
        for rows, part in zip(indices, names, strict=True)
    ]
    unified = pa.chunked_array(chunks).unify_dictionaries().chunks
    return unified[0].dictionary, [chunk.indices.to_numpy() for chunk in unified[1:]]


def _renumber(names: pa.Array, columns: Sequence[Ids]) -> pa.Array:
    """Renumber the ids in `columns`, in place, by first appearance.

    Returns the names that occur, in that order.
    """
    parts = [ids[part] for ids in columns for part in slices(len(ids))]
    first = np.full(len(names), -1, np.int64)  # where each name occurs first; −1 if it does not
    end = sum(part.size for part in parts)
    for part in reversed(parts):  # so that the first position of each name is written last
        first[part.reshape(-1)[::-1]] = np.arange(end - 1, end - 1 - part.size, -1)
        end -= part.size

    order = np.argsort(first)
    order = order[np.count_nonzero(first < 0) :]  # a header's names are left out
    new_ids = np.empty(len(names), np.int32)
    new_ids[order] = np.arange(len(order), dtype=np.int32)
    for part in parts:
        part[:] = new_ids[part]
    names = names.take(pa.array(order))
    return names.cast(pa.string()) if names.nbytes <= MAX_TEXT else names
