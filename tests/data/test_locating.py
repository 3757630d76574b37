"""The files of a graph: in folders, archives and the data folder, by name and by path."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.data.graph import SPLITS
from dualkg.data.loading import data_folder, locate, names_in_data_folder, stem
from dualkg.errors import DataError, RequestError
from tests.data.reading.conftest import tarred, zipped

LINE = b"a\tr\tb\n"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of files that each hold one triple."""

    def made(*names: str, inside: str = "mine") -> Path:
        for name in names:
            path = tmp_path / inside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(LINE)
        return tmp_path / inside

    return made


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of archives, named in DUALKG_DATA."""
    path = tmp_path / "archives"
    path.mkdir()
    monkeypatch.setenv("DUALKG_DATA", str(path))
    return path


def file_names(location) -> dict[str, str]:
    return {split: source.file_name for split, source in location.files.items()}


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("WN18RR.tar.xz", "WN18RR"),
        ("mine.tgz", "mine"),
        ("mine.txz", "mine"),
        ("a.b.tsv", "a.b"),
        ("mine.tsv.gz", "mine"),
        ("mine.NT.ZST", "mine"),
        ("mine.tsv.zip", "mine"),
        ("v1.5", "v1.5"),
    ],
)
def test_the_name_of_a_graph_is_its_file_without_suffixes(file_name: str, name: str) -> None:
    assert stem(Path("/somewhere") / file_name) == name


def test_the_name_of_a_folder_keeps_its_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graph.tsv").mkdir()
    assert stem(tmp_path / "graph.tsv") == "graph.tsv"
    monkeypatch.chdir(tmp_path / "graph.tsv")
    assert stem(Path()) == "graph.tsv"


@pytest.mark.parametrize(
    "names",
    [
        ("train.tsv", "valid.tsv", "test.tsv"),
        ("TRAIN.TXT", "Valid.csv.gz", "test.nt"),
        ("train.parquet", "validation.ttl", "test.txt.zst"),
        (
            "train.tsv",
            "dev.tsv",
            "test.tsv",
            "notes.tsv",
            ".train.tsv",
            "train2id.txt",
            "test.md",
            "test.md.orig",
        ),
    ],
)
def test_a_folder_is_read_by_the_names_of_its_files(
    folder: Callable[..., Path], names: tuple[str, ...]
) -> None:
    location = locate(folder(*names))
    assert list(location.files) == list(SPLITS)
    assert [source.path.name for source in location.files.values()] == list(names[:3])
    assert (location.name, location.single, location.labels, location.entry) == (
        "mine",
        None,
        None,
        None,
    )


def test_labels_are_found_in_the_folder_of_the_splits(folder: Callable[..., Path]) -> None:
    location = locate(folder("train.tsv", "valid.tsv", "test.tsv", "labels.tsv"))
    assert location.labels is not None
    assert location.labels.file_name == "labels.tsv"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train.tsv", "test.tsv"), "train, test"),
        (("valid.tsv",), "valid"),
        (("all.tsv",), "none of them"),
    ],
)
def test_a_missing_split_is_an_error(
    folder: Callable[..., Path], names: tuple[str, ...], found: str
) -> None:
    path = folder(*names)
    with pytest.raises(DataError) as caught:
        locate(path)
    assert str(caught.value) == (
        f"{path} should hold train, valid and test (as train.tsv and so on); it has {found}. To "
        "split one file, name the file itself."
    )


def test_two_files_for_a_split_are_an_error(folder: Callable[..., Path]) -> None:
    path = folder("train.tsv", "valid.tsv", "dev.csv", "test.tsv")
    with pytest.raises(DataError) as caught:
        locate(path)
    assert str(caught.value) == f"{path} has two files for valid: dev.csv and valid.tsv."


@pytest.mark.parametrize("name", ["test", "test.tsv"])
def test_a_folder_where_a_file_should_be_is_an_error(
    folder: Callable[..., Path], name: str
) -> None:
    path = folder("train.tsv", "valid.tsv", f"{name}/part-1.tsv")
    with pytest.raises(DataError) as caught:
        locate(path)
    assert str(caught.value).startswith(f"{path}/{name}")
    assert "is a folder; a file of triples was expected" in str(caught.value)


def test_a_folder_named_like_a_split_is_ignored_beside_its_file(
    folder: Callable[..., Path],
) -> None:
    assert (
        file_names(locate(folder("train.tsv", "valid.tsv", "test.tsv", "test/notes.tsv")))["test"]
        == "test.tsv"
    )


def test_an_archive_is_read_like_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "mine.zip"
    path.write_bytes(
        zipped(
            {f"deep/{name}": LINE for name in ("train.tsv", "dev.tsv", "test.tsv", "labels.tsv")}
        )
    )
    location = locate(path)
    assert file_names(location) == {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
    assert location.labels is not None
    assert (location.name, location.source, location.where) == ("mine", str(path), str(path))


def test_an_archive_may_hold_one_file_and_its_labels(tmp_path: Path) -> None:
    path = tmp_path / "mine.tar"
    path.write_bytes(tarred({"facts.tsv": LINE, "labels.tsv": b"a\tA\n", "README.md": b"hello"}))
    location = locate(path)
    assert location.single is not None
    assert location.labels is not None
    assert (location.single.file_name, location.labels.file_name) == ("facts.tsv", "labels.tsv")
    assert list(location.files) == ["triples"]


def test_an_archive_of_several_graphs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "both.tar").write_bytes(tarred({"one.tsv": LINE, "two.tsv": LINE}))
    with pytest.raises(DataError) as caught:
        locate(tmp_path / "both.tar")
    assert "holds 2 files of triples, and one was expected" in str(caught.value)
    assert "Its files: one.tsv, two.tsv." in str(caught.value)


def test_the_name_of_a_catalogued_graph_sets_its_entry(folder: Callable[..., Path]) -> None:
    location = locate(folder("train.tsv", "valid.tsv", "test.tsv", inside="wn18rr"))
    assert location.entry is not None
    assert location.entry.name == "WN18RR"
    assert location.where != location.entry.address


@pytest.mark.parametrize("file_name", ["UMLS.tar.gz", "umls.tar.gz", "UMLS.zip"])
def test_archives_in_the_data_folder_are_found_by_name(archives: Path, file_name: str) -> None:
    files = {f"{split}.txt": LINE for split in SPLITS}
    (archives / file_name).write_bytes(
        zipped(files) if file_name.endswith("zip") else tarred(files, ".gz")
    )
    location = locate("umls")
    assert (location.name, location.where) == ("UMLS", str(archives / file_name))


def test_a_folder_in_the_data_folder_is_found_by_name(
    archives: Path, folder: Callable[..., Path]
) -> None:
    folder(*(f"{split}.txt" for split in SPLITS), inside="archives/Own")
    assert locate("Own").where == str(archives / "Own")


def test_the_data_folder_lists_its_graphs(archives: Path, folder: Callable[..., Path]) -> None:
    assert names_in_data_folder() == []
    (archives / "B.tar.xz").write_bytes(b"")
    (archives / "B.zip").write_bytes(b"")
    (archives / "README.md").write_bytes(b"")
    folder("train.tsv", inside="archives/A")
    folder("page.html", inside="archives/C")
    assert names_in_data_folder() == ["A", "B"]


def test_without_the_variable_there_is_no_data_folder() -> None:
    assert data_folder() is None
    assert names_in_data_folder() == []


def test_a_data_folder_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALKG_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(RequestError) as caught:
        locate("WN18RR")
    assert str(caught.value) == f"DUALKG_DATA names {tmp_path}/nowhere, which is not a folder."
    assert locate("world").name == "world"


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [("WN18R", ["WN18RR"]), ("wordl", ["world"]), ("qqqqqqq", []), ("x" * 300, [])],
)
def test_an_unknown_graph_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suggestions: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        locate(name)
    assert "There is no graph, file or folder '" in str(caught.value)
    assert all(f"Did you mean '{name}'" in str(caught.value) for name in suggestions)


def test_a_misspelled_path_gets_a_suggestion(folder: Callable[..., Path]) -> None:
    path = folder("triples.tsv")
    with pytest.raises(RequestError) as caught:
        locate(path / "tripels.tsv")
    assert "Did you mean 'triples.tsv'?" in str(caught.value)


def test_the_only_folder_inside_a_folder_is_read(tmp_path):
    inner = tmp_path / "mine" / "inner"
    inner.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (inner / f"{split}.tsv").write_text("a\tr\tb\n")
    location = locate(tmp_path / "mine")
    assert location.name == "mine"
    assert [source.path.parent for source in location.files.values()] == [inner] * 3
