"""From a name or a path to a graph: find or download its files, read them, and cache the graph."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dualkg.data.archives import COMPRESSIONS, TARS, Source, cache_folder, find_sources
from dualkg.data.columns import Columns, check_columns
from dualkg.data.conversion import advice_for, is_datasets, is_table
from dualkg.data.encoding import COMPANIONS, ReadTriples, read_triples
from dualkg.data.errors import (
    DownloadDiscarded,
    DownloadFailed,
    GraphNotFound,
    OtherGraph,
    UnusableData,
    WrongObject,
)
from dualkg.data.graph import FORMAT, SPLITS, Graph, load_saved_graph, save_graph
from dualkg.data.inspection import many_relations
from dualkg.data.readers import find_reader, holds_triples, one_source, only_triples
from dualkg.data.splits import Splitting, graph_fields, parse_split
from dualkg.data.text import read_labels
from dualkg.errors import DataError, Sentence, Unsupported, close_matches

BUNDLED = "world"
ARCHIVE_SUFFIXES = (*TARS, ".zip")
READING = 4  # increased when the same bytes are read in another way
SPLIT_WORDS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}
OPENKE_FILES = {
    **{f"{split}2id.txt": split for split in SPLITS},
    **{f"{name}.txt": name for name in COMPANIONS},
}
REQUIRED_SPLITS = ("train", "valid")  # a folder may have no test file
OFFLINE = (
    "To work offline, put its archive into a folder and name that folder in the variable "
    "DUALKG_DATA."
)


def load_graph(
    graph: str | Path | Any,
    *,
    columns: Columns | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    labels: str | Path | None = None,
    delimiter: str | None = None,
    max_size: int | str | None = None,
) -> Graph:
    """Load `world`, a graph of the catalogue, or a folder, archive or file of triples.

    A single file is split into train, valid and test by `split` and `seed`. A graph that was read
    before is loaded from the cache as long as its bytes and these options stay the same. A table of
    pandas, polars or Arrow is read by `Graph.from_dataframe`; other data in memory have
    constructors of their own, such as `Graph.from_triples`. `max_size`, such as "64G", is the size
    that a compressed file may expand to (default: 16 GiB, and 100 times its own size).
    """
    if is_table(graph) and not isinstance(graph, Mapping) and not is_datasets(graph):
        _check_no_file_options({"delimiter": delimiter, "max_size": max_size})
        return Graph.from_dataframe(graph, columns=columns, split=split, seed=seed, labels=labels)
    if not isinstance(graph, str | os.PathLike):
        expected = "a name or a path"
        raise WrongObject("load_graph", expected=expected, found=graph, advice=advice_for(graph))
    check_columns(columns)
    splitting = Splitting(parse_split(split, seed), seed)
    location = locate(os.fspath(graph), max_size=max_size)
    if labels is not None:
        location = replace(location, labels=_one_file_of_labels(labels, max_size))

    request = _Request(location, columns, delimiter, splitting)
    if location.source == BUNDLED:
        loaded = _read(request)
    else:
        loaded = _read_or_load(request, cache_folder() / "graphs" / request.cache_key())

    options: dict[str, object] = {
        "columns": columns and tuple(columns),
        "delimiter": delimiter,
        "labels": labels and str(labels),
        "max_size": max_size,
    }
    if location.single:
        options = {"split": split, "split_seed": seed, **options}
    read_options = {name: value for name, value in options.items() if value is not None}
    return replace(loaded, source=location.source, read_options=read_options)


def _check_no_file_options(options: Mapping[str, object]) -> None:
    """Refuse options that only files have."""
    for name, value in options.items():
        if value is not None:
            raise Unsupported("A table", f"has no {name}, as files have", advice="Leave it out.")


def _one_file_of_labels(path: str | Path, max_size: int | str | None) -> Source:
    sources = find_sources(path, max_size=max_size)
    if len(sources) != 1:
        problem = f"holds {len(sources)} files, and one file of labels was expected"
        raise UnusableData(path, problem, advice="Name one file.")
    return sources[0]


class _Request(NamedTuple):
    """The files of a graph, and the options that determine what is read from them."""

    location: Location
    columns: Columns | None
    delimiter: str | None
    splitting: Splitting

    def cache_key(self) -> str:
        """A checksum of the bytes to read, the names that notes mention, and the options."""
        location = self.location
        files = dict(location.files)
        if location.labels:
            files["labels"] = location.labels
        contents = {
            name: [source.name, source.checksum(stored=True), source.compression]
            for name, source in files.items()
        }
        facts = [
            FORMAT,
            READING,
            location.name,
            location.entry and asdict(location.entry),
            contents,
            list(self.columns or []),
            self.delimiter,
            self.splitting if location.single else [],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read_or_load(request: _Request, cached: Path) -> Graph:
    """The cached graph, or one that is read and cached."""
    with suppress(OSError, ValueError):
        return load_saved_graph(cached)

    # A graph that is damaged, or of an older version, is written again.
    shutil.rmtree(cached, ignore_errors=True)
    graph = _read(request)
    with suppress(OSError):  # loading works without a writable cache
        save_graph(graph, cached)
    if graph.is_mapped and cached.exists():
        # Its temporary files take as much disk as the cache, and memory while they are read.
        del graph
        return load_saved_graph(cached)
    return graph


def _read(request: _Request) -> Graph:
    """Read a graph from its files, and check or look up its catalogue entry."""
    location, columns, delimiter, splitting = request
    labels = read_labels(location.labels) if location.labels else {}
    with _discard_on_error(location.entry, location.where):
        entry = location.entry
        as_published = columns is None or list(columns) == [1, 2, 3]
        if entry and not as_published:
            raise Unsupported(
                entry.name,
                f"is read as it is published, and columns {tuple(columns or ())} were given",
                advice=f"Leave them out; if it is another graph, give {location.where} another "
                "name.",
            )

        read = read_triples(
            location.files,
            columns=columns,
            delimiter=delimiter,
            find_headers=True,
            optional=("test",),
        )
        remarks = [*read.remarks, *_questions(location, read)]
        fields = graph_fields(
            replace(read, remarks=remarks),
            location.name,
            splitting,
            labels=labels,
            where=location.single.name if location.single else location.where,
            alternative="a folder with train, valid and test",
        )
        graph = Graph(**fields)
        if entry:
            _check_entry(entry, graph, location.files, location.where)
        elif as_published:
            entry = _identify(graph, location.files)
        if entry:
            graph = replace(graph, name=entry.name, catalogued=True)
        return graph.with_fingerprint()


def _questions(location: Location, read: ReadTriples) -> Iterator[Sentence]:
    """Sentences on a graph without test triples, and on one with very many relations."""
    test = location.files.get("test")
    if not location.single and test is None:
        yield Sentence(f"{location.where} has no test file, so there are no test triples.")
    elif test is not None and not len(read.triples["test"]):
        yield Sentence(f"{test.name} is empty, so there are no test triples.")
    question = many_relations(len(read.entities), len(read.relations))
    if question:
        yield question


# -- the files of a graph ----------------------------------------------------


class Files(NamedTuple):
    """The files of triples by split, and the file of labels."""

    triples: dict[str, Source]
    labels: Source | None


@dataclass(frozen=True)
class Location:
    """The files of a graph: train, valid and test, or a single file of `triples` to be split."""

    name: str
    source: str
    where: str
    files: dict[str, Source]
    labels: Source | None
    entry: Entry | None = None  # the catalogue's graph of that name

    @property
    def single(self) -> Source | None:
        return self.files.get("triples")


def locate(graph: str | Path, *, max_size: int | str | None = None) -> Location:
    """Find a graph by its name, or by the path of a folder, an archive or a file of triples."""
    text = str(graph)
    path = Path(text)
    with suppress(RuntimeError):  # `~nobody/x`: there is no such user
        path = path.expanduser()
    is_name = os.sep not in text and not text.startswith("~")

    if is_name and text == BUNDLED:
        files = _files_at(Path(str(resources.files("dualkg.data") / BUNDLED)))
        return Location(BUNDLED, BUNDLED, BUNDLED, *files)

    if is_name and (entry := find_entry(text)):
        archive = _in_data_folder(entry.name)
        if archive:
            files = _files_at(archive, max_size)
        else:
            files = _by_split(fetch(entry), entry.address)
        return Location(entry.name, entry.name, str(archive or entry.address), *files, entry)

    if _exists(path):
        files = _files_at(path, max_size)
        name = stem(path)
        # OpenKE's files of a graph of the catalogue have other bytes than the published ones.
        is_openke = any(
            source.file_name.lower() in OPENKE_FILES for source in files.triples.values()
        )
        return Location(name, text, str(path), *files, None if is_openke else find_entry(name))

    if is_name and (archive := _in_data_folder(text)):
        return Location(text, text, str(archive), *_files_at(archive, max_size))

    raise GraphNotFound(text, suggestions=_similar_graphs(text, path))


def _similar_graphs(name: str, path: Path) -> list[str]:
    """Graphs with similar names, or else files beside the path."""
    known = [BUNDLED, *catalogue(), *names_in_data_folder()]
    suggestions = close_matches(name, known)
    if not suggestions and _exists(path.parent) and path.parent.is_dir():
        neighbours = [neighbour.name for neighbour in path.parent.iterdir()]
        suggestions = close_matches(path.name, neighbours)
    return suggestions


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for any file, or with a null character
        return False


def stem(path: Path) -> str:
    """The name of a file without any of its suffixes, of a folder as it is."""
    if path.is_dir():
        return path.resolve().name
    name = path.name
    for suffix in (*ARCHIVE_SUFFIXES, *COMPRESSIONS):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    return PurePosixPath(name).stem if find_reader(name) else name


def data_folder() -> Path | None:
    """The folder of archives that is searched before the network: the variable DUALKG_DATA."""
    name = os.environ.get("DUALKG_DATA")
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise Unsupported("DUALKG_DATA", f"names {folder}, which is not a folder")
    return folder


def names_in_data_folder() -> list[str]:
    """The names of the graphs in DUALKG_DATA, archives or folders."""
    folder = data_folder()
    if folder is None:
        return []
    return sorted({stem(path) for path in folder.iterdir() if _looks_like_graph(path)})


def _looks_like_graph(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("train.*")) or (path / "train2id.txt").exists()
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def _in_data_folder(name: str) -> Path | None:
    """The archive or folder of a graph in DUALKG_DATA, by its name without regard to case."""
    folder = data_folder()
    if folder is None:
        return None
    paths = {path.name.casefold(): path for path in sorted(folder.iterdir())}
    for suffix in (*ARCHIVE_SUFFIXES, ""):
        path = paths.get(f"{name}{suffix}".casefold())
        if path:
            return path
    return None


def _files_at(path: Path, max_size: int | str | None = None) -> Files:
    """The files of triples and the file of labels in a folder or an archive, or a single file."""
    if path.is_dir():
        return _files_in_folder(path, max_size)

    sources = find_sources(path, max_size=max_size)
    if len(sources) > 1:
        if _is_openke(source.file_name for source in sources):
            return _openke_files(sources, path)
        if any(_split_of(source.file_name) and holds_triples(source) for source in sources):
            return _by_split(sources, path)
    return Files({"triples": only_triples(sources, path)}, _find_labels(sources))


def _files_in_folder(folder: Path, max_size: int | str | None) -> Files:
    children = sorted(folder.iterdir())
    if _is_openke(child.name for child in children):
        sources: list[Source] = []
        for child in children:
            if child.name.lower() in OPENKE_FILES or _is_labels(child.name):
                sources += find_sources(child, max_size=max_size)
        return _openke_files(sources, folder)

    named = [child for child in children if _split_of(child.name) or _is_labels(child.name)]
    files = [child for child in named if not child.is_dir()]
    splits_in_files = {_split_of(file.name) for file in files}
    for child in named:
        if child.is_dir() and _split_of(child.name) not in splits_in_files:
            problem = "is a folder; a file of triples was expected"
            raise UnusableData(child, problem, advice=f"Name the file {child.name}.tsv.")

    # An archive may have unpacked into a folder inside this one.
    inner = [child for child in children if child.is_dir() and _looks_like_graph(child)]
    if not named and len(inner) == 1:
        return _files_in_folder(inner[0], max_size)
    return _by_split([one_source(file, max_size=max_size) for file in files], folder)


def _is_openke(file_names: Iterable[str]) -> bool:
    names = [name.lower() for name in file_names]
    return "train2id.txt" in names and "train" not in map(_split_of, names)


def _openke_files(sources: list[Source], where: str | Path) -> Files:
    """The files of OpenKE, train2id.txt and so on; those of names are optional."""
    by_file_name = {source.file_name.lower(): source for source in sources}
    files = {
        name: by_file_name[file_name]
        for file_name, name in OPENKE_FILES.items()
        if file_name in by_file_name
    }
    missing = [split for split in REQUIRED_SPLITS if split not in files]
    if missing:
        problem = (
            "has train2id.txt, so it should hold the files of OpenKE, and "
            f"{missing[0]}2id.txt is missing"
        )
        raise UnusableData(
            where, problem, advice="Add it, or name train2id.txt itself to split it."
        )
    return Files(files, _find_labels(sources))


def _by_split(sources: Iterable[Source], where: str | Path) -> Files:
    splits: dict[str, Source] = {}
    for source in sources:
        split = _split_of(source.file_name)
        if not split or not holds_triples(source):
            continue
        if split in splits:
            first_name = splits[split].file_name
            problem = f"has two files for {split}: {first_name} and {source.file_name}"
            raise UnusableData(where, problem)
        splits[split] = source

    if not splits.keys() >= set(REQUIRED_SPLITS):
        present = ", ".join(split for split in SPLITS if split in splits) or "none of them"
        problem = f"should hold train, valid and test (as train.tsv and so on); it has {present}"
        raise UnusableData(where, problem, advice="To split one file, name the file itself.")
    files = {str(split): splits[split] for split in SPLITS if split in splits}
    return Files(files, _find_labels(sources))


def _find_labels(sources: Iterable[Source]) -> Source | None:
    return next((source for source in sources if _is_labels(source.file_name)), None)


def _split_of(file_name: str) -> str | None:
    return SPLIT_WORDS.get(file_name.lower().split(".")[0])


def _is_labels(file_name: str) -> bool:
    return file_name.lower().startswith("labels.")


# -- the catalogue of public graphs ------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A public graph.

    Checksums are of the split files, so that a repacked archive is recognized.
    """

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
    folded = name.casefold()
    return next((entry for entry in catalogue().values() if entry.name.casefold() == folded), None)


