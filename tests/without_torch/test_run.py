"""Runs that NumPy queries give the answers of the predictor of PyTorch."""

import json
import os
import subprocess
import sys

import pytest
import torch

import dualkg as kg
from dualkg.data.errors import NotInVocabulary
from dualkg.training.recipe import ModelConfig
from dualkg.without_torch.run import SavedRun
from dualkg.without_torch.scores import MODELS
from dualkg.workflows.predict import predict_queries
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


def test_probabilities_need_torch(small_graph, tmp_path):
    save_run(tmp_path / "run", small_graph, name="ComplEx")
    kg.calibrate(tmp_path / "run")
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
    run = save_run(tmp_path / "run", small_graph, name="ComplEx")
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
    names = [answer["name"] for answer in json.loads(process.stdout)["predictions"]]
    assert names == [answer.name for answer in run.predictor().tails("e1", "r1")]
