"""The calibration of a run is fitted once and saved; a damaged file is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.files import write_json
from dualkg.inference.integrity import check_run
from dualkg.inference.probability import Calibration, calibration_for
from tests.conftest import graph_of
from tests.inference.calibrations import recalibration_of


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    return kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1, out=tmp_path / "run")


def test_fitted_once_and_saved(run):
    fitted = calibration_for(run)
    path = run.folder / "calibration.json"
    written = path.stat()

    loaded = calibration_for(kg.load_run(run.folder))
    assert loaded.as_dict() == fitted.as_dict()
    assert loaded.prediction_sets.threshold(1, "head") == pytest.approx(
        fitted.prediction_sets.threshold(1, "head")
    )
    assert calibration_for(run).as_dict() == fitted.as_dict()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_a_saved_calibration_is_not_fitted_again(run):
    """A model without finite scores cannot be calibrated, and its saved calibration is read."""
    calibration_for(run)
    with torch.no_grad():
        run.model.entities[:] = torch.nan
    assert np.isfinite(calibration_for(run).slopes).all()
    with pytest.raises(kg.DivergedError):
        calibration_for(run, overwrite=True)


@pytest.fixture
def other(small_graph, tmp_path) -> kg.Run:
    """Another run on the same graph, calibrated."""
    model = kg.CP(small_graph.shape, dim=4, seed=1)
    made = kg.train(model, small_graph, epochs=1, seed=1, out=tmp_path / "other")
    calibration_for(made)
    return made


@pytest.mark.parametrize("is_link", [True, False])
def test_a_calibration_of_another_run_is_refused(run, other, is_link):
    calibration_for(run)
    path = run.folder / "calibration.json"
    path.unlink()
    if is_link:
        path.symlink_to(other.folder / "calibration.json")
    else:
        shutil.copyfile(other.folder / "calibration.json", path)
    for use in (calibration_for, kg.calibrate, kg.Predictor.of):
        with pytest.raises(kg.RequestError, match="was made from another run") as caught:
            use(kg.load_run(run.folder))
    assert str(caught.value).endswith(f"with: dualkg calibrate {run.folder} --overwrite")
    kg.calibrate(run, overwrite=True)
    assert check_run(run.folder)[0].ok
    assert not path.is_symlink()


def test_a_run_that_was_replaced_after_it_was_loaded_has_its_calibration_no_longer(run, other):
    loaded = kg.load_run(run.folder)
    shutil.rmtree(run.folder)
    other.folder.rename(run.folder)
    with pytest.raises(kg.RequestError, match="was made from another run"):
        calibration_for(loaded)


@pytest.mark.parametrize("target", ["nowhere", "calibration.json"])
def test_a_link_that_leads_nowhere_is_not_a_run_without_probabilities(run, target):
    path = run.folder / "calibration.json"
    path.symlink_to(target)
    for use in (calibration_for, kg.calibrate, kg.Predictor.of):
        with pytest.raises(kg.RequestError, match=r"calibration\.json is damaged"):
            use(run)
    (check,) = check_run(run.folder)
    assert not check.ok


def test_priors_of_an_earlier_version_are_not_used(run):
    """It saved them beside the calibration."""
    path = run.folder / "priors.safetensors"
    path.write_bytes(b"anything")
    kg.calibrate(run.folder)
    assert not path.exists()
    path.write_bytes(b"anything")
    assert calibration_for(run).priors(0).shape
    assert check_run(run.folder)[0].ok


def test_a_run_without_a_folder_saves_nothing(run):
    in_memory = kg.TrainedRun(run.model, run.graph, run.recipe)
    assert calibration_for(in_memory).made_from is None
    assert not (run.folder / "calibration.json").exists()


def test_all_parts_are_saved(run):
    fitted = calibration_for(run)
    changed = replace(
        fitted,
        recalibration=recalibration_of([-4.0, -1.0, 2.0], [-4.5, -0.7, 1.9]),
        missing_share=0.3,
        checks={"coverage": 0.9},
    )
    changed.save(run.folder)
    loaded = Calibration.load(run.folder, run.graph)
    assert loaded.as_dict() == changed.as_dict()
    assert loaded.checks == {"coverage": 0.9}
    assert loaded.made_from == run.identity

    triples = run.graph.test.astype(np.int64)
    values = torch.linspace(-5, -0.1, len(triples))
    for one, other in zip(
        loaded.of_triples(triples, values), changed.of_triples(triples, values), strict=True
    ):
        assert one.tolist() == other.tolist()


# -- damage ------------------------------------------------------------------


def remove_slopes(content):
    del content["calibration"]["slopes"]


def keep_two_relations(content):
    for name in ("slopes", "offsets", "relation_specific"):
        content["calibration"][name] = content["calibration"][name][:2]


def remove_patterns(content):
    offsets = content["calibration"]["offsets"]
    content["calibration"]["offsets"] = [row[0] for row in offsets]


def negate_a_slope(content):
    content["calibration"]["slopes"][0] = -1.0


def offset_infinity(content):
    content["calibration"]["offsets"][0][0] = 1e999


def recalibrate_with_one_value(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 1.0], "values": [0.0]}


def repeat_a_knot(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 0.0], "values": [0.0, 1.0]}


def recalibrate_to_infinity(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 1.0], "values": [0.0, 1e999]}


def gain_infinity(content):
    content["calibration"]["cross_fit"]["gain"] = 1e999


def shorten_a_column(content):
    del content["prediction_sets"]["relations"][0]


def name_an_unknown_relation(content):
    content["prediction_sets"]["relations"][0] = 17


def replace_the_table(content):
    content["calibration"] = "none"


DAMAGES = {
    remove_slopes: "there is no 'slopes'",
    keep_two_relations: "it should have 4 relations with 4 offsets each",
    remove_patterns: "it should have 4 relations with 4 offsets each",
    negate_a_slope: "a slope is not above 0",
    offset_infinity: "an offset is not finite",
    recalibrate_with_one_value: "its recalibration should have a value for each of two or more",
    repeat_a_knot: "the knots of its recalibration do not increase",
    recalibrate_to_infinity: "the values of its recalibration do not increase",
    gain_infinity: "the cross-fit of its recalibration is not finite",
    shorten_a_column: "its prediction sets have columns of different lengths",
    name_an_unknown_relation: "are of relations that are not among the 4 of the graph",
    replace_the_table: "string indices must be integers",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items())
def test_content_that_is_no_calibration_is_refused(run, damage, reason):
    calibration_for(run)
    path = run.folder / "calibration.json"
    content = json.loads(path.read_text())
    damage(content)

    path.write_text(json.dumps(content))
    with pytest.raises(kg.RequestError, match="its checksum is not that of its content"):
        Calibration.load(run.folder, run.graph)

    del content["sha256"]
    write_json(path, content)
    with pytest.raises(kg.RequestError) as error:
        Calibration.load(run.folder, run.graph)
    assert str(error.value).startswith(f"{path} is damaged: ")
    assert reason in str(error.value)
    assert str(error.value).endswith(f"with: dualkg calibrate {run.folder} --overwrite")

    calibration_for(run, overwrite=True)
    Calibration.load(run.folder, run.graph)


@pytest.mark.parametrize("text", ["[]", '{"calibration": {"slopes": [1.0'])
def test_a_file_of_other_content_is_refused(run, text):
    (run.folder / "calibration.json").write_text(text)
    with pytest.raises(kg.RequestError, match="is damaged"):
        Calibration.load(run.folder, run.graph)


def test_a_graph_without_valid_triples_is_refused(run, small_graph):
    without = graph_of(small_graph.train, (), small_graph.test, num_entities=30, num_relations=4)
    with pytest.raises(kg.DataError, match="Calibration needs valid triples"):
        calibration_for(kg.TrainedRun(run.model, without, run.recipe))
