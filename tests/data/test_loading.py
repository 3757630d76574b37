"""From names and paths to graphs: files, archives, the cache, and errors."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dualkg.data import loading
from dualkg.data.catalogue import catalogue
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.loading import load_graph
from dualkg.errors import DataError, RequestError
from tests.data.reading.conftest import compressed, tarred, zipped

TRAIN = [("a", "r", "b"), ("b", "r", "c"), ("c", "s", "d"), ("d", "s", "a")]
VALID = [("a", "r", "c")]
TEST = [("b", "s", "d")]
Rows = list[tuple[str, str, str]]


def lines(rows: Rows, separator: str = "\t") -> bytes:
    return "".join(f"{separator.join(row)}\n" for row in rows).encode()


FILES = {"train.tsv": lines(TRAIN), "valid.tsv": lines(VALID), "test.tsv": lines(TEST)}
PAIRS = [(head, tail) for head in range(30) for tail in range(30) if head != tail]
DENSE: Rows = [(f"e{head}", f"r{(head + tail) % 3}", f"e{tail}") for head, tail in PAIRS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of files; those named replace the good ones, None leaves one out."""

    def made(changes: dict[str, bytes | None] | None = None, name: str = "mine") -> Path:
        path = tmp_path / name
        path.mkdir()
        for file_name, content in (FILES | (changes or {})).items():
            if content is not None:
                (path / file_name).write_bytes(content)
        return path

    return made


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A file of triples dense enough to be split."""
    path = tmp_path / "dense.tsv"
    path.write_bytes(lines(DENSE))
    return path


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], type[Exception]]:
    """From now on only the cache can give a graph."""

    class FilesReadError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise FilesReadError

    def patched() -> type[Exception]:
        monkeypatch.setattr(loading, "read_triples", fail)
        return FilesReadError

    return patched


def named(graph: Graph, split: str) -> Rows:
    entities = graph.entities
    relations = graph.relations
    return [(entities[h], relations[r], entities[t]) for h, r, t in graph.split(split).tolist()]


def same(one: Graph, other: Graph) -> bool:
    return (one.entities, one.relations) == (other.entities, other.relations) and all(
        np.array_equal(one.split(split), other.split(split)) for split in SPLITS
    )


def refused(path: Path, **choices: object) -> str:
    """The sentence that answers a bad graph; it exits with 2 and nothing is kept of it."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(RequestError) as caught:
        load_graph(path, **choices)
    assert caught.value.exit_code == 2
    assert sorted(path.parent.rglob("*")) == before
    return str(caught.value)


# Where graphs come from.


def test_the_bundled_graph_loads_and_is_not_cached(cache: Path) -> None:
    graph = load_graph("world")
    assert (graph.name, graph.source, graph.catalogued) == ("world", "world", False)
    assert list(graph.notes) == []
    assert graph.counts["train"] > 7_000
    assert not cache.exists()


def test_a_folder_of_three_files(folder: Callable[..., Path]) -> None:
    path = folder()
    graph = load_graph(path)
    assert [named(graph, split) for split in SPLITS] == [TRAIN, VALID, TEST]
    assert (graph.name, graph.source, graph.catalogued) == ("mine", str(path), False)
    assert list(graph.notes) == []
    assert len(graph.fingerprint) == 64


@pytest.mark.parametrize("name", ["mine.tar.gz", "mine.zip"])
def test_an_archive_of_three_files(tmp_path: Path, folder: Callable[..., Path], name: str) -> None:
    (tmp_path / name).write_bytes(zipped(FILES) if name.endswith("zip") else tarred(FILES, ".gz"))
    graph = load_graph(str(tmp_path / name))
    assert graph.name == "mine"
    assert same(graph, load_graph(folder()))


