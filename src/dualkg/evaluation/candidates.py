"""Restricted candidates of an evaluation: domains and ranges of relations, and a given list for
each query.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualkg.data.archives import FREE_SIZE, MAX_RATIO, read_parquet
from dualkg.data.graph import Graph, Split
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError

Ids = npt.NDArray[np.int64]
PARTS = ("head", "relation", "tail")
LISTS = {
    "tail_candidates": "tail_neg",
    "head_candidates": "head_neg",
}  # with the names of the Open Graph Benchmark
ADVICE = "Rows have head, relation, tail, tail_candidates and head_candidates."
MAX_BLOCK = 4096  # queries


@dataclass(frozen=True, eq=False)
class TypeConstraint:
    """The entities that train has as tail of each relation r, and as head, listed as r +
    num_relations.

    Those of relation r are `entities[offsets[r]:offsets[r + 1]]`. A relation that train does not
    have allows all.
    """

    num_entities: int
    entities: Tensor
    offsets: list[int]

    @classmethod
    def of(cls, graph: Graph, device: torch.device | str = "cpu") -> TypeConstraint:
        (num_entities, num_relations), train = graph.shape, graph.train.astype(np.int64)
        relations = np.concatenate([train[:, 1], train[:, 1] + num_relations])
        keys = np.unique(relations * num_entities + np.concatenate([train[:, 2], train[:, 0]]))
        offsets = np.searchsorted(keys, np.arange(2 * num_relations + 1) * num_entities)
        return cls(num_entities, torch.from_numpy(keys % num_entities).to(device), offsets.tolist())

    def allowed(self, relations: Tensor, *, backward: bool) -> Tensor:
        """Whether each entity is a candidate, for the queries of these relations, `(batch,
        num_entities)`.
        """
        distinct, rows = torch.unique(relations, return_inverse=True)
        table = torch.zeros(
            len(distinct), self.num_entities, dtype=torch.bool, device=relations.device
        )
        for row, relation in enumerate(distinct.tolist()):
            relation += backward * (len(self.offsets) // 2)
            first, last = self.offsets[relation : relation + 2]
            table[row, self.entities[first:last] if first < last else slice(None)] = True
        return table[rows]


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """A list of entities for each query of a split: tail queries in the order of its triples, then
    head queries.

    The list of query q is `entities[starts[q]:starts[q + 1]]`. It may have the answer or not.
    """

    entities: npt.NDArray[np.int32]
    starts: Ids

    @property
    def num_queries(self) -> int:
        return len(self.starts) - 1

    def blocks(
        self, first: int, last: int, max_candidates: int
    ) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
        """The first and the last query of each block and the lists between, filled with −1,
        `(num_queries, longest)`.

        A block has at most `max_candidates` numbers, or one query.
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
            return _from_table(
                _table_of_arrays(candidates, "The mapping"), graph, split, source="The mapping"
            )
        if not isinstance(candidates, (str, Path)):
            kind = type(candidates).__name__
            raise RequestError(
                f"Candidates are a file of lists, or a mapping of its columns; {kind} was given."
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
        raise RequestError(
            f"Candidate lists are read from {', '.join(readers)}; '{path.name}' is none of these."
        )
    if not path.is_file():
        raise RequestError(f"{path} is not a file; candidate lists were expected. {ADVICE}")
    return _from_table(readers[path.suffix.lower()](path), graph, split, source=str(path))


def _read_parquet(path: Path) -> pa.Table:
    try:
        return read_parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from None


def _read_json_lines(path: Path) -> pa.Table:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            raise DataError(f"{path}, line {number:,} is empty. Remove it.")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number:,} is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number:,} should be an object; it is {type(row).__name__}. {ADVICE}"
            )
        rows.append(
            {
                key: list(map(str, value)) if isinstance(value, list) else value
                for key, value in row.items()
            }
        )
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    return _table_of_arrays(columns, str(path))


def _read_npz(path: Path) -> pa.Table:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
        if size > (most := max(FREE_SIZE, MAX_RATIO * path.stat().st_size)):
            raise ValueError(
                f"they expand to {size / 2**20:,.0f} MiB, and {most / 2**20:,.0f} are allowed"
            )
        with np.load(path, allow_pickle=False) as arrays:
            return _table_of_arrays(dict(arrays), str(path))
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read as arrays: {error}. Save them with numpy.savez."
        ) from None


def _table_of_arrays(columns: Mapping[str, Any], source: str) -> pa.Table:
    """Columns of names `(num_triples,)` and of lists, which may be arrays `(num_triples, n)`;
    others are left out.
    """
    arrays = {}
    for name in {*PARTS, *LISTS, *LISTS.values()} & columns.keys():
        values = np.asarray(columns[name]) if hasattr(columns[name], "__array__") else columns[name]
        if isinstance(values, np.ndarray) and values.ndim == 2:
            kind = (
                pa.large_string() if values.dtype.kind == "U" else None
            )  # shorter offsets end at 2 GiB
            arrays[name] = pa.FixedSizeListArray.from_arrays(
                pa.array(values.reshape(-1), kind), values.shape[1]
            )
            continue
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            kind = "names" if name in PARTS else "lists of names"
            raise DataError(f"{source}: {name} should be {kind}; {error}.") from None
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array):,}" for name, array in sorted(arrays.items()))
        raise DataError(f"{source} should have as many rows in each column; it has {lengths}.")
    return pa.table(arrays)


