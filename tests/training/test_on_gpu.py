"""The same results on a GPU: run with `pytest -m gpu` where there is one."""

import gc

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.losses.softmax import BoundOneVsAll
from dualkg.regularizers import REGULARIZERS
from dualkg.training.errors import InterruptedRunError
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.steps import ReferenceStep
from dualkg.training.trainer import Trainer
from tests.evaluation.test_ranking import FORMS, whole_numbers
from tests.families import BILINEAR, DISTANCE, EMBEDDINGS
from tests.training.test_fused import ALL_CASES, batches, build, gradient_of
from tests.training.test_trainer import stop_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize(("name", "dual", "reciprocal"), FORMS)
def test_ranks_are_those_of_the_cpu(small_graph, name, reciprocal, dual):
    """Small whole numbers, so that scores are exact and ties are many on both."""
    model = whole_numbers(EMBEDDINGS[name](small_graph.shape, dim=3, reciprocal=reciprocal))
    scored = kg.Dual(model, dual) if dual else model
    here = kg.rank(scored, small_graph)
    there = kg.rank(scored.to("cuda"), small_graph)
    np.testing.assert_array_equal(here.optimistic, there.optimistic)
    np.testing.assert_array_equal(here.pessimistic, there.pessimistic)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("name", BILINEAR)
def test_gradients_are_those_of_the_cpu(small_graph, name, regularizer):
    if regularizer == "N3" and not BILINEAR[name].diagonal:
        pytest.skip(f"N3 does not apply to {name}")
    gradients = []
    for device in ("cpu", "cuda"):
        model = BILINEAR[name](small_graph.shape, dim=5, init_scale=0.5).double().to(device)
        chosen = REGULARIZERS[regularizer](0.1)
        step = ReferenceStep(
            model, BoundOneVsAll(relation_weight=0.5), chosen, torch.optim.SGD(model.parameters())
        )
        batch = torch.from_numpy(small_graph.train[:50].astype(np.int64)).to(device)
        step.objective(batch).backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
    for here, there in zip(*gradients, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "regularizer", "loss", "reciprocal"), ALL_CASES)
