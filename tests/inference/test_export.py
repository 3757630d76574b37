import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import dualkg as kg
from dualkg.errors import InvalidValue, PathExists
from dualkg.inference.export import MEANINGS, describe_score, export
from dualkg.models.score_text import BilinearText, Formula
from dualkg.tables.base import DeviceTables
from dualkg.tables.shard import Shard
from dualkg.training.recipe import ModelConfig
from tests.families import BILINEAR, DISTANCE, EMBEDDINGS
from tests.raising import refused


@pytest.fixture
def run(small_graph) -> kg.Run:
    return kg.TrainedRun(kg.CP(small_graph.shape, dim=3), small_graph, kg.Recipe())


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


@pytest.mark.parametrize("kind", [kg.CP, kg.RESCAL, kg.TuckER, kg.MuRP])
def test_files_are_those_of_the_libraries(small_graph, tmp_path, kind):
    """They are written in blocks, and have the bytes of arrays that are written as a whole."""
    model = kind(small_graph.shape, dim=3)
    run = kg.TrainedRun(model, small_graph, kg.Recipe())
    tables = {name: value.numpy() for name, value in model.state_dict().items()}
    export(run, tmp_path / "numpy")
    for name, table in tables.items():
        np.save(tmp_path / "whole.npy", table)
        assert (tmp_path / "numpy" / f"{name}.npy").read_bytes() == (
            tmp_path / "whole.npy"
        ).read_bytes()
    export(run, tmp_path / "safetensors", format="safetensors")
    save_file(tables, tmp_path / "whole.safetensors")
    written = (tmp_path / "safetensors" / "tables.safetensors").read_bytes()
    assert written == (tmp_path / "whole.safetensors").read_bytes()


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


def test_exported_tables_can_be_imported(run, small_graph, tmp_path):
    export(run, tmp_path / "out")
    tables = {path.stem: np.load(path) for path in (tmp_path / "out").glob("*.npy")}
    names = json.loads((tmp_path / "out" / "entities.json").read_text())
    again = kg.from_arrays("CP", **tables, graph=small_graph, entity_names=names)
    assert kg.evaluate(again.model, small_graph).mrr == kg.evaluate(run.model, small_graph).mrr


def test_an_unknown_format_is_refused(run, tmp_path):
    with pytest.raises(InvalidValue) as error:
        export(run, tmp_path / "out", format="excel")
    assert (error.value.setting, error.value.found) == ("format", "excel")


