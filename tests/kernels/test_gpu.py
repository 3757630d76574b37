"""The Triton kernels against float64: random numbers, odd sizes, buffers filled with NaN."""

import pytest
import torch
from torch.nn import functional as F

import dualkg as kg
from dualkg.kernels.hashing import splitmix64
from dualkg.kernels.scores import Targets
from tests.families import EMBEDDINGS
from tests.kernels.pairwise_sums import KINDS, check_sums
from tests.kernels.test_cpu import cross_entropy_in_float64, queries_with_several_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 5), (7, 2048), (2, 2049), (33, 14541), (5, 16385), (3, 40943), (0, 10)],
)
def test_softmax_gradient(rows, columns, dtype):
    from dualkg.kernels.gpu.scores import softmax_gradient_

    padded = -(-columns // 128) * 128
    scores = (torch.randn(rows, padded, device="cuda") * 5).to(dtype)
    scores[:, columns:] = torch.nan  # padding must never be read as a score
    targets = torch.randint(0, columns, (rows, 3), device="cuda")[:, 1]  # not contiguous
    weights = torch.rand(rows, device="cuda")
    losses = torch.full((rows,), torch.nan, device="cuda")
    exact = scores[:, :columns].double()
    expected = exact.softmax(-1)
    expected[torch.arange(rows), targets] -= 1
    softmax_gradient_(scores, Targets.one_each(targets, weights), columns, losses)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    expected *= weights[:, None]
    torch.testing.assert_close(
        scores[:, :columns].double(), expected, rtol=tolerance, atol=tolerance
    )
    assert not scores[:, columns:].any()
    exact_losses = weights * F.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(losses.double(), exact_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 2049, 14541, 40943])
