"""From a name or a path to a graph: find its files, read them, and cache the graph by their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path, PurePosixPath

import numpy as np

from dualkg.data import catalogue
from dualkg.data.archives import COMPRESSIONS, TARS, TRIPLE_SUFFIXES, Source, find_sources, holds_triples, one_source
from dualkg.data.catalogue import Entry, find_entry
from dualkg.data.encoding import ReadTriples, read_triples
from dualkg.data.graph import (
    FORMAT,
    SPLITS,
    Graph,
    GraphShape,
    Notes,
    Triples,
    count_repeats,
    load_saved_graph,
    save_graph,
    sorted_distinct,
    triple_keys,
)
from dualkg.data.readers import Columns, check_columns
from dualkg.data.splits import split_triples
from dualkg.data.text import read_labels
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError, RequestError, did_you_mean

BUNDLED = "world"
ARCHIVE_SUFFIXES = (*TARS, ".zip")
SPLIT_WORDS = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}


def load_graph(
    graph: str | Path,
    *,
    columns: Columns | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    labels: str | Path | None = None,
) -> Graph:
    """Load `world`, a graph of the catalogue, or a folder, archive or file of triples.

    A single file is split into train, valid and test by `split` and `seed`. A graph that was read before is loaded from
    the cache as long as its bytes and these options stay the same.
    """
    check_columns(columns)
    if seed < 0:
        raise RequestError(f"A seed is a whole number, 0 or more; {seed} came.")
    options = _Options(columns, parse_split(split), seed)
    location = locate(graph)
    if labels is not None:
        location = replace(location, labels=_labels_source(labels))
    fingerprint = _fingerprint(location, options)
    cached = catalogue.cache_folder() / "graphs" / fingerprint[:32]
    found = _load_cached(cached) if location.source != BUNDLED else None
    if found is None:
        labels_read = read_labels(location.labels) if location.labels else {}
        with catalogue.discard_on_error(location.entry) if location.entry and location.fetched else nullcontext():
            found = replace(_read(location, options, labels_read), fingerprint=fingerprint)
        if location.source != BUNDLED:
            with suppress(OSError):  # loading works without a writable cache
                save_graph(found, cached)
    read_options: dict[str, object] = {"split": split, "split_seed": seed} if location.single else {}
    if columns is not None:
        read_options["columns"] = tuple(columns)
    if labels is not None:
        read_options["labels"] = str(labels)
    return replace(found, source=location.source, read_options=read_options)


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


@dataclass(frozen=True)
class _Options:
    """The options that determine the graph, together with the bytes of its files."""

    columns: Columns | None
    fractions: tuple[float, float, float]
    seed: int

    @property
    def as_published(self) -> bool:
        return self.columns is None or list(self.columns) == [1, 2, 3]


def _labels_source(path: str | Path) -> Source:
    sources = find_sources(path)
    if len(sources) != 1:
        raise DataError(f"One file of labels was expected in {path}, and it holds {len(sources)}. Name one file.")
    return sources[0]


def _fingerprint(location: Location, options: _Options) -> str:
    """One checksum of the bytes to read and of the options."""
    files = {"labels": location.labels, **location.files} if location.labels else location.files
    read = {name: [source.fingerprint(), source.suffix, source.compression] for name, source in files.items()}
    entry = asdict(location.entry) if location.entry else None
    cut = [options.fractions, options.seed] if location.single else []
    facts = [FORMAT, location.name, entry, read, list(options.columns or []), cut]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _load_cached(folder: Path) -> Graph | None:
    with suppress(OSError, ValueError):
        return load_saved_graph(folder)
    shutil.rmtree(folder, ignore_errors=True)  # damaged or of an older version: it is written again
    return None


# -- reading ------------------------------------------------------------------------------------------------


def _read(location: Location, options: _Options, labels: dict[str, str]) -> Graph:
    """Read a graph from its files, and check or look up its catalogue entry."""
    if location.entry and not options.as_published:
        raise RequestError(
            f"{location.entry.name} is read as it is published, and columns {tuple(options.columns or ())} were asked "
            f"for. Leave them out; if it is another graph, give {location.where} another name."
        )
    graph = _assemble(location, read_triples(location.files, columns=options.columns), options, labels)
    if location.entry:
        catalogue.check(location.entry, graph, location.files, location.where)
        return replace(graph, name=location.entry.name, catalogued=True)
    entry = catalogue.identify(graph, location.files) if options.as_published else None
    return replace(graph, name=entry.name, catalogued=True) if entry else graph


def _assemble(location: Location, read: ReadTriples, options: _Options, labels: dict[str, str]) -> Graph:
    shape = GraphShape(len(read.entities), len(read.relations))
    labels = read.labels | labels
    if location.single:
        splits, remarks = _split(location.single, read.triples["triples"], shape, options)
        notes = Notes(remarks=(*read.remarks, *remarks))
    else:
        splits = {name: read.triples[name] for name in SPLITS}
        notes = count_repeats(splits, shape, read.remarks)
    return Graph(
        name=location.name,
        entities=Vocabulary(read.entities, labels or None, kind="entity"),
        relations=Vocabulary(read.relations, labels or None, kind="relation"),
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        notes=notes,
    )


def _split(
    source: Source, triples: Triples, shape: GraphShape, options: _Options
) -> tuple[dict[str, Triples], list[str]]:
    """Split one file after removing duplicates: a copy in test of a triple in train would be known."""
    remarks = []
    keys = triple_keys(triples, shape)
    num_repeated = len(keys) - len(sorted_distinct(keys))
    if num_repeated:
        _, first = np.unique(keys, return_index=True)
        repeats = "1 repeat of a triple was" if num_repeated == 1 else f"{num_repeated:,} repeats of triples were"
        remarks.append(f"{repeats} left out.")
        triples = triples[np.sort(first)]
    parts = split_triples(triples, options.fractions, seed=options.seed)
    for name, fraction, part in zip(SPLITS, options.fractions, parts, strict=True):
        if fraction and not len(part):
            raise DataError(
                f"{source.name} cannot be split: of its {len(triples):,} triples none can go to {name} without leaving "
                f"an entity or a relation unseen in train (triples of the same two entities stay together). Give more "
                f"triples, or a folder with train, valid and test."
            )
    requested = sum(options.fractions[1:]) * len(triples)
    held_out = len(parts[1]) + len(parts[2])
    if held_out < 0.9 * requested:
        remarks.append(
            f"valid and test have {held_out:,} triples of the {requested:,.0f} asked for: the others are the only ones "
            f"of some entity or relation."
        )
    return dict(zip(SPLITS, parts, strict=True)), remarks


# -- the files of a graph -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Location:
    """The files of a graph: one for each split, or a single one to be split."""

    name: str
    source: str
    where: str
    splits: dict[str, Source] = field(default_factory=dict)
    labels: Source | None = None
    single: Source | None = None
    entry: Entry | None = None  # the catalogue's graph of that name

    @property
    def files(self) -> dict[str, Source]:
        return {"triples": self.single} if self.single else self.splits

    @property
    def fetched(self) -> bool:
        return self.entry is not None and self.where == self.entry.address


def locate(graph: str | Path) -> Location:
    """Find a graph by its name, or by the path of a folder, an archive or a file of triples."""
    text = str(graph)
    path = Path(text).expanduser()
    is_name = os.sep not in text and not text.startswith("~")
    if is_name and text == BUNDLED:
        return _in_folder(Path(str(resources.files("dualkg.data") / BUNDLED)), name=BUNDLED, source=BUNDLED)
    if is_name and (entry := find_entry(text)):
        if found := _in_data_folder(entry.name):
            return _at_path(found, name=entry.name, source=entry.name, entry=entry)
        sources = catalogue.fetch(entry)
        return _of_sources(sources, name=entry.name, source=entry.name, where=entry.address, entry=entry)
    with suppress(OSError):  # a name too long for any file
        if path.exists():
            return _at_path(path, name=stem(path), source=text, entry=find_entry(stem(path)))
    if is_name and (found := _in_data_folder(text)):
        return _at_path(found, name=text, source=text)
    known = [BUNDLED, *catalogue.catalogue(), *names_in_data_folder()]
    suggestion = did_you_mean(text, known)
    if not suggestion and path.parent.is_dir():
        suggestion = did_you_mean(path.name, [found.name for found in path.parent.iterdir()])
    raise RequestError(f"There is no graph, file or folder '{text}'.{suggestion} See: dualkg datasets")


def stem(path: Path) -> str:
    """The name of a file without any of its suffixes, of a folder as it is."""
    if path.is_dir():
        return path.resolve().name
    name = path.name
    for suffix in (*ARCHIVE_SUFFIXES, *COMPRESSIONS):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    return PurePosixPath(name).stem if PurePosixPath(name).suffix.lower() in TRIPLE_SUFFIXES else name


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
    paths = folder.iterdir() if folder else []
    return sorted({stem(path) for path in paths if _looks_like_graph(path)})


def _looks_like_graph(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("train.*"))
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def _in_data_folder(name: str) -> Path | None:
    folder = data_folder()
    if folder is None:
        return None
    paths = {path.name.casefold(): path for path in sorted(folder.iterdir())}
    wanted = [f"{name}{suffix}".casefold() for suffix in (*ARCHIVE_SUFFIXES, "")]
    return next((paths[file_name] for file_name in wanted if file_name in paths), None)


def _at_path(path: Path, *, name: str, source: str, entry: Entry | None = None) -> Location:
    if path.is_dir():
        return _in_folder(path, name=name, source=source, entry=entry)
    sources = find_sources(path)
    if len(sources) > 1 and _by_split(sources, str(path)):
        return _of_sources(sources, name=name, source=source, where=str(path), entry=entry)
    single = sources[0] if len(sources) == 1 else one_source(path)
    return Location(name, source, str(path), labels=_find_labels(sources), single=single, entry=entry)


def _in_folder(folder: Path, *, name: str, source: str, entry: Entry | None = None) -> Location:
    paths = [path for path in sorted(folder.iterdir()) if _split_of(path.name) or _is_labels(path.name)]
    files = [path for path in paths if not path.is_dir()]
    in_files = {_split_of(path.name) for path in files}
    for path in paths:
        if path.is_dir() and _split_of(path.name) not in in_files:
            raise DataError(f"{path} is a folder; a file of triples was expected. Name the file {path.name}.tsv.")
    inner = [path for path in folder.iterdir() if path.is_dir() and _looks_like_graph(path)]
    if not paths and len(inner) == 1:  # as an archive unpacks
        return _in_folder(inner[0], name=name, source=source, entry=entry)
    sources = [one_source(path) for path in files]
    return _of_sources(sources, name=name, source=source, where=str(folder), entry=entry)


def _of_sources(sources: list[Source], *, name: str, source: str, where: str, entry: Entry | None = None) -> Location:
    splits = _by_split(sources, where)
    if len(splits) < len(SPLITS):
        found = ", ".join(split for split in SPLITS if split in splits) or "none of them"
        raise DataError(
            f"{where} should hold train, valid and test (as train.tsv and so on); it has {found}. To split one file, "
            f"name the file itself."
        )
    ordered = {str(split): splits[split] for split in SPLITS}
    return Location(name, source, where, ordered, labels=_find_labels(sources), entry=entry)


def _find_labels(sources: Iterable[Source]) -> Source | None:
    return next((source for source in sources if _is_labels(source.file_name)), None)


def _by_split(sources: Iterable[Source], where: str) -> dict[str, Source]:
    splits: dict[str, Source] = {}
    for source in sources:
        split = _split_of(source.file_name)
        if not split or not holds_triples(source):
            continue
        if split in splits:
            raise DataError(f"{where} has two files for {split}: {splits[split].file_name} and {source.file_name}.")
        splits[split] = source
    return splits


def _split_of(file_name: str) -> str | None:
    return SPLIT_WORDS.get(file_name.lower().split(".")[0])


def _is_labels(file_name: str) -> bool:
    return file_name.lower().startswith("labels.")
