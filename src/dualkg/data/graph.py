"""A knowledge graph: triples of ids in three splits with their vocabularies, repeated triples, and saved graphs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data.inspection import Inspection
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.files import atomic_folder

Triples = npt.NDArray[np.int32]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
COLUMNS = ("head", "relation", "tail")
FORMAT = 1  # increased when folders of earlier versions cannot be read any more
MIN_SELF_LOOPS = 0.01  # the least fraction of self-loops in train by which a relation may have more of them


class GraphShape(NamedTuple):
    """The sizes of a graph that determine the shape of a model."""

    num_entities: int
    num_relations: int


@dataclass(frozen=True)
class Notes:
    """Repeated triples and remarks of the readers."""

    duplicates: dict[str, int] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """One sentence for each irregularity; none for a clean graph."""
        counts = [(n, f"more than once in {split}") for split, n in self.duplicates.items()]
        counts += [(n, f"in both {pair}") for pair, n in self.overlaps.items()]
        found = [f"{n:,} {'triple occurs' if n == 1 else 'triples occur'} {where}." for n, where in counts if n]
        return found + list(self.remarks)


@dataclass(frozen=True, eq=False)
class Graph:
    """Triples `(num_triples, 3)` of head, relation and tail ids, as train, valid and test."""

    name: str
    entities: Vocabulary
    relations: Vocabulary
    train: Triples
    valid: Triples
    test: Triples
    source: str = "memory"
    fingerprint: str = ""
    catalogued: bool = False
    notes: Notes = Notes()
    read_options: dict[str, Any] = field(default_factory=dict)
    """The keys of a recipe's [data] table that `load_graph` was called with."""

    @property
    def shape(self) -> GraphShape:
        return GraphShape(len(self.entities), len(self.relations))

    def split(self, name: str) -> Triples:
        if name not in SPLITS:
            raise RequestError(f"The splits of a graph are {', '.join(SPLITS)}; '{name}' was given.")
        triples: Triples = getattr(self, name)
        return triples

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of entities, relations and triples of each split, as in the catalogue."""
        return {
            "entities": len(self.entities),
            "relations": len(self.relations),
            **{name: len(self.split(name)) for name in SPLITS},
        }

    def inspect(self) -> Inspection:
        """Degrees, cardinalities, components, unseen entities, redundant relations, and the leakage they cause."""
        splits: dict[str, Triples] = {name: self.split(name) for name in SPLITS}
        return Inspection(self.name, self.entities, self.relations, splits, tuple(self.notes.sentences()))

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.counts.items())
        return f"Graph({self.name!r}: {counts})"


def triple_keys(triples: Triples, shape: GraphShape) -> npt.NDArray[np.int64]:
    """One number per triple, ordered like (head, relation, tail)."""
    num_entities, num_relations = shape
    if not _fits(shape):
        _, keys = np.unique(triples, axis=0, return_inverse=True)
        return keys.reshape(-1).astype(np.int64)
    keys = triples[:, 0].astype(np.int64)
    keys *= num_relations
    keys += triples[:, 1]
    keys *= num_entities
    keys += triples[:, 2]
    return keys


def _fits(shape: GraphShape) -> bool:
    """Whether all possible triples can be numbered by 63 bits."""
    return shape.num_entities**2 * shape.num_relations < 2**63


def distinct_triples(triples: Triples, shape: GraphShape) -> Triples:
    """The distinct triples, sorted by (head, relation, tail)."""
    if not _fits(shape):
        return np.unique(triples, axis=0)
    keys = sorted_distinct(triple_keys(triples, shape))
    distinct = np.empty((len(keys), 3), dtype=np.int32)
    keys, distinct[:, 2] = np.divmod(keys, max(shape.num_entities, 1))
    distinct[:, 0], distinct[:, 1] = np.divmod(keys, max(shape.num_relations, 1))
    return distinct


def count_repeats(splits: dict[str, Triples], shape: GraphShape, remarks: Iterable[str] = ()) -> Notes:
    """Count the triples that occur twice in one split, or in two splits."""
    joined = np.concatenate(list(splits.values()))
    ends = np.cumsum([len(triples) for triples in splits.values()])[:-1]
    keys = dict(zip(splits, np.split(triple_keys(joined, shape), ends), strict=True))
    distinct = {name: sorted_distinct(found) for name, found in keys.items()}
    duplicates = {name: len(keys[name]) - len(distinct[name]) for name in splits}
    overlaps = {
        f"{one} and {other}": _num_common(distinct[one], distinct[other]) for one, other in combinations(splits, 2)
    }
    return Notes(duplicates, overlaps, tuple(remarks))


def sorted_distinct(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The distinct keys, sorted; several times faster than `np.unique`, which hashes."""
    keys = np.sort(keys)
    fresh = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return keys[fresh]


