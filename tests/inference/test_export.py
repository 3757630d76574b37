from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import dualkg as kg
from dualkg.inference.export import export


@pytest.fixture
def run(small_graph) -> kg.Run:
    return kg.Run(kg.CP(small_graph.shape, dim=3), small_graph, kg.Recipe())


def read_tsv(path):
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=np.float32)


@pytest.mark.parametrize("format", ["numpy", "tsv", "safetensors"])
def test_tables_and_names(run, tmp_path, format):
    folder = tmp_path / "out"
    export(run, folder, format=format)
    names = json.loads((folder / "relations.json").read_text())
    assert names == ["r0", "r1", "r2", "r3", "r0⁻¹", "r1⁻¹", "r2⁻¹", "r3⁻¹"]
    for table in ("entities", "tails", "relations"):
        if format == "numpy":
            values = np.load(folder / f"{table}.npy")
        elif format == "tsv":
            row_names, values = read_tsv(folder / f"{table}.tsv")
            assert row_names[0] == ("r0" if table == "relations" else "e0")
        else:
            values = load_file(folder / "tables.safetensors")[table]
        np.testing.assert_array_equal(values, run.model.state_dict()[table].numpy())


def test_exported_tables_can_be_imported(run, small_graph, tmp_path):
    export(run, tmp_path / "out")
    tables = {path.stem: np.load(path) for path in (tmp_path / "out").glob("*.npy")}
    names = json.loads((tmp_path / "out" / "entities.json").read_text())
    again = kg.from_arrays("CP", **tables, graph=small_graph, entity_names=names)
    assert kg.evaluate(again.model, small_graph).mrr == kg.evaluate(run.model, small_graph).mrr


def test_refusals(run, tmp_path):
    with pytest.raises(kg.RequestError, match="numpy, tsv, safetensors; got 'excel'"):
        export(run, tmp_path / "out", format="excel")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(kg.RequestError, match="exists already"):
        export(run, tmp_path / "full")
