"""Candidate lists of an evaluation: the entities among which the answer of each query is ranked."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualkg.data.graph import Graph, Split
from dualkg.data.parquet_files import read_parquet
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, InvalidValue, RequestError
from dualkg.files import read_bytes, regular_file

Ids = npt.NDArray[np.int64]
PARTS = ("head", "relation", "tail")
# The columns of lists, with their names in the Open Graph Benchmark.
LISTS = {"tail_candidates": "tail_neg", "head_candidates": "head_neg"}
ADVICE = "Rows have head, relation, tail, tail_candidates and head_candidates."
MAX_BLOCK = 4096  # queries
MAX_LINES = 4 << 30  # bytes of a file of JSON lines


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """A list of entities for each query of a split.

    Tail queries come in the order of its triples, then head queries. The list of query q is
    `entities[starts[q]:starts[q + 1]]`. It may have the answer or not.
    """

    entities: npt.NDArray[np.int32]
    starts: Ids

    @property
    def num_queries(self) -> int:
        return len(self.starts) - 1

    def blocks(
        self, first: int, last: int, max_candidates: int
    ) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
        """The first query of each block, the end of the block, and its lists.

        The lists are `(num_queries, longest)`, filled with −1. A block has at most
        `max_candidates` numbers, or one query.
        """
        while first < last:
            lengths = np.diff(self.starts[first : min(last, first + MAX_BLOCK) + 1])
            sizes = np.maximum.accumulate(lengths + 1) * np.arange(1, len(lengths) + 1)
            size = max(1, int(np.searchsorted(sizes, max_candidates, side="right")))
            within = np.arange(lengths[:size].max()) < lengths[:size, None]
            ids = np.full(within.shape, -1, dtype=np.int32)
            ids[within] = self.entities[self.starts[first] : self.starts[first + size]]
            yield first, first + size, ids
            first += size

    @classmethod
    def of(cls, candidates: GivenCandidates, graph: Graph, split: Split) -> CandidateLists:
        """Candidates as they are, from a file, or from columns by name."""
        if isinstance(candidates, CandidateLists):
            return candidates
        if isinstance(candidates, Mapping):
            table = _table_of_arrays(candidates, "The mapping")
            return _from_table(table, graph, split, source="The mapping")
        if not isinstance(candidates, (str, Path)):
            raise InvalidValue(
                "candidates",
                expected="a file of lists, or a mapping of its columns",
                found=type(candidates).__name__,
            )
        return read_candidates(candidates, graph, split=split)


GivenCandidates = CandidateLists | str | Path | Mapping[str, Any]


def read_candidates(path: str | Path, graph: Graph, *, split: Split = "test") -> CandidateLists:
    """Read the candidates of a split by the names of a graph: one row per triple, in any order.

    Rows have `head`, `relation`, `tail` and two lists, `tail_candidates` for the query (head,
    relation, ?) and `head_candidates` for (?, relation, tail). Files are .parquet, .jsonl, or .npz
    with one array per column, as a split of the Open Graph Benchmark, whose lists are named
    `tail_neg` and `head_neg`. Numbers stand for names.
    """
    path = Path(path)
    readers = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".npz": _read_npz}
    if path.suffix.lower() not in readers:
        raise InvalidValue(
            "candidates", expected=f"a file of the kind {', '.join(readers)}", found=path.name
        )
    if not path.is_file():
        reason = "is not a file; candidate lists were expected"
        raise _invalid(str(path), reason, advice=ADVICE)
    return _from_table(readers[path.suffix.lower()](path), graph, split, source=str(path))


def _invalid(place: str, reason: str, *, advice: str = "") -> DataError:
    """The error for lists that cannot be used.

    `place` is a file, or a line, a row or a column of it; `reason` is the rest of the sentence.
    """
    return DataError(f"{place} {reason}. {advice}".rstrip())


def _read_parquet(path: Path) -> pa.Table:
    try:
        return read_parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise _invalid(str(path), f"cannot be read as Parquet: {error}") from None


def _read_json_lines(path: Path) -> pa.Table:
    rows = []
    for number, line in enumerate(_read_lines(path), start=1):
        rows.append(_read_json_line(line, f"{path}, line {number:,}"))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return _table_of_arrays(columns, str(path))


def _read_lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path, max_bytes=MAX_LINES).splitlines()
    except OSError as error:
        raise _invalid(str(path), f"cannot be read: {error.strerror}") from None


def _read_json_line(line: bytes, place: str) -> dict[str, Any]:
    if not line.strip():
        raise _invalid(place, "is empty", advice="Remove it.")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid(place, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        reason = f"should be an object; it is {type(row).__name__}"
        raise _invalid(place, reason, advice=ADVICE)
    for name, value in row.items():
        if isinstance(value, list):
            row[name] = [str(entity) for entity in value]
    return row


def _read_npz(path: Path) -> pa.Table:
    try:
        with np.load(regular_file(path), allow_pickle=False) as arrays:
            return _table_of_arrays(dict(arrays), str(path))
    except (ValueError, OSError, MemoryError, zipfile.BadZipFile) as error:
        # NumPy makes room for as many numbers as the header of an array names.
        reason = f"cannot be read as arrays: {error}"
        raise _invalid(str(path), reason, advice="Save them with numpy.savez.") from None


def _table_of_arrays(columns: Mapping[str, Any], source: str) -> pa.Table:
    """Columns of names `(num_triples,)` and of lists; other columns are left out.

    Lists of equal lengths may be arrays `(num_triples, n)`.
    """
    arrays = {}
    for name in (*PARTS, *LISTS, *LISTS.values()):
        if name in columns:
            arrays[name] = _arrow_array(columns[name], name, source)
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array):,}" for name, array in sorted(arrays.items()))
        reason = f"should have as many rows in each column; it has {lengths}"
        raise _invalid(source, reason)
    return pa.table(arrays)


def _arrow_array(values: Any, name: str, source: str) -> pa.Array:
    if hasattr(values, "__array__"):
        values = np.asarray(values)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        # The offsets of shorter strings end at 2 GiB.
        kind = pa.large_string() if values.dtype.kind == "U" else None
        flat = pa.array(values.reshape(-1), kind)
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        expected = "names" if name in PARTS else "lists of names"
        reason = f"should be {expected}; {error}"
        raise _invalid(f"{source}, column {name},", reason) from None


def _from_table(table: pa.Table, graph: Graph, split: Split, *, source: str) -> CandidateLists:
    """Match the rows to the triples of a split."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name, ogb_name in LISTS.items():
        if name not in columns and ogb_name in columns:
            columns[name] = columns[ogb_name]
    for name in (*PARTS, *LISTS):
        if name not in columns:
            listed = ", ".join(table.column_names) or "none"
            reason = f"has no column {name}; its columns are {listed}"
            raise _invalid(source, reason, advice=ADVICE)

    ids = []
    for part, names in zip(PARTS, (graph.entities, graph.relations, graph.entities), strict=True):
        ids.append(_ids(columns[part], names, f"{source}, column {part}", np.arange))
    rows = _rows_of(np.stack(ids, axis=1), graph, split, source)

    entities = []
    lengths = []
    for name in LISTS:
        place = f"{source}, column {name}"
        list_entities, list_lengths = _lists(columns[name], graph.entities, place, rows)
        entities.append(list_entities)
        lengths.append(list_lengths)
    starts = np.append(0, np.cumsum(np.concatenate(lengths)))
    return CandidateLists(np.concatenate(entities), starts)


