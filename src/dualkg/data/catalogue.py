"""The catalogue of public graphs: what is known of each, its download, and the check of it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NotRequired, TypedDict

from dualkg.data.archives import (
    TARS,
    ExpandsTooMuch,
    Source,
    cache_folder,
    find_sources,
    uncompressed,
)
from dualkg.data.columns import Columns
from dualkg.data.readers import one_source
from dualkg.data.triples import SPLITS
from dualkg.errors import DataError
from dualkg.files import open_regular, read_text, write_text

ARCHIVE_SUFFIXES = (*TARS, ".zip")


class LabelFile(TypedDict):
    """A file of labels: its address, the names of two columns, and its checksum, if known."""

    address: str
    suffix: str
    columns: list[str]
    checksum: NotRequired[str]


@dataclass(frozen=True)
class Entry:
    """A public graph.

    `sha256` and `md5` are of the split files, so that a repacked archive is recognized. `checksum`
    is of the download itself, such as "md5:4e0e…". `counts` has `triples` in place of the splits if
    the publisher has no split: the number of lines, before duplicates are removed. `files` are the
    names inside an archive, if they do not tell the splits. `suffix` is that of a download whose
    address has none. `labels` is a file with the labels of entities.
    """

    name: str
    about: str
    address: str
    counts: dict[str, int]
    licence: str
    sha256: dict[str, str] = field(default_factory=dict)
    md5: dict[str, str] = field(default_factory=dict)
    checksum: str = ""
    files: dict[str, str] = field(default_factory=dict)
    columns: Columns | None = None
    delimiter: str | None = None
    suffix: str = ""
    labels: LabelFile | None = None
    note: str = ""

    @property
    def is_split(self) -> bool:
        """Whether the publisher has a split."""
        return "train" in self.counts

    @property
    def file_name(self) -> str:
        """The name of the download, and of its copy in DUALKG_DATA."""
        return f"{self.name}{self.download_suffix}"

    @property
    def download_suffix(self) -> str:
        """The suffixes of format and compression, such as `.tar.gz`."""
        if self.suffix:
            return self.suffix
        file_name, compression = uncompressed(PurePosixPath(self.address).name)
        return f"{PurePosixPath(file_name).suffix}{compression}"

    @property
    def offline_advice(self) -> str:
        """How to use the graph without a network."""
        is_archive = "{split}" in self.address or self.file_name.endswith(ARCHIVE_SUFFIXES)
        download = "its archive" if is_archive else f"it as {self.file_name}"
        return (
            f"To work offline, put {download} into a folder and name that folder in the variable "
            "DUALKG_DATA."
        )

    @property
    def checked_by(self) -> str:
        """What a download is checked by besides its counts: the kind of a checksum, or "counts"."""
        if self.checksum:
            return self.checksum.partition(":")[0]
        for kind, checksums in (("sha256", self.sha256), ("md5", self.md5)):
            if checksums.keys() >= set(SPLITS):
                return kind
        return "counts"

    def known_hash(self, split: str) -> str:
        """The published checksum of a split file as `kind:digest`, or nothing."""
        for kind, checksums in (("sha256", self.sha256), ("md5", self.md5)):
            if split in checksums:
                return f"{kind}:{checksums[split]}"
        return ""


@cache
def catalogue() -> dict[str, Entry]:
    """All entries by name."""
    text = (resources.files("dualkg.data") / "catalogue.json").read_text(encoding="utf-8")
    return {name: Entry(name=name, **facts) for name, facts in json.loads(text).items()}


def find_entry(name: str) -> Entry | None:
    """The entry of that name, case aside."""
    folded = name.casefold()
    return next((entry for entry in catalogue().values() if entry.name.casefold() == folded), None)


def published_files(entry: Entry, sources: Iterable[Source]) -> dict[str, Source]:
    """The sources that the entry names, by split; none if the archive has other files."""
    files = {}
    for source in sources:
        for split, file_name in entry.files.items():
            if source.name.endswith((f":{file_name}", f"/{file_name}")):
                files[split] = source
    return files if files.keys() == entry.files.keys() else {}


# -- checks ------------------------------------------------------------------


def identify(counts: Mapping[str, int], sources: Mapping[str, Source]) -> Entry | None:
    """The entry with the counts and checksums of a graph, if any."""
    same_counts = [entry for entry in catalogue().values() if entry.counts == counts]
    if not same_counts or not sources.keys() >= set(SPLITS):
        return None
    checksums = {split: sources[split].checksum() for split in SPLITS}
    return next((entry for entry in same_counts if entry.sha256 == checksums), None)


def check_entry(
    entry: Entry, counts: Mapping[str, int], sources: Mapping[str, Source], where: str
) -> list[str]:
    """Refuse a graph with the name of an entry and other counts or checksums.

    Bytes that have the published checksum are the published graph. If they have other counts, the
    publisher counts in another way, and a note says so.
    """
    # What the catalogue's own address holds cannot be given another name.
    advice = ""
    if where != entry.address:
        advice = f"If it is another graph, give {where} another name."

    def other(expected: str, found: str) -> DataError:
        return DataError(f"{entry.name} should have {expected}; {found}. {advice}".rstrip())

    if entry.is_split and not sources.keys() >= set(SPLITS):
        difference = "is one file of triples" if "triples" in sources else "has no test file"
        raise other("train, valid and test", f"{where} {difference}")
    if not entry.is_split and "triples" not in sources:
        raise other("one file of triples", f"{where} has splits")

    notes = []
    for name, expected in entry.counts.items():
        number = counts[name]
        if number == expected:
            continue
        noun = f"{name} triples" if name in SPLITS else name
        if not _has_published_checksum(entry, sources):
            raise other(f"{expected:,} {noun}", f"{where} has {number:,}")
        notes.append(
            f"{entry.name} has {number:,} {noun}; its publisher counts {expected:,}. The checksum "
            "of the download is the published one."
        )

    for kind, checksums in (("sha256", entry.sha256), ("md5", entry.md5)):
        for split, expected_checksum in checksums.items():
            checksum = sources[split].checksum(kind)
            if checksum != expected_checksum:
                raise other(
                    f"a {split} file whose {kind} begins with {expected_checksum[:12]}",
                    f"that of {sources[split].name} begins with {checksum[:12]}",
                )
    return notes


def _has_published_checksum(entry: Entry, sources: Mapping[str, Source]) -> bool:
    """Whether all files are in one archive, or are one file, with the entry's checksum."""
    paths = {source.path for source in sources.values()}
    if not entry.checksum or len(paths) != 1:
        return False
    kind, _, digest = entry.checksum.partition(":")
    return _digest(paths.pop(), kind) == digest


