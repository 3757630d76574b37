"""A knowledge graph: triples of ids in three splits with their vocabularies, from memory or
saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data import memory
from dualkg.data.archives import read_parquet
from dualkg.data.inspection import Inspection
from dualkg.data.spill import is_mapped, release, slices, text_of
from dualkg.data.triples import (
    SPLITS,
    GraphShape,
    Notes,
    Split,
    Triples,
    count_repeats,
    distinct_triples,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError
from dualkg.files import atomic_folder

__all__ = [
    "SPLITS",
    "GraphShape",
    "Notes",
    "Split",
    "Triples",
    "count_repeats",
    "distinct_triples",
    "triple_keys",
]
__all__ += ["Graph", "load_saved_graph", "relations_with_self_loops", "save_graph"]

COLUMNS = ("head", "relation", "tail")
TEXT = (pa.string(), pa.large_string())
FORMAT = 1
MAPPED_FORMAT = 2  # of Parquet files, and of files that are memory-mapped
MIN_SELF_LOOPS = (
    0.01  # the least fraction of self-loops in train by which a relation may have more of them
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

    The triples of a graph larger than memory are memory-mapped files, and so are its names.
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
    notes: Notes = field(default_factory=Notes)
    read_options: dict[str, Any] = field(
        default_factory=dict
    )  # keys of a recipe's [data] table, for `load_graph`

    @classmethod
    def from_triples(
        cls,
        triples: Any,
        *,
        entities: Sequence[str] | None = None,
        relations: Sequence[str] | None = None,
        **options: Unpack[MemoryOptions],
    ) -> Graph:
        """A graph of rows (head, relation, tail): tuples, lists, dictionaries, or an array
        `(num_triples, 3)`.

        Names are text or whole numbers. If the rows are ids from 0, `entities` and `relations` are
        their names.
        """
        return cls(
            **memory.make_fields(
                triples, kind="triples", entities=entities, relations=relations, **options
            )
        ).with_fingerprint()

    @classmethod
    def from_dataframe(cls, frame: Any, **options: Unpack[MemoryOptions]) -> Graph:
        """A graph of a table with one row per triple: pandas, polars, Arrow, or a dictionary of
        columns.

        Any object with `__arrow_c_stream__` or `__dataframe__` will do.
        """
        return cls(**memory.graph_of_table(frame, **options)).with_fingerprint()

    @classmethod
    def from_datasets(cls, dataset: Any, **options: Unpack[MemoryOptions]) -> Graph:
        """A graph of rows of Hugging Face `datasets`: a Dataset, an IterableDataset or a
        DatasetDict with splits.
        """
        return cls(**memory.graph_of_datasets(dataset, **options)).with_fingerprint()

    @classmethod
    def from_networkx(
        cls, graph: Any, *, relation: str | None = None, **options: Unpack[MemoryOptions]
    ) -> Graph:
        """A graph of the edges of a networkx graph; `relation` is the attribute of an edge that
        names its relation.

        Without it, a well-known name such as `relation`, `type` or `label`, or the key of a
        multigraph's edge.
        """
        return cls(**memory.graph_of_networkx(graph, relation, **options)).with_fingerprint()

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
        return cls(
            **memory.graph_of_pyg(data, entities=entities, relations=relations, **options)
        ).with_fingerprint()

    def with_fingerprint(self) -> Graph:
        """The graph with a checksum of its names and triples, in their order, however they were
        stored.
        """
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
            release(triples)
        return replace(self, fingerprint=checksum.hexdigest())

    @property
    def is_mapped(self) -> bool:
        """Whether the graph is larger than memory: then its triples should not be copied."""
        return is_mapped(self.train)

    @property
    def shape(self) -> GraphShape:
        return GraphShape(len(self.entities), len(self.relations))

    def split(self, name: str) -> Triples:
        if name not in SPLITS:
            raise RequestError(
                f"The splits of a graph are {', '.join(SPLITS)}; '{name}' was given."
            )
        triples: Triples = getattr(self, name)
        return triples

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of entities, relations and triples of each split, as in the catalogue."""
        return {name: len(getattr(self, name)) for name in ("entities", "relations", *SPLITS)}

    def inspect(self) -> Inspection:
        """Degrees, cardinalities, components, unseen entities, redundant relations, and the leakage
        they cause.
        """
        splits = {str(name): self.split(name) for name in SPLITS}
        return Inspection(
            self.name, self.entities, self.relations, splits, tuple(self.notes.sentences())
        )

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.counts.items())
        return f"Graph({self.name!r}: {counts})"


def relations_with_self_loops(graph: Graph) -> frozenset[int]:
    """The relations that train has self-loops of, more often than by mistake.

    For other relations an entity is no candidate for queries about itself, though models score it
    high: for a symmetric relation nothing scores higher.
    """
    relations = graph.train[:, 1]
    is_loop = graph.train[:, 0] == graph.train[:, 2]
    totals, loops = (
        np.bincount(ids, minlength=graph.shape.num_relations)
        for ids in (relations, relations[is_loop])
    )
    return frozenset(np.flatnonzero((loops > 0) & (loops >= MIN_SELF_LOOPS * totals)).tolist())


