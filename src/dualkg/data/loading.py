"""From a name or a path to a graph: find or download its files, read them, and cache the graph."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dualkg.data.archives import (
    COMPRESSIONS,
    Source,
    cache_folder,
    find_one_source,
    find_sources,
)
from dualkg.data.catalogue import (
    ARCHIVE_SUFFIXES,
    Entry,
    catalogue,
    check_entry,
    discard_on_error,
    fetch,
    fetch_labels,
    find_entry,
    identify,
    published_files,
)
from dualkg.data.columns import Columns, check_columns
from dualkg.data.conversion import advice_for, is_datasets, is_table, wrong_object
from dualkg.data.encoding import COMPANIONS, ReadTriples, read_triples
from dualkg.data.formats.delimited import read_labels
from dualkg.data.graph import FORMAT, SPLITS, Graph, load_saved_graph, save_graph
from dualkg.data.inspection import many_relations
from dualkg.data.readers import find_reader, holds_triples, one_source, only_triples
from dualkg.data.splits import Splitting, graph_fields, parse_split
from dualkg.errors import DataError, RequestError, close_matches, one_of

BUNDLED = "world"
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

    A graph that was read before is loaded from the cache as long as its bytes and these options
    stay the same. A table of pandas, polars or Arrow is read by `Graph.from_dataframe`; other data
    in memory have constructors of their own, such as `Graph.from_triples`.

    Args:
        graph: Name of a graph (`dualkg datasets` lists them), path of a file, folder or archive,
            or a table.
        columns: Columns of head, relation and tail, by name or number.
        split: Percentages of train, valid and test, for a single file.
        seed: Seed of this split.
        labels: File of readable labels for names.
        delimiter: What separates columns.
        max_size: Size that a compressed file may expand to, such as "64G" (default: 16 GiB, and 100
            times its own size).

    Returns:
        The graph, with its triples as ids and its names.

    Examples:
        >>> kg.load_graph("world")
        Graph('world': 1,945 entities, 15 relations, 7,681 train, 678 valid, 677 test)
    """
    if is_table(graph) and not isinstance(graph, Mapping) and not is_datasets(graph):
        _check_no_file_options({"delimiter": delimiter, "max_size": max_size})
        return Graph.from_dataframe(graph, columns=columns, split=split, seed=seed, labels=labels)
    if not isinstance(graph, str | os.PathLike):
        advice = advice_for(graph)
        raise wrong_object("load_graph", expected="a name or a path", found=graph, advice=advice)
    check_columns(columns)
    splitting = Splitting(parse_split(split, seed), seed)
    location = locate(os.fspath(graph), max_size=max_size)
    if labels is not None:
        own_labels = find_one_source(labels, content="labels", max_size=max_size)
        location = replace(location, labels=own_labels, label_columns=None)

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
            raise RequestError(f"A table has no {name}, as files have. Leave it out.")


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
    return graph


def _read(request: _Request) -> Graph:
    """Read a graph from its files, and check or look up its catalogue entry."""
    location, columns, delimiter, splitting = request
    labels = {}
    if location.labels and not location.label_columns:
        labels = read_labels(location.labels)
    with discard_on_error(location.entry, location.where):
        if location.labels and location.label_columns:
            labels = read_labels(location.labels, location.label_columns)
        entry = location.entry
        as_published = _reads_as_published(location, columns)
        if entry:
            columns = entry.columns or columns
            delimiter = delimiter or entry.delimiter
        read = read_triples(
            location.files,
            columns=columns,
            delimiter=delimiter,
            find_headers=True,
            optional=("test",),
        )
        notes = [*read.notes, *_questions(location, read)]
        fields = graph_fields(
            replace(read, notes=notes),
            location.name,
            splitting,
            labels=labels,
            where=location.single.name if location.single else location.where,
            alternative="a folder with train, valid and test",
        )
        graph = Graph(**fields)
        if entry:
            num_read = {split: len(triples) for split, triples in read.triples.items()}
            counts = graph.counts | num_read
            notes = check_entry(entry, counts, location.files, location.where)
            graph = replace(graph, notes=(*graph.notes, *notes))
        elif as_published:
            entry = identify(graph.counts, location.files)
        if entry:
            graph = replace(graph, name=entry.name, catalogued=True)
        return graph.with_fingerprint()


def _reads_as_published(location: Location, columns: Columns | None) -> bool:
    """Whether columns are the published ones; others of a graph of the catalogue are refused."""
    entry = location.entry
    published_columns = (entry and entry.columns) or (1, 2, 3)
    as_published = columns is None or tuple(columns) == tuple(published_columns)
    if entry and not as_published:
        raise RequestError(
            f"{entry.name} is read as it is published, and columns {tuple(columns or ())} were "
            f"given. Leave them out; if it is another graph, give {location.where} another name."
        )
    return as_published


