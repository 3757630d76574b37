"""Graphs larger than memory: what is written to disk and read a part at a time equals what is done
in memory.
"""

import errno
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkg.data import encoding, spill, vocabulary
from dualkg.data.graph import SPLITS, Graph, load_saved_graph, save_graph
from dualkg.data.loading import load_graph
from dualkg.data.spill import NameIndex, hash_names
from dualkg.data.triples import GraphShape, count_repeats, distinct_triples, triple_keys
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import DataError

NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=6
)


@contextmanager
def tiny_memory(
    *, names: int = 3, triples: int = 4, rows: int = 5, partitions: int = 3
) -> Iterator[None]:
    """Everything is written to disk after a few names or triples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "MAX_NAMES", names)
        patch.setattr(encoding, "MAX_TRIPLES", triples)
        patch.setattr(encoding, "MAX_WAITING", 1)
        patch.setattr(encoding, "POSITIONS", rows)
        patch.setattr(spill, "ROWS", rows)
        patch.setattr(spill, "NUM_PARTITIONS", partitions)
        patch.setattr(spill, "HASHED_NAMES", 3)
        patch.setattr(vocabulary, "INDEXED_NAMES", 2)
        yield


def facts(graph: Graph) -> dict[str, object]:
    """All that two readings of the same triples have in common."""
    return {
        "names": [known.names.to_pylist() for known in (graph.entities, graph.relations)],
        "labels": [
            known.labels and known.labels.to_pylist() for known in (graph.entities, graph.relations)
        ],
        "triples": [graph.split(split).tolist() for split in SPLITS],
        "about": (graph.name, graph.fingerprint, graph.notes),
    }


def in_blocks(rows: list[tuple[str, ...]], size: int) -> pa.Table:
    """A table of small batches, which are the blocks of a reader."""
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    table = pa.table(dict(zip(("head", "relation", "tail"), columns, strict=True)))
    return pa.Table.from_batches(table.to_batches(max_chunksize=size))


@st.composite
def named_triples(draw: st.DrawFn, *, min_size: int = 1) -> list[tuple[str, ...]]:
    names, relations = (
        draw(st.lists(NAMES, min_size=1, max_size=size, unique=True)) for size in (12, 4)
    )
    entity = st.sampled_from(names)
    relation = st.sampled_from(relations)
    return draw(st.lists(st.tuples(entity, relation, entity), min_size=min_size, max_size=60))


@settings(max_examples=12)
@given(
    named_triples(min_size=5),
    st.integers(0, 3),
    st.sampled_from(["80/10/10", "50/25/25", "100/0/0"]),
)
def test_a_graph_split_on_disk_is_the_same(
    rows: list[tuple[str, ...]], seed: int, split: str
) -> None:
    table = in_blocks(rows, 7)

    def made() -> object:
        try:
            return facts(
                Graph.from_dataframe(table, split=split, seed=seed, labels={rows[0][0]: "label"})
            )
        except DataError as error:
            return str(error)

    expected = made()
    with tiny_memory():
        assert made() == expected


@settings(max_examples=10)
@given(named_triples(), named_triples(), named_triples())
def test_given_splits_on_disk_are_the_same(
    train: list[tuple[str, ...]], valid: list[tuple[str, ...]], test: list[tuple[str, ...]]
) -> None:
    def made() -> Graph:
        return Graph.from_dataframe(
            in_blocks(train, 6), valid=in_blocks(valid, 3), test=in_blocks(test + train[:2], 9)
        )

    expected = facts(made())
    with tiny_memory(names=0):
        graph = made()
        assert graph.is_mapped
        assert facts(graph) == expected
        for known in (graph.entities, graph.relations):
            assert [known.id(name) for name in known.names.to_pylist()] == list(range(len(known)))
        with TemporaryDirectory() as folder:
            save_graph(graph, Path(folder) / "graph")
            loaded = load_saved_graph(Path(folder) / "graph")
            assert loaded.is_mapped
            assert facts(loaded) == expected


@pytest.mark.parametrize("header", ["von\tkante\tnach", "a\tr\tb", ""])
@pytest.mark.parametrize("folder", [False, True])
def test_headers_and_files_on_disk_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, folder: bool
) -> None:
    random = np.random.default_rng(0)
    lines = [f"e{h}\tr{r}\te{t}" for h, r, t in random.integers(0, (40, 3, 40), (300, 3)).tolist()]
    for number, name in enumerate(("train", "valid", "test")):
        content = [header, *lines[number::3]] if header else lines[number::3]
        (tmp_path / f"{name}.tsv").write_text("\n".join(content) + "\n")
    path = tmp_path if folder else tmp_path / "train.tsv"
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "ordinary"))
    expected = facts(load_graph(path))
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "mapped"))
    with tiny_memory(names=20, triples=30, rows=50, partitions=256 if folder else 7):
        for _ in range(2):  # the second time from the cache
            graph = load_graph(path)
            assert graph.is_mapped
            assert facts(graph) == expected
    assert {file.suffix for file in (tmp_path / "mapped").rglob("*.*")} == {
        ".json",
        ".npy",
        ".arrow",
    }
    assert (
        facts(load_graph(path)) == expected
    )  # a graph that was read with little memory is opened with much


@pytest.mark.parametrize(
    ("function", "number"), [("pwrite", 1), ("pwrite", 160), ("posix_fallocate", 1)]
)
def test_a_full_disk_is_reported_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: Callable[..., Any],
    function: str,
    number: int,
) -> None:
    random = np.random.default_rng(0)
    lines = [
        f"e{h}\tr{r}\te{t}\n" for h, r, t in random.integers(0, (40, 3, 40), (300, 3)).tolist()
    ]
    (tmp_path / "mine.tsv").write_text("".join(lines))
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    write = getattr(os, function)
    calls = itertools.count(1)

    def full(*arguments: Any) -> Any:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, function, full)
    with tiny_memory(names=20, triples=30, rows=50, partitions=7):
        result = run_cli("inspect", tmp_path / "mine.tsv")
    assert result.code == 1
    assert (
        f"dualkg: {tmp_path / 'cache'}: No space left on device for temporary files of a graph"
        in result.err
    )
    assert list((tmp_path / "cache").rglob("*")) == []
    gc.collect()
    assert not [
        file for file in Path("/proc/self/fd").iterdir() if "cache/#" in os.path.realpath(file)
    ]
    monkeypatch.undo()
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))
    calls = itertools.count(number)
    monkeypatch.setattr(
        np, "save", lambda *_, **__: full()
    )  # of the copy that is read the next time
    with tiny_memory(names=20, triples=30, rows=50, partitions=7):
        assert load_graph(tmp_path / "mine.tsv").is_mapped
    assert list((tmp_path / "cache").rglob("*")) == [tmp_path / "cache" / "graphs"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with tiny_memory():
        rows = [(f"e{n % 30}", f"r{n % 3}", f"e{n * n % 31}") for n in range(200)]
        save_graph(Graph.from_triples(rows, split="100/0/0"), tmp_path / "graph")
    return tmp_path / "graph"


def _ids_too_large(folder: Path) -> None:
    np.save(folder / "train.npy", np.full((9, 3), 99, np.int32))


def _other_numbers(folder: Path) -> None:
    np.save(folder / "train.npy", np.zeros((9, 3)))


def _cut(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return cut


@pytest.mark.parametrize(
    "damage", [_ids_too_large, _other_numbers, _cut("train.npy"), _cut("entities.arrow")]
)
def test_a_damaged_mapped_graph_is_refused(saved: Path, damage: Callable[[Path], None]) -> None:
    assert load_saved_graph(saved).is_mapped
    damage(saved)
    with pytest.raises((ValueError, OSError)):
        load_saved_graph(saved)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=30, unique=True),
    st.integers(1, 50),
)
def test_hashes_do_not_depend_on_the_place_of_a_name(names: list[str], size: int) -> None:
    array = pa.array(names, pa.string())
    expected = [int(hash_names(pa.array([name], pa.large_string()))[0]) for name in names]
    assert hash_names(array, at_once=size).tolist() == expected
    assert hash_names(array[1:], at_once=size).tolist() == expected[1:]
    index = NameIndex(array)
    assert [index.get(name) for name in names] == list(range(len(names)))
    assert index.get("x" * 50) is None
    assert None not in index


def test_names_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "hash_names", lambda names: np.zeros(len(names), np.uint64))
    monkeypatch.setattr(vocabulary, "INDEXED_NAMES", 1)
    known = Vocabulary(["a", "b", "B", "cc"])
    assert [known.id(name) for name in ("a", "b", "B", "CC")] == [0, 1, 2, 3]
    assert "d" not in known
    assert known.ids_ignoring_case("B") == [1, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=40
    )
)
def test_keys_of_triples_past_63_bits(rows: list[tuple[int, int, int]]) -> None:
    shape = GraphShape(86_000_000, 60_000)
    scale = np.array([17_000_000, 19_000, 17_000_000])  # the largest ids are near the shape
    triples = (np.array(rows) * scale).astype(np.int32)
    small = np.array(rows, np.int32)
    keys = triple_keys(triples, shape)
    expected = triple_keys(small, GraphShape(6, 4))
    assert np.array_equal(np.argsort(keys, kind="stable"), np.argsort(expected, kind="stable"))
    assert len(set(keys.tolist())) == len(set(rows))
    distinct = distinct_triples(triples, shape)
    assert (distinct // scale).tolist() == distinct_triples(small, GraphShape(6, 4)).tolist()
    halves = {"train": triples[::2], "valid": triples[1::2]}
    assert count_repeats(halves, shape) == count_repeats(
        {"train": small[::2], "valid": small[1::2]}, GraphShape(6, 4)
    )