def _digest(path: Path, kind: str) -> str:
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


# -- downloads ---------------------------------------------------------------


def fetch(entry: Entry, *, max_size: int | str | None = None) -> list[Source]:
    """Download the files of an entry once, and check their checksums."""
    if "{split}" in entry.address:
        paths = []
        for split in SPLITS:
            address = entry.address.format(split=split)
            target = _downloads() / entry.name / f"{split}{entry.download_suffix}"
            paths.append(_download(entry, address, target, entry.known_hash(split)))
    else:
        target = _downloads() / entry.file_name
        paths = [_download(entry, entry.address, target, entry.checksum)]

    with discard_on_error(entry, entry.address):
        return [source for path in paths for source in find_sources(path, max_size=max_size)]


def fetch_labels(entry: Entry, *, max_size: int | str | None = None) -> Source | None:
    """Download the labels of an entry once, if it has some."""
    if entry.labels is None:
        return None
    target = _downloads() / entry.name / f"labels{entry.labels['suffix']}"
    checksum = entry.labels.get("checksum", "")
    path = _download(entry, entry.labels["address"], target, checksum)
    return one_source(path, max_size=max_size)


@contextmanager
def discard_on_error(entry: Entry | None, where: str) -> Iterator[None]:
    """Delete the downloads of an entry that turn out to be another graph.

    The next call then downloads again. Files of the user stay, and so does what is only larger than
    a limit.
    """
    try:
        yield
    except ExpandsTooMuch:
        raise
    except DataError as error:
        if not entry or where != entry.address:
            raise
        shutil.rmtree(_downloads() / entry.name, ignore_errors=True)
        target = _downloads() / entry.file_name
        for path in (target, _first_checksum(target)):
            path.unlink(missing_ok=True)
        raise DataError(f"{error} The download from {entry.address} was deleted.") from None


def _downloads() -> Path:
    return cache_folder() / "downloads"


def _first_checksum(target: Path) -> Path:
    """The file with the checksum of the first download, where none is published."""
    return target.with_name(f"{target.name}.sha256")


def _download(entry: Entry, address: str, target: Path, published: str) -> Path:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    first = _first_checksum(target)
    known_hash = published or None
    is_repeated = not published and first.exists()
    if is_repeated:
        known_hash = f"sha256:{read_text(first).strip()}"
    try:
        path = pooch.retrieve(address, known_hash=known_hash, fname=target.name, path=target.parent)
        if known_hash is None:
            write_text(first, f"{_digest(Path(path), 'sha256')}\n")
        return Path(path)
    except ValueError as error:  # a checksum that differs
        reason = str(error).partition(". ")[0]
        advice = entry.offline_advice
        verb = "holds"
        if is_repeated:
            verb = "held at the first download"
            advice = f"If the publisher changed it, delete {first} to accept the change."
        text = f"is not what {address} {verb}: {reason}. The download was deleted. {advice}"
    except OSError as error:
        # Errors of requests, which pooch downloads by, are OSErrors without a number.
        if error.errno is None:
            text = (
                f"could not be downloaded from {address} ({type(error).__name__}). "
                f"{entry.offline_advice}"
            )
        else:
            text = (
                f"could not be saved in {target.parent} ({error.strerror or error}). Set the "
                "variable DUALKG_CACHE to a folder that can be written."
            )
    # Here the error of requests is no longer handled, so this error does not keep its connection.
    raise DataError(f"{entry.name} {text}")
