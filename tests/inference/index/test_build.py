"""Building, saving and loading an index; a damaged one is refused."""

import json
from importlib.util import find_spec

import pytest
import torch

import dualkg as kg
from dualkg.files import write_json
from dualkg.inference.index import ExactIndex, tables_of
from dualkg.inference.index_build import (
    build_index,
    load_index,
    recalls,
    save_index,
    tuning_queries,
)

FAISS_KINDS = ["exact", *(["ivf", "hnsw", "sq8"] if find_spec("faiss") else [])]


@pytest.fixture
def model(small_graph) -> kg.ComplEx:
    return kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0)


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_saved_recall_is_reproducible(model, small_graph, tmp_path, kind):
    built = save_index(build_index(model, small_graph, kind=kind, recall=0.8), tmp_path / "index")
    again = load_index(tmp_path / "index")
    assert (again.kind, again.metric, again.fingerprints) == (
        kind,
        "inner product",
        built.fingerprints,
    )
    assert again.stats == built.stats
    exact = ExactIndex.build(tables_of(model)["tail"])
    _, held_out = tuning_queries(model, small_graph, "tail", exact, seed=0)
    assert again.stats["tail"].num_queries == len(held_out)
    assert (
        recalls(again.for_side("head"), held_out, exact.search(held_out, 100).ids)
        == again.stats["tail"].recall
    )


def test_stats_of_an_index(model, small_graph, tmp_path):
    built = save_index(
        build_index(model, small_graph, kind="exact", storage="int8"), tmp_path / "index"
    )
    stats = json.loads((tmp_path / "index" / "index.json").read_text())["tables"]["tail"]["stats"]
    assert stats["bytes"] == (tmp_path / "index" / "tail" / "table.safetensors").stat().st_size
    assert stats["bytes"] >= 30 * 12 + 30 * 4
    assert set(stats["recall"]) == {"1", "10", "100"}
    assert built.stats["tail"].recall[100] == 1.0  # of 30 entities, all
    assert stats["queries_per_second"] > 0 < stats["exact_queries_per_second"]


def test_two_tables_are_two_indexes(small_graph, tmp_path):
    model = kg.CP(small_graph.shape, dim=6, init_scale=1.0, reciprocal=False)
    save_index(build_index(model, small_graph, kind="exact"), tmp_path / "index")
    loaded = load_index(tmp_path / "index", in_memory=False)
    assert torch.equal(loaded.for_side("head").rows(), model.head_table)
    assert torch.equal(loaded.for_side("tail").rows(), model.tail_table)
    loaded.check_model(model)


def test_a_folder_that_is_not_empty_is_refused(model, small_graph, tmp_path):
    index = build_index(model, small_graph, kind="exact")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(kg.RequestError, match="full exists already"):
        save_index(index, tmp_path / "full")
    with pytest.raises(kg.RequestError, match=r"full holds no index \(there is no index.json\)"):
        load_index(tmp_path / "full")


def damage(folder, what):
    about = folder / "index.json"
    table = next((folder / "tail").iterdir())
    saved = json.loads(about.read_text())
    saved.pop("sha256")
    if what == "not JSON":
        about.write_text("{")
    elif what == "no table":
        table.unlink()
    elif what == "half a table":
        table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])
    else:
        table = saved["tables"]["tail"]
        changes = {
            "no tables": lambda: saved.pop("tables"),
            "kind": lambda: saved.update(kind="tree"),
            "shape": lambda: table.update(shape=[31, 12]),
            "effort": lambda: table["config"].update(effort="16"),
            "storage": lambda: table["config"].update(storage={}),
            "norm": lambda: table["config"].update(max_norm=[1]),
            "other kind": lambda: table["config"].update(
                kind="ivf" if saved["kind"] == "hnsw" else "hnsw"
            ),
        }
        changes[what]()
        write_json(about, saved)


@pytest.mark.parametrize("kind", FAISS_KINDS[:2])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("not JSON", "index.json is damaged: it is not JSON"),
        ("no table", "The index .* is damaged: .* Build it again: dualkg index RUN"),
        ("half a table", "The index .* is damaged: .* Build it again: dualkg index RUN"),
        ("no tables", "The index .* is damaged: 'tables' is missing"),
        ("kind", "The index .* is damaged: its kind is 'tree'"),
        ("shape", "The index .* is damaged: its .*31 × 12"),
        (
            "effort",
            "is damaged: (its effort 16 or its max_norm .* is no number above 0|.*'effort')",
        ),
        (
            "norm",
            r"is damaged: (its effort .* or its max_norm \[1\] is no number above 0|.*'max_norm')",
        ),
        ("storage", "is damaged: (its storage format is '{}'|.*'storage')"),
        (
            "other kind",
            "is damaged: (its file is not of the kind '(ivf|hnsw)'|.*'kind')",
        ),  # an exact one has none
    ],
)
def test_a_damaged_index_is_refused(model, small_graph, tmp_path, kind, what, told):
    save_index(build_index(model, small_graph, kind=kind, recall=0.5), tmp_path / "index")
    damage(tmp_path / "index", what)
    with pytest.raises(kg.RequestError, match=told):
        load_index(tmp_path / "index")


def test_refusals(model, small_graph):
    with pytest.raises(kg.RequestError, match="one of exact, ivf, hnsw, sq8; got 'tree'"):
        build_index(model, small_graph, kind="tree")
    with pytest.raises(
        kg.RequestError,
        match="Only the exact index can use the storage format int8; got the kind ivf",
    ):
        build_index(model, small_graph, kind="ivf", storage="int8")
    with pytest.raises(kg.RequestError, match="The model was made for 3 entities"):
        build_index(kg.ComplEx(kg.GraphShape(3, 1), dim=2), small_graph)
    with pytest.raises(kg.RequestError, match="HAKE scores in another way"):
        build_index(kg.HAKE(small_graph.shape, dim=2), small_graph)
