"""The CPU kernels, compiled and plain, against float64: random numbers, odd sizes, buffers filled
with NaN.
"""

import importlib.util
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dualkg.kernels import cpu
from dualkg.kernels.cpu import adagrad_, softmax_gradient_
from dualkg.kernels.hardware import has_bf16_products
from dualkg.kernels.scores import Targets
from dualkg.training.trainer import flush_denormals
from tests.kernels.pairwise_sums import KINDS, check_sums, sums_of
from tests.pairwise import pairwise
from tests.processes import run_python

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
FORMS = ["numba", "plain"]
THREADS = [1, 3]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Run a test with the compiled and with the plain form."""
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(cpu, "HAS_NUMBA", request.param == "numba")


@pytest.fixture(params=THREADS)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def one_each(*targets: int) -> Targets:
    """One target per query, each with weight 1."""
    return Targets.one_each(torch.tensor(targets), torch.ones(len(targets)))


def queries_with_several_answers(columns: int) -> tuple[Tensor, Targets]:
    """Scores padded with NaN; the second query has one answer twice, and the last has none."""
    counts = torch.tensor([1, 2, 16, 1, 3, 0])
    entities = torch.randint(0, columns, (int(counts.sum()), 3))[:, 1]  # not contiguous
    entities[1] = entities[2]
    scores = torch.randn(len(counts), -(-columns // 128) * 128) * 5
    scores[:, columns:] = torch.nan
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return scores, Targets(entities, torch.rand(len(entities)), starts)


def cross_entropy_in_float64(scores: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """By autograd: the gradient of the sum of all losses, and each loss."""
    exact = scores.double().requires_grad_()
    terms = targets.weights * (
        exact.logsumexp(-1)[targets.queries] - exact[targets.queries, targets.entities]
    )
    losses = torch.zeros(len(exact), dtype=torch.float64, device=exact.device).index_add(
        0, targets.queries, terms
    )
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return gradient, losses.detach()


def softmax_in_float64(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax − one-hot, and the losses."""
    exact = scores.double()
    gradient = exact.softmax(-1)
    gradient[torch.arange(len(targets)), targets] -= 1
    return gradient, torch.nn.functional.cross_entropy(exact, targets, reduction="none")


