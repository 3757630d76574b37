"""The interface of all readers of triples, the choice of columns, and the readers of tables and of JSON."""

import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import Source, unreadable
from dualkg.errors import DataError, RequestError, did_you_mean

Columns = Sequence[str | int]
Indices = tuple[int, ...]

ROLES = ("head", "relation", "tail")
# Earlier words take precedence, so that `head relation tail source` is read as intended.
WORDS = {
    "head": ("head", "subject", "subj", "source", "src", "from", "start", "node1", "h", "s"),
    "relation": (
        *("relation", "predicate", "property", "relationship", "rel", "pred", "edge", "link", "type", "r", "p"),
        "label",
    ),
    "tail": ("tail", "object", "obj", "target", "dst", "dest", "destination", "to", "end", "node2", "t", "o"),
}
ENDINGS = ("", "id", "name", "entity", "node", "type", "uri", "iri", "label")  # head_id, Head Entity, edge_type
NAMES = pa.dictionary(pa.int32(), pa.string())
NUM_ROWS = 1 << 17


class Reader(ABC):
    """Reads the triples of `name`; `labels` and `remarks` are complete once all blocks are read."""

    def __init__(self, name: str, columns: Columns | None = None) -> None:
        self.name = name
        self.columns = columns
        self.labels: dict[str, str] = {}
        self.remarks: list[str] = []
        self.num_stripped = 0  # names with blanks around them
        self.first_line: tuple[str, ...] | None = None  # three cells that may be a header of unknown names

    @abstractmethod
    def blocks(self) -> Generator[pa.RecordBatch]:
        """Triples in the order of the file, as columns head, relation and tail of type `NAMES`."""

    def choose(self, header: Sequence[str], *, what: str = "column") -> Indices:
        """The positions of head, relation and tail among names: as chosen, as recognized, or the only three."""
        if self.columns is not None:
            return find_columns(self.columns, header, self.name)
        if indices := recognize_header(header):
            return indices
        if len(header) == len(ROLES):
            self.remarks.append(f"Head, relation and tail of {self.name} are its {what}s {', '.join(header)}.")
            return 0, 1, 2
        listed = ", ".join(f"'{cell}'" for cell in header[:20])
        example = tuple(header[:3]) if len(header) > len(ROLES) else ROLES
        raise DataError(
            f"{self.name} should have three {what}s, or some named head, relation and tail; its {what}s are {listed}. "
            f"Choose three, such as columns={example!r}."
        )


class FileReader(Reader):
    """Reads one file, or a member of an archive."""

    def __init__(self, source: Source, columns: Columns | None = None) -> None:
        super().__init__(source.name, columns)
        self.source = source


def make_block(heads: pa.Array, relations: pa.Array, tails: pa.Array) -> pa.RecordBatch:
    """A block from three arrays of strings."""
    encoded = [column.dictionary_encode() for column in (heads, relations, tails)]
    return pa.RecordBatch.from_arrays(encoded, names=list(ROLES))


def is_empty(names: pa.Array) -> pa.BooleanArray:
    import pyarrow.compute as pc  # slow to import, and most graphs are loaded from a cache or a run

    return pc.equal(pc.binary_length(names), 0)


def strip_blanks(names: pa.StringArray) -> tuple[pa.StringArray, pa.BooleanArray | None]:
    """Names without the blanks around them, and which of them had any; None if none had."""
    _, offsets, content = names.buffers()
    if content is None or not len(names):
        return names, None
    ends = np.frombuffer(offsets, np.int32)[names.offset : names.offset + len(names) + 1]
    filled = ends[1:] > ends[:-1]
    letters = np.frombuffer(content, np.uint8)
    # Only ASCII blanks and bytes of other alphabets need a closer look, which is several times slower.
    if not any(
        ((edge <= 32) | (edge >= 127)).any() for edge in (letters[ends[:-1][filled]], letters[ends[1:][filled] - 1])
    ):
        return names, None
    import pyarrow.compute as pc

    stripped = pc.utf8_trim_whitespace(names)
    changed = pc.not_equal(stripped, names)
    return (stripped, changed) if changed.true_count else (names, None)


# -- choice of columns --------------------------------------------------------------------------------------


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


