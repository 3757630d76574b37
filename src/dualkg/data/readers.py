"""The interface of all readers of triples, the choice of columns, and the readers of tables, of
rows and of RDF.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from dualkg.data.archives import RDF_FORMATS, Source, parquet_size, unreadable
from dualkg.data.spill import text_of
from dualkg.errors import DataError, RequestError, did_you_mean
from dualkg.extras import optional_import

Columns = Sequence[str | int]
Indices = tuple[int, ...]

ROLES = ("head", "relation", "tail")
# Earlier words take precedence, so that `head relation tail source` is read as intended.
WORDS = {
    "head": ("head", "subject", "subj", "source", "src", "from", "start", "node1", "h", "s"),
    "relation": (
        *(
            "relation",
            "predicate",
            "property",
            "relationship",
            "rel",
            "pred",
            "edge",
            "link",
            "type",
            "r",
            "p",
        ),
        "label",
    ),
    "tail": (
        "tail",
        "object",
        "obj",
        "target",
        "dst",
        "dest",
        "destination",
        "to",
        "end",
        "node2",
        "t",
        "o",
    ),
}
ENDINGS = (
    "",
    "id",
    "name",
    "entity",
    "node",
    "type",
    "uri",
    "iri",
    "label",
)  # head_id, Head Entity, edge_type
NUM_ROWS = 1 << 17
RDF_LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
SKIPPED = {"literal": "a literal", "blank": "a blank node", "quoted": "a quoted triple"}


class Reader(ABC):
    """Reads the triples of `data`, a file or an object in memory that errors call `name`.

    `labels` and `remarks` are complete once all blocks are read.
    """

    def __init__(self, data: Any, columns: Columns | None = None, name: str = "") -> None:
        self.data = data
        self.columns = columns
        self.name: str = name or data.name
        self.labels: dict[str, str] = {}
        self.remarks: list[str] = []
        self.num_stripped = 0  # names with blanks around them
        self.first_line: tuple[str, ...] | None = (
            None  # three cells that may be a header of unknown names
        )

    @abstractmethod
    def blocks(self) -> Generator[pa.RecordBatch]:
        """Triples in the order of the file, as dictionary-encoded columns head, relation and
        tail.
        """

    def choose(self, header: Sequence[str], *, what: str = "column") -> Indices:
        """The positions of head, relation and tail among names: as chosen, as recognized, or the
        only three.
        """
        if self.columns is not None:
            return find_columns(self.columns, header, self.name)
        if indices := recognize_header(header):
            return indices
        if len(header) == len(ROLES):
            self.remarks.append(
                f"Head, relation and tail of {self.name} are its {what}s {', '.join(header)}."
            )
            return 0, 1, 2
        listed = ", ".join(f"'{cell}'" for cell in header[:20])
        example = tuple(header[:3]) if len(header) > len(ROLES) else ROLES
        raise DataError(
            f"{self.name} should have three {what}s, or some named head, relation and tail; its "
            f"{what}s are {listed}. Choose three, such as columns={example!r}."
        )

    def strip(self, column: pa.DictionaryArray) -> pa.DictionaryArray:
        """A column without the blanks around its names, which are counted."""
        ends, letters = text_of(column.dictionary)
        starts = ends[:-1][ends[1:] > ends[:-1]]
        ends = ends[1:][ends[1:] > ends[:-1]]
        # Only ASCII blanks and bytes of other alphabets need a closer look, which is several times
        # slower.
        if not any(
            ((edges <= 32) | (edges >= 127)).any() for edges in (letters[starts], letters[ends - 1])
        ):
            return column
        # Slow to import, and most graphs are loaded from a cache or a run.
        import pyarrow.compute as pc

        stripped = pc.utf8_trim_whitespace(column.dictionary)
        changed = pc.not_equal(stripped, column.dictionary)
        if not changed.true_count:
            return column
        self.num_stripped += changed.take(column.indices).true_count
        encoded = stripped.dictionary_encode()  # two names may have become one
        return pa.DictionaryArray.from_arrays(
            encoded.indices.take(column.indices), encoded.dictionary
        )


def is_empty(names: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each name is empty."""
    return np.asarray(np.diff(text_of(names)[0]) == 0)