def _rows_of(listed: Ids, graph: Graph, split: Split, source: str) -> Ids:
    """The row of each triple of a split; repeated triples may share one."""
    triples = graph.split(split)
    if np.array_equal(listed, triples):
        return np.arange(len(triples))
    distinct, inverse = np.unique(np.concatenate([listed, triples]), axis=0, return_inverse=True)
    key_of_row, key_of_triple = np.split(inverse.reshape(-1), [len(listed)])
    row_of_key = np.full(len(distinct), -1)
    row_of_key[key_of_row] = np.arange(len(listed))

    missing = np.flatnonzero(row_of_key[key_of_triple] < 0)
    if len(missing):
        raise _invalid(
            source,
            f"has no candidates for {len(missing):,} of the {len(triples):,} {split} triples; the "
            f"first is {_named(graph, triples[missing[0]])}",
            advice="Add a row for each.",
        )
    repeated = np.flatnonzero(np.bincount(key_of_row)[key_of_row] > 1)
    if len(repeated):
        reason = f"has two rows for {_named(graph, listed[repeated[0]])}"
        raise _invalid(source, reason, advice="Remove one.")
    extra = np.flatnonzero(~np.isin(key_of_row, key_of_triple))
    if len(extra):
        raise _invalid(
            source,
            f"has {len(extra):,} rows that are no {split} triples of {graph.name}; the first is "
            f"row {extra[0] + 1:,}, {_named(graph, listed[extra[0]])}",
            advice="Remove them, or choose another split.",
        )
    return np.asarray(row_of_key[key_of_triple])


def _lists(column: pa.ChunkedArray, names: Vocabulary, place: str, rows: Ids) -> tuple[Any, Ids]:
    """The ids of the lists of some rows, joined, and the length of each list."""
    import pyarrow.compute as pc  # slow to import, and needed for lists only

    kind = column.type
    are_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (are_lists or pa.types.is_fixed_size_list(kind)):
        raise _invalid(f"{place},", f"should be lists of names; it holds {kind}")
    if column.null_count:
        row = column.is_null().combine_chunks().index(True).as_py() + 1
        raise _invalid(f"{place}, row {row:,},", "is missing; it should be a list")
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    row_of_value = np.repeat(np.arange(len(lengths)), lengths)
    ids = _ids(pc.list_flatten(column), names, place, lambda _: row_of_value).astype(np.int32)
    if np.array_equal(rows, np.arange(len(lengths))):
        return ids, lengths
    lists = pa.LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), ids).take(rows)
    return lists.flatten().to_numpy(), lengths[rows]


def _ids(column: pa.ChunkedArray, names: Vocabulary, place: str, rows: Callable[[int], Ids]) -> Ids:
    """The ids of names; each distinct name is looked up once.

    `rows(n)` are the rows of the n values, for errors.
    """
    encoded = column.dictionary_encode().unify_dictionaries()
    if encoded.null_count:
        row = rows(len(encoded))[encoded.is_null().index(True).as_py()] + 1
        raise _invalid(f"{place}, row {row:,},", "has no name")
    parts = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    indices = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    values = encoded.chunk(0).dictionary if parts else pa.array([], pa.string())
    are_texts = values.type in (pa.string(), pa.large_string())
    if len(values) and not (are_texts or pa.types.is_integer(values.type)):
        reason = f"should be text or whole numbers; it holds {values.type}"
        raise _invalid(f"{place},", reason)
    ids = np.empty(len(values), dtype=np.int64)
    for position, text in enumerate(values.cast(pa.string()).to_pylist()):
        try:
            ids[position] = names.id(text)
        except RequestError as error:
            row = rows(len(encoded))[int(np.argmax(indices == position))] + 1
            raise _invalid(f"{place}, row {row:,}:", str(error).rstrip(".")) from None
    return np.asarray(ids[indices])


def _named(graph: Graph, triple: Any) -> str:
    head, relation, tail = triple.tolist()
    return f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"
