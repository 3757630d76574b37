"""Parquet: three columns of names, or of whole numbers that stand for names."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import unreadable
from dualkg.data.columns import ROLES, Indices, Reader, block_of, empty_among, locate, recognise
from dualkg.errors import DataError

NUM_ROWS = 1 << 17


class TableReader(Reader):
    """A Parquet file; errors count its rows from 1."""

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
        names = [schema.names[index] for index in self._places(schema.names)]
        for role, name in zip(ROLES, names, strict=True):
            self._check_type(role, name, schema)
        row = 1
        for batch in table.iter_batches(NUM_ROWS, columns=names):
            block = block_of(
                *(self._text(role, batch.column(name), row) for role, name in zip(ROLES, names, strict=True))
            )
            row += batch.num_rows
            yield block

    def _places(self, header: list[str]) -> Indices:
        if self.columns is not None:
            return locate(self.columns, header, self.source.name)
        places = recognise(header)
        if places is None and len(header) == len(ROLES):
            places = (0, 1, 2)
        if places is None:
            listed = ", ".join(f"'{name}'" for name in header[:20])
            raise DataError(
                f"{self.source.name} should have three columns, or some named head, relation and tail; "
                f"its columns are {listed}. Choose three with columns=('…', '…', '…')."
            )
        return places

    def _check_type(self, role: str, name: str, schema: pa.Schema) -> None:
        if schema.names.count(name) > 1:
            raise DataError(f"{self.source.name} has several columns named '{name}'. Rename all but one.")
        kind = schema.field(name).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (_is_text(values) or pa.types.is_integer(values)):
            raise DataError(
                f"{self.source.name}: the {role}s should be text or whole numbers, and column '{name}' "
                f"holds {kind}. Convert it, or choose another column."
            )

    def _text(self, role: str, column: pa.Array, first_row: int) -> pa.Array:
        """A column as text, each of its names checked."""
        if column.null_count:
            raise self._bad_row(role, column.is_null(), first_row, "is missing")
        if not pa.types.is_string(column.type):
            column = self._cast(role, column, first_row)
        empty = empty_among(column)
        if empty.true_count:
            raise self._bad_row(role, empty, first_row, "is empty")
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise self._bad_text(role, column.cast(pa.binary()), first_row) from None
        return column

    def _cast(self, role: str, column: pa.Array, first_row: int) -> pa.Array:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            raise self._bad_text(role, column.cast(pa.binary()), first_row) from None

    def _bad_text(self, role: str, column: pa.Array, first_row: int) -> DataError:
        bad = pa.array([not _is_utf8(value) for value in column.to_pylist()], pa.bool_())
        return self._bad_row(role, bad, first_row, "is not valid UTF-8")

    def _bad_row(self, role: str, bad: pa.BooleanArray, first_row: int, problem: str) -> DataError:
        row = first_row + bad.index(True).as_py()
        return DataError(f"{self.source.name}, row {row:,}: the {role} {problem}. Give it a name, or remove the row.")


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
