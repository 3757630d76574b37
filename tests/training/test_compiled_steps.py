"""The compiled kernels of diagonal models compute the gradients of autograd."""

import pytest
import torch

import dualkg as kg
from dualkg.kernels.cpu import HAS_NUMBA
from dualkg.losses.base import Loss
from dualkg.regularizers import PowerSum
from dualkg.training.fused import OneVsAllFusedStep, SampledFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep
from dualkg.training.updates import sum_rows
from tests.training.test_fused import batches

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")

REGULARIZERS: dict[str, PowerSum] = {
    "DURA": kg.DURA(0.1, plain=0.5, mapped=1.5),
    "Frobenius": kg.Frobenius(0.1),
    "none": kg.DURA(0.0),
}
LOSSES: dict[str, Loss] = {
    "1-vs-all": kg.OneVsAll(),
    "1-vs-all and relations": kg.OneVsAll(relation_weight=0.7),
    "sampled": kg.SampledSoftmax(num_negatives=20),
    "sampled and relations": kg.SampledSoftmax(num_negatives=20, relation_weight=0.7),
}


def build(graph: kg.Graph, model: str, loss: Loss, regularizer: PowerSum, *, fused: bool):
    dtype = torch.float32 if fused else torch.float64
    built = getattr(kg, model)(graph.shape, dim=5, init_scale=0.5, seed=1).to(dtype)
    bound = loss.bind(built, graph, batch_size=9, seed=3)
    optimizer = build_optimizer(Optimizer(learning_rate=0.1), built.parameters(), one_pass=fused)
    if not fused:
        return ReferenceStep(built, bound, regularizer, optimizer)
    kind = SampledFusedStep if isinstance(loss, kg.SampledSoftmax) else OneVsAllFusedStep
    return kind(built, bound, regularizer, optimizer)


def entity_gradients(step: OneVsAllFusedStep | SampledFusedStep) -> dict[str, torch.Tensor]:
    sides = {"entities": "head", "tails": "tail"}
    if isinstance(step, OneVsAllFusedStep):
        return {
            name: step.tables.gradient(side)
            for name, side in sides.items()
            if side in step.parameters
        }
    names = {id(table): name for name, table in step.model.named_parameters()}
    gradients = {}
    for table, ids, rows in step.tables.take():
        distinct, sums = sum_rows(ids, rows)
        dense = torch.zeros_like(table)
        dense[distinct] = sums
        gradients[names[id(table)]] = dense
    return gradients


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", ["ComplEx", "CP", "DistMult"])
def test_gradients_are_those_of_autograd(small_graph, model, loss, regularizer):
    arguments = (small_graph, model, LOSSES[loss], REGULARIZERS[regularizer])
    fused = build(*arguments, fused=True)
    reference = build(*arguments, fused=False)
    assert fused.compiled
    for batch in batches(small_graph, True, 4):
        for parameter in reference.model.parameters():
            parameter.grad = None
        fused._prepare(batch)
        objective = fused.gradients(batch)
        torch.testing.assert_close(
            objective.double(), reference.gradients(batch), rtol=1e-5, atol=0
        )
        gradients = entity_gradients(fused)
        gradients["relations"] = fused.model.relations.grad
        for name, gradient in gradients.items():
            expected = reference.model.get_parameter(name).grad
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["SimplE", "QuatE", "RESCAL", "TransE"])
def test_other_models_have_no_compiled_kernels(small_graph, model):
    step = build(small_graph, model, kg.OneVsAll(), kg.DURA(0.0), fused=True)
    assert not step.compiled


def test_cubes_have_no_compiled_kernels(small_graph):
    assert not build(small_graph, "ComplEx", kg.OneVsAll(), kg.N3(0.1), fused=True).compiled
