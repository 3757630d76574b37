"""The calibration of a run is fitted once and saved; a damaged file is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile
from dualkg.files import write_json
from dualkg.inference.calibration import (
    NOT_BOUND,
    SavedCalibration,
    UnusableCalibration,
    calibration_for,
    load_calibration,
    save_calibration,
)
from dualkg.inference.integrity import check_run
from dualkg.inference.recalibration import Recalibration
from dualkg.inference.scoring import MissingTriples
from dualkg.training.errors import OtherSource
from tests.conftest import graph_of
from tests.raising import check_error, refused


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    return kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1, out=tmp_path / "run")


def test_fitted_once_and_saved(run):
    fitted = calibration_for(run)
    path = run.folder / "calibration.json"
    written = path.stat()

    loaded = calibration_for(kg.load_run(run.folder))
    assert torch.equal(loaded.calibration.slopes, fitted.calibration.slopes)
    assert loaded.prediction_sets.threshold(1, "head") == pytest.approx(
        fitted.prediction_sets.threshold(1, "head")
    )
    assert torch.equal(calibration_for(run).calibration.offsets, fitted.calibration.offsets)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_a_saved_calibration_is_not_fitted_again(run):
    """A model without finite scores cannot be calibrated, and its saved calibration is read."""
    calibration_for(run)
    with torch.no_grad():
        run.model.entities[:] = torch.nan
    assert isinstance(calibration_for(run), SavedCalibration)
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
        with refused(UnusableCalibration, run=run.folder) as caught:
            use(kg.load_run(run.folder))
        check_error(caught.value.cause, OtherSource, path=path)
    assert str(caught.value) == (
        f"{path} was made from another run: the weights, the recipe or the graph are other ones "
        f"here. Make it again: kg.calibrate('{run.folder}', overwrite=True)"
    )
    (check,) = check_run(run.folder)
    assert not check.ok
    kg.calibrate(run, overwrite=True)
    assert check_run(run.folder)[0].ok
    assert not path.is_symlink()


def test_a_run_that_was_replaced_after_it_was_loaded_has_its_calibration_no_longer(run, other):
    loaded = kg.load_run(run.folder)
    shutil.rmtree(run.folder)
    other.folder.rename(run.folder)
    with refused(UnusableCalibration, run=run.folder):
        calibration_for(loaded)


@pytest.mark.parametrize("target", ["nowhere", "calibration.json"])
def test_a_link_that_leads_nowhere_is_not_a_run_without_probabilities(run, target):
    path = run.folder / "calibration.json"
    path.symlink_to(target)
    for use in (calibration_for, kg.calibrate, kg.Predictor.of):
        with refused(UnusableCalibration, run=run.folder) as caught:
            use(run)
        reason = f"it is a link to {target}, which cannot be found"
        check_error(caught.value.cause, DamagedFile, path=path, reason=reason)
    (check,) = check_run(run.folder)
    assert not check.ok


def test_a_calibration_of_an_earlier_version_is_accepted_with_a_note(run, caplog):
    calibration_for(run)
    path = run.folder / "calibration.json"
    content = json.loads(path.read_text())
    assert content.pop("made_from") == run.identity == kg.load_run(run.folder).identity
    content.pop("sha256")
    write_json(path, content)
    assert calibration_for(run).made_from is None
    assert NOT_BOUND in caplog.text
    (check,) = check_run(run.folder)
    assert check.ok


def test_a_run_without_a_folder_saves_nothing(run):
    in_memory = kg.TrainedRun(run.model, run.graph, run.recipe)
    assert isinstance(calibration_for(in_memory), SavedCalibration)
    assert not (run.folder / "calibration.json").exists()


@pytest.fixture
def recalibration() -> Recalibration:
    knots = torch.tensor([-4.0, -1.0, 2.0], dtype=torch.float64)
    return Recalibration(knots, torch.tensor([-4.5, -0.7, 1.9], dtype=torch.float64))


def test_a_recalibration_is_saved(run, recalibration):
    fitted = calibration_for(run)
    recalibrated = replace(fitted.calibration, recalibration=recalibration)
    save_calibration(replace(fitted, calibration=recalibrated), run.folder, run.graph)

    loaded = load_calibration(run.folder, run.graph).calibration
    assert torch.equal(loaded.recalibration.knots, recalibration.knots)
    assert torch.equal(loaded.recalibration.values, recalibration.values)
    assert loaded.cross_fit == fitted.calibration.cross_fit

    inputs = (torch.tensor([-2.5, -0.1]), torch.tensor([0, 3]), torch.tensor([0, 2]))
    assert torch.equal(loaded.probability(*inputs), recalibrated.probability(*inputs))
    plain = fitted.calibration.probability(*inputs)
    assert not torch.equal(loaded.probability(*inputs), plain)


def test_a_file_of_an_earlier_version_is_read(run):
    """It has neither a recalibration nor its cross-fit."""
    calibration_for(run)
    path = run.folder / "calibration.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    del content["calibration"]["recalibration"]
    del content["calibration"]["cross_fit"]
    write_json(path, content)

    loaded = load_calibration(run.folder, run.graph).calibration
    assert loaded.recalibration is None
    assert loaded.cross_fit is None
    assert kg.calibrate(run.folder).as_dict()["recalibration"] is None


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


def recalibrate_without_values(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 1.0]}


def recalibrate_with_one_value(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 1.0], "values": [0.0]}


def recalibrate_with_one_knot(content):
    content["calibration"]["recalibration"] = {"knots": [0.0], "values": [0.0]}


def repeat_a_knot(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 0.0], "values": [0.0, 1.0]}


def recalibrate_downwards(content):
    content["calibration"]["recalibration"] = {"knots": [0.0, 1.0], "values": [1.0, 0.5]}


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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_slopes, "there is no 'slopes'"),
        (keep_two_relations, "it should have 4 relations with 4 offsets each"),
        (remove_patterns, "it should have 4 relations with 4 offsets each"),
        (negate_a_slope, "a slope is not above 0"),
        (recalibrate_without_values, "there is no 'values'"),
        (
            recalibrate_with_one_value,
            "its recalibration should have a value for each of two or more knots",
        ),
        (
            recalibrate_with_one_knot,
            "its recalibration should have a value for each of two or more knots",
        ),
        (repeat_a_knot, "the knots of its recalibration do not increase"),
        (recalibrate_downwards, "the values of its recalibration do not increase"),
        (recalibrate_to_infinity, "the values of its recalibration do not increase"),
        (gain_infinity, "the cross-fit of its recalibration is not finite"),
        (shorten_a_column, "its prediction sets have columns of different lengths"),
        (
            name_an_unknown_relation,
            "its prediction sets are of relations that are not among the 4 of the graph",
        ),
        (replace_the_table, "string indices must be integers, not 'str'"),
    ],
)
def test_content_that_is_no_calibration_is_refused(run, damage, reason):
    calibration_for(run)
    path = run.folder / "calibration.json"
    content = json.loads(path.read_text())
    damage(content)

    path.write_text(json.dumps(content))
    with refused(UnusableCalibration, run=run.folder) as unusable:
        load_calibration(run.folder, run.graph)
    assert isinstance(unusable.value.cause, DamagedFile)
    assert unusable.value.cause.reason.startswith("its checksum is not that of its content")

    del content["sha256"]
    write_json(path, content)
    with pytest.raises(UnusableCalibration) as error:
        load_calibration(run.folder, run.graph)
    assert error.value.run == run.folder
    assert isinstance(error.value.cause, DamagedFile)
    assert (error.value.cause.path, error.value.cause.reason) == (path, reason)

    assert isinstance(calibration_for(run, overwrite=True), SavedCalibration)
    load_calibration(run.folder, run.graph)


@pytest.mark.parametrize("text", ["[]", '{"calibration": {"slopes": [1.0'])
def test_a_file_of_other_content_is_refused(run, text):
    (run.folder / "calibration.json").write_text(text)
    with pytest.raises(UnusableCalibration) as error:
        load_calibration(run.folder, run.graph)
    assert error.value.run == run.folder
    assert isinstance(calibration_for(run, overwrite=True), SavedCalibration)


def test_the_message_says_how_to_make_it_again(run):
    error = UnusableCalibration(run.folder, DamagedFile("calibration.json", "it is cut"))
    assert str(error) == (
        "calibration.json is damaged: it is cut. Make it again: "
        f"kg.calibrate('{run.folder}', overwrite=True)"
    )


def test_a_graph_without_valid_triples_is_refused(run, small_graph):
    without = graph_of(small_graph.train, (), small_graph.test, num_entities=30, num_relations=4)
    with pytest.raises(MissingTriples) as error:
        calibration_for(kg.TrainedRun(run.model, without, run.recipe))
    assert (error.value.purpose, error.value.split) == ("Calibration", "valid")