def test_repeats_and_overlaps_are_reported(folder: Callable[..., Path]) -> None:
    graph = load_graph(
        folder({"train.tsv": lines(TRAIN + TRAIN[:2]), "test.tsv": lines(TEST + VALID + TRAIN[:1])})
    )
    assert graph.counts["train"] == 6
    assert list(graph.notes) == [
        "2 triples occur more than once in train.",
        "1 triple occurs in both train and test.",
        "1 triple occurs in both valid and test.",
    ]
    assert load_graph(graph.source).notes == graph.notes


# The benchmark graphs, where they are.


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_the_benchmark_graphs_are_what_the_catalogue_says(data_folder: Path, name: str) -> None:
    if not (data_folder / f"{name}.tar.xz").exists():
        pytest.skip(f"{name} is not among the archives")
    graph = load_graph(name)
    assert (graph.name, graph.catalogued, graph.counts) == (name, True, catalogue()[name].counts)
    assert len(graph.notes) == int(name.startswith("Countries"))


def test_labels_of_a_benchmark_graph(data_folder: Path) -> None:
    graph = load_graph("WN18RR")
    assert graph.entities.labels is not None
    assert graph.entities.labels.null_count == 0
    assert graph.relations.labels is None


def test_a_part_of_a_benchmark_graph_gets_no_catalogue_name(data_folder: Path) -> None:
    if not (data_folder / "YAGO3-10-quarter.tar.xz").exists():
        pytest.skip("YAGO3-10-quarter is not among the archives")
    graph = load_graph("YAGO3-10-quarter")
    assert (graph.name, graph.catalogued) == ("YAGO3-10-quarter", False)
    assert graph.counts == {
        "entities": 106_196,
        "relations": 37,
        "train": 269_760,
        "valid": 5_000,
        "test": 5_000,
    }


def test_a_graph_with_the_name_of_another_is_refused(folder: Callable[..., Path]) -> None:
    path = folder(name="WN18RR")
    assert refused(path) == (
        f"WN18RR should have 40,943 entities; {path} has 4. If it is another graph, give {path} "
        "another name."
    )