def _questions(location: Location, read: ReadTriples) -> Iterator[str]:
    """Sentences on a graph without test triples, and on one with very many relations."""
    test = location.files.get("test")
    if not location.single and test is None:
        yield f"{location.where} has no test file, so there are no test triples."
    elif test is not None and not len(read.triples["test"]):
        yield f"{test.name} is empty, so there are no test triples."
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
    label_columns: Columns | None = None  # of labels that were downloaded

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
        archive = _in_data_folder(entry.name, entry.download_suffix)
        if archive:
            files = _files_at(archive, max_size, entry)
            return Location(entry.name, entry.name, str(archive), *files, entry)
        files = _downloaded_files(entry, max_size)
        label_columns = entry.labels and entry.labels["columns"]
        return Location(entry.name, entry.name, entry.address, *files, entry, label_columns)

    if _exists(path):
        name = stem(path)
        files = _files_at(path, max_size, find_entry(name))
        # OpenKE's files of a graph of the catalogue have other bytes than the published ones.
        is_openke = any(
            source.file_name.lower() in OPENKE_FILES for source in files.triples.values()
        )
        return Location(name, text, str(path), *files, None if is_openke else find_entry(name))

    if is_name and (archive := _in_data_folder(text)):
        return Location(text, text, str(archive), *_files_at(archive, max_size))

    raise RequestError(
        f"There is no graph, file or folder '{text}'.{one_of(_similar_graphs(text, path))} See: "
        "dualkg datasets"
    )


def _downloaded_files(entry: Entry, max_size: int | str | None) -> Files:
    """The files of an entry at its address, from the network or from an earlier download."""
    sources = fetch(entry, max_size=max_size)
    labels = fetch_labels(entry, max_size=max_size)
    with discard_on_error(entry, entry.address):
        if entry.files:
            files = published_files(entry, sources)
            if not files:
                listed = ", ".join(entry.files.values())
                file_names = ", ".join(source.file_name for source in sources[:5])
                raise DataError(
                    f"{entry.address} should hold {listed}; it holds {file_names or 'nothing'}."
                )
        elif entry.is_split:
            files, own_labels = _by_split(sources, entry.address)
            labels = labels or own_labels
        else:
            files = {"triples": only_triples(sources, entry.address)}
        return Files(files, labels)


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
        raise RequestError(f"DUALKG_DATA names {folder}, which is not a folder.")
    return folder


def names_in_data_folder() -> list[str]:
    """The names of the graphs in DUALKG_DATA, archives or folders."""
    folder = data_folder()
    if folder is None:
        return []
    published = {entry.file_name.casefold(): name for name, entry in catalogue().items()}
    names = set()
    for path in folder.iterdir():
        name = published.get(path.name.casefold())
        if name or _looks_like_graph(path):
            names.add(name or stem(path))
    return sorted(names)


def _looks_like_graph(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("train.*")) or (path / "train2id.txt").exists()
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def _in_data_folder(name: str, suffix: str = "") -> Path | None:
    """The archive or folder of a graph in DUALKG_DATA, by its name without regard to case.

    `suffix` is that of a file which is no archive.
    """
    folder = data_folder()
    if folder is None:
        return None
    paths = {path.name.casefold(): path for path in sorted(folder.iterdir())}
    for ending in (suffix, *ARCHIVE_SUFFIXES, ""):
        path = paths.get(f"{name}{ending}".casefold())
        if path:
            return path
    return None


def _files_at(path: Path, max_size: int | str | None = None, entry: Entry | None = None) -> Files:
    """The files of triples and the file of labels in a folder or an archive, or a single file.

    An archive as the publisher of `entry` made it may have files of other names.
    """
    if path.is_dir():
        return _files_in_folder(path, max_size)

    sources = find_sources(path, max_size=max_size)
    if entry and (files := published_files(entry, sources)):
        return Files(files, None)
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
            raise DataError(
                f"{child} is a folder; a file of triples was expected. Name the file "
                f"{child.name}.tsv."
            )

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
        raise DataError(
            f"{where} has train2id.txt, so it should hold the files of OpenKE, and "
            f"{missing[0]}2id.txt is missing. Add it, or name train2id.txt itself to split it."
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
            raise DataError(
                f"{where} has two files for {split}: {first_name} and {source.file_name}."
            )
        splits[split] = source

    if not splits.keys() >= set(REQUIRED_SPLITS):
        present = ", ".join(split for split in SPLITS if split in splits) or "none of them"
        raise DataError(
            f"{where} should hold train, valid and test (as train.tsv and so on); it has "
            f"{present}. To split one file, name the file itself."
        )
    files = {str(split): splits[split] for split in SPLITS if split in splits}
    return Files(files, _find_labels(sources))


def _find_labels(sources: Iterable[Source]) -> Source | None:
    return next((source for source in sources if _is_labels(source.file_name)), None)


def _split_of(file_name: str) -> str | None:
    return SPLIT_WORDS.get(file_name.lower().split(".")[0])


def _is_labels(file_name: str) -> bool:
    return file_name.lower().startswith("labels.")
