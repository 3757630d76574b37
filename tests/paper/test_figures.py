"""The figures, each once from tiny runs on the bundled graph."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import dualkg as kg
from paper import figures, plan
from paper.published import published
from paper.setting import Setting

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

STEMS = {
    "cp": {},
    "cp-n3": {"regularizer.name": "N3", "regularizer.weight": 0.05},
    "cp-dura": {"regularizer.name": "DURA", "regularizer.weight": 0.05},
    "rescal": {"model.name": "RESCAL"},
    "rescal-dura": {"model.name": "RESCAL", "regularizer.name": "DURA", "regularizer.weight": 0.05},
    "cp-dim-2": {"model.dim": 2},
    "cp-dura-dim-2": {"model.dim": 2, "regularizer.name": "DURA", "regularizer.weight": 0.05},
}


@pytest.fixture
def setting(tmp_path, monkeypatch) -> Setting:
    folder = tmp_path / "recipes" / "world"
    folder.mkdir(parents=True)
    base = {"model.name": "CP", "model.dim": 4, "training.epochs": 1, "training.batch_size": 500}
    for stem, changes in STEMS.items():
        (folder / f"{stem}.toml").write_text(kg.Recipe().with_changes(base | changes).as_toml())
    monkeypatch.setattr(plan, "RECIPE_FOLDERS", (folder.parent,))
    monkeypatch.setattr(plan, "GRAPHS", ("world",))
    monkeypatch.setattr(figures, "FIGURES_GRAPH", "world")
    return Setting(None, 2, tmp_path / "records", tmp_path / "runs", device="cpu")


def pieces(setting: Setting, name: str) -> list[str]:
    return sorted(path.suffix for path in (setting.records / "figures").glob(f"{name}-world.*"))


def test_sparsity(setting):
    curves, storage = figures.sparsity(setting)
    assert [row[0] for row in curves.rows] == [
        "CP",
        "CP-N3",
        "CP-DURA",
        "RESCAL",
        "RESCAL-DURA",
        "RESCAL-DURA, rotated",
    ]
    assert pieces(setting, "sparsity") == [".json", ".md", ".png", ".svg"]
    facts = json.loads((setting.records / "figures" / "sparsity-world.json").read_text())["found"]
    dense = [one["points"][0]["metrics"]["mrr"] for one in facts if one["row"] == "CP-DURA"]
    run = kg.load_run(setting.runs / "world" / "cp-dura" / "seed-1")
    assert dense[1] == pytest.approx(run.report.mrr)
    assert curves.rows[2][1] == f"{sum(dense) / 2:.4f}"
    assert "40 % there" in storage.notes[0]
    page = (setting.records / "figures" / "sparsity-world.md").read_text(encoding="utf-8")
    assert "](figures/sparsity-world.png)" in page


def test_tsne(setting, monkeypatch):
    graph = kg.load_graph("world")
    heads = {graph.entities.label(int(head)) for head in graph.train[:, 0]}
    asked = [[head, "borders"] for head in ("Germany", "Brazil", "China") if head in heads]
    assert len(asked) == 3
    monkeypatch.setitem(published(), "tsne_queries", asked)
    [sheet] = figures.tsne(setting)
    assert [row[0] for row in sheet.rows] == ["CP", "CP-DURA"]
    assert all("±" in cell for row in sheet.rows for cell in row[1:3])  # two seeds
    assert pieces(setting, "tsne") == [".json", ".md", ".png", ".svg"]


def test_the_plane(setting):
    [sheet] = figures.plane(setting)
    assert [row[0] for row in sheet.rows] == ["CP", "CP-DURA"]
    assert pieces(setting, "figure1") == [".json", ".md", ".png", ".svg"]


def test_the_two_weights_of_dura(setting, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    space = tmp_path / "spaces" / "world-complex-lambdas.toml"
    space.parent.mkdir()
    recipe = (tmp_path / "recipes" / "world" / "cp-dura.toml").as_posix()
    grid = '"regularizer.plain" = [0.5, 1.0]\n"regularizer.mapped" = [0.5, 1.5]\n'
    space.write_text(f'recipe = "{recipe}"\n[space]\n{grid}[search]\nprune = false\n')
    monkeypatch.setattr(figures, "spaces_folder", lambda: space.parent)
    one = Setting("world", 1, setting.records, setting.runs, device="cpu")
    [sheet] = figures.lambdas(one)
    assert [row[0] for row in sheet.rows] == ["λ1 = 0.5", "λ1 = 1"]
    assert len(sheet.facts) == 4
    assert (setting.records / "searches" / "world-complex-lambdas" / "trials.csv").exists()
    assert pieces(setting, "lambdas") == [".json", ".md", ".png", ".svg"]


@pytest.mark.parametrize("module", ["matplotlib", "sklearn"])
@pytest.mark.parametrize("name", ["tsne", "plane", "sparsity", "lambdas"])
def test_a_missing_extra_is_told_before_anything_is_trained(setting, monkeypatch, name, module):
    for loaded in [key for key in sys.modules if key.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kg.RequestError, match=r"pip install 'dualkg\[analysis\]'"):
        getattr(figures, name)(setting)
    assert not setting.runs.exists()


def test_published_points_are_of_their_own_graph():
    assert figures._published_points("FB15k-237")["CP-DURA"] == {0.6: 0.366}
    assert figures._published_points("WN18RR") == {}


def test_every_space_and_recipe_of_a_figure_ships():
    root = Path(__file__).parents[2]
    stems = [row.stem for rows in figures.SPARSE_PANELS.values() for row in rows]
    stems += [row.stem for row in figures.IN_THE_PLANE]
    assert all((root / "recipes" / "fb15k-237" / f"{stem}.toml").exists() for stem in stems)
    assert all(
        (root / "spaces" / "paper" / f"{graph}-complex-lambdas.toml").exists() for graph in ("fb15k-237", "wn18rr")
    )
