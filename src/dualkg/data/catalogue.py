"""The catalogue: public benchmark graphs, where they are, and how to know them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from dualkg.data.graph import SPLITS, Graph
from dualkg.data.reading import Source, find_sources
from dualkg.errors import DataError


@dataclass(frozen=True)
class Entry:
    """A public graph. Checksums are of the split files, so that a repacked archive is the same graph."""

    name: str
    about: str
    address: str
    counts: dict[str, int]
    licence: str
    sha256: dict[str, str] = field(default_factory=dict)
    md5: dict[str, str] = field(default_factory=dict)
    archive_sha256: str | None = None
    note: str = ""


@cache
def catalogue() -> dict[str, Entry]:
    """All entries by name."""
    text = (resources.files("dualkg.data") / "catalogue.json").read_text(encoding="utf-8")
    return {name: Entry(name=name, **facts) for name, facts in json.loads(text).items()}


def find_entry(name: str) -> Entry | None:
    """The entry of that name, case aside."""
    return next((entry for entry in catalogue().values() if entry.name.casefold() == name.casefold()), None)


def identify(fingerprints: Mapping[str, str]) -> Entry | None:
    """The entry whose three split files have these sha256 sums, if any."""
    return next((entry for entry in catalogue().values() if len(entry.sha256) == len(SPLITS)
                 and all(fingerprints.get(split) == entry.sha256[split] for split in SPLITS)), None)


def check(entry: Entry, graph: Graph, sources: Mapping[str, Source], fingerprints: Mapping[str, str]) -> None:
    """Refuse a graph that calls itself by a name of the catalogue and is not that graph."""
    where = sources[SPLITS[0]].path
    advice = f"If it is another graph, give {where} another name."
    for what, expected in entry.counts.items():
        came = graph.counts[what]
        if came != expected:
            thing = f"{what} triples" if what in SPLITS else what
            raise DataError(f"{entry.name} should have {expected:,} {thing}; {where} has {came:,}. {advice}")
    for split in SPLITS:
        expected_sum = entry.sha256.get(split)
        if expected_sum and fingerprints[split] != expected_sum:
            raise DataError(
                f"{sources[split].name} is not the {split} file of {entry.name}: its sha256 should begin with "
                f"{expected_sum[:12]} and begins with {fingerprints[split][:12]}. {advice}"
            )
        if split in entry.md5 and _md5(sources[split]) != entry.md5[split]:
            raise DataError(f"{sources[split].name} is not the {split} file of {entry.name}: its md5 differs. {advice}")


def cache_folder() -> Path:
    """Where fetched and read graphs are kept: DUALKG_CACHE, or the user's cache folder."""
    import pooch

    return Path(os.environ.get("DUALKG_CACHE") or pooch.os_cache("dualkg"))


def fetch(entry: Entry) -> list[Source]:
    """Download an entry's files once, checked by their sha256 where it is known."""
    if "{split}" in entry.address:
        paths = [_download(entry, entry.address.format(split=split), f"{entry.name}/{split}.txt",
                           entry.sha256.get(split)) for split in SPLITS]
    else:
        file_name = f"{entry.name}.tar.gz"
        paths = [_download(entry, entry.address, file_name, entry.archive_sha256)]
    return [source for path in paths for source in find_sources(path)]


def _download(entry: Entry, address: str, file_name: str, sha256: str | None) -> Path:
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    target = cache_folder() / "downloads" / file_name
    try:
        found = pooch.retrieve(address, known_hash=sha256 and f"sha256:{sha256}", fname=target.name, path=target.parent)
    except ValueError as error:  # pooch's word for a checksum that differs
        raise DataError(f"What {address} gave is not {entry.name}: {error}. Nothing was kept.") from None
    except (requests.RequestException, OSError) as error:
        raise DataError(
            f"{entry.name} could not be fetched from {address} ({type(error).__name__}). Without a network, put its "
            f"archive into a folder and name that folder in the variable DUALKG_DATA."
        ) from None
    return Path(found)


def _md5(source: Source) -> str:
    with source.open() as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