def _from_table(table: pa.Table, graph: Graph, split: Split, *, source: str) -> CandidateLists:
    """Match the rows to the triples of a split."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    columns |= {
        name: columns[ogb] for name, ogb in LISTS.items() if name not in columns and ogb in columns
    }
    for name in (*PARTS, *LISTS):
        if name not in columns:
            listed = ", ".join(table.column_names) or "none"
            raise DataError(f"{source} has no column {name}; its columns are {listed}. {ADVICE}")
    vocabularies = (graph.entities, graph.relations, graph.entities)
    ids = [
        _ids(columns[part], names, part, source, np.arange)
        for part, names in zip(PARTS, vocabularies, strict=True)
    ]
    rows = _rows_of(np.stack(ids, axis=1), graph, split, source)
    lists = [_lists(columns[name], graph.entities, name, source, rows) for name in LISTS]
    starts = np.append(0, np.cumsum(np.concatenate([lengths for _, lengths in lists])))
    return CandidateLists(np.concatenate([entities for entities, _ in lists]), starts)


def _rows_of(found: Ids, graph: Graph, split: Split, source: str) -> Ids:
    """The row of each triple of a split; repeated triples may share one."""
    triples = graph.split(split)
    if np.array_equal(found, triples):
        return np.arange(len(triples))
    distinct, inverse = np.unique(np.concatenate([found, triples]), axis=0, return_inverse=True)
    has, wanted = np.split(inverse.reshape(-1), [len(found)])
    rows = np.full(len(distinct), -1)
    rows[has] = np.arange(len(found))
    if len(missing := np.flatnonzero(rows[wanted] < 0)):
        raise DataError(
            f"{source} has no candidates for {len(missing):,} of the {len(triples):,} {split} "
            f"triples; the first is {_named(graph, triples[missing[0]])}. Add a row for each."
        )
    if len(np.unique(has)) < len(has):
        repeated = found[np.flatnonzero(np.bincount(has)[has] > 1)[0]]
        raise DataError(f"{source} has two rows for {_named(graph, repeated)}. Remove one.")
    if len(extra := np.flatnonzero(~np.isin(has, wanted))):
        raise DataError(
            f"{source}: {len(extra):,} rows are no {split} triples of {graph.name}; the first is "
            f"row {extra[0] + 1:,}, {_named(graph, found[extra[0]])}. Remove them, or choose "
            "another split."
        )
    return np.asarray(rows[wanted])


def _lists(
    column: pa.ChunkedArray, names: Vocabulary, name: str, source: str, rows: Ids
) -> tuple[Any, Ids]:
    """The ids of the lists of some rows, joined, and the length of each list."""
    import pyarrow.compute as pc  # slow to import, and needed for lists only

    kind = column.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        raise DataError(f"{source}: {name} should be lists of names; it holds {kind}.")
    if column.null_count:
        row = column.is_null().combine_chunks().index(True).as_py() + 1
        raise DataError(f"{source}, row {row:,}: {name} is missing; it should be a list.")
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    ids = _ids(pc.list_flatten(column), names, name, source, lambda _: row_of).astype(np.int32)
    if np.array_equal(rows, np.arange(len(lengths))):
        return ids, lengths
    lists = pa.LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), ids).take(rows)
    return lists.flatten().to_numpy(), lengths[rows]


def _ids(column: pa.ChunkedArray, names: Vocabulary, name: str, source: str, rows: Any) -> Ids:
    """The ids of names; each distinct one is looked up once. `rows(n)` are the rows of the values,
    for errors.
    """
    encoded = column.dictionary_encode().unify_dictionaries()
    if encoded.null_count:
        row = rows(len(encoded))[encoded.is_null().index(True).as_py()] + 1
        raise DataError(f"{source}, row {row:,}: a name of {name} is missing.")
    parts = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    indices = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    values = encoded.chunk(0).dictionary if parts else pa.array([], pa.string())
    if len(values) and not (
        pa.types.is_integer(values.type) or values.type in (pa.string(), pa.large_string())
    ):
        raise DataError(
            f"{source}: {name} should be text or whole numbers; it holds {values.type}."
        )
    ids = np.empty(len(values), dtype=np.int64)
    for position, text in enumerate(values.cast(pa.string()).to_pylist()):
        try:
            ids[position] = names.id(text)
        except RequestError as error:
            row = rows(len(encoded))[int(np.argmax(indices == position))] + 1
            raise DataError(f"{source}, row {row:,}, {name}: {error}") from None
    return np.asarray(ids[indices])


def _named(graph: Graph, triple: Any) -> str:
    head, relation, tail = triple.tolist()
    return f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"
