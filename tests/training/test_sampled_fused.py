"""The fused step of sampled softmax takes the steps of autograd."""

import pytest
import torch

import dualkg as kg
from dualkg.kernels import cpu
from dualkg.kernels.scores import Targets
from dualkg.training.fused import SampledFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep
from dualkg.training.updates import AnyOptimizer
from tests.training.test_fused import batches, grouped_by_query

MODELS = {
    "ComplEx": {},
    "CP": {},
    "RESCAL": {},
    "ComplEx both sides": {"reciprocal": False},
    "CP both sides": {"reciprocal": False},
}
LOSSES = {
    "uniform": {},
    "log-uniform": {"distribution": "log-uniform"},
    "frequency weight": {"frequency_weight": 0.9},
    "relation weight": {"relation_weight": 0.5},
}


def build(
    kind: type, graph: kg.Graph, model: str, loss: str, *, grouped: bool = False
) -> ReferenceStep | SampledFusedStep:
    torch.set_default_dtype(torch.float64)
    try:
        name = model.split()[0]
        built = getattr(kg, name)(graph.shape, dim=3, init_scale=0.5, seed=1, **MODELS[model])
        built = built.double()
        # More than half of the entities, so that many answers are negatives too.
        softmax = kg.SampledSoftmax(num_negatives=20, **LOSSES[loss])
        bound = softmax.bind(built, graph, seed=3, grouped_by_query=grouped)
        regularizer = kg.DURA(0.1, plain=0.5, mapped=1.5)
        one_pass = kind is SampledFusedStep
        optimizer: AnyOptimizer = build_optimizer(
            Optimizer(learning_rate=0.1), built.parameters(), one_pass=one_pass
        )
    finally:
        torch.set_default_dtype(torch.float32)
    return kind(built, bound, regularizer, optimizer)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_end_at_the_same_weights(small_graph, model, loss):
    reference = build(ReferenceStep, small_graph, model, loss)
    fused = build(SampledFusedStep, small_graph, model, loss)
    for batch in batches(small_graph, reference.model.reciprocal, 10):
        expected = reference(batch, 0.1)
        torch.testing.assert_close(fused(batch, 0.1), expected, rtol=1e-9, atol=1e-12)
    for weights, expected in zip(
        fused.model.parameters(), reference.model.parameters(), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_grouping_by_query_does_not_change_the_weights(small_graph, loss):
    reference = build(ReferenceStep, small_graph, "ComplEx", loss)
    fused = build(SampledFusedStep, small_graph, "ComplEx", loss, grouped=True)
    for batch in grouped_by_query(small_graph, 10):
        expected = reference(batch, 0.1)
        torch.testing.assert_close(fused(batch, 0.1), expected, rtol=1e-9, atol=1e-12)
    for weights, expected in zip(
        fused.model.parameters(), reference.model.parameters(), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def queries_with_hits(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Targets]:
    """Scores of 60 queries with one to five targets, a third of which are negatives as well."""
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 6, (60,), generator=random)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_targets = int(starts[-1])
    scores = scale * torch.randn(60, 50, generator=random)
    positives = scale * torch.randn(num_targets, generator=random)
    weights = torch.rand(num_targets, generator=random)
    columns = torch.randint(0, 50, (num_targets,), generator=random)
    is_hit = torch.rand(num_targets, generator=random) < 1 / 3
    hits = torch.where(is_hit, columns, -1)
    targets = Targets(torch.zeros(num_targets, dtype=torch.int64), weights, starts)
    scores[targets.queries[is_hit], columns[is_hit]] = positives[is_hit]
    return scores, positives, hits, targets


@pytest.mark.skipif(not cpu.HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_the_compiled_softmax_is_the_plain_one(scale):
    scores, positives, hits, targets = queries_with_hits(scale)
    plain = scores.double()
    expected = cpu.sampled_softmax_gradient_(plain, positives.double(), hits, targets)
    losses, gradients = cpu.sampled_softmax_gradient_(scores, positives, hits, targets)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients.double(), expected[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores.double(), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sampled_softmax_by_hand(dtype):
    """Two targets of one query, and three negatives, the second of which is the first target.

    Target 1 has the score log 2 against log 1 and log 3: 2 / (2 + 1 + 3) = 1/3.
    Target 2 has the score log 4 against all three: 4 / (4 + 1 + 2 + 3) = 2/5.
    """
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype).log()
    positives = torch.tensor([2.0, 4.0], dtype=dtype).log()
    hits = torch.tensor([1, -1])
    targets = Targets(torch.tensor([7, 9]), torch.ones(2, dtype=dtype), torch.tensor([0, 2]))
    losses, gradients = cpu.sampled_softmax_gradient_(scores, positives, hits, targets)
    expected_loss = -torch.log(torch.tensor([1 / 3 * 2 / 5], dtype=dtype))
    torch.testing.assert_close(losses, expected_loss)
    torch.testing.assert_close(gradients, torch.tensor([1 / 3 - 1, 2 / 5 - 1], dtype=dtype))
    expected = torch.tensor([[1 / 6 + 1 / 10, 2 / 10, 3 / 6 + 3 / 10]], dtype=dtype)
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_reaches_the_loss(value):
    targets = Targets(torch.tensor([0]), torch.ones(1), torch.tensor([0, 1]))
    for where in ("negative", "positive"):
        scores = torch.zeros(1, 5)
        positives = torch.zeros(1)
        if where == "negative":
            scores[0, 2] = value
        else:
            positives[0] = value
        losses, _ = cpu.sampled_softmax_gradient_(scores, positives, torch.tensor([-1]), targets)
        assert not losses.isfinite().all()
