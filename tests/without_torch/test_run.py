"""Runs that NumPy queries give the answers of the predictor of PyTorch."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.entity_types import EntityTypes
from dualkg.data.errors import NotInVocabulary
from dualkg.inference.calibration import fit_calibration, save_calibration
from dualkg.inference.integrity import check_run
from dualkg.inference.recalibration import Recalibration
from dualkg.training.recipe import ModelConfig
from dualkg.without_torch.priors import QueryPriors
from dualkg.without_torch.run import SavedRun
from dualkg.without_torch.scores import MODELS
from dualkg.workflows.predict import predict_queries
from tests.conftest import graph_of
from tests.raising import refused

SETTINGS = [
    *({"name": name} for name in MODELS),
    *({"name": name, "reciprocal": False} for name in ("ComplEx", "CP", "QuatE", "RESCAL")),
    *({"name": name, "dual": "tail"} for name in ("ComplEx", "SimplE", "TuckER")),
    *({"name": name, "norm": 2} for name in ("RotatE", "TransE")),
    *({"name": name, "norm": "squared"} for name in ("RotatE", "ModE")),
    {"name": "QuatE", "normalized": False},
    {"name": "TuckER", "relation_dim": 3},
]
QUERIES = [
    ("e1", "r1", None),
    ("e1", "r1", "e2"),
    (None, "r2", "e3"),
    ("e4", None, "e5"),
]


def save_run(path, graph, *, name, dim=4, **settings):
    """Save a run of a model with random weights, as training would."""
    fields = {key: settings.pop(key) for key in ("reciprocal", "dual") if key in settings}
    config = ModelConfig(name=name, dim=dim, **fields, options=settings)
    model = config.build(graph.shape, seed=0)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    kg.TrainedRun(model, graph, kg.Recipe(model=config)).save(path)
    return kg.load_run(path)


def name_of(settings):
    return "-".join(str(value) for value in settings.values())


def assert_equal(prediction, expected):
    """Compare two predictions as JSON, with their figures up to rounding."""
    assert prediction.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, float):
            assert prediction[name] == pytest.approx(value, rel=1e-5, abs=1e-6)
        else:
            assert prediction[name] == value


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_answers_and_scores_are_those_of_the_predictor(small_graph, tmp_path, settings):
    run = save_run(tmp_path / "run", small_graph, **settings)
    saved = SavedRun.load(tmp_path / "run")
    assert saved
    for omit_known in (False, True):
        known = "omit" if omit_known else "mark"
        expected = predict_queries(run.predictor(), QUERIES, top=8, known=known)
        for query, by_torch in zip(QUERIES, expected, strict=True):
            by_numpy = saved.predict(query, k=8, omit_known=omit_known)
            assert [(p.name, p.split) for p in by_numpy] == [(p.name, p.split) for p in by_torch]
            scores = [prediction.score for prediction in by_torch]
            assert [prediction.score for prediction in by_numpy] == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "HAKE"},
        {"name": "TransE", "reciprocal": False},
        {"name": "ComplEx", "dual": "head"},
        {"name": "TuckER", "batch_norm": True},
    ],
    ids=name_of,
)
def test_other_models_need_torch(small_graph, tmp_path, settings):
    save_run(tmp_path / "run", small_graph, **settings)
    assert SavedRun.load(tmp_path / "run") is None


@pytest.fixture(scope="module")
def symmetric_graph():
    """A graph with a symmetric relation, and entities that a relation does not have."""
    random = np.random.default_rng(3)
    pairs = random.integers(0, 20, (120, 2))
    triples = [(head, 0, tail) for head, tail in pairs if head != tail]
    triples += [(tail, 0, head) for head, _, tail in triples]
    triples += [(head, 1 + head % 2, tail) for head, tail in random.integers(0, 20, (60, 2))]
    train = np.unique(np.array(triples), axis=0)
    others = np.flatnonzero(train[:, 1] > 0)[::4]
    return graph_of(np.delete(train, others, axis=0), train[others], num_entities=20)


def calibrate_with_a_map(run, *, missing_share=None):
    """Calibrate a run with types and a map of log odds, which so few triples do not support."""
    fitted = fit_calibration(run)
    types = EntityTypes.of_relation(run.graph, "r1")
    knots = torch.tensor([-4.0, -1.0, 2.0], dtype=torch.float64)
    recalibration = Recalibration(knots, knots / 2 - 1)
    calibration = replace(
        fitted.calibration,
        recalibration=recalibration,
        types=types,
        missing_share=missing_share,
    )
    save_calibration(replace(fitted, calibration=calibration), run.folder, run.graph)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "ComplEx"},
        {"name": "ComplEx", "reciprocal": False},
        {"name": "RESCAL", "dual": "tail"},
        {"name": "RotatE"},
    ],
    ids=name_of,
)
@pytest.mark.parametrize("missing_share", [None, 0.95])
def test_probabilities_are_those_of_the_predictor(
    symmetric_graph, tmp_path, settings, missing_share
):
    assert symmetric_graph.symmetric_relations[0]
    run = save_run(tmp_path / "run", symmetric_graph, **settings)
    calibrate_with_a_map(run, missing_share=missing_share)
    saved = SavedRun.load(tmp_path / "run")
    assert saved
    queries = [(1, 0, None), (None, 1, 2), (3, None, 4), (5, 0, 6), (7, 2, None)]
    expected = predict_queries(kg.load_run(tmp_path / "run").predictor(), queries, top=12)
    for query, by_torch in zip(queries, expected, strict=True):
        by_numpy = saved.predict(query, k=12)
        for one, other in zip(by_numpy, by_torch, strict=True):
            assert_equal(one.as_dict(), other.as_dict())
    assert any(answer.probability for answer in expected[0])


@pytest.mark.parametrize("damage", ["none", "changed", "of another calibration", "missing"])
def test_priors_are_read_only_if_they_are_those_of_the_calibration(
    symmetric_graph, tmp_path, monkeypatch, damage
):
    """Others are computed, as for a calibration of an earlier version."""
    run = save_run(tmp_path / "run", symmetric_graph, name="ComplEx")
    path = run.folder / "priors.safetensors"
    calibrate_with_a_map(run, missing_share=0.5)
    other = path.read_bytes()
    calibrate_with_a_map(run)
    content = path.read_bytes()
    if damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "of another calibration":
        path.write_bytes(other)
    elif damage == "missing":
        path.unlink()

    expected = predict_queries(run.predictor(), [(1, 0, None)], top=12)[0]
    computed = []
    of = QueryPriors.of.__func__
    monkeypatch.setattr(
        QueryPriors, "of", classmethod(lambda *given, **by: computed.append(1) or of(*given, **by))
    )
    by_numpy = SavedRun.load(run.folder).predict((1, 0, None), k=12)
    for one, prediction in zip(by_numpy, expected, strict=True):
        assert_equal(one.as_dict(), prediction.as_dict())
    assert len(computed) == (damage != "none")
    (check,) = check_run(run.folder)
    assert check.ok == (damage in ("none", "missing"))


def test_the_calibration_of_another_run_is_left_to_torch(small_graph, tmp_path):
    calibrate_with_a_map(save_run(tmp_path / "run", small_graph, name="ComplEx"))
    assert SavedRun.load(tmp_path / "run")
    save_run(tmp_path / "other", small_graph, name="DistMult")
    shutil.copy(tmp_path / "run" / "calibration.json", tmp_path / "other")
    assert SavedRun.load(tmp_path / "other") is None


def test_a_damaged_calibration_is_left_to_torch(small_graph, tmp_path):
    calibrate_with_a_map(save_run(tmp_path / "run", small_graph, name="ComplEx"))
    path = tmp_path / "run" / "calibration.json"
    path.write_bytes(path.read_bytes().replace(b"slopes", b"slopse", 1))
    assert SavedRun.load(tmp_path / "run") is None


@pytest.mark.parametrize("name", ["weights.safetensors", "recipe.toml", "graph/train.parquet"])
def test_a_damaged_run_is_left_to_torch_which_says_what_is_wrong(small_graph, tmp_path, name):
    save_run(tmp_path / "run", small_graph, name="ComplEx")
    file = tmp_path / "run" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert SavedRun.load(tmp_path / "run") is None


@pytest.mark.parametrize("name", ["weights.safetensors", "report.json", "graph"])
def test_a_run_without_a_file_is_left_to_torch(small_graph, tmp_path, name):
    save_run(tmp_path / "run", small_graph, name="ComplEx")
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    assert SavedRun.load(tmp_path / "run") is None


def test_an_unknown_name_is_refused_as_elsewhere(small_graph, tmp_path):
    save_run(tmp_path / "run", small_graph, name="ComplEx")
    saved = SavedRun.load(tmp_path / "run")
    with refused(NotInVocabulary, name="x"):
        saved.predict(("e1", "x", None), k=3)


def test_the_command_imports_neither_torch_nor_pandas(small_graph, tmp_path):
    """The same answers, in a process of its own and in this one, which has imported torch."""
    calibrate_with_a_map(save_run(tmp_path / "run", small_graph, name="ComplEx"))
    run = kg.load_run(tmp_path / "run")
    code = (
        "import sys; from dualkg.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'pandas') if name in sys.modules], "
        "file=sys.stderr)"
    )
    words = ["predict", tmp_path / "run", "--head", "e1", "--relation", "r1", "--json"]
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert process.stderr.splitlines()[-1] == "[]"
    by_numpy = json.loads(process.stdout)["predictions"]
    by_torch = run.predictor().tails("e1", "r1")
    assert len(by_numpy) == len(by_torch)
    for answer, expected in zip(by_numpy, by_torch, strict=True):
        assert_equal(answer, expected.as_dict())