@pytest.mark.usefixtures("form", "threads")
@pytest.mark.parametrize(
    ("form", "threads", "dtype", "size"),
    pairwise(
        product(
            FORMS, THREADS, DTYPES, [(1, 1), (3, 5), (7, 2048), (2, 2049), (33, 14541), (0, 10)]
        )
    ),
    indirect=["form", "threads"],
)
def test_softmax_gradient(dtype, size):
    rows, columns = size
    padded = -(-columns // 128) * 128
    scores = (torch.randn(rows, padded) * 5).to(dtype)
    scores[:, columns:] = torch.nan  # padding must never be read as a score
    targets = torch.randint(0, columns, (rows, 3))[:, 1]  # not contiguous
    expected, expected_losses = softmax_in_float64(scores[:, :columns], targets)
    losses = softmax_gradient_(scores, Targets.one_each(targets, torch.ones(rows)), columns)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(
        scores[:, :columns].double(), expected, rtol=tolerance, atol=min(tolerance, 1e-6)
    )
    assert not scores[:, columns:].any()
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(losses.double(), expected_losses, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("form", "threads")
@pytest.mark.parametrize(
    ("form", "threads", "dtype", "columns"),
    pairwise(product(FORMS, THREADS, DTYPES, [5, 2049, 14541])),
    indirect=["form", "threads"],
)
def test_softmax_gradient_of_queries_with_several_answers(columns, dtype):
    scores, targets = queries_with_several_answers(columns)
    scores = scores.to(dtype)
    expected, expected_losses = cross_entropy_in_float64(scores[:, :columns], targets)
    losses = softmax_gradient_(scores, targets, columns)
    tolerance = 2e-5 if dtype != torch.bfloat16 else 4e-3
    torch.testing.assert_close(
        scores[:, :columns].double(), expected, rtol=tolerance, atol=min(tolerance, 1e-6)
    )
    assert not scores[:, columns:].any()
    assert not scores[-1].any()
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_outside_the_rows_is_not_changed(dtype):
    whole = torch.randn(5, 40).to(dtype)
    before = whole.clone()
    scores = whole[1:4, 3:33]
    targets = torch.tensor([0, 28, 5])
    expected, _ = softmax_in_float64(scores[:, :29], targets)
    softmax_gradient_(scores, Targets.one_each(targets, torch.ones(3)), 29)
    torch.testing.assert_close(scores[:, :29].double(), expected, rtol=4e-3, atol=1e-6)
    assert not scores[:, 29:].any()
    whole[1:4, 3:33] = before[1:4, 3:33]
    assert torch.equal(whole, before)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_stay_finite(dtype):
    scores = torch.tensor([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [300.0, 0.0, 299.0]]).to(
        dtype
    )
    expected, expected_losses = softmax_in_float64(scores, torch.tensor([1, 0, 1]))
    losses = softmax_gradient_(scores, one_each(1, 0, 1), 3)
    torch.testing.assert_close(scores.double(), expected, rtol=4e-3, atol=1e-6)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("form", "dtype", "bad", "place"),
    pairwise(product(FORMS, DTYPES, [float("nan"), float("inf")], [0, 7, 1500])),
    indirect=["form"],
)
def test_a_nan_score_affects_only_the_loss_of_its_row(dtype, bad, place):
    """A NaN of either sign: that of 0 · ∞ is negative on some processors."""
    for sign in (1, -1) if bad != bad else (1,):
        scores = torch.randn(3, 2000).to(dtype)
        scores[1, place] = torch.copysign(torch.tensor(bad), torch.tensor(float(sign)))
        losses = softmax_gradient_(scores, one_each(7, 7, 7), 2000)
        assert torch.isfinite(losses).tolist() == [True, False, True]
        assert scores[1].isnan().all()
        assert scores[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("form")
def test_a_score_of_minus_infinity_has_probability_zero():
    scores = torch.tensor([[0.0, -torch.inf, 0.0]]).repeat(2, 1)
    losses = softmax_gradient_(scores, one_each(0, 1), 3)
    assert losses.tolist() == pytest.approx([float(np.log(2)), np.inf])
    assert scores.tolist() == [[-0.5, 0.0, 0.5], [0.5, -1.0, 0.5]]


@pytest.mark.usefixtures("form")
def test_exponentials_agree_with_float64():
    """Over the whole range that does not count as 0."""
    scores = torch.linspace(-63.9, 0, 100_000).unsqueeze(0)
    exact = scores.double().exp()
    softmax_gradient_(scores, one_each(0), scores.shape[1])
    assert (scores[0, 1:].double() * exact.sum() / exact[0, 1:] - 1).abs().max() < 1e-6


@pytest.mark.usefixtures("form", "threads")
@pytest.mark.parametrize("shape", [(1, 1), (37, 11), (1000, 129), (0, 4)])
def test_adagrad_steps_and_copies_in_one_pass(shape):
    table = torch.randn(shape)
    sums = torch.rand(shape)
    gradient = torch.randn(shape)
    slope = gradient.double()
    seen = sums.double() + slope.square()
    expected = table.double() - 0.1 * slope / (seen.sqrt() + 1e-10)
    copy = torch.full(shape, 7.0, dtype=torch.bfloat16)
    adagrad_(table, sums, gradient, copy, 0.1, eps=1e-10)
    torch.testing.assert_close(table.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.double(), seen, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, table.bfloat16())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adagrad_agrees_with_pytorch(dtype):
    parameter = torch.nn.Parameter(torch.randn(50, 30, dtype=dtype))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1)
    table = parameter.detach().clone()
    sums = torch.zeros(50, 30, dtype=dtype)
    for rate in (0.1, 0.07, 0.02):
        parameter.grad = torch.randn(50, 30, dtype=dtype)
        parameter.grad[:20] = 0  # rows without a gradient so far divide 0 by 0
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        adagrad_(table, sums, parameter.grad, None, rate, eps=1e-10)
    torch.testing.assert_close(table, parameter.detach())
    torch.testing.assert_close(sums, optimizer.state[parameter]["sum"])


@pytest.mark.usefixtures("form")
def test_copies_are_rounded_as_in_pytorch():
    """To the nearest, of two to the even one; NaN stays NaN."""
    bits = np.random.default_rng().integers(0, 2**32, 100_000, dtype=np.uint32)
    # Threads that were started during a training treat denormal numbers as 0.
    bits[(bits & 0x7F800000) == 0] = 0
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF]
    table = torch.from_numpy(bits.view(np.float32)).clone()
    copy = torch.empty(len(table), dtype=torch.bfloat16)
    adagrad_(table, torch.ones(len(table)), torch.zeros(len(table)), copy, 0.1, eps=1e-10)
    torch.testing.assert_close(
        copy, torch.from_numpy(bits.view(np.float32)).bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_plain_forms_run_without_numba():
    code = """
import sys
sys.modules["numba"] = None
import torch
from dualkg.kernels.cpu import adagrad_, softmax_gradient_
from dualkg.kernels.pairwise import pairwise_modulus_sums
from dualkg.kernels.scores import Targets
targets = Targets.one_each(torch.tensor([0]), torch.ones(1))
print(softmax_gradient_(torch.zeros(1, 2), targets, 2).exp().item())
table = torch.ones(2)
sums = torch.zeros(2)
adagrad_(table, sums, torch.tensor([3.0, 4.0]), None, 0.5, eps=0.0)
print(table.tolist(), sums.tolist())
"""
    assert run_python(code).out.split("\n")[:2] == ["2.0", "[0.5, 0.5] [9.0, 16.0]"]


def test_exponentials_of_a_softmax_are_computed_in_float32():
    """A constant of another type would turn the loop into one of float64, at half the speed."""
    numba = pytest.importorskip("numba")
    cpu.exp(np.float32(1))
    returned = {signature.return_type for signature in cpu.exp.nopython_signatures}
    assert returned == {numba.float32}


def test_kernels_are_compiled_without_a_writable_cache(monkeypatch):
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(cpu, "HAS_NUMBA", True)
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    @cpu.compiled()
    def next_of(number):
        return number + 1

    assert next_of(1) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx512f amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16\nbugs\t\t: spectre\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbogomips\t: 4400\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", False),
        ("model name\t: a processor with bf16\n", False),
    ],
)
def test_bf16_products_are_read_from_the_flags(tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(text, encoding="utf-8")
    assert has_bf16_products(path) is expected


def test_no_bf16_products_without_a_description_of_the_processor(tmp_path):
    assert not has_bf16_products(tmp_path / "missing")
    assert isinstance(has_bf16_products(), bool)


def test_threads_started_during_training_keep_denormal_numbers(monkeypatch):
    """A thread inherits the mode of its creator."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cpu._pool.cache_clear()
    found = {}
    with flush_denormals():
        cpu.in_parallel(
            lambda first, last: found.update({first: float(torch.tensor([2.0**-126]) * 0.5)}), 2
        )
    assert found[0] == 0
    assert found[1] > 0


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("threads", "dtype", "kind", "sizes"),
    pairwise(
        product(
            THREADS,
            [torch.float32, torch.float64],
            KINDS,
            [(1, 1, 1), (3, 5, 7), (17, 33, 16), (8, 200, 35), (0, 4, 3)],
        )
    ),
    indirect=["threads"],
)
def test_pairwise_sums(dtype, kind, sizes):
    check_sums(kind, *sizes, dtype=dtype, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_coordinate_affects_only_its_column(kind):
    one = torch.zeros(2, 4)
    other = torch.zeros(3, 4)
    other[1, -1] = torch.nan
    found = sums_of(kind, one, other)
    assert found[:, 1].isnan().all()
    assert not found[:, [0, 2]].any()
