"""The choice of engine and precision, and the requests that are refused."""

from typing import ClassVar

import pytest
import torch

import dualkg as kg
from dualkg.losses.softmax import BoundOneVsAll
from dualkg.regularizers import PowerSum
from dualkg.training import engines, steps
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep
from tests.families import BILINEAR
from tests.models import odd_models as odd
from tests.training.test_fused import batches


def engine_step(recipe: kg.Recipe, model: kg.Model, regularizer: kg.Regularizer) -> steps.Step:
    engine = engines.choose_engine(recipe, model, regularizer)
    optimizer = build_optimizer(recipe.optimizer, model.parameters(), one_pass=engine.fast)
    return steps.build_step(engine, model, BoundOneVsAll(), regularizer, optimizer)


def chosen(model: kg.Model, *, optimizer: str = "Adagrad", **training: str) -> steps.Step:
    recipe = kg.Recipe().with_changes({f"training.{key}": value for key, value in training.items()})
    recipe = recipe.with_changes({"optimizer.name": optimizer})
    return engine_step(recipe, model, kg.NoRegularizer())


def test_the_engine_is_selected_automatically_or_by_the_recipe(small_graph):
    model = kg.RESCAL(small_graph.shape, dim=2)
    assert type(chosen(model)) is OneVsAllFusedStep
    assert type(chosen(model, engine="reference")) is ReferenceStep
    assert type(chosen(kg.Dual(model))) is OneVsAllFusedStep
    assert type(chosen(kg.Dual(model, "head"))) is ReferenceStep


@pytest.mark.parametrize("supported", [True, False])
def test_products_are_bfloat16_on_processors_that_support_them(small_graph, monkeypatch, supported):
    monkeypatch.setattr(engines, "has_bf16_products", lambda: supported)
    model = kg.ComplEx(small_graph.shape, dim=2)
    assert bool(chosen(model).tables.copies) == supported
    assert not chosen(model, precision="float32").tables.copies
    if supported:
        assert chosen(model, precision="bf16").tables.copies
    else:
        with pytest.raises(kg.RequestError, match="bf16 is not supported by this processor"):
            chosen(model, precision="bf16")
    assert not chosen(model, optimizer="Adam").tables.copies
    assert not chosen(model.double()).tables.copies


