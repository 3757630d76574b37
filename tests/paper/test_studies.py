"""The studies, each once with tiny runs on the bundled graph."""

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import dualkg as kg
from paper import registry, studies
from paper.records import RECORDS, Config
from paper.registry import Row, published, recipe_path
from paper.studies import STUDIES, time_steps
from tests.paper.conftest import DURA

# Importing them takes seconds, which every process that collects tests would spend.
NEEDED = ("matplotlib", "sklearn", "openTSNE")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs the extra analysis")

FILES = [".json", ".png", ".svg"]


@pytest.fixture
def config(write_recipes, tmp_path, monkeypatch) -> Config:
    cp = {"model.name": "CP", "training.epochs": 1}
    rescal = {"model.name": "RESCAL", "training.epochs": 1}
    write_recipes(
        {
            "complex-dura": DURA,
            "rotate": {"model.name": "RotatE", "training.epochs": 1},
            "cp": cp,
            "cp-n3": cp | {"regularizer.name": "N3", "regularizer.weight": 0.05},
            "cp-dura": cp | DURA,
            "rescal": rescal,
            "rescal-dura": rescal | DURA,
            "cp-dim-2": cp | {"model.dim": 2},
            "cp-dura-dim-2": cp | DURA | {"model.dim": 2},
        }
    )
    monkeypatch.setattr(studies, "STUDIED", Row("ComplEx-DURA", "complex-dura"))
    return Config("world", 1, (), tmp_path / "records", tmp_path / "runs", "cpu")


def saved(config: Config, name: str) -> object:
    return json.loads((config.records / "figures" / f"{name}-world.json").read_text())["results"]


def files(config: Config, name: str) -> list[str]:
    return sorted(path.suffix for path in (config.records / "figures").glob(f"{name}-world.*"))


def test_ensemble(config, monkeypatch):
    monkeypatch.setattr(
        studies, "ENSEMBLE_ROWS", (Row("RESCAL-DURA", "rescal-dura"), Row("RotatE", "rotate"))
    )
    [table] = STUDIES["ensemble"].run(config)
    results = saved(config, "ensemble")
    assert [row[0] for row in table.rows] == ["RESCAL-DURA", "RotatE", "ensemble"]
    member = kg.load_run(config.runs / "world" / "rescal-dura" / "seed-0")
    assert results[0]["test"] == pytest.approx(member.report.mrr)
    assert results[2]["weight"] is None
    assert len({round(one["test"], 6) for one in results}) == 3
    assert results[0]["weight"] > 0


def test_completion(config):
    [table] = STUDIES["completion"].run(config)
    results = saved(config, "completion")
    assert [row[0] for row in table.rows] == ["100", "1,000", "10,000", "100,000"]
    assert [row[1] for row in table.rows] == [f"{hits:,}" for hits in results["found"]]
    assert 0 < results["found"][-1] <= results["num_test"] < results["num_triples"]


def test_calibration(config):
    [table] = STUDIES["calibration"].run(config)
    results = saved(config, "calibration")
    assert [row[0] for row in table.rows] == ["all candidates", "with p ≥ .01"]
    assert f"{results['coverage']['coverage']:.1%}" in table.notes[0]
    assert files(config, "calibration") == FILES


def test_explanations(config, monkeypatch):
    quick = partial(studies.measure_explanations, counts=(2,), max_triples=9)
    [table] = replace(STUDIES["explanations"], measure=quick).run(config)
    removed = [["nothing", "0"], ["supporting", "2"], ["random", "2"], ["opposing", "2"]]
    assert [row[:2] for row in table.rows] == removed
    results = {one["removed"]: one for one in saved(config, "explanations")}
    assert table.rows[1][2] == f"{results['supporting']['metrics']['mrr']:.4f}"
    keys = ("score_drop", "expected_drop", "rank_correlation")
    assert table.rows[3][4:7] == [f"{results['opposing'][key]:.2f}" for key in keys]
    assert table.rows[0][4:7] == ["–"] * 3
    assert files(config, "explanations") == FILES


def test_deletion(config, write_recipes):
    network = {
        "model.name": "PathNetwork",
        "model.options": {"steps": 2},
        "training.epochs": 2,
        "training.batch_size": 64,
    }
    (registry.RECIPE_FOLDERS[0] / "world" / "path-network.toml").write_text(
        kg.Recipe().with_changes({"model.dim": 16, **network}).as_toml()
    )
    quick = partial(studies.measure_deletion, counts=(2,), max_triples=5)
    [table] = replace(STUDIES["deletion"], measure=quick).run(config)
    deleted = [["nothing", "0"], ["supporting paths", "2"], ["neighbours", "2"], ["random", "2"]]
    assert [row[:2] for row in table.rows] == deleted
    results = {one["deleted"]: one for one in saved(config, "deletion")}
    assert results["nothing"]["mrr"] == 1
    assert table.rows[1][4] == f"{results['supporting paths']['mrr']:.4f}"
    assert "5 test triples whose tail has the first rank" in table.notes[0]