def test_softmax_gradient_of_queries_with_several_answers(columns, dtype):
    from dualkg.kernels.gpu.scores import softmax_gradient_

    scores, targets = queries_with_several_answers(columns)
    scores = scores.to("cuda", dtype)
    targets = Targets(*(array.cuda() for array in targets))
    losses = torch.full((len(scores),), torch.nan, device="cuda")
    expected, exact_losses = cross_entropy_in_float64(scores[:, :columns], targets)
    softmax_gradient_(scores, targets, columns, losses)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(
        scores[:, :columns].double(), expected, rtol=tolerance, atol=tolerance
    )
    assert not scores[:, columns:].any()
    assert not scores[-1].any()  # a query without an answer
    torch.testing.assert_close(losses.double(), exact_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("columns", [100, 20000])
def test_a_nonfinite_score_makes_the_loss_nonfinite(columns, bad):
    from dualkg.kernels.gpu.scores import softmax_gradient_

    scores = torch.randn(2, columns, device="cuda")
    scores[1, columns // 2] = bad
    losses = torch.zeros(2, device="cuda")
    targets = Targets.one_each(
        torch.zeros(2, dtype=torch.int64, device="cuda"), torch.ones(2, device="cuda")
    )
    softmax_gradient_(scores, targets, columns, losses)
    assert losses.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("with_product", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (37, 11), (1000, 129), (50, 4001)])
def test_adagrad_sums_steps_and_copies_in_one_pass(shape, with_product):
    from dualkg.kernels.gpu.elementwise import RowGradients, adagrad_

    num_rows, width = shape
    shape_of_copy = (num_rows + 5, -(-width // 8) * 8)
    table = torch.randn(shape)
    sums = torch.rand(shape)
    rows = torch.randn(shape)
    stamps = torch.randint(6, 8, (num_rows,), dtype=torch.int32)
    product = torch.randn(shape_of_copy).bfloat16()
    now = torch.tensor(7, dtype=torch.int32)
    slope = torch.where(stamps[:, None] == 7, rows, 0.0).double()
    if with_product:
        slope += product[:num_rows, :width].double()
    seen = sums.double() + slope.square()
    expected = table.double() - 0.1 * slope / (seen.sqrt() + 1e-10)
    on_gpu = [tensor.cuda() for tensor in (table, sums, rows, stamps, product, now)]
    table, sums, rows, stamps, product, now = on_gpu
    copy = torch.full(shape_of_copy, 7.0, dtype=torch.bfloat16, device="cuda")
    padded = {"product": product, "copy": copy} if with_product else {}
    rate = torch.tensor(0.1, device="cuda")
    adagrad_(RowGradients(table, rows, stamps), sums, now=now, rate=rate, eps=1e-10, **padded)
    torch.testing.assert_close(table.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.cpu().double(), seen, rtol=1e-5, atol=1e-6)
    assert not rows[stamps == 7].any()
    if with_product:
        assert torch.equal(copy[:num_rows, :width], table.bfloat16())
        assert (copy[num_rows:] == 7).all()
        assert (copy[:, width:] == 7).all()


@pytest.mark.parametrize("dim", [1, 33, 600])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "SimplE", "QuatE"])
def test_rows_are_mapped(name, dim):
    from dualkg.kernels.gpu.diagonal import compile_algebra, map_rows_

    kind = EMBEDDINGS[name]
    options = {"normalized": False} if name == "QuatE" else {}
    model = kind(kg.GraphShape(50, 7), dim=dim, init_scale=1.0, **options).cuda()
    batch = torch.stack([torch.randint(0, high, (41,)) for high in (50, 14, 50)], dim=-1).cuda()
    width = model.entities.shape[1]
    algebra = compile_algebra(kind.numbers_per_coordinate, kind.times, kind.conjugate)
    for column in (0, 2):
        mapped = torch.full((41, width + 3), 7.0, device="cuda")
        table = model.head_table if column == 0 else model.tail_table
        map_rows_(
            mapped,
            batch,
            table.detach(),
            model.relations.detach(),
            algebra=algebra,
            columns=(column, 1),
        )
        f = model.factors(*batch.unbind(-1))
        expected = f.mapped_head if column == 0 else f.mapped_tail
        torch.testing.assert_close(mapped[:, :width], expected, rtol=1e-5, atol=1e-6)
        assert (mapped[:, width:] == 7).all()


@pytest.mark.parametrize("size", [1, 5, 300])
@pytest.mark.parametrize("dim", [1, 33, 130])
def test_rows_are_multiplied_by_the_matrices_of_their_relations(dim, size):
    from dualkg.kernels.gpu.matrices import TriplesByRelation, map_rows_

    table = torch.randn(50, dim, device="cuda")
    matrices = torch.randn(9, dim * dim, device="cuda")
    ids = torch.randint(0, 50, (size, 3), device="cuda")[:, 1]
    relations = torch.randint(0, 9, (size,), device="cuda") // 2 * 2  # some are absent
    groups = TriplesByRelation.of(relations, 9)
    per_triple = matrices.double().view(9, dim, dim)[relations]
    for transposed in (False, True):
        applied = per_triple.mT if transposed else per_triple
        expected = torch.einsum("bi,bij->bj", table[ids].double(), applied)
        mapped = torch.full((size, dim), torch.nan, device="cuda")
        rounded = torch.full((size, dim + 5), 7.0, dtype=torch.bfloat16, device="cuda")
        map_rows_(
            table,
            matrices,
            groups,
            transposed=transposed,
            ids=ids,
            output=mapped,
            bf16_output=rounded,
        )
        assert near(mapped, expected, 2e-3)
        assert torch.equal(rounded[:, :dim], mapped.bfloat16())
        assert (rounded[:, dim:] == 7).all()
        rows = torch.zeros(50, dim, device="cuda")
        map_rows_(mapped, matrices, groups, transposed=transposed, ids=ids, rows=rows)
        again = torch.einsum("bi,bij->bj", mapped.double(), applied)
        assert near(
            rows, torch.zeros(50, dim, device="cuda").double().index_add_(0, ids, again), 2e-3
        )


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).norm() <= tolerance * expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "others", "dim"), [(1, 1, 1), (3, 5, 7), (17, 33, 16), (100, 1000, 35), (0, 4, 3)]
)
def test_pairwise_sums(kind, batch, others, dim):
    check_sums(kind, batch, others, dim, dtype=torch.float32, device="cuda")


@pytest.mark.parametrize("shape", [(1,), (5, 7), (1024,), (1025,), (0,), (3, 2049)])
def test_hashes_equal_those_on_a_cpu(shape):
    bits = torch.randint(-(2**63), 2**63 - 1, shape)
    assert torch.equal(splitmix64(bits.cuda()).cpu(), splitmix64(bits))
    assert torch.equal(splitmix64(bits.cuda()[..., ::2]).cpu(), splitmix64(bits[..., ::2]))