def _identify(graph: Graph, sources: Mapping[str, Source]) -> Entry | None:
    """The entry with the counts and checksums of this graph, if any."""
    same_counts = [entry for entry in catalogue().values() if entry.counts == graph.counts]
    if not same_counts or not sources.keys() >= set(SPLITS):
        return None
    checksums = {split: sources[split].checksum() for split in SPLITS}
    return next((entry for entry in same_counts if entry.sha256 == checksums), None)


def _check_entry(entry: Entry, graph: Graph, sources: Mapping[str, Source], where: str) -> None:
    """Refuse a graph with the name of an entry and other counts or checksums."""
    # What the catalogue's own address holds cannot be given another name.
    rename = "" if where == entry.address else where

    def other(expected: str, found: str) -> OtherGraph:
        return OtherGraph(entry.name, expected=expected, found=found, rename=rename)

    if not sources.keys() >= set(SPLITS):
        found = "is one file of triples" if "triples" in sources else "has no test file"
        raise other("train, valid and test", f"{where} {found}")

    for what, expected in entry.counts.items():
        number = graph.counts[what]
        if number != expected:
            noun = f"{what} triples" if what in SPLITS else what
            raise other(f"{expected:,} {noun}", f"{where} has {number:,}")

    for kind, checksums in (("sha256", entry.sha256), ("md5", entry.md5)):
        for split, expected_checksum in checksums.items():
            checksum = sources[split].checksum(kind)
            if checksum != expected_checksum:
                raise other(
                    f"a {split} file whose {kind} begins with {expected_checksum[:12]}",
                    f"that of {sources[split].name} begins with {checksum[:12]}",
                )


