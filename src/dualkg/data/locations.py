"""Where the files of a graph are: bundled, in a folder of archives, fetched, or one's own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath

from dualkg.data.archives import COMPRESSIONS, TARS, TRIPLE_SUFFIXES, Source, find_sources, holds_triples, one_source
from dualkg.data.catalogue import Entry, catalogue, fetch, find_entry
from dualkg.data.graph import SPLITS
from dualkg.errors import DataError, RequestError, did_you_mean

BUNDLED = "world"
ARCHIVE_SUFFIXES = (*TARS, ".zip")
SPLIT_WORDS = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}


@dataclass(frozen=True)
class Location:
    """The files of a graph: one for each split, or a single one that is still to be split."""

    name: str
    source: str
    where: str
    splits: dict[str, Source] = field(default_factory=dict)
    labels: Source | None = None
    single: Source | None = None
    entry: Entry | None = None  # the catalogue's graph that it says it is

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
    named = os.sep not in text and not text.startswith("~")
    if named and text == BUNDLED:
        return _of_folder(Path(str(resources.files("dualkg.data") / BUNDLED)), name=BUNDLED, source=BUNDLED)
    if named and (entry := find_entry(text)):
        found = _in_data_folder(entry.name)
        if found is None:
            return _of_sources(fetch(entry), name=entry.name, source=entry.name, where=entry.address, entry=entry)
        return _of_path(found, name=entry.name, source=entry.name, entry=entry)
    if _exists(path):
        name = stem(path)
        return _of_path(path, name=name, source=text, entry=find_entry(name))
    if named and (found := _in_data_folder(text)):
        return _of_path(found, name=text, source=text)
    raise _unknown(text, path)


def _exists(path: Path) -> bool:
    with suppress(OSError):  # a name too long for any file
        return path.exists()
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
    return PurePosixPath(name).stem if PurePosixPath(name).suffix.lower() in TRIPLE_SUFFIXES else name


def data_folder() -> Path | None:
    """The folder of archives that is looked in before the network: the variable DUALKG_DATA."""
    name = os.environ.get("DUALKG_DATA")
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise RequestError(f"DUALKG_DATA names {folder}, which is not a folder.")
    return folder


def names_in_data_folder() -> list[str]:
    """The graphs whose archives, or folders, lie in DUALKG_DATA."""
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
    here = {path.name.casefold(): path for path in sorted(folder.iterdir())}
    wanted = [f"{name}{suffix}".casefold() for suffix in (*ARCHIVE_SUFFIXES, "")]
    return next((here[file_name] for file_name in wanted if file_name in here), None)


def _of_path(path: Path, *, name: str, source: str, entry: Entry | None = None) -> Location:
    if path.is_dir():
        return _of_folder(path, name=name, source=source, entry=entry)
    sources = find_sources(path)
    if len(sources) > 1 and _by_split(sources, str(path)):
        return _of_sources(sources, name=name, source=source, where=str(path), entry=entry)
    single = sources[0] if len(sources) == 1 else one_source(path)
    return Location(name, source, str(path), labels=_labels_among(sources), single=single, entry=entry)


def _of_folder(folder: Path, *, name: str, source: str, entry: Entry | None = None) -> Location:
    paths = [path for path in sorted(folder.iterdir()) if _split_word(path.name) or _is_labels(path.name)]
    files = [path for path in paths if not path.is_dir()]
    in_files = {_split_word(path.name) for path in files}
    for path in paths:
        if path.is_dir() and _split_word(path.name) not in in_files:
            raise DataError(f"{path} is a folder; a file of triples was expected. Name the file {path.name}.tsv.")
    inner = [path for path in folder.iterdir() if path.is_dir() and _looks_like_graph(path)]
    if not paths and len(inner) == 1:  # as an archive unpacks
        return _of_folder(inner[0], name=name, source=source, entry=entry)
    sources = [one_source(path) for path in files]
    return _of_sources(sources, name=name, source=source, where=str(folder), entry=entry)


def _of_sources(sources: list[Source], *, name: str, source: str, where: str, entry: Entry | None = None) -> Location:
    splits = _by_split(sources, where)
    missing = [split for split in SPLITS if split not in splits]
    if missing:
        found = ", ".join(split for split in SPLITS if split in splits) or "none of them"
        raise DataError(
            f"{where} should hold train, valid and test (as train.tsv and so on); it has {found}. To split one file, "
            f"name the file itself."
        )
    ordered = {str(split): splits[split] for split in SPLITS}
    return Location(name, source, where, ordered, labels=_labels_among(sources), entry=entry)


def _labels_among(sources: Iterable[Source]) -> Source | None:
    return next((source for source in sources if _is_labels(source.file_name)), None)


def _by_split(sources: Iterable[Source], where: str) -> dict[str, Source]:
    splits: dict[str, Source] = {}
    for source in sources:
        split = _split_word(source.file_name)
        if not split or not holds_triples(source):
            continue
        if split in splits:
            raise DataError(f"{where} has two files for {split}: {splits[split].file_name} and {source.file_name}.")
        splits[split] = source
    return splits


def _split_word(file_name: str) -> str | None:
    return SPLIT_WORDS.get(file_name.lower().split(".")[0]) if not file_name.startswith(".") else None


def _is_labels(file_name: str) -> bool:
    return file_name.lower().startswith("labels.")


def _unknown(text: str, path: Path) -> RequestError:
    known = [BUNDLED, *catalogue(), *names_in_data_folder()]
    near = did_you_mean(text, known)
    if not near and path.parent.is_dir():
        near = did_you_mean(path.name, [found.name for found in path.parent.iterdir()])
    return RequestError(f"There is no graph, file or folder '{text}'.{near} See: dualkg datasets")
