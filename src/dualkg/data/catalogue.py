"""The catalogue of public benchmark graphs: their addresses, checksums and downloads."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from dualkg.data.archives import Source, cache_folder, find_sources
from dualkg.data.graph import SPLITS, Graph
from dualkg.errors import DataError

OFFLINE = " To work offline, put its archive into a folder and name that folder in the variable DUALKG_DATA."


@dataclass(frozen=True)
class Entry:
    """A public graph. Checksums are of the split files, so that a repacked archive is recognized."""

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


def identify(graph: Graph, sources: Mapping[str, Source]) -> Entry | None:
    """The entry with the counts and checksums of this graph, if any."""
    same_counts = [entry for entry in catalogue().values() if entry.counts == graph.counts]
    if not same_counts or not sources.keys() >= set(SPLITS):
        return None
    sums = {split: sources[split].checksum() for split in SPLITS}
    return next((entry for entry in same_counts if entry.sha256 == sums), None)


def check(entry: Entry, graph: Graph, sources: Mapping[str, Source], where: str) -> None:
    """Refuse a graph with the name of an entry and other counts or checksums."""
    advice = "" if where == entry.address else f" If it is another graph, give {where} another name."
    if not sources.keys() >= set(SPLITS):
        raise DataError(f"{entry.name} has train, valid and test; {where} is one file of triples.{advice}")
    for what, expected in entry.counts.items():
        if graph.counts[what] != expected:
            noun = f"{what} triples" if what in SPLITS else what
            raise DataError(
                f"{entry.name} should have {expected:,} {noun}; {where} has {graph.counts[what]:,}.{advice}"
            )
    for kind, sums in (("sha256", entry.sha256), ("md5", entry.md5)):
        for split, expected_sum in sums.items():
            found = sources[split].checksum(kind)
            if found != expected_sum:
                raise DataError(
                    f"{sources[split].name} is not the {split} file of {entry.name}: its {kind} should begin with "
                    f"{expected_sum[:12]} and begins with {found[:12]}.{advice}"
                )


def fetch(entry: Entry) -> list[Source]:
    """Download the files of an entry once, and check their sha256 if it is known."""
    if "{split}" in entry.address:
        paths = [
            _download(entry, entry.address.format(split=split), f"{entry.name}/{split}.txt", entry.sha256.get(split))
            for split in SPLITS
        ]
    else:
        paths = [_download(entry, entry.address, f"{entry.name}.tar.gz", entry.archive_sha256)]
    with discard_on_error(entry):
        return [source for path in paths for source in find_sources(path)]


@contextmanager
def discard_on_error(entry: Entry) -> Iterator[None]:
    """Delete the downloads of an entry that turn out to be another graph, so that the next call downloads again."""
    try:
        yield
    except DataError as error:
        shutil.rmtree(_downloads() / entry.name, ignore_errors=True)
        (_downloads() / f"{entry.name}.tar.gz").unlink(missing_ok=True)
        raise DataError(f"{error} The download from {entry.address} was deleted.") from None


def _downloads() -> Path:
    return cache_folder() / "downloads"


def _download(entry: Entry, address: str, file_name: str, sha256: str | None) -> Path:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    target = _downloads() / file_name
    try:
        found = pooch.retrieve(address, known_hash=sha256 and f"sha256:{sha256}", fname=target.name, path=target.parent)
    except ValueError as error:  # a checksum that differs
        reason = str(error).partition(". ")[0]
        raise DataError(f"{address} is not {entry.name}: {reason}. The download was deleted.{OFFLINE}") from None
    except OSError as error:
        if error.errno is None:  # errors of requests, which pooch downloads by, are OSErrors without a number
            reason = type(error).__name__
            raise DataError(f"{entry.name} could not be downloaded from {address} ({reason}).{OFFLINE}") from None
        raise DataError(
            f"{entry.name} could not be saved in {target.parent} ({error.strerror or error}). Set the variable "
            "DUALKG_CACHE to a folder that can be written."
        ) from None
    return Path(found)
