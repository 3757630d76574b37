"""A knowledge graph: triples of ids in three splits with their vocabularies, in memory or saved.

A saved graph is read without what makes or inspects one, since a query of a run waits for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.parquet_files import read_parquet
from dualkg.data.triples import (
    NO_TRIPLES,
    SPLITS,
    GraphShape,
    Split,
    Triples,
    distinct_triples,
    is_among,
    note_on_repeats,
    slices,
    sorted_distinct,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary, text_of
from dualkg.errors import DataError, InvalidValue
from dualkg.files import atomic_folder, read_text, regular_file

if TYPE_CHECKING:
    from dualkg.data.inspection import Inspection

__all__ = [
    "SPLITS",
    "Graph",
    "GraphShape",
    "Split",
    "Triples",
    "distinct_triples",
    "load_saved_graph",
    "relations_with_self_loops",
    "save_graph",
    "triple_keys",
]

COLUMNS = ("head", "relation", "tail")
TEXT = (pa.string(), pa.large_string())
FORMAT = 1  # of Parquet files
MAPPED_FORMAT = 2  # .npy and .arrow files, in which large graphs were saved until November 2026
# A relation with a larger fraction of self-loops in train may have self-loops as new triples.
MIN_SELF_LOOPS = 0.01
# A relation is symmetric if train reverses its triples at least 95 % as often as it would if every
# triple had its reverse and train were a random sample of all triples.
MIN_REVERSED = 0.95
MIN_SYMMETRIC = 5  # reversed triples; fewer may be chance
# From these sizes on, training computes reciprocal triples for each batch, and filters are made for
# the queries of a split: a copy of all triples of both directions would take over 500 MiB.
LARGE_TRIPLES = 12_000_000
LARGE_NAMES = 2_000_000
# What reading a damaged folder may raise, besides OSError and ValueError.
DAMAGE = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    DataError,
    pa.ArrowException,
)


class MemoryOptions(TypedDict, total=False):
    """What all constructors from memory take.

    Given `valid` and `test`, the data are train; else they are split by `split` ("80/10/10") and
    `seed`, as a file is. `columns` are the names or numbers of head, relation and tail; `labels`
    are by name, or a file of them.
    """

    valid: Any
    test: Any
    split: str
    seed: int
    columns: Sequence[str | int] | None
    labels: Mapping[Any, str] | str | Path | None
    name: str


@dataclass(frozen=True, eq=False)
class Graph:
    """Triples `(num_triples, 3)` of head, relation and tail ids, as train, valid and test.

    Attributes:
        name: Name of the graph.
        entities: Names of the entities, by id.
        relations: Names of the relations, by id.
        train: Triples of ids to train on.
        valid: Triples of ids to choose by.
        test: Triples of ids to report on.
        source: Where the triples come from.
        fingerprint: Hash of names and triples.
        catalogued: Whether it is a graph of the catalogue, as it was published.
        notes: Sentences on what reading it found.
        rejected: Triples that a curator rejected, which are negatives in training.
        read_options: How the file was read.

    Examples:
        >>> triples = [("a", "knows", "b"), ("b", "knows", "c"), ("c", "knows", "a")]
        >>> small = kg.Graph.from_triples(triples, split="100/0/0")
        >>> small.counts["train"], small.entities[0]
        (3, 'a')
    """

    name: str
    entities: Vocabulary
    relations: Vocabulary
    train: Triples
    valid: Triples
    test: Triples
    source: str = "memory"
    fingerprint: str = ""
    catalogued: bool = False
    notes: tuple[str, ...] = ()
    # Triples that people rejected, which are negatives in training (see `data.decisions`).
    rejected: Triples = field(default_factory=lambda: NO_TRIPLES)
    # Keys of a recipe's [data] table, for `load_graph`.
    read_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_triples(
        cls,
        triples: Any,
        *,
        entities: Sequence[str] | None = None,
        relations: Sequence[str] | None = None,
        **options: Unpack[MemoryOptions],
    ) -> Graph:
        """A graph of rows (head, relation, tail): tuples, lists, dictionaries, or an array.

        An array has the shape `(num_triples, 3)`. Names are text or whole numbers. If the rows are
        ids from 0, `entities` and `relations` are their names.
        """
        from dualkg.data import conversion

        fields = conversion.make_fields(
            triples, kind="triples", entities=entities, relations=relations, **options
        )
        return cls(**fields).with_fingerprint()

    @classmethod
    def from_dataframe(cls, frame: Any, **options: Unpack[MemoryOptions]) -> Graph:
        """A graph of a table with one row per triple: pandas, polars, Arrow, or a dictionary.

        Any object with `__arrow_c_stream__` or `__dataframe__` will do.
        """
        from dualkg.data import conversion

        return cls(**conversion.graph_of_table(frame, **options)).with_fingerprint()

    @classmethod
    def from_datasets(cls, dataset: Any, **options: Unpack[MemoryOptions]) -> Graph:
        """A graph of Hugging Face `datasets`: Dataset, IterableDataset or DatasetDict."""
        from dualkg.data import conversion

        return cls(**conversion.graph_of_datasets(dataset, **options)).with_fingerprint()

    @classmethod
    def from_networkx(
        cls, graph: Any, *, relation: str | None = None, **options: Unpack[MemoryOptions]
    ) -> Graph:
        """A graph of the edges of a networkx graph.

        `relation` is the attribute of an edge that names its relation. Without it, this is a
        well-known name such as `relation`, `type` or `label`, or the key of a multigraph's edge.
        """
        from dualkg.data import conversion

        return cls(**conversion.graph_of_networkx(graph, relation, **options)).with_fingerprint()

    @classmethod
    def from_pyg(
        cls,
        data: Any,
        *,
        entities: Sequence[str] | None = None,
        relations: Sequence[str] | None = None,
        **options: Unpack[MemoryOptions],
    ) -> Graph:
        """A graph of PyTorch Geometric: a Data with `edge_index` and `edge_type`, or a HeteroData.

        `entities` and `relations` are the names of a Data's ids.
        """
        from dualkg.data import conversion

        fields = conversion.graph_of_pyg(data, entities=entities, relations=relations, **options)
        return cls(**fields).with_fingerprint()

    def with_fingerprint(self) -> Graph:
        """The graph with a checksum of its names and triples in their order, however stored."""
        checksum = hashlib.sha256()
        for vocabulary in (self.entities, self.relations):
            ends, letters = text_of(vocabulary.names)
            checksum.update(np.array([-len(vocabulary)], "<i8").data)
            for part in slices(len(vocabulary)):
                checksum.update(np.diff(ends[part.start : part.stop + 1]).astype("<i8").data)
            checksum.update(letters[ends[0] : ends[-1]].data)
        for split in SPLITS:
            triples = np.ascontiguousarray(self.split(split), dtype="<i4")
            checksum.update(len(triples).to_bytes(8, "little"))
            checksum.update(triples.data)
        if len(self.rejected):
            checksum.update(np.ascontiguousarray(self.rejected, dtype="<i4").data)
        return replace(self, fingerprint=checksum.hexdigest())

    @property
    def is_large(self) -> bool:
        """Whether the graph is so large that its triples should not be copied as a whole."""
        num_triples = sum(len(self.split(split)) for split in SPLITS)
        return num_triples > LARGE_TRIPLES or len(self.entities) > LARGE_NAMES

    @property
    def shape(self) -> GraphShape:
        """The numbers of entities and relations, from which models are built."""
        return GraphShape(len(self.entities), len(self.relations))

    def split(self, name: str) -> Triples:
        """The triples of train, valid or test, `(num_triples, 3)`."""
        if name not in SPLITS:
            raise InvalidValue("split", expected="train, valid or test", found=name)
        triples: Triples = getattr(self, name)
        return triples

    @cached_property
    def symmetric_relations(self) -> npt.NDArray[np.bool_]:
        """Which relations are symmetric by train, `(num_relations,)`.

        The share of triples whose reverse train has, too, is compared with the share of all triples
        that train has.
        """
        triples = self.train[self.train[:, 0] != self.train[:, 2]]
        reversed_triples = np.ascontiguousarray(triples[:, ::-1])
        # Past 63 bits, keys are comparable only among triples that are encoded together.
        keys = triple_keys(np.concatenate([triples, reversed_triples]), self.shape)
        first, second = np.split(keys, 2)
        is_reversed = is_among(first, sorted_distinct(second))

        num_relations = len(self.relations)
        num_triples = np.bincount(triples[:, 1], minlength=num_relations)
        num_reversed = np.bincount(triples[is_reversed, 1], minlength=num_relations)
        num_known = sum(len(self.split(split)) for split in SPLITS)
        share = MIN_REVERSED * len(self.train) / max(1, num_known)
        is_symmetric: npt.NDArray[np.bool_] = num_reversed >= np.maximum(
            MIN_SYMMETRIC, share * num_triples
        )
        return is_symmetric

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of entities, relations and triples of each split, as in the catalogue."""
        return {name: len(getattr(self, name)) for name in ("entities", "relations", *SPLITS)}

    def inspect(self) -> Inspection:
        """Degrees, cardinalities, components, unseen entities, redundant relations and leakage."""
        from dualkg.data.inspection import Inspection

        splits = {str(name): self.split(name) for name in SPLITS}
        return Inspection(self.name, self.entities, self.relations, splits, self.notes)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number:,} {name}" for name, number in self.counts.items())
        return f"Graph({self.name!r}: {counts})"


