"""What answers are worth, each once from a tiny run on the bundled graph."""

from __future__ import annotations

import json

import pytest
from paper.plan import Row
from paper.setting import Setting

import dualkg as kg
from paper import answers


@pytest.fixture
def setting(recipes, tmp_path, monkeypatch) -> Setting:
    monkeypatch.setattr(answers, "ASKED", Row("ComplEx-DURA", "complex-dura"))
    monkeypatch.setattr(answers, "GRAPH", "world")
    monkeypatch.setattr(Setting, "graphs", ("world",))
    monkeypatch.setattr(Setting, "graph", lambda self, usual: kg.load_graph(usual))
    return Setting(None, 1, tmp_path / "records", tmp_path / "runs", device="cpu")


def kept(setting: Setting, name: str) -> dict:
    return json.loads((setting.records / "figures" / f"{name}-world.json").read_text())["found"]


def test_completion(setting):
    [sheet] = answers.completion(setting)
    found = kept(setting, "completion")
    assert [row[0] for row in sheet.rows] == ["100", "1,000", "10,000", "100,000"]
    assert [row[1] for row in sheet.rows] == [f"{hits:,}" for hits in found["found"]]
    assert 0 < found["found"][-1] <= found["num_test"] < found["num_triples"]


def test_calibration(setting):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    [sheet] = answers.calibration(setting)
    found = kept(setting, "calibration")
    assert [row[0] for row in sheet.rows] == ["all", "with p ≥ .01"]
    assert f"{found['coverage']['overall']['coverage']:.1%}" in sheet.notes[0]
    assert (setting.records / "figures" / "calibration-world.png").exists()


def test_forms(setting):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    [sheet] = answers.forms(setting)
    found = kept(setting, "forms")
    assert [row[0] for row in sheet.rows] == [one["name"] for one in found]
    assert [row[2] for row in sheet.rows] == [f"{one['metrics']['mrr']:.4f}" for one in found]
    assert (setting.records / "figures" / "forms-world.svg").exists()


def test_inductive_entities(setting, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    study = answers.study_inductive
    monkeypatch.setattr(answers, "study_inductive", lambda *a, **k: study(*a, **k, share=0.01, counts=(1, None)))
    [sheet] = answers.inductive_entities(setting)
    assert [row[:2] for row in sheet.rows] == [
        ["embedded", "1"],
        ["embedded", "all"],
        ["mean", "0"],
        ["random", "0"],
        ["retrained", "1"],
        ["retrained", "all"],
    ]
    by_kind = {(one["method"], one["triples_per_entity"]): one for one in kept(setting, "inductive")}
    assert sheet.rows[1][2] == f"{by_kind['embedded', None]['inductive']['mrr']:.4f}"
    assert sheet.rows[4][5] == f"{by_kind['retrained', 1]['known']['mrr']:.4f}"
    page = (setting.records / "figures" / "inductive-world.md").read_text(encoding="utf-8")
    assert f"{by_kind['embedded', 1]['num_entities']} entities of world are withheld" in page
    assert (setting.records / "figures" / "inductive-world.png").exists()


def test_reasons(setting, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    study = answers.study
    monkeypatch.setattr(answers, "study_reasons", lambda *a, **k: study(*a, **k, counts=(2,), most_answers=9))
    [sheet] = answers.reasons(setting)
    assert [row[:2] for row in sheet.rows] == [["nothing", "0"], ["reasons", "2"], ["any", "2"], ["against", "2"]]
    by_way = {one["way"]: one for one in kept(setting, "reasons")}
    assert sheet.rows[1][2] == f"{by_way['reasons']['metrics']['mrr']:.4f}"
    assert sheet.rows[3][4:7] == [f"{by_way['against'][name]:.2f}" for name in ("fall", "expected", "agreement")]
    assert sheet.rows[0][4:7] == ["–"] * 3
    assert (setting.records / "figures" / "reasons-world.svg").exists()