def _num_common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    if not len(one):
        return 0
    position = np.minimum(np.searchsorted(one, other), len(one) - 1)
    return int((one[position] == other).sum())


def relations_with_self_loops(graph: Graph) -> frozenset[int]:
    """The relations that train has self-loops of, more often than by mistake.

    For other relations an entity is no candidate for queries about itself, though models score it high: for a symmetric
    relation nothing scores higher.
    """
    relations, is_loop = graph.train[:, 1], graph.train[:, 0] == graph.train[:, 2]
    totals, loops = (np.bincount(ids, minlength=graph.shape.num_relations) for ids in (relations, relations[is_loop]))
    return frozenset(np.flatnonzero((loops > 0) & (loops >= MIN_SELF_LOOPS * totals)).tolist())


# -- saved graphs -------------------------------------------------------------------------------------------


def save_graph(graph: Graph, folder: Path) -> None:
    """Write a graph to a folder, which appears complete or not at all."""
    with atomic_folder(folder, existing="keep") as fresh:
        for vocabulary, name in ((graph.entities, "entities"), (graph.relations, "relations")):
            columns = {"name": vocabulary.names}
            if vocabulary.labels is not None:
                columns["label"] = vocabulary.labels
            _write(columns, fresh / f"{name}.parquet", use_dictionary=False)
        for split in SPLITS:
            columns = {name: pa.array(graph.split(split)[:, i]) for i, name in enumerate(COLUMNS)}
            _write(columns, fresh / f"{split}.parquet", use_dictionary=True)
        plain = {name: getattr(graph, name) for name in ("name", "source", "fingerprint", "catalogued")}
        about = {"format": FORMAT, **plain, "notes": asdict(graph.notes)}
        (fresh / "graph.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


def load_saved_graph(folder: Path) -> Graph:
    """Read a graph that `save_graph` wrote; OSError or ValueError if it is missing, damaged or of another format."""
    try:
        about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        if (saved := about.pop("format")) != FORMAT:
            raise ValueError(f"{folder} has format {saved}; this version reads {FORMAT}")
        notes = about.pop("notes")
        about["notes"] = Notes(notes["duplicates"], notes["overlaps"], tuple(notes["remarks"]))
        with _system_memory_pool():
            about["entities"] = _load_vocabulary(folder / "entities.parquet", "entity")
            about["relations"] = _load_vocabulary(folder / "relations.parquet", "relation")
            about |= {split: _load_triples(folder / f"{split}.parquet") for split in SPLITS}
        return Graph(**about)
    except (KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"{folder} is damaged ({error})") from error


@contextmanager
def _system_memory_pool() -> Iterator[None]:
    """Return memory to the system after reading: Arrow's default pool keeps more than a small graph takes."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _write(columns: dict[str, pa.Array], path: Path, *, use_dictionary: bool) -> None:
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=use_dictionary, write_page_checksum=True)


def _read_parquet(path: Path) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:  # `read_table` would load another library
        return file.read()


def _load_vocabulary(path: Path, kind: str) -> Vocabulary:
    table = _read_parquet(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return Vocabulary(columns["name"], columns.get("label"), kind=kind)


def _load_triples(path: Path) -> Triples:
    table = _read_parquet(path)
    triples = np.empty((table.num_rows, 3), dtype=np.int32)
    for i, name in enumerate(COLUMNS):
        triples[:, i] = table[name].to_numpy()
    return triples
