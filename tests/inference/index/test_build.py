"""Building, saving and loading an index; a damaged one is refused."""

import json
import math
from importlib.util import find_spec

import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, InvalidValue, PathExists, Unsupported
from dualkg.files import write_json
from dualkg.inference.index import ExactIndex, tables_of
from dualkg.inference.index_build import (
    DamagedIndex,
    IndexNotFound,
    load_index,
    recalls,
    save_index,
    tuning_queries,
)
from tests.inference.index.conftest import NUM_QUERIES, quick_index
from tests.raising import refused

FAISS_KINDS = ["exact", *(["ivf", "hnsw", "sq8"] if find_spec("faiss") else [])]


@pytest.fixture
def model(small_graph) -> kg.ComplEx:
    return kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0)


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_saved_recall_is_reproducible(model, small_graph, tmp_path, kind):
    built = save_index(quick_index(model, small_graph, kind=kind, recall=0.8), tmp_path / "index")
    again = load_index(tmp_path / "index")
    assert (again.kind, again.metric, again.fingerprints) == (
        kind,
        "inner product",
        built.fingerprints,
    )
    assert again.stats == built.stats
    exact = ExactIndex.build(tables_of(model)["tail"])
    _, held_out = tuning_queries(model, small_graph, "tail", exact, num=NUM_QUERIES, seed=0)
    assert again.stats["tail"].num_queries == len(held_out)
    assert (
        recalls(again.for_side("head"), held_out, exact.search(held_out, 100).ids)
        == again.stats["tail"].recall
    )


def test_stats_of_an_index(model, small_graph, tmp_path):
    built = save_index(
        quick_index(model, small_graph, kind="exact", storage="int8"), tmp_path / "index"
    )
    stats = json.loads((tmp_path / "index" / "index.json").read_text())["tables"]["tail"]["stats"]
    assert stats["bytes"] == (tmp_path / "index" / "tail" / "table.safetensors").stat().st_size
    assert stats["bytes"] >= 30 * 12 + 30 * 4
    assert set(stats["recall"]) == {"1", "10", "100"}
    assert built.stats["tail"].recall[100] == 1.0  # of 30 entities, all
    assert stats["queries_per_second"] > 0 < stats["exact_queries_per_second"]


def test_two_tables_are_two_indexes(small_graph, tmp_path):
    model = kg.CP(small_graph.shape, dim=6, init_scale=1.0, reciprocal=False)
    save_index(quick_index(model, small_graph, kind="exact"), tmp_path / "index")
    loaded = load_index(tmp_path / "index", in_memory=False)
    assert torch.equal(loaded.for_side("head").rows(), model.head_table)
    assert torch.equal(loaded.for_side("tail").rows(), model.tail_table)
    loaded.check_model(model)


def test_a_folder_that_is_not_empty_is_refused(model, small_graph, tmp_path):
    index = quick_index(model, small_graph, kind="exact")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with refused(PathExists, path=tmp_path / "full", overwritable=False):
        save_index(index, tmp_path / "full")


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(IndexNotFound) as error:
        load_index(tmp_path)
    assert error.value.folder == tmp_path
    assert "holds no index (there is no index.json). Build one with: kg." in str(error.value)


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
            "infinity": lambda: table.update(shape=[math.inf, 12]),
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
    ("what", "reason"),
    [
        ("no table", "tail/"),
        ("half a table", "tail/"),
        ("no tables", "'tables' is missing"),
        ("kind", "its kind is 'tree'"),
        ("shape", "31 × 12"),
        ("infinity", "infinity"),
        ("effort", "effort"),
        ("norm", "max_norm"),
        ("storage", "storage"),
        ("other kind", "kind"),
    ],
)
def test_a_damaged_index_is_refused(model, small_graph, tmp_path, kind, what, reason):
    folder = tmp_path / "index"
    save_index(quick_index(model, small_graph, kind=kind, recall=0.5), folder)
    damage(folder, what)
    with pytest.raises(DamagedIndex) as error:
        load_index(folder)
    assert error.value.folder == folder
    assert reason in error.value.reason
    assert str(error.value).startswith(f"The index {folder} is damaged: {error.value.reason}.")
    assert "Build it again: kg." in str(error.value)


def test_a_description_that_is_not_json_is_refused(model, small_graph, tmp_path):
    save_index(quick_index(model, small_graph, kind="exact"), tmp_path / "index")
    damage(tmp_path / "index", "not JSON")
    with refused(DamagedFile, path=tmp_path / "index" / "index.json") as caught:
        load_index(tmp_path / "index")
    assert caught.value.reason.startswith("it is not JSON")


@pytest.mark.parametrize(
    ("options", "setting", "found"),
    [
        ({"kind": "tree"}, "kind", "tree"),
        ({"kind": "ivf", "storage": "int8"}, "storage", "int8"),
        ({"kind": "exact", "storage": "int4"}, "storage", "int4"),
    ],
)
def test_invalid_options_are_refused(model, small_graph, options, setting, found):
    with pytest.raises(InvalidValue) as error:
        quick_index(model, small_graph, **options)
    assert (error.value.setting, error.value.found) == (setting, found)


def test_models_that_do_not_fit_are_refused(small_graph):
    with pytest.raises(kg.RequestError):
        quick_index(kg.ComplEx(kg.GraphShape(3, 1), dim=2), small_graph)
    with refused(Unsupported, what="An index", advice="Predict without an index.") as caught:
        quick_index(kg.HAKE(small_graph.shape, dim=2), small_graph)
    assert caught.value.reason.endswith(", but HAKE scores in another way")