def relations_with_self_loops(graph: Graph) -> frozenset[int]:
    """The relations that train has self-loops of, more often than by mistake.

    For other relations an entity is no candidate for queries about itself, though models score it
    high: for a symmetric relation nothing scores higher.
    """
    relations = graph.train[:, 1]
    is_loop = graph.train[:, 0] == graph.train[:, 2]
    num_relations = graph.shape.num_relations
    num_triples = np.bincount(relations, minlength=num_relations)
    num_loops = np.bincount(relations[is_loop], minlength=num_relations)
    has_loops = (num_loops > 0) & (num_loops >= MIN_SELF_LOOPS * num_triples)
    return frozenset(np.flatnonzero(has_loops).tolist())


# -- saved graphs ------------------------------------------------------------


def save_graph(graph: Graph, folder: Path) -> None:
    """Write a graph to a folder, which appears complete or not at all."""
    with atomic_folder(folder, existing="keep") as fresh:
        _save_vocabulary(graph.entities, fresh / "entities.parquet")
        _save_vocabulary(graph.relations, fresh / "relations.parquet")
        for split in SPLITS:
            _save_triples(graph.split(split), fresh / f"{split}.parquet")
        if len(graph.rejected):
            _save_triples(graph.rejected, fresh / "rejected.parquet")

        about = {
            "format": FORMAT,
            "name": graph.name,
            "source": graph.source,
            "fingerprint": graph.fingerprint,
            "catalogued": graph.catalogued,
            "notes": graph.notes,
        }
        text = json.dumps(about, indent=1, ensure_ascii=False)
        (fresh / "graph.json").write_text(text, encoding="utf-8")


