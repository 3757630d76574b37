"""The interface of all readers of triples, the choice of columns, and the Parquet reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import Source, unreadable
from dualkg.errors import DataError, RequestError, did_you_mean

Columns = Sequence[str | int]
Indices = tuple[int, ...]

ROLES = ("head", "relation", "tail")
# Earlier words take precedence, so that `head relation tail source` is read as intended.
WORDS = {
    "head": ("head", "subject", "source", "h", "s"),
    "relation": ("relation", "predicate", "property", "rel", "r", "p", "label"),
    "tail": ("tail", "object", "target", "t", "o"),
}
NAMES = pa.dictionary(pa.int32(), pa.string())
NUM_ROWS = 1 << 17


class Reader(ABC):
    """Reads one source; `labels` and `remarks` are complete once all blocks are read."""

    def __init__(self, source: Source, columns: Columns | None = None) -> None:
        self.source = source
        self.columns = columns
        self.labels: dict[str, str] = {}
        self.remarks: list[str] = []

    @abstractmethod
    def blocks(self) -> Generator[pa.RecordBatch]:
        """Triples in the order of the file, as columns head, relation and tail of type `NAMES`."""


def make_block(heads: pa.Array, relations: pa.Array, tails: pa.Array) -> pa.RecordBatch:
    """A block from three arrays of strings."""
    encoded = [column.dictionary_encode() for column in (heads, relations, tails)]
    return pa.RecordBatch.from_arrays(encoded, names=list(ROLES))


def is_empty(names: pa.Array) -> pa.BooleanArray:
    import pyarrow.compute as pc  # slow to import, and most graphs are loaded from a cache or a run

    return pc.equal(pc.binary_length(names), 0)


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
    cells = [cell.strip().casefold() for cell in cells]
    found = [next((cells.index(word) for word in WORDS[role] if word in cells), None) for role in ROLES]
    indices = tuple(index for index in found if index is not None)
    return indices if len(indices) == len(ROLES) else None


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


# -- Parquet ------------------------------------------------------------------------------------------------


class ParquetReader(Reader):
    """Three columns of strings, or of integers that stand for names; errors count rows from 1."""

    def blocks(self) -> Generator[pa.RecordBatch]:
        with self.source.open() as stream:
            seekable = stream if stream.seekable() else pa.BufferReader(stream.read())
            try:
                with pa.parquet.ParquetFile(seekable) as table:
                    yield from self._blocks(table)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(error, self.source.path, self.source.name) from error

    def _blocks(self, table: pa.parquet.ParquetFile) -> Iterator[pa.RecordBatch]:
        schema = table.schema_arrow
        columns = dict(zip(ROLES, (schema.names[index] for index in self._indices(schema.names)), strict=True))
        for role, name in columns.items():
            self._check_type(role, name, schema)
        row = 1
        for batch in table.iter_batches(NUM_ROWS, columns=list(columns.values())):
            yield make_block(*(self._strings(role, batch.column(name), row) for role, name in columns.items()))
            row += batch.num_rows

    def _indices(self, header: list[str]) -> Indices:
        if self.columns is not None:
            return find_columns(self.columns, header, self.source.name)
        if indices := recognize_header(header):
            return indices
        if len(header) == len(ROLES):
            return 0, 1, 2
        listed = ", ".join(f"'{name}'" for name in header[:20])
        raise DataError(
            f"{self.source.name} should have three columns, or some named head, relation and tail; "
            f"its columns are {listed}. Choose three with columns=('…', '…', '…')."
        )

    def _check_type(self, role: str, name: str, schema: pa.Schema) -> None:
        if schema.names.count(name) > 1:
            raise DataError(f"{self.source.name} has several columns named '{name}'. Rename all but one.")
        kind = schema.field(name).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        strings = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
        if values not in strings and not pa.types.is_integer(values):
            raise DataError(
                f"{self.source.name}: the {role}s should be text or whole numbers, and column '{name}' "
                f"holds {kind}. Convert it, or choose another column."
            )

    def _strings(self, role: str, column: pa.Array, first_row: int) -> pa.Array:
        """A column as strings, each of its names checked."""
        if column.null_count:
            raise self._bad_row(role, column.is_null(), first_row, "is missing")
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        try:
            strings = column.cast(pa.string())
            empty = is_empty(strings)
            if not empty.true_count:
                strings.validate(full=True)
                return strings
        except pa.ArrowInvalid:
            values = column.cast(pa.binary()).to_pylist()
            bad = pa.array([value.decode("utf-8", "ignore").encode() != value for value in values], pa.bool_())
            raise self._bad_row(role, bad, first_row, "is not valid UTF-8") from None
        raise self._bad_row(role, empty, first_row, "is empty")

    def _bad_row(self, role: str, bad: pa.BooleanArray, first_row: int, problem: str) -> DataError:
        row = first_row + bad.index(True).as_py()
        return DataError(f"{self.source.name}, row {row:,}: the {role} {problem}. Give it a name, or remove the row.")
