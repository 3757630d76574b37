"""From a name or a path to a graph, through a cache keyed by content."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualkg.data import catalogue
from dualkg.data.graph import SPLITS, Graph, GraphShape, Notes, Triples, count_repeats, sorted_distinct, triple_keys
from dualkg.data.places import BUNDLED, Place, locate
from dualkg.data.reading import Columns, ReadTriples, Source, find_sources, read_labels, read_triples
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
    shares = parse_shares(split)
    place = locate(graph)
    if labels is not None:
        place = replace(place, labels=find_sources(labels)[0])
    fingerprints = {name: source.fingerprint() for name, source in place.files.items()}
    fingerprint = _fingerprint(place, fingerprints, columns, split, seed)
    kept = catalogue.cache_folder() / "graphs" / fingerprint[:32]
    found = _from_cache(kept) if place.source != BUNDLED else None
    if found is None:
        read = read_triples(place.files, columns=columns)
        found = _assemble(place, read, fingerprint, shares, seed)
        entry = catalogue.identify(fingerprints)
        found = replace(found, name=entry.name if entry else found.name, catalogued=bool(entry or place.claims))
        if place.claims:
            catalogue.check(place.claims, found, place.splits or place.files, fingerprints)
        if place.source != BUNDLED:
            with suppress(OSError):  # a cache that cannot be written is no reason to fail
                save_graph(found, kept)
    return replace(found, source=place.source)


def parse_shares(split: str) -> tuple[float, float, float]:
    """`80/10/10` → (0.8, 0.1, 0.1)."""
    try:
        parts = [float(part) for part in split.split("/")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or parts[0] == 0 or abs(sum(parts) - 100) > 1e-6:
        raise RequestError(
            f"A split is written as three shares in percent that make 100, as in 80/10/10; '{split}' came."
        )
    return parts[0] / 100, parts[1] / 100, parts[2] / 100


def _fingerprint(
    place: Place, fingerprints: dict[str, str], columns: Columns | None, split: str, seed: int
) -> str:
    """One sum for the bytes that were read and the choices they were read by."""
    labels = place.labels.fingerprint() if place.labels else None
    how = [split, seed] if place.single else []
    formats = {name: source.suffix for name, source in place.files.items()}
    claims = place.claims.name if place.claims else None
    facts = [FORMAT, place.name, claims, fingerprints, formats, labels, list(columns or []), how]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _from_cache(folder: Path) -> Graph | None:
    with suppress(OSError, ValueError, KeyError):  # damaged or of an older version: read anew
        return load_saved_graph(folder)
    return None


def _assemble(
    place: Place, read: ReadTriples, fingerprint: str, shares: tuple[float, float, float], seed: int
) -> Graph:
    shape = GraphShape(len(read.entities), len(read.relations))
    remarks = list(read.remarks)
    if place.single:
        splits = _split(place.single, read.triples["triples"], shape, shares, seed, remarks)
    else:
        splits = {name: read.triples[name] for name in SPLITS}
    labels = read.labels | (read_labels(place.labels) if place.labels else {})
    return Graph(
        name=place.name,
        entities=Vocabulary(read.entities, labels or None, kind="entity"),
        relations=Vocabulary(read.relations, labels or None, kind="relation"),
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        fingerprint=fingerprint,
        notes=Notes(remarks=tuple(remarks)) if place.single else count_repeats(splits, shape, remarks),
    )


def _split(
    source: Source, triples: Triples, shape: GraphShape, shares: tuple[float, float, float], seed: int,
    remarks: list[str],
) -> dict[str, Triples]:
    """Split one file; its duplicates go first, since one of them in test would be known from train."""
    keys = triple_keys(triples, shape)
    num_repeated = len(keys) - len(sorted_distinct(keys))
    if num_repeated:
        _, first = np.unique(keys, return_index=True)
        remarks.append(f"{num_repeated:,} triples that stand more than once were left out.")
        triples = triples[np.sort(first)]
    splits: dict[str, Triples] = dict(zip(SPLITS, split_triples(triples, shares, seed=seed), strict=True))
    for name, share in zip(SPLITS, shares, strict=True):
        if share and not len(splits[name]):
            raise DataError(
                f"{source.name} cannot be split: of its {len(triples):,} triples none can go to {name} without leaving "
                f"an entity or a relation unseen in train. Give more triples, or a folder with train, valid and test."
            )
    asked = sum(shares[1:]) * len(triples)
    came = len(splits["valid"]) + len(splits["test"])
    if came < 0.9 * asked:
        remarks.append(
            f"valid and test have {came:,} triples of the {asked:,.0f} asked for: the others are the only ones of "
            f"some entity or relation."
        )
    return splits
