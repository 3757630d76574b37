"""Saved graphs: load unchanged, or are refused if damaged."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data import graph as graph_module
from dualkg.data.graph import SPLITS, Graph, load_saved_graph, save_graph
from dualkg.data.vocabulary import Vocabulary
from tests.conftest import graph_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs whose names, labels and remarks are any text."""
    names, relations = (draw(st.lists(TEXT, min_size=1, max_size=8, unique=True)) for _ in range(2))
    entity = st.integers(0, len(names) - 1)
    relation = st.integers(0, len(relations) - 1)
    triples = st.lists(st.tuples(entity, relation, entity), max_size=10)
    splits = [np.array(draw(triples), dtype=np.int32).reshape(-1, 3) for _ in SPLITS]
    labels = draw(st.none() | st.dictionaries(st.sampled_from(names), TEXT))
    notes = tuple(draw(st.lists(TEXT, max_size=2)))
    return Graph(
        draw(TEXT),
        Vocabulary(names, labels),
        Vocabulary(relations, kind="relation"),
        *splits,
        source=draw(TEXT),
        fingerprint="f" * 64,
        catalogued=draw(st.booleans()),
        notes=notes,
    )


def facts(graph: Graph) -> dict[str, object]:
    """All that a graph holds, as plain Python."""
    return {
        "about": (graph.name, graph.source, graph.fingerprint, graph.catalogued, graph.notes),
        "names": [
            (known.kind, known.names.to_pylist()) for known in (graph.entities, graph.relations)
        ],
        "labels": [
            known.labels and known.labels.to_pylist() for known in (graph.entities, graph.relations)
        ],
        "triples": [(graph.split(split).dtype, graph.split(split).tolist()) for split in SPLITS],
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a saved graph large enough that its columns fill pages."""
    random = np.random.default_rng(0)
    triples = np.stack([random.integers(0, n, 2_000) for n in (500, 7, 500)], axis=1)
    save_graph(graph_of(triples, triples[:50], triples[50:99]), tmp_path / "graph")
    return tmp_path / "graph"


@given(graphs())
def test_a_saved_graph_loads_unchanged(graph: Graph) -> None:
    with TemporaryDirectory() as folder:
        save_graph(graph, Path(folder) / "graph")
        assert facts(load_saved_graph(Path(folder) / "graph")) == facts(graph)


def test_saved_labels_load_unchanged(tmp_path: Path) -> None:
    graph = replace(
        graph_of([(0, 0, 2)]), entities=Vocabulary(["a", "b", "c"], {"b": "Bee", "c": ""})
    )
    save_graph(graph, tmp_path / "graph")
    assert load_saved_graph(tmp_path / "graph").entities.labels.to_pylist() == [None, "Bee", ""]


def test_another_format_is_refused(saved: Path) -> None:
    about = json.loads((saved / "graph.json").read_text())
    (saved / "graph.json").write_text(json.dumps(about | {"format": 0}))
    with pytest.raises(ValueError, match=r"graph has format 0; this version reads \d+ and \d+$"):
        load_saved_graph(saved)


def test_a_failed_save_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table = pq.write_table
    written = []

    def fails_at_the_third(table: pa.Table, path: Path, **options: object) -> None:
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(path)
        write_table(table, path, **options)

    monkeypatch.setattr(graph_module.pq, "write_table", fails_at_the_third)
    with pytest.raises(OSError, match="No space left"):
        save_graph(graph_of([(0, 0, 1)]), tmp_path / "graph")
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("about", ["", "[]", "null", "{}", '{"format": 1, "name": "x"}', "\udc80"])
def test_a_damaged_description_is_a_value_error(saved: Path, about: str) -> None:
    (saved / "graph.json").write_bytes(about.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError):
        load_saved_graph(saved)


@pytest.mark.parametrize("name", ["entities", "relations", *SPLITS])
def test_a_file_that_is_missing_is_an_os_error(saved: Path, name: str) -> None:
    (saved / f"{name}.parquet").unlink()
    with pytest.raises(OSError, match=name):
        load_saved_graph(saved)


@pytest.mark.parametrize("name", ["entities", "train"])
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_truncated_file_is_detected(saved: Path, name: str, share: float) -> None:
    path = saved / f"{name}.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises((OSError, ValueError)):
        load_saved_graph(saved)


@pytest.mark.parametrize("name", ["entities", "train"])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_a_changed_byte_is_detected(saved: Path, name: str, share: float) -> None:
    path = saved / f"{name}.parquet"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        load_saved_graph(saved)


def test_a_missing_column_is_a_value_error(saved: Path) -> None:
    pq.write_table(pa.table({"head": pa.array([0], pa.int32())}), saved / "train.parquet")
    with pytest.raises(ValueError, match="is damaged"):
        load_saved_graph(saved)


def test_notes_of_earlier_versions_load(saved: Path) -> None:
    """They were counts, and sentences with options."""
    remark = {"template": "If it is a triple, use {columns}.", "options": {"columns": [1, 2, 3]}}
    notes = {"duplicates": {"train": 1}, "overlaps": {"train and test": 0}, "remarks": [remark]}
    about = json.loads((saved / "graph.json").read_text())
    (saved / "graph.json").write_text(json.dumps(about | {"notes": notes}))
    assert load_saved_graph(saved).notes == (
        "1 triple occurs more than once in train.",
        "If it is a triple, use `columns=(1, 2, 3)`.",
    )


def test_large_graphs_of_earlier_versions_load(saved: Path) -> None:
    """They were saved in files that can be mapped."""
    expected = facts(load_saved_graph(saved))
    for split in SPLITS:
        table = pq.read_table(saved / f"{split}.parquet")
        np.save(saved / f"{split}.npy", np.stack([table[name] for name in table.column_names], 1))
    for kind in ("entities", "relations"):
        names = pq.read_table(saved / f"{kind}.parquet")["name"].combine_chunks()
        batch = pa.record_batch({"name": names.cast(pa.large_string())})
        with pa.ipc.new_file(str(saved / f"{kind}.arrow"), batch.schema) as writer:
            writer.write_batch(batch)
    for path in saved.glob("*.parquet"):
        path.unlink()
    about = json.loads((saved / "graph.json").read_text())
    (saved / "graph.json").write_text(json.dumps(about | {"format": 2}))
    assert facts(load_saved_graph(saved)) == expected
    content = (saved / "entities.arrow").read_bytes()
    (saved / "entities.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_saved_graph(saved)
