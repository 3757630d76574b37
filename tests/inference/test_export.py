"""Exported files: arrays and names of rows in each format, and the manifest."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import dualkg as kg
from dualkg.errors import InvalidValue, PathExists
from dualkg.inference.export import arrays_of, export
from dualkg.tables.base import DeviceTables
from dualkg.tables.shard import Shard
from tests.families import EMBEDDINGS


@pytest.fixture
def run(small_graph) -> kg.Run:
    return kg.TrainedRun(kg.CP(small_graph.shape, dim=3), small_graph, kg.Recipe())


def read_tsv(path):
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=np.float32)


@pytest.mark.parametrize("format", ["numpy", "tsv", "safetensors"])
def test_arrays_and_names(run, tmp_path, format):
    folder = tmp_path / "out"
    paths = export(run, folder, format=format)
    assert sorted(paths) == sorted(folder.iterdir())
    manifest = json.loads((folder / "manifest.json").read_text())
    names = json.loads((folder / manifest["names"]["relations"]).read_text())
    assert names == ["r0", "r1", "r2", "r3", "r0⁻¹", "r1⁻¹", "r2⁻¹", "r3⁻¹"]
    for table, about in manifest["arrays"].items():
        path = folder / about["file"]
        if format == "numpy":
            values = np.load(path)
        elif format == "tsv":
            row_names, values = read_tsv(path)
            assert row_names[0] == ("r0" if table == "relations" else "e0")
        else:
            values = load_file(path)[table]
        np.testing.assert_array_equal(values, run.model.state_dict()[table].numpy())
        assert (about["shape"], about["dtype"]) == (list(values.shape), "float32")


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_every_array_of_a_model_is_exported(small_graph, name):
    model = EMBEDDINGS[name](small_graph.shape, dim=2)
    arrays = arrays_of(model)
    assert set(arrays) == set(model.state_dict())
    assert all(np.array_equal(arrays[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("num_processes", [1, 3])
def test_blocks_are_the_rows_of_all_entities(num_processes):
    """In the order of ids, whatever rows a process has; here each has the rows of the others."""
    table = torch.arange(46.0).reshape(23, 2)
    for process in range(num_processes):
        shard = Shard(23, process, num_processes)
        tables = DeviceTables(shard, block_rows=5)
        assert tables.is_first == (process == 0)
        tables.rows = lambda own, ids: table[ids]
        blocks = list(tables.rows_of_all(table[shard.ids]))
        assert [len(block) for block in blocks] == [5, 5, 5, 5, 3]
        assert torch.equal(torch.cat(blocks), table)


def test_the_manifest(run, small_graph, tmp_path):
    export(run, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["model"]["name"] == "CP"
    assert manifest["graph"]["fingerprint"] == small_graph.fingerprint
    assert manifest["inverse_relations"] == 4
    rows = {name: about["rows"] for name, about in manifest["arrays"].items()}
    assert rows == {"entities": "entities", "tails": "entities", "relations": "relations"}
    for name, record in manifest["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert record == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    assert manifest["trained_with"] is None


def test_names_in_tsv_have_no_tabs(small_graph, tmp_path):
    names = ["a\tb\nc", *(f"e{number}" for number in range(1, 30))]
    graph = replace(small_graph, entities=kg.Vocabulary(names))
    run = kg.TrainedRun(kg.CP(graph.shape, dim=2), graph, kg.Recipe())
    export(run, tmp_path / "out", format="tsv")
    assert read_tsv(tmp_path / "out" / "entities.tsv")[0][0] == "a b c"
    assert json.loads((tmp_path / "out" / "entities.json").read_text())[0] == "a\tb\nc"


def test_exported_tables_can_be_imported(run, small_graph, tmp_path):
    export(run, tmp_path / "out")
    tables = {path.stem: np.load(path) for path in (tmp_path / "out").glob("*.npy")}
    names = json.loads((tmp_path / "out" / "entities.json").read_text())
    again = kg.from_arrays("CP", **tables, graph=small_graph, entity_names=names)
    scores = (one.model.score(*torch.tensor([[0], [1], [2]])) for one in (run, again))
    assert torch.equal(*scores)


def test_refusals(run, tmp_path):
    with pytest.raises(InvalidValue, match="`format` should be one of"):
        export(run, tmp_path / "out", format="excel")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(PathExists):
        export(run, tmp_path / "full")