def recognize_header(cells: Sequence[str]) -> Indices | None:
    """The positions of head, relation and tail in a header, or None if the cells are not one."""
    cells = ["".join(letter for letter in cell.casefold() if letter.isalnum()) for cell in cells]
    indices = []
    for role in ROLES:
        words = (word + ending for ending in ENDINGS for word in WORDS[role] if len(word) > 1 or not ending)
        found = next((cells.index(word) for word in words if word in cells), None)
        if found is None or found in indices:
            return None
        indices.append(found)
    return tuple(indices)


def find_columns(columns: Columns, header: Sequence[str], name: str) -> Indices:
    """The positions of the chosen columns in a header, or in a first line if all are numbers."""
    indices = tuple(_find_column(column, header, name) for column in columns)
    if len(set(indices)) < len(indices):
        raise RequestError(f"Three different columns are needed; {tuple(columns)} means one of {name} twice.")
    return indices


def _find_column(column: str | int, header: Sequence[str], name: str) -> int:
    if isinstance(column, int):
        if column > len(header):
            raise DataError(
                f"{name} has {len(header)} columns, and column {column} was given. "
                f"Choose numbers from 1 to {len(header)}."
            )
        return column - 1
    exact = [index for index, cell in enumerate(header) if cell == column]
    folded = column.strip().casefold()
    indices = exact or [index for index, cell in enumerate(header) if cell.strip().casefold() == folded]
    if len(indices) == 1:
        return indices[0]
    if indices:
        raise DataError(f"{name} has {len(indices)} columns named '{column}'. Choose by number instead.")
    listed = ", ".join(f"'{cell}'" for cell in header[:20])
    raise DataError(f"{name} has no column named '{column}'. Its columns are {listed}.{did_you_mean(column, header)}")


# -- tables -------------------------------------------------------------------------------------------------


