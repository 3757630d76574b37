"""Readers of triples: their interface, their registry, and the parts that formats share.

A format is a module in `dualkg.data.formats` with a reader that names the endings of its files:

    @reads(".parquet")
    class ParquetReader(TableReader): ...

Another package adds a format by an entry point, whose name is the ending:

    [project.entry-points."dualkg.readers"]
    ".graphml" = "my_package:GraphmlReader"
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data import formats
from dualkg.data.archives import Source, find_sources
from dualkg.data.columns import (
    ROLES,
    Columns,
    Indices,
    find_columns,
    quoted,
    recognize_header,
)
from dualkg.data.vocabulary import text_of
from dualkg.errors import DataError, RequestError
from dualkg.registry import Registry

# Files of these names beside the triples are about something else.
NOT_TRIPLES = ("readme", "license", "licence", "copying", "citation", "changelog", "labels")
TEXT_TYPES = (
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
)


@dataclass(frozen=True)
class ReadOptions:
    """What a request says about its files, and how much of them is read at a time.

    `columns` are the names or numbers of head, relation and tail. `names_of_ids` has the contents
    of OpenKE's files of names, by the names of these files.
    """

    columns: Columns | None = None
    delimiter: str | None = None
    names_of_ids: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    block_rows: int = 1 << 17
    # Small enough that the hash table of a block's names stays in the processor's cache.
    block_bytes: int = 4 << 20


class Reader(ABC):
    """Reads the triples of `data`, a file or an object in memory that messages call `name`.

    `labels`, `notes`, `num_stripped` and `num_comments` are complete once all blocks are read.
    """

    takes_delimiter: ClassVar[bool] = False

    def __init__(self, data: Any, options: ReadOptions, *, name: str = "") -> None:
        self.data = data
        self.options = options
        self.columns = options.columns
        self.name: str = name or data.name
        self.labels: dict[str, str] = {}
        self.notes: list[str] = []  # sentences about the graph
        self.num_stripped = 0  # names with blanks around them
        self.num_comments = 0  # lines that were skipped
        # Whether the columns are read as head, tail and relation without being so named.
        self.is_openke_order = False
        # Three cells that may be a header of unknown names.
        self.first_line: tuple[str, ...] | None = None

    @abstractmethod
    def blocks(self) -> Generator[pa.RecordBatch]:
        """Triples in the order of the file, as dictionary-encoded columns head, relation, tail."""

    def unusable(self, problem: str, *, place: str = "", advice: str = "") -> DataError:
        """The error that the data cannot be used; `place` is a line or a row."""
        subject = f"{self.name}, {place}:" if place else self.name
        return DataError(f"{subject} {problem}. {advice}".rstrip())

    def check_number(self, num_triples: int, expected: int) -> None:
        """Refuse another number of triples than the first line says."""
        if num_triples != expected:
            raise DataError(
                f"{self.name} should have {expected:,} triples, by its first line, and it has "
                f"{num_triples:,}. Fetch it or make it again."
            )

    def choose(self, header: Sequence[str], *, what: str = "column") -> Indices:
        """The positions of head, relation and tail: as chosen, as recognized, or the only three."""
        if self.columns is not None:
            return find_columns(self.columns, header, self.name)

        indices = recognize_header(header)
        if indices:
            return indices

        if len(header) == len(ROLES):
            listed = ", ".join(header)
            self.notes.append(f"{self.name}: head, relation and tail are its {what}s {listed}.")
            return 0, 1, 2

        example = tuple(header[:3]) if len(header) > len(ROLES) else ROLES
        raise self.unusable(
            f"should have three {what}s, or some named head, relation and tail; its {what}s are "
            f"{quoted(header)}",
            advice=f"Choose three, such as `columns={example}`.",
        )

    def strip(self, column: pa.DictionaryArray) -> pa.DictionaryArray:
        """A column without the blanks around its names, which are counted."""
        if not _may_have_blanks(column.dictionary):
            return column

        # Slow to import, and most graphs are loaded from a cache or a run.
        import pyarrow.compute as pc

        stripped = pc.utf8_trim_whitespace(column.dictionary)
        changed = pc.not_equal(stripped, column.dictionary)
        if not changed.true_count:
            return column

        self.num_stripped += changed.take(column.indices).true_count
        encoded = stripped.dictionary_encode()  # two names may have become one
        indices = encoded.indices.take(column.indices)
        return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def _may_have_blanks(names: pa.Array) -> bool:
    """Whether a name begins or ends with a blank or a byte of another alphabet than ASCII.

    Only such names need a closer look, which is several times slower.
    """
    ends, letters = text_of(names)
    is_name = ends[1:] > ends[:-1]
    first_letters = letters[ends[:-1][is_name]]
    last_letters = letters[ends[1:][is_name] - 1]
    return any(
        bool(((edges <= 32) | (edges >= 127)).any()) for edges in (first_letters, last_letters)
    )


def unclear_columns(name: str) -> DataError:
    """A file begins with the number of its triples, and its relations may be in column 2 or 3."""
    return DataError(
        f"{name} begins with the number of its triples, as files of OpenKE do, and it is not clear "
        "which column has the relations. Use `columns=(1, 3, 2)` if the columns are head, tail and "
        "relation, or `columns=(1, 2, 3)` if they are head, relation and tail."
    )


def is_empty(names: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each name is empty."""
    ends, _ = text_of(names)
    return np.asarray(np.diff(ends) == 0)


