"""From a name or a path to a graph: find or download its files, read them, and cache the graph by
their content.
"""

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

from dualkg.data.archives import (
    COMPRESSIONS,
    TARS,
    TRIPLE_SUFFIXES,
    Source,
    cache_folder,
    find_sources,
    holds_triples,
    one_source,
    only_triples,
)
from dualkg.data.encoding import OPENKE, read_triples
from dualkg.data.graph import FORMAT, SPLITS, Graph, load_saved_graph, save_graph
from dualkg.data.memory import advice_for
from dualkg.data.readers import Columns, check_columns
from dualkg.data.splits import Splitting, graph_fields, parse_split
from dualkg.data.text import read_labels
from dualkg.errors import DataError, RequestError, did_you_mean

Files = tuple[dict[str, Source], Source | None]  # of triples by split, and of labels
BUNDLED = "world"
ARCHIVE_SUFFIXES = (*TARS, ".zip")
READING = 2  # increased when the same bytes are read in another way
SPLIT_WORDS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}

OFFLINE = " To work offline, put its archive into a folder and name that folder in the variable DUALKG_DATA."
OPENKE_FILES = {f"{name}2id.txt": name for name in SPLITS} | {
    f"{name}.txt": name for name in OPENKE
}


def load_graph(
    graph: str | Path,
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
    before is loaded from the cache as long as its bytes and these options stay the same. Data in
    memory have constructors of their own, such as `Graph.from_triples`. `max_size`, such as "64G",
    is the size that a compressed file may expand to (default: 16 GiB, and 100 times its own size).
    """
    if not isinstance(graph, str | os.PathLike):
        raise RequestError(advice_for(graph))
    check_columns(columns)
    splitting = parse_split(split, seed), seed
    location = locate(graph, max_size=max_size)
    if labels is not None:
        found_labels = find_sources(labels, max_size=max_size)
        if len(found_labels) != 1:
            raise DataError(
                f"One file of labels was expected in {labels}, and it holds {len(found_labels)}. "
                "Name one file."
            )
        location = replace(location, labels=found_labels[0])
    # One checksum of the bytes to read, the names that remarks mention, and the options that
    # determine the graph.
    files = {"labels": location.labels, **location.files} if location.labels else location.files
    read = {
        name: [source.name, source.checksum(stored=True), source.compression]
        for name, source in files.items()
    }
    facts = [
        FORMAT,
        READING,
        location.name,
        location.entry and asdict(location.entry),
        read,
        list(columns or []),
    ]
    facts += [delimiter, splitting if location.single else []]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    cached = cache_folder() / "graphs" / key
    found = None
    if location.source != BUNDLED:
        with suppress(OSError, ValueError):
            found = load_saved_graph(cached)
    if found is None:
        shutil.rmtree(
            cached, ignore_errors=True
        )  # damaged or of an older version: it is written again
        labels_read = read_labels(location.labels) if location.labels else {}
        with _discard_on_error(location.entry, location.where):
            found = _read(location, columns, delimiter, splitting, labels_read).with_fingerprint()
        if location.source != BUNDLED:
            with suppress(OSError):  # loading works without a writable cache
                save_graph(found, cached)
            if found.is_mapped and cached.exists():
                del found  # its temporary files take as much disk, and memory while they are read
                found = load_saved_graph(cached)
    read_options: dict[str, object] = (
        {"split": split, "split_seed": seed} if location.single else {}
    )
    read_options |= {"columns": columns and tuple(columns), "delimiter": delimiter}
    read_options |= {"labels": labels and str(labels), "max_size": max_size}
    read_options = {name: option for name, option in read_options.items() if option is not None}
    return replace(found, source=location.source, read_options=read_options)


def _read(
    location: Location,
    columns: Columns | None,
    delimiter: str | None,
    splitting: Splitting,
    labels: dict[str, str],
) -> Graph:
    """Read a graph from its files, and check or look up its catalogue entry."""
    entry = location.entry
    as_published = columns is None or list(columns) == [1, 2, 3]
    if entry and not as_published:
        raise RequestError(
            f"{entry.name} is read as it is published, and columns {tuple(columns or ())} were "
            f"given. Leave them out; if it is another graph, give {location.where} another name."
        )
    read = read_triples(location.files, columns=columns, delimiter=delimiter, find_headers=True)
    where = location.single.name if location.single else location.where
    advice = "a folder with train, valid and test"
    graph = Graph(
        **graph_fields(read, location.name, splitting, labels=labels, where=where, advice=advice)
    )
    if entry:
        _check_entry(entry, graph, location.files, location.where)
    elif as_published:
        entry = _identify(graph, location.files)
    return replace(graph, name=entry.name, catalogued=True) if entry else graph


# -- the files of a graph ----------------------------------------------------


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
        return Location(
            BUNDLED,
            BUNDLED,
            BUNDLED,
            *_files_at(Path(str(resources.files("dualkg.data") / BUNDLED))),
        )
    if is_name and (entry := find_entry(text)):
        found = _in_data_folder(entry.name)
        files = _files_at(found, max_size) if found else _by_split(fetch(entry), entry.address)
        return Location(entry.name, entry.name, str(found or entry.address), *files, entry)
    if _exists(path):
        at_path = _files_at(path, max_size)
        name = stem(path)
        openke = any(source.file_name.lower() in OPENKE_FILES for source in at_path[0].values())
        return Location(
            name, text, str(path), *at_path, None if openke else find_entry(name)
        )  # other bytes
    if is_name and (found := _in_data_folder(text)):
        return Location(text, text, str(found), *_files_at(found, max_size))
    known = [BUNDLED, *catalogue(), *names_in_data_folder()]
    suggestion = did_you_mean(text, known)
    if not suggestion and _exists(path.parent) and path.parent.is_dir():
        suggestion = did_you_mean(path.name, [found.name for found in path.parent.iterdir()])
    raise RequestError(
        f"There is no graph, file or folder '{text}'.{suggestion} See: dualkg datasets"
    )


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
    return (
        PurePosixPath(name).stem if PurePosixPath(name).suffix.lower() in TRIPLE_SUFFIXES else name
    )


def data_folder() -> Path | None:
    """The folder of archives that is searched before the network: the variable DUALKG_DATA."""
    name = os.environ.get("DUALKG_DATA")
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise RequestError(f"DUALKG_DATA names {folder}, which is not a folder.")
    return folder


def names_in_data_folder() -> list[str]:
    """The names of the graphs in DUALKG_DATA, archives or folders."""
    folder = data_folder()
    return (
        sorted({stem(path) for path in folder.iterdir() if _looks_like_graph(path)})
        if folder
        else []
    )


def _looks_like_graph(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("train.*")) or (path / "train2id.txt").exists()
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def _in_data_folder(name: str) -> Path | None:
    folder = data_folder()
    paths = {path.name.casefold(): path for path in sorted(folder.iterdir())} if folder else {}
    wanted = [f"{name}{suffix}".casefold() for suffix in (*ARCHIVE_SUFFIXES, "")]
    return next((paths[file_name] for file_name in wanted if file_name in paths), None)


def _files_at(path: Path, max_size: int | str | None = None) -> Files:
    """The files of triples and the file of labels in a folder or an archive, or a single file."""
    if path.is_dir():
        return _files_in_folder(path, max_size)
    sources = find_sources(path, max_size=max_size)
    if len(sources) > 1 and _is_openke(source.file_name for source in sources):
        return _openke_files(sources, path)
    if len(sources) > 1 and any(
        _split_of(source.file_name) and holds_triples(source) for source in sources
    ):
        return _by_split(sources, path)
    return {"triples": only_triples(sources, path)}, _find_labels(sources)


def _files_in_folder(folder: Path, max_size: int | str | None) -> Files:
    if _is_openke(path.name for path in folder.iterdir()):
        paths = [
            path
            for path in folder.iterdir()
            if path.name.lower() in OPENKE_FILES or _is_labels(path.name)
        ]
        return _openke_files(
            [source for path in paths for source in find_sources(path, max_size=max_size)], folder
        )
    paths = [
        path for path in sorted(folder.iterdir()) if _split_of(path.name) or _is_labels(path.name)
    ]
    files = [path for path in paths if not path.is_dir()]
    in_files = {_split_of(path.name) for path in files}
    for path in paths:
        if path.is_dir() and _split_of(path.name) not in in_files:
            raise DataError(
                f"{path} is a folder; a file of triples was expected. Name the file "
                f"{path.name}.tsv."
            )
    inner = [path for path in folder.iterdir() if path.is_dir() and _looks_like_graph(path)]
    if not paths and len(inner) == 1:  # as an archive unpacks
        return _files_in_folder(inner[0], max_size)
    return _by_split([one_source(path, max_size=max_size) for path in files], folder)


def _is_openke(file_names: Iterable[str]) -> bool:
    names = [name.lower() for name in file_names]
    return "train2id.txt" in names and "train" not in map(_split_of, names)


def _openke_files(sources: list[Source], where: str | Path) -> Files:
    """The files of OpenKE, train2id.txt and so on; those of names are optional."""
    found = {source.file_name.lower(): source for source in sources}
    files = {name: found[file] for file, name in OPENKE_FILES.items() if file in found}
    if missing := [split for split in SPLITS if split not in files]:
        raise DataError(
            f"{where} has train2id.txt, so it should hold the files of OpenKE, and "
            f"{missing[0]}2id.txt is missing. Add it, or name train2id.txt itself to split it."
        )
    return files, _find_labels(sources)


def _by_split(sources: Iterable[Source], where: str | Path) -> Files:
    splits: dict[str, Source] = {}
    for source in sources:
        split = _split_of(source.file_name)
        if not split or not holds_triples(source):
            continue
        if split in splits:
            raise DataError(
                f"{where} has two files for {split}: {splits[split].file_name} and "
                f"{source.file_name}."
            )
        splits[split] = source
    if len(splits) < len(SPLITS):
        found = ", ".join(split for split in SPLITS if split in splits) or "none of them"
        raise DataError(
            f"{where} should hold train, valid and test (as train.tsv and so on); it has {found}. "
            "To split one file, name the file itself."
        )
    return {split: splits[split] for split in SPLITS}, _find_labels(sources)


def _find_labels(sources: Iterable[Source]) -> Source | None:
    return next((source for source in sources if _is_labels(source.file_name)), None)


def _split_of(file_name: str) -> str | None:
    return SPLIT_WORDS.get(file_name.lower().split(".")[0])


def _is_labels(file_name: str) -> bool:
    return file_name.lower().startswith("labels.")


# -- the catalogue of public graphs ------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A public graph. Checksums are of the split files, so that a repacked archive is
    recognized.
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
    return next(
        (entry for entry in catalogue().values() if entry.name.casefold() == name.casefold()), None
    )


def _identify(graph: Graph, sources: Mapping[str, Source]) -> Entry | None:
    """The entry with the counts and checksums of this graph, if any."""
    same_counts = [entry for entry in catalogue().values() if entry.counts == graph.counts]
    if not same_counts or not sources.keys() >= set(SPLITS):
        return None
    sums = {split: sources[split].checksum() for split in SPLITS}
    return next((entry for entry in same_counts if entry.sha256 == sums), None)


def _check_entry(entry: Entry, graph: Graph, sources: Mapping[str, Source], where: str) -> None:
    """Refuse a graph with the name of an entry and other counts or checksums."""
    advice = (
        "" if where == entry.address else f" If it is another graph, give {where} another name."
    )
    if not sources.keys() >= set(SPLITS):
        raise DataError(
            f"{entry.name} has train, valid and test; {where} is one file of triples.{advice}"
        )
    for what, expected in entry.counts.items():
        if graph.counts[what] != expected:
            noun = f"{what} triples" if what in SPLITS else what
            raise DataError(
                f"{entry.name} should have {expected:,} {noun}; {where} has "
                f"{graph.counts[what]:,}.{advice}"
            )
    for kind, sums in (("sha256", entry.sha256), ("md5", entry.md5)):
        for split, expected_sum in sums.items():
            found = sources[split].checksum(kind)
            if found != expected_sum:
                raise DataError(
                    f"{sources[split].name} is not the {split} file of {entry.name}: its {kind} "
                    f"should begin with {expected_sum[:12]} and begins with {found[:12]}.{advice}"
                )


def fetch(entry: Entry) -> list[Source]:
    """Download the files of an entry once, and check their sha256 if it is known."""
    if "{split}" in entry.address:
        paths = [
            _download(
                entry,
                entry.address.format(split=split),
                f"{entry.name}/{split}.txt",
                entry.sha256.get(split),
            )
            for split in SPLITS
        ]
    else:
        paths = [_download(entry, entry.address, f"{entry.name}.tar.gz", entry.archive_sha256)]
    with _discard_on_error(entry, entry.address):
        return [source for path in paths for source in find_sources(path)]


@contextmanager
def _discard_on_error(entry: Entry | None, where: str) -> Iterator[None]:
    """Delete the downloads of an entry that turn out to be another graph, so that the next call
    downloads again.
    """
    try:
        yield
    except DataError as error:
        if not entry or where != entry.address:
            raise
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
        found = pooch.retrieve(
            address, known_hash=sha256 and f"sha256:{sha256}", fname=target.name, path=target.parent
        )
    except ValueError as error:  # a checksum that differs
        reason = str(error).partition(". ")[0]
        raise DataError(
            f"{address} is not {entry.name}: {reason}. The download was deleted.{OFFLINE}"
        ) from None
    except OSError as error:
        if (
            error.errno is None
        ):  # errors of requests, which pooch downloads by, are OSErrors without a number
            reason = type(error).__name__
            raise DataError(
                f"{entry.name} could not be downloaded from {address} ({reason}).{OFFLINE}"
            ) from None
        raise DataError(
            f"{entry.name} could not be saved in {target.parent} ({error.strerror or error}). Set "
            "the variable DUALKG_CACHE to a folder that can be written."
        ) from None
    return Path(found)
