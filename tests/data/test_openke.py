"""Folders of OpenKE: ids of head, tail and relation after a count, and their names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.data.graph import SPLITS
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError
from tests.data.reading.conftest import zipped

ENTITIES = ["Île de Ré", "b", "c", "d", "unused"]
RELATIONS = ["r", "s"]
IDS = {
    "train": [(0, 0, 1), (1, 0, 2), (2, 1, 3), (3, 1, 0)],
    "valid": [(0, 0, 2)],
    "test": [(1, 1, 3)],
}
Make = Callable[..., Path]


def openke_files() -> dict[str, str]:
    files = {
        f"{split}2id.txt": f"{len(ids)}\n" + "".join(f"{h} {t} {r}\n" for h, r, t in ids)
        for split, ids in IDS.items()
    }
    for name, names in (("entity2id.txt", ENTITIES), ("relation2id.txt", RELATIONS)):
        files[name] = f"{len(names)}\n" + "".join(f"{one}\t{id}\n" for id, one in enumerate(names))
    return files


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))

    def made(changes: dict[str, str | None] | None = None, name: str = "mine") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in (
            openke_files() | {"type_constrain.txt": "1\n"} | (changes or {})
        ).items():
            if content is not None:
                (folder / file).write_text(content, encoding="utf-8")
        return folder

    return made


def refused(path: Path, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        load_graph(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_folder_of_openke_is_the_graph_of_its_names(make: Make, tmp_path: Path) -> None:
    graph = load_graph(make())
    plain = tmp_path / "plain"
    plain.mkdir()
    for split, ids in IDS.items():
        rows = [f"{ENTITIES[h]}\t{RELATIONS[r]}\t{ENTITIES[t]}\n" for h, r, t in ids]
        (plain / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    assert graph.fingerprint == load_graph(plain).fingerprint
    assert (graph.name, list(graph.notes)) == ("mine", [])


def test_an_archive_a_benchmark_name_and_tabs(make: Make, tmp_path: Path) -> None:
    graph = load_graph(make())
    (tmp_path / "other.zip").write_bytes(
        zipped({f"x/{name}": text.encode() for name, text in openke_files().items()})
    )
    assert load_graph(tmp_path / "other.zip").fingerprint == graph.fingerprint
    named = make({"train2id.txt": openke_files()["train2id.txt"].replace(" ", "\t")}, name="WN18RR")
    assert load_graph(named).fingerprint == graph.fingerprint
    assert not load_graph(named).catalogued


def test_plain_files_precede_those_of_openke(make: Make) -> None:
    files = {f"{split}.txt": f"{split}\tx\t{split}2\n" for split in SPLITS}
    assert load_graph(make(files)).counts["entities"] == 6  # type: ignore[arg-type]


def test_ids_are_names_without_their_files(make: Make) -> None:
    folder = make({"entity2id.txt": None, "relation2id.txt": None})
    graph = load_graph(folder)
    assert graph.entities.names.to_pylist() == ["0", "1", "2", "3"]
    assert len(graph.notes) == 3
    assert graph.notes[0] == (
        f"{folder}/train2id.txt is read without entity2id.txt and relation2id.txt: its ids are "
        "the names."
    )


def test_openke_has_no_columns_to_choose(make: Make) -> None:
    assert refused(make(), columns=(1, 2, 3)).endswith(
        "whose columns are known. Leave columns out."
    )