def fetch(entry: Entry) -> list[Source]:
    """Download the files of an entry once, and check their sha256 if it is known."""
    if "{split}" in entry.address:
        paths = []
        for split in SPLITS:
            address = entry.address.format(split=split)
            target = _downloads() / entry.name / f"{split}.txt"
            paths.append(_download(entry, address, target, entry.sha256.get(split)))
    else:
        target = _downloads() / f"{entry.name}.tar.gz"
        paths = [_download(entry, entry.address, target, entry.archive_sha256)]

    with _discard_on_error(entry, entry.address):
        return [source for path in paths for source in find_sources(path)]


@contextmanager
def _discard_on_error(entry: Entry | None, where: str) -> Iterator[None]:
    """Delete the downloads of an entry that turn out to be another graph.

    The next call then downloads again. Files of the user stay.
    """
    try:
        yield
    except DataError as error:
        if not entry or where != entry.address:
            raise
        shutil.rmtree(_downloads() / entry.name, ignore_errors=True)
        (_downloads() / f"{entry.name}.tar.gz").unlink(missing_ok=True)
        raise DownloadDiscarded(error, entry.address) from None


def _downloads() -> Path:
    return cache_folder() / "downloads"


def _download(entry: Entry, address: str, target: Path, sha256: str | None) -> Path:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    known_hash = sha256 and f"sha256:{sha256}"
    try:
        path = pooch.retrieve(address, known_hash=known_hash, fname=target.name, path=target.parent)
        return Path(path)
    except ValueError as error:  # a checksum that differs
        reason = str(error).partition(". ")[0]
        problem = f"is not what {address} holds: {reason}. The download was deleted"
        failure = DownloadFailed(entry.name, problem, advice=OFFLINE)
    except OSError as error:
        # Errors of requests, which pooch downloads by, are OSErrors without a number.
        if error.errno is None:
            problem = f"could not be downloaded from {address} ({type(error).__name__})"
            failure = DownloadFailed(entry.name, problem, advice=OFFLINE)
        else:
            problem = f"could not be saved in {target.parent} ({error.strerror or error})"
            advice = "Set the variable DUALKG_CACHE to a folder that can be written."
            failure = DownloadFailed(entry.name, problem, advice=advice)
    # Here the error of requests is no longer handled, so the failure does not keep its connection.
    raise failure