# -- saved graphs ------------------------------------------------------------


def save_graph(graph: Graph, folder: Path) -> None:
    """Write a graph to a folder, which appears complete or not at all."""
    with atomic_folder(folder, existing="keep") as fresh:
        for vocabulary, name in ((graph.entities, "entities"), (graph.relations, "relations")):
            columns = {"name": vocabulary.names}
            if vocabulary.labels is not None:
                columns["label"] = vocabulary.labels
            if graph.is_mapped:
                _write_mapped(columns, fresh / f"{name}.arrow")
            else:
                _write(columns, fresh / f"{name}.parquet", use_dictionary=False)
        for split in SPLITS:
            triples = graph.split(split)
            if graph.is_mapped:
                np.save(fresh / f"{split}.npy", triples, allow_pickle=False)
                release(triples)
            else:
                columns = {name: pa.array(triples[:, i]) for i, name in enumerate(COLUMNS)}
                _write(columns, fresh / f"{split}.parquet", use_dictionary=True)
        plain = {
            name: getattr(graph, name) for name in ("name", "source", "fingerprint", "catalogued")
        }
        about = {
            "format": MAPPED_FORMAT if graph.is_mapped else FORMAT,
            **plain,
            "notes": asdict(graph.notes),
        }
        (fresh / "graph.json").write_text(
            json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8"
        )


def load_saved_graph(folder: Path) -> Graph:
    """Read a graph that `save_graph` wrote; OSError or ValueError if it is missing, damaged or of
    another format.
    """
    try:
        about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        if (saved := about.pop("format")) not in (FORMAT, MAPPED_FORMAT):
            raise ValueError(
                f"{folder} has format {saved}; this version reads {FORMAT} and {MAPPED_FORMAT}"
            )
        notes = about.pop("notes")
        texts = [*(about[key] for key in ("name", "source", "fingerprint")), *notes["remarks"]]
        counts = [*notes["duplicates"].values(), *notes["overlaps"].values()]
        if any(not isinstance(one, str) for one in texts) or any(
            not isinstance(one, int) for one in counts
        ):
            raise TypeError("graph.json has other values than names, sentences and counts")
        about["notes"] = Notes(notes["duplicates"], notes["overlaps"], tuple(notes["remarks"]))
        suffixes = ("parquet", "parquet") if saved == FORMAT else ("arrow", "npy")
        about["entities"] = _load_vocabulary(folder / f"entities.{suffixes[0]}", "entity")
        about["relations"] = _load_vocabulary(folder / f"relations.{suffixes[0]}", "relation")
        shape = len(about["entities"]), len(about["relations"]), len(about["entities"])
        about |= {
            split: _load_triples(folder / f"{split}.{suffixes[1]}", shape) for split in SPLITS
        }
        pa.default_memory_pool().release_unused()  # which may be more than a small graph takes
        return Graph(**about)
    except (
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        DataError,
        pa.ArrowException,
    ) as error:
        raise ValueError(f"{folder} is damaged ({error})") from error


def _write(columns: dict[str, pa.Array], path: Path, *, use_dictionary: bool) -> None:
    pq.write_table(
        pa.table(columns),
        path,
        compression="zstd",
        use_dictionary=use_dictionary,
        write_page_checksum=True,
    )


def _write_mapped(columns: dict[str, pa.Array], path: Path) -> None:
    """Write one batch of large strings, which is mapped as it is; labels that are missing are
    empty.
    """
    filled = {
        name: names.fill_null("") if names.null_count else names for name, names in columns.items()
    }
    batch = pa.record_batch({name: names.cast(pa.large_string()) for name, names in filled.items()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _load_vocabulary(path: Path, kind: str) -> Vocabulary:
    mapped = path.suffix == ".arrow"
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all() if mapped else read_parquet(path)
    chunks = {name: table[name].chunks for name in table.column_names}
    columns = {
        name: found[0] if len(found) == 1 else table[name].combine_chunks()
        for name, found in chunks.items()
    }
    if any(column.type not in TEXT for column in columns.values()) or columns["name"].null_count:
        raise ValueError(f"{path} is damaged: it should hold names")
    for column in columns.values():
        column.validate(full=True)
    return Vocabulary(columns["name"], columns.get("label"), kind=kind)


def _load_triples(path: Path, shape: tuple[int, int, int]) -> Triples:
    """Triples of a saved graph, each id checked."""
    if path.suffix == ".npy":
        triples: Triples = np.load(
            path, mmap_mode="c", allow_pickle=False
        )  # PyTorch takes no read-only arrays
    else:
        table = read_parquet(path)
        triples = np.stack([table[name].to_numpy() for name in COLUMNS], axis=1)
    if triples.dtype != np.int32 or triples.ndim != 2 or triples.shape[1] != len(COLUMNS):
        raise ValueError(f"{path} is damaged: it should hold triples")
    for part in slices(len(triples)):
        for name, ids, size in zip(COLUMNS, triples[part].T, shape, strict=True):
            if ids.min() < 0 or ids.max() >= size:
                raise ValueError(
                    f"{path} is damaged: its {name}s should be ids from 0 to {size - 1:,}"
                )
    release(triples)
    return triples