def blocks_of(triples: Iterator[Sequence[str]], num_rows: int) -> Generator[pa.RecordBatch]:
    """Blocks of triples of names."""
    while rows := list(islice(triples, num_rows)):
        columns = [
            pa.array(names, pa.string()).dictionary_encode() for names in zip(*rows, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, names=ROLES)


# -- the registry ------------------------------------------------------------

READERS: Registry[type[Reader]] = Registry("reader", group="dualkg.readers")
ReaderClass = TypeVar("ReaderClass", bound=type[Reader])


def reads(*endings: str) -> Callable[[ReaderClass], ReaderClass]:
    """Register a reader of the files whose names have one of these endings, as a decorator."""

    def register(reader: ReaderClass) -> ReaderClass:
        for ending in endings:
            READERS.add(ending, reader)
        return reader

    return register


@cache
def _import_formats() -> None:
    """Import all modules of `dualkg.data.formats`, which register their readers."""
    for module in pkgutil.iter_modules(formats.__path__):
        import_module(f"{formats.__name__}.{module.name}")


def find_reader(file_name: str) -> type[Reader] | None:
    """The reader of the longest ending that a file name has, or None."""
    _import_formats()
    lower_name = file_name.lower()
    endings = [ending for ending in READERS if lower_name.endswith(ending)]
    if not endings:
        return None
    return READERS[max(endings, key=len)]


def open_reader(source: Source, options: ReadOptions, *, default: type[Reader]) -> Reader:
    """The reader of a file; `default` reads the files of unknown endings."""
    reader = find_reader(source.file_name) or default
    if options.delimiter is not None and not reader.takes_delimiter:
        raise RequestError(
            f"{source.name} has no delimiter, as {source.suffix} is no text of columns. Leave it "
            "out."
        )
    return reader(source, options)


# -- files of triples --------------------------------------------------------


def holds_triples(source: Source) -> bool:
    """Whether the name of a file is that of a file of triples, not of labels or a licence."""
    stem = PurePosixPath(source.file_name).stem.lower()
    return stem not in NOT_TRIPLES and find_reader(source.file_name) is not None


def one_source(path: str | Path, *, max_size: int | str | None = None) -> Source:
    """A file, or the only file of triples in an archive."""
    return only_triples(find_sources(path, max_size=max_size), path)


def only_triples(sources: list[Source], path: str | Path) -> Source:
    """The only source, or the only one of triples."""
    candidates = sources
    if len(sources) != 1:
        candidates = [source for source in sources if holds_triples(source)]
    if len(candidates) == 1:
        return candidates[0]

    listed = ", ".join(source.file_name for source in (candidates or sources)[:5])
    raise DataError(
        f"{path} holds {len(candidates)} files of triples, and one was expected. Its files: "
        f"{listed or 'none'}. Make an archive of one, or extract the one you mean."
    )


# -- tables ------------------------------------------------------------------


class TableReader(Reader):
    """Reads columns of strings, or of integers that stand for names.

    Errors count rows from 1.
    """

    def column_names(self, schema: pa.Schema) -> list[str]:
        """The columns of head, relation and tail, which hold names."""
        names = [schema.names[index] for index in self.choose(schema.names)]
        for role, name in zip(ROLES, names, strict=True):
            self._check_column(role, name, schema)
        return names

    def _check_column(self, role: str, name: str, schema: pa.Schema) -> None:
        if schema.names.count(name) > 1:
            problem = f"has several columns named '{name}'"
            raise self.unusable(problem, advice="Rename all but one.")

        column_type = schema.field(name).type
        value_type = column_type
        if pa.types.is_dictionary(column_type):
            value_type = column_type.value_type
        if value_type not in TEXT_TYPES and not pa.types.is_integer(value_type):
            raise self.unusable(
                f"should have text or whole numbers as {role}s, and column '{name}' holds "
                f"{column_type}",
                advice="Convert it, or choose another column.",
            )

    def table_blocks(
        self, names: Sequence[str], batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """The blocks of batches of a table; `names` are the columns of head, relation and tail."""
        first_row = 1
        for batch in batches:
            columns = [
                self._names(role, batch.column(name), first_row)
                for role, name in zip(ROLES, names, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, names=ROLES)
            first_row += batch.num_rows

    def _names(self, role: str, column: pa.Array, first_row: int) -> pa.DictionaryArray:
        """A column as dictionary-encoded strings, each of its names checked."""
        if column.null_count:
            raise self._bad_row(role, column.is_null(), first_row, "is missing")

        if pa.types.is_dictionary(column.type):
            values = column.dictionary
            if values.type == pa.string_view():  # of Polars; Arrow cannot take from views
                values = values.cast(pa.string())
            column = pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
            if column.null_count:
                raise self._bad_row(role, column.is_null(), first_row, "is missing")
        try:
            strings = column.cast(pa.string())
            strings.validate(full=True)
        except pa.ArrowInvalid:
            is_bad = [_is_invalid_text(name) for name in column.cast(pa.binary()).to_pylist()]
            raise self._bad_row(role, is_bad, first_row, "is not valid UTF-8") from None

        encoded = self.strip(strings.dictionary_encode())
        empty = is_empty(encoded.dictionary)
        if empty.any():
            raise self._bad_row(role, empty[encoded.indices], first_row, "is empty")
        return encoded

    def _bad_row(self, role: str, is_bad: Any, first_row: int, problem: str) -> DataError:
        row = first_row + int(np.argmax(is_bad))
        advice = "Give it a name, or remove the row."
        return self.unusable(f"the {role} {problem}", place=f"row {row:,}", advice=advice)


def _is_invalid_text(content: bytes) -> bool:
    return content.decode("utf-8", "ignore").encode() != content


# -- rows --------------------------------------------------------------------


class RowReader(Reader):
    """Reads rows with keys (mappings) or in an order (sequences), as those of JSON or of Python."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, Any]]:
        """Each row, after its place, such as `line 3`."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        return blocks_of(self._triples(), self.options.block_rows)

    def _triples(self) -> Iterator[list[str]]:
        keys: list[Any] = []
        for place, row in self.rows():
            if not keys:  # the first row shows what all rows are like
                keys = self._keys(place, row)
                has_keys = isinstance(row, Mapping)
                width = len(row)

            if has_keys:
                fits = isinstance(row, Mapping) and all(key in row for key in keys)
                expected = f"the keys {', '.join(map(repr, keys))}"
            else:
                fits = _is_sequence(row) and len(row) == width
                expected = f"{width} values"
            if not fits:
                raise self._not_a_row(place, row, expected)

            yield [
                self._checked_name(place, role, row[key])
                for role, key in zip(ROLES, keys, strict=True)
            ]

    def _keys(self, place: str, row: Any) -> list[Any]:
        """The keys of head, relation and tail in a mapping, or their positions in a sequence."""
        chosen = self.columns or ()
        if isinstance(row, Mapping):
            if any(isinstance(column, int) for column in chosen):
                raise RequestError(
                    f"{self.name} has rows with keys. Choose columns by their names, not by number."
                )
            keys = list(row)
            header = [str(key) for key in keys]
            return [keys[index] for index in self.choose(header, what="key")]

        if not _is_sequence(row) or (self.columns is None and len(row) != len(ROLES)):
            raise self._not_a_row(place, row, "head, relation and tail")
        if any(isinstance(column, str) for column in chosen):
            raise RequestError(
                f"{self.name} has rows without keys. Choose columns by number, counted from 1."
            )
        header = [str(cell) for cell in row]
        return list(find_columns(self.columns or (1, 2, 3), header, self.name))

    def _not_a_row(self, place: str, row: Any, expected: str) -> DataError:
        text = repr(row)
        if len(text) > 60:
            text = f"{text[:60]}…"
        problem = f"expected {expected}, found {text}"
        return self.unusable(problem, place=place, advice="Correct the row, or remove it.")

    def _checked_name(self, place: str, role: str, value: Any) -> str:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return str(int(value))
        if not isinstance(value, str):
            problem = f"the {role} should be text or a whole number, and it is {value!r}"
            raise self.unusable(problem, place=place, advice="Convert it, or remove the row.")

        stripped = value.strip()
        self.num_stripped += len(stripped) < len(value)
        if not stripped:
            advice = "Give it a name, or remove the row."
            raise self.unusable(f"the {role} is empty", place=place, advice=advice)
        return str(stripped)


def _is_sequence(row: Any) -> bool:
    return isinstance(row, Sequence | np.ndarray) and not isinstance(row, str | bytes)
