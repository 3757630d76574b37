"""The Triton kernels against float64, on fresh random numbers, odd sizes and poisoned buffers."""

from __future__ import annotations

import pytest
import torch

import dualkg as kg
from dualkg.training.fused import FusedStep
from dualkg.training.graphed import GraphedStep
from dualkg.training.loop import Trainer
from dualkg.training.step import PlainStep
from tests.training.test_fused import batches, build, gradient_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (7, 2048), (2, 2049), (33, 14541), (0, 10)])
def test_softmax_gradient(rows, columns, dtype):
    from dualkg.kernels.gpu.softmax import softmax_gradient_

    padded = -(-columns // 128) * 128
    scores = (torch.randn(rows, padded, device="cuda") * 5).to(dtype)
    scores[:, columns:] = torch.nan  # padding must never be read as a score
    targets = torch.randint(0, columns, (rows, 3), device="cuda")[:, 1]  # not contiguous
    exact = scores[:, :columns].double()
    expected = exact.softmax(-1)
    expected[torch.arange(rows), targets] -= 1
    losses = softmax_gradient_(scores, targets, columns)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(scores[:, :columns].double(), expected, rtol=tolerance, atol=tolerance)
    assert not scores[:, columns:].any()
    torch.testing.assert_close(
        losses.double(), torch.nn.functional.cross_entropy(exact, targets, reduction="none"), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(1, 1), (37, 11), (1000, 129)])
def test_adagrad_steps_and_copies_in_one_pass(shape):
    from dualkg.kernels.gpu.adagrad import adagrad_

    table, sums, gradient = torch.randn(shape), torch.rand(shape), torch.randn(shape)
    seen = sums.double() + gradient.double().square()
    expected = table.double() - 0.1 * gradient.double() / (seen.sqrt() + 1e-10)
    table, sums, gradient = (
        table.cuda(),
        sums.cuda(),
        torch.cat([gradient, torch.full((5, shape[1]), torch.nan)]).cuda(),
    )
    copy = torch.full((shape[0] + 5, shape[1]), 7.0, dtype=torch.bfloat16, device="cuda")
    adagrad_(table, sums, gradient, copy, torch.tensor(0.1, device="cuda"), eps=1e-10)
    torch.testing.assert_close(table.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.cpu().double(), seen, rtol=1e-5, atol=1e-6)
    assert torch.equal(copy[: shape[0]], table.bfloat16())
    assert (copy[shape[0] :] == 7).all()


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "DistMult", "ComplEx", "RESCAL"])
def test_bfloat16_gradients_are_near(small_graph, name, reciprocal):
    plain = build(PlainStep, name, "DURA", "both", reciprocal, small_graph, dtype=torch.float32, device="cuda")
    half = build(half_step, name, "DURA", "both", reciprocal, small_graph, dtype=torch.float32, device="cuda")
    for batch in batches(small_graph, reciprocal, 4):
        plain.optimizer.zero_grad()
        plain.objective(batch.cuda()).backward()
        half.gradients(batch.cuda())
        for table, one in plain.model.named_parameters():
            other = gradient_of(half, table)[: len(one)]
            assert (one.grad - other).abs().max() <= 0.03 * one.grad.abs().max()


def half_step(*choices: object) -> FusedStep:
    return FusedStep(*choices, half=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["CP", "ComplEx"])
def test_a_captured_step_is_the_step_it_captured(small_graph, name):
    """Odd batch sizes among the captured one; the learning rate changes from step to step."""
    eager = build(half_step, name, "DURA", "both", True, small_graph, dtype=torch.float32, device="cuda")
    graphed = GraphedStep(build(half_step, name, "DURA", "both", True, small_graph, dtype=torch.float32, device="cuda"))
    for number, batch in enumerate([batches(small_graph, True, 4)[3], *batches(small_graph, True, 4)] * 5):
        rate = 0.1 / (number + 1)
        one, other = eager(batch.cuda(), rate), graphed(batch.cuda(), rate)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert graphed.graph is not None
    for one, other in zip(eager.model.parameters(), graphed.step.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_resumed_run_multiplies_by_the_weights_it_was_given(small_graph, tmp_path):
    """The bfloat16 copies must be of the restored tables, not of those that the model was built with."""
    recipe = kg.Recipe().with_changes({"training.precision": "bf16", "training.batch_size": 32, "model.dim": 8})

    def trainer(seed: int) -> Trainer:
        return Trainer(kg.CP(small_graph.shape, dim=8, seed=seed).cuda(), small_graph, recipe, kg.DURA(0.1))

    trainer(1).save(tmp_path / "checkpoint.safetensors")
    resumed = trainer(2)
    resumed.restore(tmp_path / "checkpoint.safetensors")
    tables = resumed.step.step.tables
    assert torch.equal(tables.copies["head"][:30], resumed.model.entities.detach().bfloat16())
    assert torch.equal(tables.copies["tail"][:30], resumed.model.tails.detach().bfloat16())
