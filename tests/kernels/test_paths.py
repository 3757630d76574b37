"""Message passing of path networks: a step worked out by hand, and the Triton form against it."""

import math

import pytest
import torch

from dualkg.kernels import paths
from dualkg.kernels.paths import Edges, Mixing, Segments


def mixing_of(dim, *, steps=1, dtype=torch.float64, seed=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes):
        numbers = torch.randn(*sizes, generator=generator, dtype=torch.float64) * 0.3
        return numbers.to(device, dtype).requires_grad_()

    mixings = []
    for _ in range(steps):
        weights = (drawn(3 * dim, 4 * dim), drawn(dim, dim), drawn(dim), drawn(dim), drawn(dim))
        mixings.append(Mixing(*weights))
    return mixings


def random_edges(num_entities, num_relations, num_triples, *, drop=0.0, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def drawn(high):
        return torch.randint(0, high, (num_triples,), generator=generator)

    triples = torch.stack([drawn(num_entities), drawn(num_relations), drawn(num_entities)], dim=1)
    edges = Edges.of(triples.to(device), num_entities=num_entities, num_relations=num_relations)
    if drop:
        kept = torch.rand(num_triples, generator=generator).to(device) > drop
        edges = edges.keep(torch.cat([kept, kept]))
    return edges


def test_a_step_by_hand():
    """0 → 1 and 2 → 1 with relation 0; the query (0, r, ?) and vectors of one number."""
    triples = torch.tensor([[0, 0, 1], [2, 0, 1]])
    edges = Edges.of(triples, num_entities=3, num_relations=1)
    assert edges.degrees.tolist() == [2, 3, 2]
    heads = torch.tensor([0])
    reached = paths.reach(heads, edges, 2)
    assert [step[:, 0].tolist() for step in reached] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    query = torch.tensor([[2.0]], dtype=torch.float64)
    vectors = torch.zeros(3, 1, 2, dtype=torch.float64)
    vectors[0, 0] = torch.tensor([2.0, -1.0])
    query = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    factors = torch.tensor([[[3.0, 1.0]], [[0.5, 0.5]]], dtype=torch.float64)
    # The result is normalized, so that two numbers show the sign of their difference alone. The
    # first output is the mean of the first number, the second its maximum.
    statistics = torch.zeros(6, 8, dtype=torch.float64)
    statistics[0, 0] = 1.0
    statistics[1, 2] = 1.0
    identity = Mixing(
        statistics,
        torch.zeros(2, 2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    after = paths.take_step(
        vectors,
        factors,
        query,
        identity,
        heads=heads,
        edges=edges,
        before=reached[0],
        after=reached[1],
    )
    # Entity 1 has the messages 0, (6, −1) and 0: mean 2 and maximum 6. Their mean is 4 and their
    # variance 4, so that the larger becomes 1, and the smaller −1, which is cut off.
    normalized = 2 / math.sqrt(4 + 1e-5)
    torch.testing.assert_close(after[1, 0], torch.tensor([0.0, normalized], dtype=torch.float64))
    # Entity 2 is not reached yet, and the vector of the head grows.
    assert after[2].tolist() == [[0.0, 0.0]]
    head = after[0, 0] - vectors[0, 0]
    # The head has the messages 0, its query (2, −1), and 0 from entity 1: mean 2/2, maximum 2.
    normalized = 0.5 / math.sqrt(0.25 + 1e-5)
    torch.testing.assert_close(head, torch.tensor([0.0, normalized], dtype=torch.float64))


def test_the_gradients_of_a_step_are_those_of_finite_differences():
    edges = random_edges(6, 2, 9, drop=0.2)
    heads = torch.tensor([1, 4])
    reached = paths.reach(heads, edges, 2)
    generator = torch.Generator().manual_seed(3)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(vectors, factors, queries, *weights):
        return paths.take_step(
            vectors * reached[1][:, :, None],
            factors,
            queries,
            Mixing(*weights),
            heads=heads,
            edges=edges,
            before=reached[1],
            after=reached[2],
        )

    arguments = (drawn(6, 2, 3), drawn(4, 2, 3), drawn(2, 3), *mixing_of(3)[0])
    assert torch.autograd.gradcheck(function, arguments, atol=1e-6)


@pytest.mark.parametrize("lengths", [[0], [5], [64], [65], [0, 200, 3, 64, 129], [1] * 10])
def test_segments_cover_every_edge_once(lengths):
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    segments = Segments.of(starts)
    covered = []
    for entity, start, end, slot in zip(*(part.tolist() for part in segments[:4]), strict=True):
        assert end - start <= paths.SEGMENT
        assert starts[entity] <= start <= end <= starts[entity + 1]
        covered += range(start, end)
        num_segments = -(-lengths[entity] // paths.SEGMENT)
        assert (slot >= 0) == (num_segments > 1)
    assert covered == list(range(sum(lengths)))
    assert set(segments.entities.tolist()) == set(range(len(lengths)))
    slots = [slot for slot in segments.slots.tolist() if slot >= 0]
    assert slots == list(range(int(segments.slot_starts[-1])))
    for number, entity in enumerate(segments.divided.tolist()):
        own = segments.slots[segments.entities == entity].tolist()
        assert own == list(range(*segments.slot_starts[number : number + 2].tolist()))


def test_kept_edges_count_in_degrees_and_scalers():
    triples = torch.tensor([[0, 0, 1], [2, 0, 1], [0, 0, 2]])
    edges = Edges.of(triples, num_entities=3, num_relations=1)
    kept = edges.keep(torch.tensor([False, True, True] * 2))
    assert kept.degrees.tolist() == [2, 2, 3]
    assert kept.mean_log_degree == edges.mean_log_degree
    assert kept.scalers[:, 0].tolist() == [1, 1, 1]
    logs = kept.degrees.log() / edges.mean_log_degree
    torch.testing.assert_close(kept.scalers[:, 1], logs)
    torch.testing.assert_close(kept.scalers[:, 2], 1 / logs)


def score_by_steps(form, queries, factors, mixings, of_scores, *, heads, edges):
    """What is reached after each step, and the scores `(num_entities, batch)`."""
    reached = form.reach(heads, edges, len(factors))
    batch, dim = queries.shape
    numbers = torch.arange(batch, device=heads.device)
    zeros = queries.new_zeros(edges.num_entities, batch, dim)
    vectors = zeros.index_put((heads, numbers), queries)
    for step, mixing in enumerate(mixings):
        vectors = form.take_step(
            vectors,
            factors[step],
            queries,
            mixing,
            heads=heads,
            edges=edges,
            before=reached[step],
            after=reached[step + 1],
        )
    return reached, form.score(vectors, *of_scores)


def score_by_query(form, queries, factors, mixings, of_scores, *, heads, edges):
    """The same of a form that computes all steps of a query at once."""
    reached = form.reach(heads, edges, len(factors))
    is_placed = reached.places >= 0
    masks = [(is_placed & (reached.places < counts[:, None])).t() for counts in reached.counts]
    from_queries, weight, score_weight = of_scores
    scores = form.score_entities(
        queries,
        torch.stack(factors).transpose(1, 2),
        Mixing(*(torch.stack(parts) for parts in zip(*mixings, strict=True))),
        heads=heads,
        edges=edges,
        from_queries=from_queries,
        weight=weight,
        score_weight=score_weight,
    )
    return masks, scores.t()


def compare(form, *, num_entities, num_triples, batch, dim, dtype, device, tolerances):
    """Compare the scores and the gradients of three steps with the plain form in float64.

    In low precision a maximum or a zero may be another one, so that norms are compared, and errors
    may be twice those of the plain form in this precision, and `tolerances` besides.
    """
    num_steps = 3
    edges = random_edges(num_entities, 3, num_triples, drop=0.1, device=device)
    # Heads are a column of a batch of triples, so that they are not contiguous.
    triples = torch.full((batch, 3), num_entities - 1, device=device)
    triples[:, 0] = torch.arange(batch, device=device) % num_entities
    heads = triples[:, 0]

    def run(form, dtype, weight_dtype):
        generator = torch.Generator().manual_seed(2)

        def drawn(*sizes):
            numbers = torch.randn(*sizes, generator=generator, dtype=torch.float64)
            return numbers.to(device, dtype).requires_grad_()

        factors = [drawn(6, batch, dim) for _ in range(num_steps)]
        queries = drawn(batch, dim)
        mixings = mixing_of(dim, steps=num_steps, dtype=weight_dtype, device=device)
        numbers = [drawn(batch, 2 * dim), drawn(2 * dim, dim), drawn(2 * dim)]
        of_scores = [number.detach().to(weight_dtype).requires_grad_() for number in numbers]
        arguments = (queries, factors, mixings, of_scores)
        score_all = score_by_query if hasattr(form, "score_entities") else score_by_steps
        reached, scores = score_all(form, *arguments, heads=heads, edges=edges)
        weights = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
        (scores.double() * weights.to(device)).sum().backward()
        parameters = [*factors, queries, *(part for mixing in mixings for part in mixing)]
        parameters += of_scores
        gradients = [parameter.grad for parameter in parameters]
        return reached, scores.detach(), gradients

    reached, expected, gradients = run(paths, torch.float64, torch.float64)
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    same_reach, found, other_gradients = run(form, dtype, weight_dtype)
    for one, other in zip(reached, same_reach, strict=True):
        assert torch.equal(one, getattr(other, "mask", other))
    of_scores, of_gradients = tolerances
    assert _distance(expected, found) < of_scores
    rounded = gradients
    if dtype == torch.bfloat16:
        _, _, rounded = run(paths, dtype, dtype)
    for gradient, other, plain in zip(gradients, other_gradients, rounded, strict=True):
        assert _distance(gradient, other) < of_gradients + 2 * _distance(gradient, plain)


def _distance(expected, found):
    return float((expected - found.double()).norm() / expected.norm().clamp(min=1e-12))


# In float32 the products of large dims take minutes to compile.
FLOAT32 = (torch.float32, (1e-5, 2e-2))
BFLOAT16 = (torch.bfloat16, (2e-2, 5e-2))
CASES = [
    (20, 40, 5, 16, *FLOAT32),
    (20, 300, 35, 16, *FLOAT32),
    (20, 40, 5, 16, *BFLOAT16),
    (20, 300, 35, 16, *BFLOAT16),
    (300, 3000, 32, 32, *BFLOAT16),
    # With 400 edges at an entity, rounded messages often have another maximum.
    (10, 2000, 3, 64, *BFLOAT16),
]


# Each dim of each precision takes six seconds to compile: other tests have compiled the even ones.
@pytest.mark.parametrize(
    ("dtype", "even_dim", "tolerances"),
    [(torch.float64, 8, (1e-12, 1e-10)), (torch.float32, 16, (1e-5, 2e-2))],
)
@pytest.mark.parametrize(
    ("num_entities", "num_triples", "batch", "dim"),
    [(20, 40, 5, 7), (9, 300, 35, None), (60, 70, 20, None)],
)
def test_the_numba_form_is_the_reference(
    num_entities, num_triples, batch, dim, even_dim, dtype, tolerances
):
    pytest.importorskip("numba")
    from dualkg.kernels import cpu_paths

    compare(
        cpu_paths,
        num_entities=num_entities,
        num_triples=num_triples,
        batch=batch,
        dim=dim or even_dim,
        dtype=dtype,
        device="cpu",
        tolerances=tolerances,
    )


def test_groups_of_queries_and_threads_do_not_change_the_numba_form():
    pytest.importorskip("numba")
    from dualkg.kernels import cpu_paths

    num_entities, batch, dim = 30, 35, 8
    edges = random_edges(num_entities, 3, 60, drop=0.1)
    heads = torch.arange(batch) % num_entities

    def run(**options):
        generator = torch.Generator().manual_seed(2)

        def drawn(*sizes):
            numbers = torch.randn(*sizes, generator=generator, dtype=torch.float64)
            return numbers.requires_grad_()

        parameters = [drawn(batch, dim), drawn(2, batch, 6, dim)]
        sizes = ((2, 3 * dim, 4 * dim), (2, dim, dim), (2, dim), (2, dim), (2, dim))
        mixing = Mixing(*(drawn(*size) for size in sizes))
        of_scores = {
            "from_queries": drawn(batch, 2 * dim),
            "weight": drawn(2 * dim, dim),
            "score_weight": drawn(2 * dim),
        }
        scores = cpu_paths.score_entities(
            *parameters, mixing, heads=heads, edges=edges, **of_scores, **options
        )
        scores.square().sum().backward()
        parameters += [*mixing, *of_scores.values()]
        return [scores.detach(), *(parameter.grad for parameter in parameters)]

    expected = run()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        by_threads = run()
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(by_threads, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(max_rows=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize(
    ("num_entities", "num_triples", "batch", "dim", "dtype", "tolerances"), CASES
)
def test_the_triton_form_is_the_reference(num_entities, num_triples, batch, dim, dtype, tolerances):
    from dualkg.kernels.gpu import paths as triton_paths

    compare(
        triton_paths,
        num_entities=num_entities,
        num_triples=num_triples,
        batch=batch,
        dim=dim,
        dtype=dtype,
        device="cuda",
        tolerances=tolerances,
    )