class TableReader(Reader):
    """Three columns of strings, or of integers that stand for names; errors count rows from 1."""

    def table_blocks(self, names: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Blocks of batches with these columns of head, relation and tail."""
        row = 1
        for batch in batches:
            columns = zip(ROLES, names, strict=True)
            yield make_block(*(self._strings(role, batch.column(name), row) for role, name in columns))
            row += batch.num_rows

    def column_names(self, schema: pa.Schema) -> list[str]:
        """The columns of head, relation and tail, which hold names."""
        indices = self.choose(schema.names)
        for role, index in zip(ROLES, indices, strict=True):
            self._check_type(role, schema.names[index], schema)
        return [schema.names[index] for index in indices]

    def _check_type(self, role: str, name: str, schema: pa.Schema) -> None:
        if schema.names.count(name) > 1:
            raise DataError(f"{self.name} has several columns named '{name}'. Rename all but one.")
        kind = schema.field(name).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        strings = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
        if values not in strings and not pa.types.is_integer(values):
            raise DataError(
                f"{self.name}: the {role}s should be text or whole numbers, and column '{name}' "
                f"holds {kind}. Convert it, or choose another column."
            )

    def _strings(self, role: str, column: pa.Array, first_row: int) -> pa.Array:
        """A column as strings, each of its names checked."""
        if column.null_count:
            raise self._bad_row(role, column.is_null(), first_row, "is missing")
        if pa.types.is_dictionary(column.type):
            values = column.dictionary  # of polars, views, which Arrow cannot take from
            column = (values.cast(pa.string()) if values.type == pa.string_view() else values).take(column.indices)
        try:
            strings = column.cast(pa.string())
            strings.validate(full=True)
        except pa.ArrowInvalid:
            values = column.cast(pa.binary()).to_pylist()
            bad = pa.array([value.decode("utf-8", "ignore").encode() != value for value in values], pa.bool_())
            raise self._bad_row(role, bad, first_row, "is not valid UTF-8") from None
        strings, changed = strip_blanks(strings)
        self.num_stripped += changed.true_count if changed else 0
        if (empty := is_empty(strings)).true_count:
            raise self._bad_row(role, empty, first_row, "is empty")
        return strings

    def _bad_row(self, role: str, bad: pa.BooleanArray, first_row: int, problem: str) -> DataError:
        row = first_row + bad.index(True).as_py()
        return DataError(f"{self.name}, row {row:,}: the {role} {problem}. Give it a name, or remove the row.")


class ParquetReader(FileReader, TableReader):
    """A Parquet file."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        with self.source.open() as stream:
            seekable = stream if stream.seekable() else pa.BufferReader(stream.read())
            try:
                with pa.parquet.ParquetFile(seekable) as table:
                    about = table.metadata  # a few bytes can stand for any number of rows
                    sizes = (about.row_group(group).total_byte_size for group in range(about.num_row_groups))
                    self.source.check_size(max(about.num_rows * 8 * len(ROLES), sum(sizes)))
                    names = self.column_names(table.schema_arrow)
                    yield from self.table_blocks(names, table.iter_batches(NUM_ROWS, columns=names))
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one of names of columns
                raise unreadable(error, self.source.path, self.name) from error


# -- rows ---------------------------------------------------------------------------------------------------


class RowsReader(Reader):
    """Rows of values with keys (mappings), or in an order (sequences)."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, Any]]:
        """Each row, after its place, such as `line 3`."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        found: list[list[str]] = []
        keys: list[Any] = []
        for place, row in self.rows():
            if not keys:
                keys, named, width = self._keys(place, row), isinstance(row, Mapping), len(row)
            fits = isinstance(row, Mapping) and all(key in row for key in keys) if named else _is_row(row)
            if not fits or (not named and len(row) != width):
                expected = f"the keys {', '.join(map(repr, keys))}" if named else f"{width} values"
                raise self._not_a_row(place, row, expected)
            found.append([self._name(place, role, row[key]) for role, key in zip(ROLES, keys, strict=True)])
            if len(found) == NUM_ROWS:
                yield _block_of_rows(found)
                found = []
        if found:
            yield _block_of_rows(found)

    def _keys(self, place: str, row: Any) -> list[Any]:
        """The keys of head, relation and tail in a mapping, or their positions in a sequence."""
        if isinstance(row, Mapping):
            if any(isinstance(column, int) for column in self.columns or ()):
                raise RequestError(f"{self.name} has rows with keys. Choose columns by their names, not by number.")
            keys = list(row)
            indices = self.choose(list(map(str, keys)), what="key")
            return [keys[index] for index in indices]
        if not _is_row(row) or (self.columns is None and len(row) != len(ROLES)):
            raise self._not_a_row(place, row, "head, relation and tail")
        if any(isinstance(column, str) for column in self.columns or ()):
            raise RequestError(f"{self.name} has rows without keys. Choose columns by number, counted from 1.")
        return list(find_columns(self.columns or (1, 2, 3), list(map(str, row)), self.name))

    def _not_a_row(self, place: str, row: Any, expected: str) -> DataError:
        text = repr(row)
        return DataError(
            f"{self.name}, {place}: expected {expected}, found {text[:60]}{'…' if len(text) > 60 else ''}. "
            f"Correct the row, or remove it."
        )

    def _name(self, place: str, role: str, value: Any) -> str:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return str(int(value))
        if not isinstance(value, str):
            raise DataError(
                f"{self.name}, {place}: the {role} should be text or a whole number, and it is {value!r}. Convert it, "
                f"or remove the row."
            )
        stripped = value.strip()
        self.num_stripped += len(stripped) < len(value)
        if not stripped:
            raise DataError(f"{self.name}, {place}: the {role} is empty. Give it a name, or remove the row.")
        return str(stripped)


def _block_of_rows(found: list[list[str]]) -> pa.RecordBatch:
    return make_block(*(pa.array(names, pa.string()) for names in zip(*found, strict=True)))


def _is_row(row: Any) -> bool:
    return isinstance(row, Sequence | np.ndarray) and not isinstance(row, str | bytes)


class JsonReader(FileReader, RowsReader):
    """JSON lines, or one JSON array: objects with keys, or arrays of three names."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        with self.source.open() as stream:
            if stream.peek(1)[:1] == b"[" and self.source.suffix == ".json":
                for number, row in enumerate(self._parse(stream.read(), "its array"), start=1):
                    yield f"row {number:,}", row
                return
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"line {number:,}", self._parse(line, f"line {number:,}")

    def _parse(self, content: bytes, place: str) -> Any:
        try:
            return json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise DataError(f"{self.name}, {place}: this is not valid UTF-8. Save the file as UTF-8.") from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.name}, {place}: this is not JSON ({error}). Each line should be an object such as "
                '{"head": "France", "relation": "capital", "tail": "Paris"}.'
            ) from None