def test_tf32_is_float32_on_a_cpu(small_graph):
    """So that a recipe made for a GPU runs everywhere."""
    changes = {"training.epochs": 2, "training.batch_size": 32, "model.dim": 4}
    losses = []
    for precision in ("tf32", "float32"):
        recipe = kg.Recipe().with_changes({**changes, "training.precision": precision})
        losses.append(
            [
                entry["loss"]
                for entry in kg.train_recipe(recipe, graph=small_graph, device="cpu").history
            ]
        )
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("regularizer", "engine"), [(kg.DURA(0.1), "kernels"), (kg.UnweightedDURA(0.1), "fused")]
)
@pytest.mark.parametrize("name", BILINEAR)
def test_regularizers_of_whole_tables_are_not_trained_by_gpu_kernels(
    small_graph, monkeypatch, name, regularizer, engine
):
    model = BILINEAR[name](small_graph.shape, dim=2)
    engine = "fused" if name == "QuatE" else engine  # its relations are normalized by default
    monkeypatch.setattr(BILINEAR[name], "device", torch.device("cuda"))
    monkeypatch.setattr(engines, "gpu_kernels_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert engines.choose_engine(kg.Recipe(), model, regularizer).step == engine
    if engine == "fused":
        requested = kg.Recipe().with_changes({"training.precision": "bf16"})
        sentence = (
            f"{name} with {type(regularizer).__name__} is not. Use `training.precision=float32`"
        )
        with pytest.raises(kg.RequestError, match=sentence):
            engines.choose_engine(requested, model, regularizer)


NOT_RECIPROCAL = {"reciprocal": False}


@pytest.mark.parametrize(
    ("dual", "options", "requested", "sentence"),
    [
        ("head", {}, {"engine": "fast"}, "The fast engine needs .*; this Dual is none."),
        ("tail", NOT_RECIPROCAL, {"engine": "fast"}, "Use `training.engine=reference` and"),
        ("tail", {}, {"precision": "bf16"}, "bf16 is for models that score by products"),
        ("", {}, {"engine": "reference", "precision": "bf16"}, "Use `training.engine=fast`"),
        ("", {}, {"optimizer": "Adam", "precision": "bf16"}, "`optimizer.name` is Adam"),
    ],
)
def test_engines_that_do_not_apply_are_refused(small_graph, dual, options, requested, sentence):
    model = kg.RESCAL(small_graph.shape, dim=2, **options)
    with pytest.raises(kg.RequestError, match=sentence):
        chosen(kg.Dual(model, dual) if dual else model, **requested)


@pytest.mark.parametrize(
    ("kind", "regularizer", "reciprocal"),
    [
        (odd.TwoTables, kg.DURA(0.1), True),
        (odd.Normalised, kg.DURA(0.1), True),
        (odd.Shy, kg.DURA(0.1), False),
        (kg.DistMult, odd.WholeTable(0.1), True),
        (kg.CP, odd.WholeTable(0.1), True),
        (kg.RESCAL, odd.ByRelation(0.1), True),
    ],
)
def test_the_default_engine_takes_the_reference_steps_for_classes_of_your_own(
    small_graph, kind, regularizer, reciprocal
):
    found = []
    for engine in ("reference", "auto"):
        model = kind(small_graph.shape, dim=3, reciprocal=reciprocal, init_scale=0.5).double()
        recipe = kg.Recipe().with_changes({"training.engine": engine})
        step = engine_step(recipe, model, regularizer)
        for batch in batches(small_graph, reciprocal, 5):
            step(batch, 0.1)
        found.append(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


class Quiet(kg.ComplEx):
    """Overrides only what kernels do not use."""

    def entity_vectors(self):
        return self.entities[:, :1]

    def triple_scores(self, f):
        return super().triple_scores(f)


class OwnMap(kg.ComplEx):
    def map_head(self, head, relations):
        return 2 * super().map_head(head, relations)


class HeadsOnly(PowerSum):
    term_weights: ClassVar = {"head": 1.0}


class OwnPenalty(kg.DURA):
    def per_triple(self, f):
        return 2 * super().per_triple(f)


@pytest.mark.parametrize(
    ("kind", "regularizer", "known"),
    [
        (Quiet, kg.DURA(0.1), True),
        (kg.ComplEx, HeadsOnly(0.1), True),
        (OwnMap, kg.DURA(0.1), False),
        (kg.ComplEx, OwnPenalty(0.1), False),
    ],
)
def test_kernels_train_your_own_classes_unless_they_override_what_kernels_replace(
    small_graph, monkeypatch, kind, regularizer, known
):
    steps = []
    for step in (ReferenceStep, OneVsAllFusedStep):
        model = kind(small_graph.shape, dim=3, init_scale=0.5).double()
        optimizer = build_optimizer(
            Optimizer(), model.parameters(), one_pass=step is OneVsAllFusedStep
        )
        steps.append(step(model, BoundOneVsAll(), regularizer, optimizer))
        for batch in batches(small_graph, True, 5):
            steps[-1](batch, 0.1)
    assert steps[1].without_autograd == known
    for one, other in zip(*(step.model.parameters() for step in steps), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()
    monkeypatch.setattr(engines, "gpu_kernels_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kg.ComplEx, "device", torch.device("cuda"))
    job = engines.Job(model.float(), kg.OneVsAll(), regularizer, "Adagrad")
    assert (engines.obstacle(engines.BF16, job) is None) == known


def test_an_engine_is_described_in_one_phrase(small_graph, monkeypatch):
    model = kg.ComplEx(small_graph.shape, dim=2)
    reference = kg.Recipe().with_changes({"training.engine": "reference"})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    engine = engines.choose_engine(reference, model, kg.NoRegularizer())
    assert str(engine) == "reference step, float32, 2 CPU threads"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_gpu = engines.Engine("kernels", "bf16", torch.device("cuda"))
    assert str(on_gpu) == "fast step, bfloat16 products, one NVIDIA H200"
