"""From a name or a path to a graph, through a cache keyed by content."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from dualkg.data import catalogue
from dualkg.data.graph import SPLITS, Graph, GraphShape, Notes, Triples, count_repeats, sorted_distinct, triple_keys
from dualkg.data.places import BUNDLED, Place, locate
from dualkg.data.reading import Columns, ReadTriples, Source, find_sources, read_labels, read_triples
from dualkg.data.reading.columns import check_columns
from dualkg.data.splitting import split_triples
from dualkg.data.storage import FORMAT, load_saved_graph, save_graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError


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
    how = How(columns, parse_shares(split), _checked_seed(seed))
    place = locate(graph)
    if labels is not None:
        place = replace(place, labels=_labels_source(labels))
    fingerprint = _fingerprint(place, how)
    kept = catalogue.cache_folder() / "graphs" / fingerprint[:32]
    found = _from_cache(kept) if place.source != BUNDLED else None
    if found is None:
        labels_read = read_labels(place.labels) if place.labels else {}
        with catalogue.discarding(place.claims) if place.claims and place.fetched else nullcontext():
            found = replace(_read(place, how, labels_read), fingerprint=fingerprint)
        if place.source != BUNDLED:
            with suppress(OSError):  # a cache that cannot be written is no reason to fail
                save_graph(found, kept)
    read_by: dict[str, object] = {"split": split, "split_seed": seed} if place.single else {}
    if columns is not None:
        read_by["columns"] = tuple(columns)
    if labels is not None:
        read_by["labels"] = str(labels)
    return replace(found, source=place.source, read_by=read_by)


@dataclass(frozen=True)
class How:
    """The choices that decide, with the bytes of the files, what graph comes out."""

    columns: Columns | None
    shares: tuple[float, float, float]
    seed: int

    @property
    def as_published(self) -> bool:
        return self.columns is None or list(self.columns) == [1, 2, 3]


def parse_shares(split: str) -> tuple[float, float, float]:
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


def _fingerprint(place: Place, how: How) -> str:
    """One sum for the bytes that were read and the choices they were read by."""
    files = {"labels": place.labels, **place.files} if place.labels else place.files
    read = {name: [source.fingerprint(), source.suffix, source.compression] for name, source in files.items()}
    claims = asdict(place.claims) if place.claims else None
    cut = [how.shares, how.seed] if place.single else []
    facts = [FORMAT, place.name, claims, read, list(how.columns or []), cut]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _from_cache(folder: Path) -> Graph | None:
    with suppress(OSError, ValueError):
        return load_saved_graph(folder)
    shutil.rmtree(folder, ignore_errors=True)  # damaged or of an older version: to be written anew
    return None


def _read(place: Place, how: How, labels: dict[str, str]) -> Graph:
    """Read a graph from its files, and see whether the catalogue knows it."""
    if place.claims and not how.as_published:
        raise RequestError(
            f"{place.claims.name} is read as it is published, and columns {tuple(how.columns or ())} were asked for. "
            f"Leave them out; if it is another graph, give {place.where} another name."
        )
    graph = _assemble(place, read_triples(place.files, columns=how.columns), how, labels)
    if place.claims:
        catalogue.check(place.claims, graph, place.files, place.where)
        return replace(graph, name=place.claims.name, catalogued=True)
    entry = catalogue.identify(graph, place.files) if how.as_published else None
    return replace(graph, name=entry.name, catalogued=True) if entry else graph


def _assemble(place: Place, read: ReadTriples, how: How, labels: dict[str, str]) -> Graph:
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