def test_fused_gradients_equal_the_reference(small_graph, name, regularizer, loss, reciprocal):
    plain, fused = (
        build(
            kind,
            name,
            regularizer,
            loss,
            reciprocal,
            small_graph,
            dtype=torch.float32,
            device="cuda",
        )
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    for batch in batches(small_graph, reciprocal, 4):
        plain.optimizer.zero_grad()
        plain.objective(batch.cuda()).backward()
        fused.gradients(batch.cuda())
        for table, one in plain.model.named_parameters():
            assert (one.grad - gradient_of(fused, table)).abs().max() <= 1e-5 * one.grad.abs().max()


@pytest.mark.parametrize("name", BILINEAR)
def test_fused_steps_equal_the_reference_in_double_precision(small_graph, name):
    plain, fused = (
        build(kind, name, "DURA", "both", True, small_graph, device="cuda")
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    for batch in batches(small_graph, True, 20):
        plain(batch.cuda(), 0.1)
        fused(batch.cuda(), 0.1)
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


def test_a_run_on_the_gpu_can_be_interrupted_resumed_and_loaded_on_the_cpu(small_graph, tmp_path):
    choices = {"epochs": 120, "batch_size": 32, "regularizer": kg.DURA(0.01), "device": "cuda"}
    model = kg.ComplEx(small_graph.shape, dim=8)
    with pytest.raises(InterruptedRunError):
        kg.train(model, small_graph, out=tmp_path / "run", on_progress=stop_after(3), **choices)
    run = kg.resume(tmp_path / "run", device="cuda")
    assert run.model.device.type == "cuda"
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    again = kg.load_run(tmp_path / "run")
    assert again.model.device.type == "cpu"
    assert kg.evaluate(again.model, again.graph).mrr == pytest.approx(run.report.mrr, abs=1e-3)


def test_divergence_is_detected_on_the_gpu(small_graph):
    optimizer = kg.Optimizer(name="SGD", learning_rate=1e8)
    with pytest.raises(kg.DivergedError, match="diverged"):
        kg.train(
            kg.CP(small_graph.shape, dim=8),
            small_graph,
            optimizer=optimizer,
            epochs=100,
            device="cuda",
        )


def test_repeated_trainings_do_not_leak_memory(small_graph):
    """A search trains hundreds of models in a process: after the second, each leaves what the one
    before left.
    """
    held = []
    for seed in range(4):
        recipe = kg.Recipe().with_changes(
            {
                "model.dim": 16,
                "training.epochs": 3,
                "training.batch_size": 32,
                "training.precision": "bf16",
            }
        )
        model = kg.ComplEx(small_graph.shape, dim=16, seed=seed).to("cuda")
        Trainer(model, small_graph, recipe, kg.DURA(0.05)).run()
        del model
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2] == held[3]


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", DISTANCE)
def test_distances_and_their_gradients_are_those_of_the_cpu(small_graph, name, reciprocal, side):
    """By kernels there, by plain operations in float64 here."""
    batch = torch.from_numpy(small_graph.train[:37].astype(np.int64))
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = DISTANCE[name](small_graph.shape, dim=19, reciprocal=reciprocal, init_scale=0.5).to(
            device, dtype
        )
        factors = model.factors(*batch.to(device).unbind(-1))
        scores = model.tail_scores(factors) if side == "tail" else model.head_scores(factors)
        scores.log_softmax(-1)[:, 3].sum().backward()
        found.append([scores, *(table.grad for table in model.parameters())])
    for here, there in zip(*found, strict=True):
        assert (here is None) == (there is None)
        if here is not None:
            assert (here - there.cpu()).abs().max() <= 2e-4 * here.abs().max()


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_losses_in_tf32_are_close_to_float32(small_graph, engine):
    """And leave the choice of the process as it was."""
    before = torch.backends.cuda.matmul.fp32_precision
    losses = []
    for precision in ("tf32", "float32"):
        changes = {
            "model.name": "TuckER",
            "model.dim": 16,
            "training.epochs": 10,
            "training.batch_size": 33,
        }
        changes |= {
            "training.precision": precision,
            "training.engine": engine,
            "model.init_scale": 0.3,
        }
        run = kg.train_recipe(kg.Recipe().with_changes(changes), graph=small_graph, device="cuda")
        losses.append([entry["loss"] for entry in run.history])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    assert torch.backends.cuda.matmul.fp32_precision == before


NEGATIVES = {"loss.sampler": "shared", "loss.num_negatives": 16}
WHOLE = {"loss.label_smoothing": 0.1}


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize(
    "of_loss",
    [
        {"loss.name": "NegativeSampling", **NEGATIVES},
        {"loss.name": "MarginRanking", **NEGATIVES},
        {"loss.name": "OneVsAll", **WHOLE},
        {"loss.name": "KvsAll", "loss.count_exponent": 0.5, **WHOLE},
    ],
    ids=lambda changes: changes["loss.name"],
)
@pytest.mark.parametrize("name", ["TransE", "RotatE", "ModE", "HAKE", "MuRP", "TuckER"])
def test_losses_of_a_captured_run_are_close_to_the_reference(
    small_graph, name, of_loss, reciprocal
):
    """Batches of an odd size with a short last one, and a learning rate that falls.

    Adam makes much of a difference in rounding where gradients are small, so later epochs may be
    further apart.
    """
    sampled = of_loss["loss.name"] in ("NegativeSampling", "MarginRanking")
    if not reciprocal and (name == "TuckER" or not sampled):
        pytest.skip("head queries are captured where losses sample and no batch is normalised")
    changes = {
        "model.name": name,
        "model.dim": 8,
        "training.batch_size": 33,
        "training.epochs": 12,
        **of_loss,
    }
    changes |= {
        "optimizer.name": "Adam",
        "optimizer.learning_rate": 0.01,
        "optimizer.schedule": "linear",
    }
    if name == "MuRP":
        changes["optimizer.epsilon"] = 1e-4  # as its recipe has it
    if not reciprocal:
        changes |= {"model.reciprocal": False, "loss.corruption": "both"}
    without = name in ("HAKE", "MuRP", "TuckER") or of_loss["loss.name"] == "KvsAll"
    regularizer = kg.NoRegularizer() if without else kg.DURA(0.001)
    options = {"batch_norm": True} if name == "TuckER" else {}
    losses = []
    engines = []
    for engine in ("auto", "reference"):
        recipe = kg.Recipe().with_changes({**changes, "training.engine": engine})
        model = EMBEDDINGS[name](
            small_graph.shape, dim=8, seed=1, reciprocal=reciprocal, **options
        ).cuda()
        trainer = Trainer(model, small_graph, recipe, regularizer)
        trainer.run()
        losses.append([entry["loss"] for entry in trainer.progress.history])
        engines.append(trainer.engine.step)
    assert engines == ["captured", "reference"]
    assert losses[0][:3] == pytest.approx(losses[1][:3], rel=0.02)
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0][-1] < losses[0][0]


def test_a_captured_run_can_be_resumed(small_graph, tmp_path):
    """The optimizer that is restored has a learning rate of its own, which the step must read."""
    changes = {
        "model.name": "RotatE",
        "model.dim": 8,
        "training.batch_size": 33,
        "loss.name": "NegativeSampling",
    }
    changes |= {"loss.sampler": "shared", "optimizer.name": "Adam", "optimizer.learning_rate": 0.01}
    recipe = kg.Recipe().with_changes({**changes, "training.epochs": 3})

    def trainer() -> Trainer:
        return Trainer(
            kg.RotatE(small_graph.shape, dim=8, seed=1).cuda(),
            small_graph,
            recipe,
            kg.NoRegularizer(),
        )

    whole = trainer()
    whole.run()
    first = trainer()
    first._run_epoch()
    first.save(tmp_path / "checkpoint.safetensors")
    resumed = trainer()
    resumed.restore(tmp_path / "checkpoint.safetensors")
    resumed.run()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_mapping_through_the_core_equals_mapping_by_matrices(batch_norm):
    """In training on a GPU, against the CPU; fresh numbers, and sizes that divide nothing."""
    random = torch.Generator().manual_seed(5)
    model = kg.TuckER(
        kg.GraphShape(31, 7), dim=13, relation_dim=5, batch_norm=batch_norm, init_scale=1.0
    ).double()
    head = torch.randn(37, 13, generator=random, dtype=torch.float64)
    relations = torch.randint(0, 14, (37,), generator=random)
    weights = torch.randn(37, 13, generator=random, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        here = model.to(device)
        here.zero_grad()
        image = here.map_head(head.to(device), relations.to(device))
        (image * weights.to(device)).sum().backward()
        # Clones: the gradients of a model move with it.
        found.append([one.cpu().clone() for one in (image, here.core.grad, here.relations.grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