def load_saved_graph(folder: Path) -> Graph:
    """Read a graph that `save_graph` wrote.

    Raises OSError or ValueError if it is missing, damaged or of another format.
    """
    try:
        about = json.loads(read_text(folder / "graph.json"))
        saved_format = about.pop("format")
        if saved_format not in (FORMAT, MAPPED_FORMAT):
            raise ValueError(
                f"{folder} has format {saved_format}; this version reads {FORMAT} and "
                f"{MAPPED_FORMAT}"
            )
        for key in ("name", "source", "fingerprint"):
            _check_type(about[key], str)
        notes = tuple(_load_notes(about.pop("notes")))

        mapped = saved_format == MAPPED_FORMAT
        entities = _load_vocabulary(folder / "entities", "entity", mapped=mapped)
        relations = _load_vocabulary(folder / "relations", "relation", mapped=mapped)
        shape = GraphShape(len(entities), len(relations))
        splits: dict[str, Any] = {
            split: _load_triples(folder / split, shape, mapped=mapped) for split in SPLITS
        }
        suffix = ".npy" if mapped else ".parquet"
        if (folder / "rejected").with_suffix(suffix).exists():
            splits["rejected"] = _load_triples(folder / "rejected", shape, mapped=mapped)
        pa.default_memory_pool().release_unused()  # which may be more than a small graph takes
        return Graph(entities=entities, relations=relations, notes=notes, **splits, **about)
    except DAMAGE as error:
        raise ValueError(f"{folder} is damaged ({error})") from error