def test_an_archive_named_like_a_benchmark_graph_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Nations.zip").write_bytes(zipped(FILES))
    monkeypatch.setenv("DUALKG_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load_graph("Nations")
    assert "Nations should have 14 entities" in str(caught.value)
    assert f"{tmp_path / 'Nations.zip'} has 4" in str(caught.value)


# One file, split.


def test_one_file_is_split(dense: Path) -> None:
    graph = load_graph(dense)
    parts = {split: set(named(graph, split)) for split in SPLITS}
    assert set.union(*parts.values()) == set(DENSE)
    assert sum(map(len, parts.values())) == len(DENSE)
    assert len(parts["valid"]) == pytest.approx(0.1 * len(DENSE), abs=2)
    seen = set(graph.train[:, [0, 2]].flat)
    assert {id for split in ("valid", "test") for id in graph.split(split)[:, [0, 2]].flat} <= seen
    assert list(graph.notes) == []


def test_the_split_depends_on_the_seed_and_the_fractions(dense: Path) -> None:
    graphs = [
        load_graph(dense, **choices)
        for choices in ({}, {"seed": 1}, {"split": "60/20/20"}, {"seed": 2})
    ]
    assert not any(same(one, other) for one, other in combinations(graphs, 2))
    assert len(graphs[2].valid) == pytest.approx(0.2 * len(DENSE), abs=2)
    assert len({graph.fingerprint for graph in graphs}) == 4


def test_the_same_seed_gives_the_same_split_without_a_cache(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = load_graph(dense, seed=5)
    monkeypatch.setenv("DUALKG_CACHE", str(dense.parent / "other"))
    other = load_graph(dense, seed=5)
    assert same(one, other)
    assert one.fingerprint == other.fingerprint


def test_duplicates_are_removed_before_a_split(dense: Path) -> None:
    whole = load_graph(dense)
    dense.write_bytes(lines(DENSE + DENSE[:1]))
    graph = load_graph(dense)
    assert same(graph, whole)
    assert list(graph.notes) == ["1 duplicate triple was removed."]
    dense.write_bytes(lines(DENSE[:5] + DENSE))
    assert list(load_graph(dense).notes) == ["5 duplicate triples were removed."]


def test_a_sparse_file_reports_smaller_splits(tmp_path: Path) -> None:
    ring = [(f"e{i}", "r", f"e{(i + 1) % 60}") for i in range(60)]
    (tmp_path / "ring.tsv").write_bytes(lines(ring))
    (sentence,) = list(load_graph(tmp_path / "ring.tsv", split="10/60/30").notes)
    assert sentence.startswith("valid and test have ")
    assert (
        "triples of the 54 requested: the others are the only ones of some entity or relation."
        in sentence
    )


def test_a_fraction_of_zero_leaves_a_split_empty(dense: Path) -> None:
    graph = load_graph(dense, split="100/0/0")
    assert graph.counts == {
        "entities": 30,
        "relations": 3,
        "train": len(DENSE),
        "valid": 0,
        "test": 0,
    }


# Labels.


def test_labels_beside_the_splits_are_shown(
    folder: Callable[..., Path], unreadable: Callable
) -> None:
    path = folder({"labels.tsv": "a\tAnna\nb\tBöb\nr\tloves\nz\tZoe\n".encode()})
    for attempt in range(2):
        graph = load_graph(path)
        assert [graph.entities.label(id) for id in range(4)] == ["Anna", "Böb", "c", "d"]
        assert graph.relations.label(graph.relations.id("r")) == "loves"
        if not attempt:
            unreadable()


def test_labels_may_be_in_another_folder(folder: Callable[..., Path], tmp_path: Path) -> None:
    path = folder({"labels.tsv": b"a\tAnna\nb\tBob\n"})
    other = tmp_path / "names.tsv"
    other.write_bytes(b"a\tAda\n")
    assert load_graph(path).entities.label(0) == "Anna"
    assert [load_graph(path, labels=other).entities.label(id) for id in (0, 1)] == ["Ada", "b"]
    other.write_bytes(b"a\tAbe\n")
    assert load_graph(path, labels=str(other)).entities.label(0) == "Abe"


def test_bad_labels_are_errors(folder: Callable[..., Path], tmp_path: Path) -> None:
    path = folder()
    (tmp_path / "names.tsv").write_bytes(b"a\tAnna\nb\n")
    (tmp_path / "none.zip").write_bytes(zipped({}))
    assert f"{tmp_path}/names.tsv, line 2: " in refused(path, labels=tmp_path / "names.tsv")
    assert refused(path, labels=tmp_path / "none.zip") == (
        f"{tmp_path}/none.zip holds 0 files, and one file of labels was expected. Name one file."
    )
    assert refused(path, labels=tmp_path / "names.tvs") == (
        f"There is no file {tmp_path}/names.tvs. Did you mean 'names.tsv'?"
    )


# The cache.


def test_the_second_load_comes_from_the_cache(
    folder: Callable[..., Path], unreadable: Callable
) -> None:
    path = folder()
    first = load_graph(path)
    unreadable()
    second = load_graph(path)
    assert same(first, second)
    assert (first.name, first.source, first.fingerprint) == (
        second.name,
        second.source,
        second.fingerprint,
    )


@pytest.mark.parametrize("file_name", FILES)
def test_a_changed_file_is_read_again(
    folder: Callable[..., Path], unreadable: Callable, file_name: str
) -> None:
    path = folder()
    load_graph(path)
    stands = (path / file_name).stat()
    (path / file_name).write_bytes(FILES[file_name].replace(b"a", b"b", 1).replace(b"d", b"c", 1))
    assert (path / file_name).stat().st_size == stands.st_size
    with pytest.raises(unreadable()):
        load_graph(path)


@pytest.mark.parametrize("choices", [{"columns": (3, 2, 1)}, {"split": "70/20/10"}, {"seed": 1}])
def test_other_options_are_read_again(
    dense: Path, unreadable: Callable, choices: dict[str, object]
) -> None:
    load_graph(dense)
    files_were_read = unreadable()
    load_graph(dense)
    with pytest.raises(files_were_read):
        load_graph(dense, **choices)


def test_columns_reorder_the_triples(folder: Callable[..., Path]) -> None:
    path = folder()
    load_graph(path)
    assert named(load_graph(path, columns=(3, 2, 1)), "train") == [
        (tail, rel, head) for head, rel, tail in TRAIN
    ]


def test_split_options_do_not_affect_a_folder(
    folder: Callable[..., Path], unreadable: Callable
) -> None:
    path = folder()
    load_graph(path)
    unreadable()
    assert load_graph(path, split="60/20/20", seed=3).counts["train"] == len(TRAIN)


def test_the_same_bytes_under_another_suffix_are_read_again(
    tmp_path: Path, unreadable: Callable
) -> None:
    packed = compressed(lines(DENSE), ".gz")
    (tmp_path / "mine.tsv.gz").write_bytes(packed)
    (tmp_path / "mine.tsv").write_bytes(packed)
    load_graph(tmp_path / "mine.tsv.gz")
    with pytest.raises(unreadable()):
        load_graph(tmp_path / "mine.tsv")


def test_equal_triples_have_equal_fingerprints(tmp_path: Path, folder: Callable[..., Path]) -> None:
    content = {
        "a.tsv": lines(DENSE),
        "b.csv": lines(DENSE, ","),
        "c.tsv.gz": compressed(lines(DENSE), ".gz"),
    }
    content |= {"d.zip": zipped({"x.tsv": lines(DENSE)}), "e.tsv": b"h\tr\tt\n" + lines(DENSE)}
    for name, stored in content.items():
        (tmp_path / name).write_bytes(stored)
    (tmp_path / "labels.tsv").write_bytes(b"e1\tOne\n")
    found = {load_graph(tmp_path / name).fingerprint for name in content}
    assert found == {load_graph(tmp_path / "a.tsv", labels=tmp_path / "labels.tsv").fingerprint}
    for other in (DENSE[:-1], DENSE[::-1], [*DENSE[:-1], ("e29", "r0", "e0")]):
        (tmp_path / "other.tsv").write_bytes(lines(other))
        assert load_graph(tmp_path / "other.tsv").fingerprint not in found
    one = folder()
    other = folder({"valid.tsv": lines(TEST), "test.tsv": lines(VALID)}, name="swapped")
    assert load_graph(one).fingerprint != load_graph(other).fingerprint


@pytest.mark.parametrize("damage", ["graph.json", "train.parquet", "entities.parquet"])
def test_a_damaged_cache_entry_is_written_again(
    folder: Callable[..., Path], cache: Path, unreadable: Callable, damage: str
) -> None:
    path = folder()
    load_graph(path)
    (kept,) = (cache / "graphs").iterdir()
    (kept / damage).write_bytes((kept / damage).read_bytes()[:-30])
    assert named(load_graph(path), "train") == TRAIN
    unreadable()
    assert named(load_graph(path), "train") == TRAIN


def test_a_graph_is_loaded_without_a_writable_cache(
    folder: Callable[..., Path], cache: Path
) -> None:
    cache.write_bytes(b"a file in the way")
    path = folder()
    assert [named(load_graph(path), "train") for _ in range(2)] == [TRAIN, TRAIN]


def test_a_graph_is_loaded_with_a_full_disk(
    folder: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dualkg.data.graph.pq.write_table", full)
    assert named(load_graph(folder()), "train") == TRAIN
    assert list(cache.rglob("*")) == [cache / "graphs"]


# Bad input. Every sentence names the file, and the line where there is one.
