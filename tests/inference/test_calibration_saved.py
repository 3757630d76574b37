"""The calibration of a run is fitted once and saved; a damaged file is refused."""

import json

import pytest
import torch

import dualkg as kg
from dualkg.files import write_json
from dualkg.inference import calibration as calibration_module
from dualkg.inference.calibration import SavedCalibration, calibration_for, load_calibration
from tests.conftest import graph_of


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    return kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1, out=tmp_path / "run")


def test_fitted_once_and_saved(run, monkeypatch):
    made = calibration_for(run)
    path = run.folder / "calibration.json"
    assert path.exists()
    monkeypatch.setattr(
        calibration_module,
        "calibrate",
        lambda *nouns, **choices: pytest.fail("it was there already"),
    )
    again = calibration_for(kg.load_run(run.folder))
    assert torch.equal(again.calibration.slopes, made.calibration.slopes)
    assert again.prediction_sets.threshold(1, "head") == pytest.approx(
        made.prediction_sets.threshold(1, "head")
    )
    assert torch.equal(calibration_for(run).calibration.offsets, made.calibration.offsets)


def test_a_run_without_a_folder_saves_nothing(run):
    memory = kg.Run(run.model, run.graph, run.recipe)
    assert isinstance(calibration_for(memory), SavedCalibration)
    assert not (run.folder / "calibration.json").exists()


def damaged(found: dict, how: str) -> str:
    tables = found["calibration"]
    sets = found["prediction_sets"]
    if how == "no slopes":
        del tables["slopes"]
    elif how == "other relations":
        for name in ("slopes", "offsets", "relation_specific"):
            tables[name] = tables[name][:2]
    elif how == "no patterns":
        tables["offsets"] = [row[0] for row in tables["offsets"]]
    elif how == "falling":
        tables["slopes"][0] = -1.0
    elif how == "uneven":
        sets["relations"] = sets["relations"][1:]
    elif how == "unknown relation":
        sets["relations"][0] = 17
    elif how == "no table":
        found["calibration"] = "none"
    elif how == "a list":
        return "[]"
    elif how == "cut":
        return json.dumps(found)[:100]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("cut", "calibration.json is damaged: it is not JSON"),
        ("a list", "calibration.json is damaged: .* Make it again: dualkg calibrate"),
        ("no slopes", "calibration.json is damaged: there is no 'slopes'"),
        ("no table", "calibration.json is damaged: "),
        ("other relations", "it should have 4 relations with 4 offsets each"),
        ("no patterns", "4 offsets each. Make it again: dualkg calibrate"),
        ("falling", "a slope is not above 0"),
        ("uneven", "columns of different lengths"),
        ("unknown relation", "not among the 4 of the graph"),
    ],
)
def test_a_damaged_file_is_refused(run, how, sentence):
    calibration_for(run)
    path = run.folder / "calibration.json"
    saved = json.loads(path.read_text())
    path.write_text(damaged(saved, how))
    if how not in ("cut", "a list"):
        with pytest.raises(
            kg.RequestError, match="its checksum is not that of its content. Make it again: dualkg"
        ):
            load_calibration(run.folder, run.graph)
        del saved["sha256"]
        write_json(path, saved)
    with pytest.raises(kg.RequestError, match=sentence):
        load_calibration(run.folder, run.graph)
    assert isinstance(calibration_for(run, overwrite=True), SavedCalibration)
    load_calibration(run.folder, run.graph)


def test_a_graph_without_valid_triples_is_refused(run, small_graph):
    without = graph_of(small_graph.train, (), small_graph.test, num_entities=30, num_relations=4)
    with pytest.raises(
        kg.RequestError, match="Calibration needs held-out triples, and made has no valid triples"
    ):
        calibration_for(kg.Run(run.model, without, run.recipe))
