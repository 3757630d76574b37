"""From a name or a path to a graph, through a cache keyed by content."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualkg.data import catalogue
from dualkg.data.archives import Source, find_sources
from dualkg.data.encoding import ReadTriples, read_triples
from dualkg.data.graph import SPLITS, Graph, GraphShape, Notes, Triples, count_repeats, sorted_distinct, triple_keys
from dualkg.data.locations import BUNDLED, Location, locate
from dualkg.data.readers import Columns, check_columns
from dualkg.data.splits import split_triples
from dualkg.data.text import read_labels
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError
from dualkg.files import atomic_folder

COLUMNS = ("head", "relation", "tail")
FORMAT = 1  # raised when a folder written before cannot be read any more


def save_graph(graph: Graph, folder: Path) -> None:
    """Write a graph; the folder appears whole or not at all."""
    with atomic_folder(folder, existing="keep") as fresh:
        for vocabulary, name in ((graph.entities, "entities"), (graph.relations, "relations")):
            columns = {"name": vocabulary.names}
            if vocabulary.labels is not None:
                columns["label"] = vocabulary.labels
            _write(columns, fresh / f"{name}.parquet", use_dictionary=False)
        for split in SPLITS:
            columns = {name: pa.array(graph.split(split)[:, i]) for i, name in enumerate(COLUMNS)}
            _write(columns, fresh / f"{split}.parquet", use_dictionary=True)
        about = {
            "format": FORMAT,
            "name": graph.name,
            "source": graph.source,
            "fingerprint": graph.fingerprint,
            "catalogued": graph.catalogued,
            "notes": asdict(graph.notes),
        }
        (fresh / "graph.json").write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


def load_saved_graph(folder: Path) -> Graph:
    """Read a graph that `save_graph` wrote; OSError or ValueError where that cannot be done."""
    try:
        return _load(folder)
    except (KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{folder} is damaged ({error})") from error


def _load(folder: Path) -> Graph:
    about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise ValueError(f"{folder} has format {about['format']}; this version reads {FORMAT}")
    notes = Notes(about["notes"]["duplicates"], about["notes"]["overlaps"], tuple(about["notes"]["remarks"]))
    with _memory_given_back():
        return Graph(
            name=about["name"],
            entities=_vocabulary(folder / "entities.parquet", "entity"),
            relations=_vocabulary(folder / "relations.parquet", "relation"),
            train=_triples(folder / "train.parquet"),
            valid=_triples(folder / "valid.parquet"),
            test=_triples(folder / "test.parquet"),
            source=about["source"],
            fingerprint=about["fingerprint"],
            catalogued=about["catalogued"],
            notes=notes,
        )


@contextmanager
def _memory_given_back() -> Iterator[None]:
    """Arrow's own pool would keep what reading took; small beside a large graph, but more than a small one."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _write(columns: dict[str, pa.Array], path: Path, *, use_dictionary: bool) -> None:
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=use_dictionary, write_page_checksum=True)


def _read_saved(path: Path) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:  # `read_table` would load another library
        return file.read()


