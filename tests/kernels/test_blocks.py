"""The softmax over blocks of candidates against float64, compiled and plain: odd sizes, wide ranges, poison."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkg.kernels.cpu import blocks
from dualkg.kernels.cpu.blocks import BlockedSoftmax, Shares
from dualkg.kernels.cpu.compiling import HAS_NUMBA
from tests.kernels.test_cpu_kernels import DTYPES, softmax_in_float64

FORMS = [True, False] if HAS_NUMBA else [False]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float64: 1e-12}
HIGH = 80.0


@pytest.fixture(params=FORMS, ids=["numba", "plain"][: len(FORMS)], autouse=True, scope="module")
def _form(request):
    """Which form the tests are of; for a module, as hypothesis wants it."""
    patch = pytest.MonkeyPatch()
    patch.setattr(blocks, "HAS_NUMBA", request.param)
    yield
    patch.undo()


def in_blocks(scores: Tensor, targets: Tensor, size: int) -> tuple[Tensor, Shares]:
    """Softmax − one-hot of scores `(batch, candidates)`, so many candidates at a time, in float64; and the shares."""
    columns = torch.full_like(scores.T, torch.nan, memory_format=torch.contiguous_format)
    softmax = BlockedSoftmax(columns, targets)
    for first in range(0, len(columns), size):
        block = slice(first, min(first + size, len(columns)))
        columns[block] = scores.T[block]  # what comes later is no number until its turn
        softmax.take(block.start, block.stop)
    found = softmax.finish()
    return (columns.double() * found.weights.double().T).T, found


def check(scores: Tensor, targets: Tensor, size: int) -> None:
    expected, expected_losses = softmax_in_float64(scores, targets)
    gradient, (losses, weights) = in_blocks(scores, targets, size)
    tolerance = TOLERANCE[scores.dtype]
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=min(tolerance, 1e-6))
    assert losses.dtype == weights.dtype == (torch.float64 if scores.dtype == torch.float64 else torch.float32)
    assert (losses >= 0).all()
    tolerance = 1e-12 if scores.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(losses.double(), expected_losses, rtol=tolerance, atol=tolerance)


@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 75),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, 10.0, HIGH]),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_any_sizes_and_any_range(batch, candidates, size, dtype, spread, seed):
    random = torch.Generator().manual_seed(seed)
    scores = (spread * (2 * torch.rand(batch, candidates, generator=random) - 1)).to(dtype)
    check(scores, torch.randint(0, candidates, (batch,), generator=random), size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_graph_s_size(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    targets = torch.randint(0, 14541, (33, 3))[:, 1]  # not contiguous
    check((torch.randn(33, 14541) * 5).to(dtype), targets, 512)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_rise_from_block_to_block(dtype):
    """Each block stands far above all before it, and what was written must be written anew."""
    scores = (torch.linspace(-500, 500, 90) + torch.rand(5, 90)).to(dtype)
    for target in (0, 45, 89):
        check(scores, torch.full((5,), target), 10)
        check(-scores, torch.full((5,), target), 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_loss_keeps_its_digits(dtype):
    """Three candidates 40 below the target: 3 e⁻⁴⁰, of which nothing would be left beside one."""
    scores = torch.zeros(1, 4).to(dtype)
    scores[0, 2] = 40
    gradient, (losses, _) = in_blocks(scores, torch.tensor([2]), 2)
    small = float(np.exp(-40))
    assert losses.item() == pytest.approx(3 * small, rel=1e-6)
    expected = torch.tensor([[small, small, -3 * small, small]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_only_candidate_costs_nothing(dtype):
    gradient, (losses, _) = in_blocks(torch.tensor([[3.0], [-7.0]]).to(dtype), torch.tensor([0, 0]), 5)
    assert not losses.any()
    assert not gradient.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_may_be_empty(dtype):
    gradient, (losses, _) = in_blocks(torch.zeros(0, 7).to(dtype), torch.zeros(0, dtype=torch.int64), 3)
    assert (len(gradient), len(losses)) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 7, 150, 199])
def test_a_score_that_is_no_number_shows_in_its_loss_alone(dtype, poison, place):
    """In any block, and as the target's own, which is the place 7."""
    scores = torch.randn(3, 200).to(dtype)
    scores[1, place] = poison
    gradient, (losses, _) = in_blocks(scores, torch.tensor([7, 7, 7]), 60)
    assert torch.isfinite(losses).tolist() == [True, False, True]
    assert gradient[1].isnan().all()
    assert gradient[[0, 2]].isfinite().all()


def test_minus_infinity_is_no_chance_at_all():
    gradient, (losses, _) = in_blocks(torch.tensor([[0.0, -torch.inf, 0.0]]).repeat(2, 1), torch.tensor([0, 1]), 1)
    assert losses.tolist() == pytest.approx([float(np.log(2)), np.inf])
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, 0.0, 0.5], [0.5, -1.0, 0.5]]).double())


def test_the_plain_form_runs_where_numba_is_missing():
    code = """
import sys
sys.modules["numba"] = None
import torch
from dualkg.kernels.cpu.blocks import BlockedSoftmax
softmax = BlockedSoftmax(torch.zeros(2, 1), torch.tensor([0]))
softmax.take(0, 2)
print(softmax.finish().losses.exp().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(2)