def blocks_of(triples: Iterator[Sequence[str]]) -> Generator[pa.RecordBatch]:
    """Blocks of triples of names."""
    while found := list(islice(triples, NUM_ROWS)):
        columns = [
            pa.array(names, pa.string()).dictionary_encode() for names in zip(*found, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, names=ROLES)


# -- choice of columns -------------------------------------------------------


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
        words = (
            word + ending
            for ending in ENDINGS
            for word in WORDS[role]
            if len(word) > 1 or not ending
        )
        found = next((cells.index(word) for word in words if word in cells), None)
        if found is None or found in indices:
            return None
        indices.append(found)
    return tuple(indices)


def find_columns(columns: Columns, header: Sequence[str], name: str) -> Indices:
    """The positions of the chosen columns in a header, or in a first line if all are numbers."""
    indices = tuple(_find_column(column, header, name) for column in columns)
    if len(set(indices)) < len(indices):
        raise RequestError(
            f"Three different columns are needed; {tuple(columns)} means one of {name} twice."
        )
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
    indices = exact or [
        index for index, cell in enumerate(header) if cell.strip().casefold() == folded
    ]
    if len(indices) == 1:
        return indices[0]
    if indices:
        raise DataError(
            f"{name} has {len(indices)} columns named '{column}'. Choose by number instead."
        )
    listed = ", ".join(f"'{cell}'" for cell in header[:20])
    raise DataError(
        f"{name} has no column named '{column}'. Its columns are "
        f"{listed}.{did_you_mean(column, header)}"
    )


# -- tables ------------------------------------------------------------------


class TableReader(Reader):
    """A Parquet file or an Arrow table: columns of strings, or of integers that stand for names.

    Errors count rows from 1.
    """

    def blocks(self) -> Generator[pa.RecordBatch]:
        if isinstance(self.data, pa.Table):
            names = self._column_names(self.data.schema)
            yield from self._blocks(names, self.data.to_batches(NUM_ROWS))
            return
        plain = not self.data.compression and not self.data.in_archive
        with self.data.opener() if plain else self.data.open() as stream:
            seekable = stream if plain else pa.BufferReader(stream.read())
            try:
                with pa.parquet.ParquetFile(seekable) as table:
                    self.data.check_size(parquet_size(table.metadata))
                    names = self._column_names(table.schema_arrow)
                    yield from self._blocks(names, table.iter_batches(NUM_ROWS, columns=names))
            except (
                pa.ArrowException,
                OSError,
                UnicodeDecodeError,
            ) as error:  # the last one of names of columns
                raise unreadable(error, self.data.path, self.name) from error

    def _column_names(self, schema: pa.Schema) -> list[str]:
        """The columns of head, relation and tail, which hold names."""
        names = [schema.names[index] for index in self.choose(schema.names)]
        for role, name in zip(ROLES, names, strict=True):
            if schema.names.count(name) > 1:
                raise DataError(
                    f"{self.name} has several columns named '{name}'. Rename all but one."
                )
            kind = schema.field(name).type
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            strings = (
                pa.string(),
                pa.large_string(),
                pa.string_view(),
                pa.binary(),
                pa.large_binary(),
                pa.binary_view(),
            )
            if values not in strings and not pa.types.is_integer(values):
                raise DataError(
                    f"{self.name}: the {role}s should be text or whole numbers, and column "
                    f"'{name}' holds {kind}. Convert it, or choose another column."
                )
        return names

    def _blocks(
        self, names: Sequence[str], batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        row = 1
        for batch in batches:
            columns = [
                self._names(role, batch.column(name), row)
                for role, name in zip(ROLES, names, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, names=ROLES)
            row += batch.num_rows

    def _names(self, role: str, column: pa.Array, first_row: int) -> pa.DictionaryArray:
        """A column as dictionary-encoded strings, each of its names checked."""
        if column.null_count:
            raise self._bad_row(role, column.is_null(), first_row, "is missing")
        if pa.types.is_dictionary(column.type):
            values = column.dictionary  # of polars, views, which Arrow cannot take from
            column = (values.cast(pa.string()) if values.type == pa.string_view() else values).take(
                column.indices
            )
        try:
            strings = column.cast(pa.string())
            strings.validate(full=True)
        except pa.ArrowInvalid:
            values = column.cast(pa.binary()).to_pylist()
            bad = [value.decode("utf-8", "ignore").encode() != value for value in values]
            raise self._bad_row(role, bad, first_row, "is not valid UTF-8") from None
        encoded = self.strip(strings.dictionary_encode())
        if (empty := is_empty(encoded.dictionary)).any():
            raise self._bad_row(role, empty[encoded.indices], first_row, "is empty")
        return encoded

    def _bad_row(self, role: str, bad: Any, first_row: int, problem: str) -> DataError:
        row = first_row + int(np.argmax(bad))
        return DataError(
            f"{self.name}, row {row:,}: the {role} {problem}. Give it a name, or remove the row."
        )


# -- rows --------------------------------------------------------------------


class RowsReader(Reader):
    """Rows with keys (mappings) or in an order (sequences): of Python, of JSON lines or of one JSON
    array.
    """

    def blocks(self) -> Generator[pa.RecordBatch]:
        return blocks_of(self._triples())

    def _triples(self) -> Iterator[list[str]]:
        keys: list[Any] = []
        for place, row in self._rows():
            if not keys:
                keys = self._keys(place, row)
                named = isinstance(row, Mapping)
                width = len(row)
            fits = (
                isinstance(row, Mapping) and all(key in row for key in keys)
                if named
                else _is_row(row)
            )
            if not fits or (not named and len(row) != width):
                expected = f"the keys {', '.join(map(repr, keys))}" if named else f"{width} values"
                raise self._not_a_row(place, row, expected)
            yield [
                self._checked_name(place, role, row[key])
                for role, key in zip(ROLES, keys, strict=True)
            ]

    def _rows(self) -> Iterator[tuple[str, Any]]:
        """Each row, after its place, such as `line 3`."""
        if not isinstance(self.data, Source):
            for number, row in enumerate(self.data, start=1):
                yield f"row {number:,}", row
            return
        with self.data.open() as stream:
            if stream.peek(1)[:1] == b"[" and self.data.suffix == ".json":
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
            raise DataError(
                f"{self.name}, {place}: this is not valid UTF-8. Save the file as UTF-8."
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.name}, {place}: this is not JSON ({error}). Each line should be an object such as "
                '{"head": "France", "relation": "capital", "tail": "Paris"}.'
            ) from None

    def _keys(self, place: str, row: Any) -> list[Any]:
        """The keys of head, relation and tail in a mapping, or their positions in a sequence."""
        if isinstance(row, Mapping):
            if any(isinstance(column, int) for column in self.columns or ()):
                raise RequestError(
                    f"{self.name} has rows with keys. Choose columns by their names, not by number."
                )
            keys = list(row)
            return [keys[index] for index in self.choose(list(map(str, keys)), what="key")]
        if not _is_row(row) or (self.columns is None and len(row) != len(ROLES)):
            raise self._not_a_row(place, row, "head, relation and tail")
        if any(isinstance(column, str) for column in self.columns or ()):
            raise RequestError(
                f"{self.name} has rows without keys. Choose columns by number, counted from 1."
            )
        return list(find_columns(self.columns or (1, 2, 3), list(map(str, row)), self.name))

    def _not_a_row(self, place: str, row: Any, expected: str) -> DataError:
        text = repr(row)
        return DataError(
            f"{self.name}, {place}: expected {expected}, found "
            f"{text[:60]}{'…' if len(text) > 60 else ''}. Correct the row, or remove it."
        )

    def _checked_name(self, place: str, role: str, value: Any) -> str:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return str(int(value))
        if not isinstance(value, str):
            raise DataError(
                f"{self.name}, {place}: the {role} should be text or a whole number, and it is "
                f"{value!r}. Convert it, or remove the row."
            )
        stripped = value.strip()
        self.num_stripped += len(stripped) < len(value)
        if not stripped:
            raise DataError(
                f"{self.name}, {place}: the {role} is empty. Give it a name, or remove the row."
            )
        return str(stripped)


def _is_row(row: Any) -> bool:
    return isinstance(row, Sequence | np.ndarray) and not isinstance(row, str | bytes)


# -- RDF ---------------------------------------------------------------------


class RdfReader(Reader):
    """RDF, by pyoxigraph: triples of three IRIs; an English or untagged rdfs:label becomes a
    label.
    """

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(
                f"{self.name} is RDF, which has no columns to choose. Leave them out."
            )
        yield from blocks_of(self._triples())

    def _triples(self) -> Iterator[tuple[str, str, str]]:
        skipped = Counter[str]()
        named_graphs = set[str]()
        label_ranks = dict[str, int]()
        for triple in self._parse():
            named_graphs.add(str(triple.graph_name))
            ends = {type(triple.subject).__name__, type(triple.object).__name__}
            if "Literal" in ends:
                skipped["literal"] += not self._add_label(triple, label_ranks)
            elif "BlankNode" in ends:
                skipped["blank"] += 1
            elif ends == {"NamedNode"}:
                yield triple.subject.value, triple.predicate.value, triple.object.value
            else:
                skipped["quoted"] += 1
        if len(named_graphs) > 1:
            self.remarks.append(
                f"{self.name}: the triples of {len(named_graphs):,} named graphs were put together."
            )
        if counts := [
            f"{skipped[kind]:,} with {text}" for kind, text in SKIPPED.items() if skipped[kind]
        ]:
            self.remarks.append(f"{self.name}: triples skipped: {', '.join(counts)}.")

    def _parse(self) -> Iterator[Any]:
        with optional_import("pyoxigraph", purpose=f"{self.name} is RDF, and reading it"):
            import pyoxigraph as ox
        rdf_format = getattr(ox.RdfFormat, RDF_FORMATS[self.data.suffix])
        with self.data.open() as stream:
            try:
                yield from ox.parse(stream, format=rdf_format)
            except SyntaxError as error:
                detail = str(error.msg).partition(": ")[2] or str(error.msg)
                raise DataError(
                    f"{self.name}, line {error.lineno or 1:,}: this is not valid "
                    f"{rdf_format.name} ({detail.rstrip('.')}). Correct the line, or remove it."
                ) from error

    def _add_label(self, triple: Any, ranks: dict[str, int]) -> bool:
        """Keep a label unless it is in another language; English precedes untagged, then the first
        one wins.
        """
        if type(triple.subject).__name__ != "NamedNode" or triple.predicate.value != RDF_LABEL:
            return False
        language = (triple.object.language or "").lower()
        if language and language.partition("-")[0] != "en":
            return False
        name = triple.subject.value
        rank = {"en": 0, "": 1}.get(language, 2)
        if rank < ranks.get(name, 3):
            self.labels[name], ranks[name] = triple.object.value, rank
        return True