def _vocabulary(path: Path, kind: str) -> Vocabulary:
    table = _read_saved(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return Vocabulary(columns["name"], columns.get("label"), kind=kind)


def _triples(path: Path) -> np.ndarray:
    table = _read_saved(path)
    triples = np.empty((table.num_rows, 3), dtype=np.int32)
    for i, name in enumerate(COLUMNS):
        triples[:, i] = table[name].to_numpy()
    return triples


def load_graph(
    graph: str | Path,
    *,
    columns: Columns | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    labels: str | Path | None = None,
) -> Graph:
    """Load `world`, a graph of the catalogue, or one's own folder, archive or file of triples.

    A single file is split into train, valid and test by `split` and `seed`. What has been read once comes from
    the cache as long as its bytes and these choices stay the same.
    """
    check_columns(columns)
    how = How(columns, parse_split(split), _checked_seed(seed))
    place = locate(graph)
    if labels is not None:
        place = replace(place, labels=_labels_source(labels))
    fingerprint = _fingerprint(place, how)
    kept = catalogue.cache_folder() / "graphs" / fingerprint[:32]
    found = _from_cache(kept) if place.source != BUNDLED else None
    if found is None:
        labels_read = read_labels(place.labels) if place.labels else {}
        with catalogue.discard_on_error(place.entry) if place.entry and place.fetched else nullcontext():
            found = replace(_read(place, how, labels_read), fingerprint=fingerprint)
        if place.source != BUNDLED:
            with suppress(OSError):  # a cache that cannot be written is no reason to fail
                save_graph(found, kept)
    read_options: dict[str, object] = {"split": split, "split_seed": seed} if place.single else {}
    if columns is not None:
        read_options["columns"] = tuple(columns)
    if labels is not None:
        read_options["labels"] = str(labels)
    return replace(found, source=place.source, read_options=read_options)


@dataclass(frozen=True)
class How:
    """The choices that decide, with the bytes of the files, what graph comes out."""

    columns: Columns | None
    shares: tuple[float, float, float]
    seed: int

    @property
    def as_published(self) -> bool:
        return self.columns is None or list(self.columns) == [1, 2, 3]


def parse_split(split: str) -> tuple[float, float, float]:
    """`80/10/10` → (0.8, 0.1, 0.1)."""
    try:
        parts = [float(part) for part in split.split("/")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or parts[0] == 0 or not abs(sum(parts) - 100) <= 1e-6:
        raise RequestError(
            f"A split is written as three shares in percent that make 100, as in 80/10/10; '{split}' came."
        )
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise RequestError(f"A seed is a whole number, 0 or more; {seed} came.")
    return seed


def _labels_source(path: str | Path) -> Source:
    sources = find_sources(path)
    if len(sources) != 1:
        raise DataError(f"One file of labels was expected in {path}, and it holds {len(sources)}. Name one file.")
    return sources[0]


def _fingerprint(place: Location, how: How) -> str:
    """One sum for the bytes that were read and the choices they were read by."""
    files = {"labels": place.labels, **place.files} if place.labels else place.files
    read = {name: [source.fingerprint(), source.suffix, source.compression] for name, source in files.items()}
    entry = asdict(place.entry) if place.entry else None
    cut = [how.shares, how.seed] if place.single else []
    facts = [FORMAT, place.name, entry, read, list(how.columns or []), cut]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _from_cache(folder: Path) -> Graph | None:
    with suppress(OSError, ValueError):
        return load_saved_graph(folder)
    shutil.rmtree(folder, ignore_errors=True)  # damaged or of an older version: to be written again
    return None


def _read(place: Location, how: How, labels: dict[str, str]) -> Graph:
    """Read a graph from its files, and see whether the catalogue knows it."""
    if place.entry and not how.as_published:
        raise RequestError(
            f"{place.entry.name} is read as it is published, and columns {tuple(how.columns or ())} were asked for. "
            f"Leave them out; if it is another graph, give {place.where} another name."
        )
    graph = _assemble(place, read_triples(place.files, columns=how.columns), how, labels)
    if place.entry:
        catalogue.check(place.entry, graph, place.files, place.where)
        return replace(graph, name=place.entry.name, catalogued=True)
    entry = catalogue.identify(graph, place.files) if how.as_published else None
    return replace(graph, name=entry.name, catalogued=True) if entry else graph


def _assemble(place: Location, read: ReadTriples, how: How, labels: dict[str, str]) -> Graph:
    shape = GraphShape(len(read.entities), len(read.relations))
    remarks = list(read.remarks)
    if place.single:
        splits = _split(place.single, read.triples["triples"], shape, how, remarks)
    else:
        splits = {name: read.triples[name] for name in SPLITS}
    labels = read.labels | labels
    return Graph(
        name=place.name,
        entities=Vocabulary(read.entities, labels or None, kind="entity"),
        relations=Vocabulary(read.relations, labels or None, kind="relation"),
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        notes=Notes(remarks=tuple(remarks)) if place.single else count_repeats(splits, shape, remarks),
    )


def _split(source: Source, triples: Triples, shape: GraphShape, how: How, remarks: list[str]) -> dict[str, Triples]:
    """Split one file; its duplicates go first, since one of them in test would be known from train."""
    keys = triple_keys(triples, shape)
    num_repeated = len(keys) - len(sorted_distinct(keys))
    if num_repeated:
        _, first = np.unique(keys, return_index=True)
        repeats = "1 repeat of a triple was" if num_repeated == 1 else f"{num_repeated:,} repeats of triples were"
        remarks.append(f"{repeats} left out.")
        triples = triples[np.sort(first)]
    splits: dict[str, Triples] = dict(zip(SPLITS, split_triples(triples, how.shares, seed=how.seed), strict=True))
    for name, share in zip(SPLITS, how.shares, strict=True):
        if share and not len(splits[name]):
            raise DataError(
                f"{source.name} cannot be split: of its {len(triples):,} triples none can go to {name} without leaving "
                f"an entity or a relation unseen in train (triples of the same two entities stay together). Give more "
                f"triples, or a folder with train, valid and test."
            )
    asked = sum(how.shares[1:]) * len(triples)
    came = len(splits["valid"]) + len(splits["test"])
    if came < 0.9 * asked:
        remarks.append(
            f"valid and test have {came:,} triples of the {asked:,.0f} asked for: the others are the only ones of "
            f"some entity or relation."
        )
    return splits