@pytest.mark.slow
def test_sparsity(config, monkeypatch):
    shares = (0.0, 0.5, 0.9)
    monkeypatch.setattr(studies, "SHARES", shares)
    monkeypatch.setattr(studies, "sparsity_curve", partial(studies.sparsity_curve, shares=shares))
    two_seeds = Config("world", 2, (), config.records, config.runs, "cpu")
    curves, storage = STUDIES["sparsity"].run(two_seeds)
    assert [row[0] for row in curves.rows] == [
        "CP",
        "CP-N3",
        "CP-DURA",
        "RESCAL",
        "RESCAL-DURA",
        "RESCAL-DURA, rotated",
    ]
    assert files(config, "sparsity") == FILES
    dense = [
        one["points"][0]["metrics"]["mrr"]
        for one in saved(config, "sparsity")
        if one["row"] == "CP-DURA"
    ]
    run = kg.load_run(config.runs / "world" / "cp-dura" / "seed-1")
    assert dense[1] == pytest.approx(run.report.mrr)
    assert curves.rows[2][1] == f"{sum(dense) / 2:.4f}"
    assert "40 % there" in storage.notes[0]


def test_tsne(config, monkeypatch):
    graph = kg.load_graph("world")
    heads = {graph.entities.label(int(head)) for head in graph.train[:, 0]}
    pairs = [[head, "borders"] for head in ("Germany", "Brazil", "China") if head in heads]
    assert len(pairs) == 3
    monkeypatch.setitem(published(), "tsne_queries", pairs)
    [table] = STUDIES["tsne"].run(Config("world", 2, (), config.records, config.runs, "cpu"))
    assert [row[0] for row in table.rows] == ["CP", "CP-DURA"]
    assert all("±" in cell for row in table.rows for cell in row[1:3])  # two seeds
    assert files(config, "tsne") == FILES


def test_figure1(config):
    [table] = STUDIES["figure1"].run(config)
    assert [row[0] for row in table.rows] == ["CP", "CP-DURA"]
    assert files(config, "figure1") == FILES


def test_dura_weights(config, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    space = tmp_path / "spaces" / "world-complex-dura-weights.toml"
    space.parent.mkdir()
    recipe = (tmp_path / "recipes" / "world" / "cp-dura.toml").as_posix()
    grid = '"regularizer.plain" = [0.5, 1.0]\n"regularizer.mapped" = [0.5, 1.5]\n'
    space.write_text(f'recipe = "{recipe}"\n[space]\n{grid}[search]\nprune = false\n')
    monkeypatch.setattr(registry, "SPACES", space.parent)
    [table] = STUDIES["dura-weights"].run(config)
    assert [row[0] for row in table.rows] == ["λ1 = 0.5", "λ1 = 1"]
    assert len(saved(config, "dura-weights")["grid"]) == 4
    assert (config.records / "searches" / "world-complex-dura-weights" / "trials.csv").exists()
    assert files(config, "dura-weights") == FILES


@pytest.mark.slow
def test_duality(config):
    [table] = STUDIES["duality"].run(config)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == [
        "CP",
        "CP-DURA",
        "RESCAL",
        "RESCAL-DURA",
        "ComplEx-DURA",
        "RotatE",
    ]  # rows with a recipe
    assert (
        rows["ComplEx-DURA"][1] == rows["ComplEx-DURA"][2]
    )  # a bilinear model is trained by its inner product
    assert rows["RotatE"][1] != rows["RotatE"][2]
    assert files(config, "duality") == [".json"]


def test_cost_is_measured_with_three_regularizers():
    recipe = kg.Recipe().with_changes(
        {
            "model.dim": 4,
            "regularizer.name": "DURA",
            "regularizer.weight": 0.1,
            "training.batch_size": 100,
        }
    )
    result = time_steps(
        recipe, kg.load_graph("world"), device=torch.device("cpu"), steps=2, rounds=2
    )
    assert set(result["seconds_per_step"]) == {"none", "Frobenius", "DURA"}
    assert all(seconds > 0 for seconds in result["seconds_per_step"].values())
    assert STUDIES["cost"].tables([result], "world")[0].rows[0][0] == "ComplEx"


def test_every_study_has_its_recipes_and_spaces():
    names = [
        name
        for names in studies.SPARSITY_PANELS.values()
        for name in names
        if name != studies.ROTATED
    ]
    rows = [*map(registry.model_row, names)]
    rows += [*studies.FIGURE1_ROWS, studies.STUDIED]
    assert all(recipe_path(row, "FB15k-237") for row in rows)
    assert all(
        (registry.SPACES / f"{graph}-complex-dura-weights.toml").exists()
        for graph in ("fb15k-237", "wn18rr")
    )


def test_saved_results_can_be_drawn_again(tmp_path):
    for name in ("quantization", "explanations"):
        [path] = STUDIES[name].saved(RECORDS)
        fresh = tmp_path / "figures" / path.name
        fresh.parent.mkdir(exist_ok=True)
        fresh.write_bytes(path.read_bytes())
        STUDIES[name].redraw(fresh)
        assert json.loads(fresh.read_text()) == json.loads(path.read_text())
        assert fresh.with_suffix(".svg").exists()
