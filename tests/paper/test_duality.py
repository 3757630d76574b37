"""The same embeddings scored by inner products and by distances."""

from __future__ import annotations

import pytest

import dualkg as kg
from paper import plan
from paper.duality import WAYS, duality, ways_to_score
from paper.setting import Setting


@pytest.mark.parametrize(("kind", "primal"), [(kg.RotatE, kg.ComplEx), (kg.ModE, kg.DistMult)])
def test_a_distance_model_is_turned_round(small_graph, kind, primal):
    model = kind(small_graph.shape, dim=4, norm="squared", init_scale=0.5)
    ways = ways_to_score(model)
    assert list(ways) == list(WAYS)
    assert type(ways["inner product"]) is primal
    reports = {way: kg.evaluate(one, small_graph).metrics for way, one in ways.items()}
    assert reports["as trained"] == reports["distance, tail's side"]  # with a squared norm it is that very dual
    assert reports["as trained"] != reports["inner product"]


def test_every_row_with_a_recipe_is_scored_in_all_ways(tmp_path, monkeypatch):
    folder = tmp_path / "recipes" / "world"
    folder.mkdir(parents=True)
    for stem, name in (("complex-dura", "ComplEx"), ("rotate", "RotatE")):
        recipe = kg.Recipe().with_changes(
            {"data.graph": "world", "model.name": name, "model.dim": 4, "training.epochs": 1}
        )
        (folder / f"{stem}.toml").write_text(recipe.as_toml())
    monkeypatch.setattr(plan, "RECIPE_FOLDERS", (folder.parent,))
    monkeypatch.setattr("paper.plan.graph_named", lambda name: name)
    setting = Setting("world", 1, tmp_path / "records", tmp_path / "runs", device="cpu")
    [sheet] = duality(setting)
    assert [row[0] for row in sheet.rows] == ["ComplEx-DURA", "RotatE"]
    assert sheet.rows[0][1] == sheet.rows[0][2]  # a bilinear model is trained by its inner product
    assert sheet.rows[1][1] != sheet.rows[1][2]
    assert (tmp_path / "records" / "figures" / "duality-world.json").exists()