def _load_notes(saved: Any) -> Iterator[str]:
    """The notes of a graph; until November 2026 they had counts, and templates with options."""
    if isinstance(saved, list):
        yield from (_check_type(text, str) for text in saved)
        return
    for split, number in saved["duplicates"].items():
        if _check_type(number, int):
            yield note_on_repeats(number, f"more than once in {split}")
    for pair, number in saved["overlaps"].items():
        if _check_type(number, int):
            yield note_on_repeats(number, f"in both {pair}")
    for note in saved["remarks"]:
        if isinstance(note, str):
            yield note
        else:
            # JSON has no tuples, and columns are given as a tuple.
            options = {
                name: f"`{name}={tuple(value) if isinstance(value, list) else value!r}`"
                for name, value in note["options"].items()
            }
            yield _check_type(note["template"], str).format(**options)


def _check_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError("graph.json has other values than names, sentences and counts")
    return value


def _save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    columns = {"name": vocabulary.names}
    if vocabulary.labels is not None:
        columns["label"] = vocabulary.labels
    _write_parquet(columns, path, use_dictionary=False)


def _save_triples(triples: Triples, path: Path) -> None:
    columns = {name: pa.array(triples[:, index]) for index, name in enumerate(COLUMNS)}
    _write_parquet(columns, path, use_dictionary=True)


def _write_parquet(columns: dict[str, pa.Array], path: Path, *, use_dictionary: bool) -> None:
    pq.write_table(
        pa.table(columns),
        path,
        compression="zstd",
        use_dictionary=use_dictionary,
        write_page_checksum=True,
    )


def _load_vocabulary(path: Path, kind: str, *, mapped: bool) -> Vocabulary:
    """The names and labels of a saved graph, each text checked."""
    if mapped:
        path = path.with_suffix(".arrow")
        table = pa.ipc.open_file(pa.memory_map(str(regular_file(path)))).read_all()
    else:
        path = path.with_suffix(".parquet")
        table = read_parquet(path)

    columns = {}
    for name in table.column_names:
        chunks = table[name].chunks
        # Combining a single chunk would copy it.
        columns[name] = chunks[0] if len(chunks) == 1 else table[name].combine_chunks()
    are_texts = all(column.type in TEXT for column in columns.values())
    if not are_texts or columns["name"].null_count:
        raise ValueError(f"{path} is damaged: it should hold names")
    for column in columns.values():
        column.validate(full=True)
    return Vocabulary(columns["name"], columns.get("label"), kind=kind)


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """The numbers of a column; `to_numpy` would import pandas where it is installed."""
    numbers: npt.NDArray[Any] = np.from_dlpack(column.combine_chunks())
    return numbers


def _load_triples(path: Path, shape: GraphShape, *, mapped: bool) -> Triples:
    """The triples of a saved graph, each id checked."""
    triples: Triples
    if mapped:
        path = path.with_suffix(".npy")
        triples = np.load(regular_file(path), allow_pickle=False)
    else:
        path = path.with_suffix(".parquet")
        table = read_parquet(path)
        triples = np.stack([_numbers(table[name]) for name in COLUMNS], axis=1)
    if triples.dtype != np.int32 or triples.ndim != 2 or triples.shape[1] != len(COLUMNS):
        raise ValueError(f"{path} is damaged: it should hold triples")

    sizes = (shape.num_entities, shape.num_relations, shape.num_entities)
    for part in slices(len(triples)):
        for name, ids, size in zip(COLUMNS, triples[part].T, sizes, strict=True):
            if ids.min() < 0 or ids.max() >= size:
                expected = f"its {name}s should be ids from 0 to {size - 1:,}"
                raise ValueError(f"{path} is damaged: {expected}")
    return triples