def test_a_folder_that_is_not_empty_is_refused(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with refused(PathExists, path=tmp_path / "full"):
        export(run, tmp_path / "full")


# -- the manifest: scores by NumPy alone -------------------------------------


def read_arrays(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the arrays that it lists, in any of the formats."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    arrays = {}
    for name, about in manifest["arrays"].items():
        path = folder / about["file"]
        if path.suffix == ".npy":
            arrays[name] = np.load(path)
        elif path.suffix == ".tsv":
            arrays[name] = read_tsv(path)[1].reshape(about["shape"])
        else:
            arrays[name] = load_file(path)[name]
        assert (list(arrays[name].shape), str(arrays[name].dtype)) == (
            about["shape"],
            about["dtype"],
        )
        if about["rows"]:
            assert len(json.loads((folder / manifest["names"][about["rows"]]).read_text())) == len(
                arrays[name]
            )
    return manifest, arrays


def score_by_numpy(
    manifest: dict[str, Any], arrays: dict[str, Any], triples: np.ndarray
) -> list[float]:
    """Run the function that the manifest has, with nothing but NumPy."""
    namespace: dict[str, Any] = {}
    exec("\n".join(manifest["score"]["numpy"]), namespace)
    in_float64 = {name: array.astype(np.float64) for name, array in arrays.items()}
    return [namespace["score"](in_float64, *triple) for triple in triples.tolist()]


def random_model(name: str, shape: Any, *, reciprocal: bool, **options: Any) -> kg.Model:
    side = options.pop("dual", None)
    model = EMBEDDINGS[name](shape, dim=3, reciprocal=reciprocal, **options)
    random = torch.Generator().manual_seed(0)
    # The state also has the parameters of batch normalization and angles.
    for key, value in model.state_dict().items():
        value.copy_(
            0.1 + torch.rand(value.shape, generator=random) - (0.6 if value.dim() > 1 else 0)
        )
        if key == "relations" and name == "HAKE":
            value.mul_(3)  # so that the limits of b are reached
    return (kg.Dual(model, side) if side else model).eval()


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in EMBEDDINGS),
    *((name, {"dual": side}) for name in BILINEAR for side in ("head", "tail")),
    *(
        (name, {"norm": norm})
        for name in DISTANCE
        for norm in (2, "squared")
        if name not in ("HAKE", "MuRP")
    ),
    ("QuatE", {"normalized": False}),
    ("TuckER", {"relation_dim": 2}),
    ("TuckER", {"batch_norm": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_triples_are_scored_by_the_manifest_and_numpy_alone(small_graph, tmp_path, name, options):
    reciprocal = bool(options.get("batch_norm") or options.get("dual") == "head" or name == "CP")
    model = random_model(name, small_graph.shape, reciprocal=reciprocal, **options)
    export(kg.TrainedRun(model, small_graph, kg.Recipe()), tmp_path / "out")
    manifest, arrays = read_arrays(tmp_path / "out")
    random = np.random.default_rng(0)
    num_entities, num_relations = small_graph.shape
    rows = num_relations * (2 if reciprocal else 1)
    triples = np.stack(
        [random.integers(0, n, 30) for n in (num_entities, rows, num_entities)], axis=1
    )
    expected = model.score(*torch.from_numpy(triples).T).detach().numpy()
    np.testing.assert_allclose(
        score_by_numpy(manifest, arrays, triples), expected, rtol=1e-3, atol=1e-5
    )
    assert manifest["inverse_relations"]["first_row"] == (num_relations if reciprocal else None)
    columns = [part for about in manifest["arrays"].values() for part in about.get("columns", [])]
    assert all(part["part"] and part["from"] < part["to"] for part in columns)
    assert set(manifest["arrays"]) == set(model.embedding.state_dict())


@pytest.mark.parametrize("format", ["numpy", "tsv", "safetensors"])
def test_the_manifest_describes_every_format(small_graph, tmp_path, format):
    model = random_model("TuckER", small_graph.shape, reciprocal=True, batch_norm=True)
    run = kg.TrainedRun(model, small_graph, kg.Recipe(model=ModelConfig.of(model)))
    run = kg.load_run(run.save(tmp_path / "run")) if format == "numpy" else run
    folder = tmp_path / "out"
    paths = export(run, folder, format=format)
    manifest, arrays = read_arrays(folder)
    triples = np.array([[0, 1, 2], [7, 5, 7]])
    expected = model.score(*torch.from_numpy(triples).T).detach().numpy()
    np.testing.assert_allclose(score_by_numpy(manifest, arrays, triples), expected, rtol=1e-4)
    assert {path.name for path in paths} == {*manifest["files"], "manifest.json"}
    for name, about in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            about["bytes"],
            about["sha256"],
        )
    assert manifest["exported_with"]["packages"]["numpy"] == np.__version__
    assert (manifest["trained_with"] is None) == (format != "numpy")
    assert manifest["model"]["options"] == {"relation_dim": 3, "batch_norm": True}


def test_heads_are_ranked_by_the_inverse_rows_of_the_manifest(run, small_graph, tmp_path):
    export(run, tmp_path / "out")
    manifest, arrays = read_arrays(tmp_path / "out")
    inverse = manifest["inverse_relations"]["first_row"] + 2
    found = score_by_numpy(manifest, arrays, np.array([[5, inverse, head] for head in range(30)]))
    expected = run.model.predict_heads(torch.tensor([2]), torch.tensor([5]))[0].detach()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-10)


class Own(kg.BilinearModel):
    """⟨h, t⟩, whatever the relation is."""

    def map_head(self, head, relations):
        return head

    map_tail = map_head


def test_the_manifest_of_an_own_model_has_its_docstring(small_graph, tmp_path):
    model = Own(small_graph.shape, dim=2)
    export(kg.TrainedRun(model, small_graph, kg.Recipe()), tmp_path / "out")
    manifest, _ = read_arrays(tmp_path / "out")
    assert manifest["score"]["formula"] == "⟨h, t⟩, whatever the relation is."
    assert (manifest["score"]["numpy"], manifest["arrays"]["entities"]["columns"]) == (None, [])


class Swapped(kg.DistMult):
    """A subclass that may score otherwise than DistMult."""


def test_a_subclass_does_not_inherit_the_text_of_a_score(small_graph):
    described = describe_score(Swapped(small_graph.shape, dim=2))
    assert described == {"formula": Swapped.__doc__, "numpy": None}


class Described(Own):
    """A model with a text of its own."""

    score_text = BilinearText(head=Formula("h", "h"), tail=Formula("t", "t"))


def test_an_own_model_may_have_its_own_text(small_graph, tmp_path):
    model = Described(small_graph.shape, dim=2)
    export(kg.TrainedRun(model, small_graph, kg.Recipe()), tmp_path / "out")
    manifest, arrays = read_arrays(tmp_path / "out")
    assert manifest["score"]["formula"] == "s(h, r, t) = ⟨x, t⟩ with x = h"
    triples = np.array([[0, 1, 2], [7, 3, 7]])
    expected = model.score(*torch.from_numpy(triples).T).detach().numpy()
    np.testing.assert_allclose(score_by_numpy(manifest, arrays, triples), expected, rtol=1e-4)
    columns = manifest["arrays"]["entities"]["columns"]
    assert columns == [{"part": "coordinates", "from": 0, "to": 2}]


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_every_model_describes_its_score_and_its_arrays(small_graph, name):
    model = EMBEDDINGS[name](small_graph.shape, dim=2)
    assert describe_score(model)["numpy"] is not None
    described = {*MEANINGS, *type(model).score_text.arrays}
    assert set(model.state_dict()) <= described
