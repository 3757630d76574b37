"""The problem of embedding an unseen entity, compared with training losses that are written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.inference import inductive
from dualkg.inference.extension import with_rows
from dualkg.inference.inductive import (
    RIDGE,
    EmbeddingProblem,
    FrozenContext,
    Penalty,
    embed_entities,
    num_examples,
    training_queries,
)
from dualkg.training.recipe import RegularizerConfig
from tests.conftest import graph_of

BILINEAR = [kg.CP, kg.DistMult, kg.ComplEx, kg.RESCAL, kg.SimplE, kg.QuatE, kg.TuckER]
WEIGHT = 0.05
PLAIN = 0.5
MAPPED = 1.5
DURA = kg.DURA(WEIGHT, plain=PLAIN, mapped=MAPPED)
NEW = 12
NEW_TRIPLES = torch.tensor([(NEW, 0, 3), (NEW, 0, 4), (5, 1, NEW), (NEW, 1, NEW)])


@pytest.fixture
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    return graph_of(
        np.unique(np.stack([random.integers(0, n, 40) for n in (12, 2, 12)], axis=1), axis=0)
    )


def model_of(kind, graph, *, reciprocal=True):
    return kind(graph.shape, dim=3, init_scale=0.7, reciprocal=reciprocal, seed=1).double().eval()


def recipe_of(regularizer=DURA, **loss) -> kg.Recipe:
    return kg.Recipe(regularizer=RegularizerConfig.of(regularizer), loss=kg.OneVsAll(**loss))


def problem_of(model, graph, *, regularizer=DURA):
    """The problem of the new entity, in which all negative queries have their full weight."""
    train = np.concatenate([graph.train, NEW_TRIPLES.numpy().astype(np.int32)])
    context = FrozenContext.of(model, graph, recipe=recipe_of(regularizer)).with_new_entities(
        1, train
    )
    return EmbeddingProblem.of(torch.tensor([NEW]), NEW_TRIPLES, context, negative_weight=1.0)


def random_rows(model, *, seed=0):
    shape = (1, 2 if model.two_entity_tables else 1, model.head_table.shape[1])
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value_and_gradient(problem, rows):
    """The objectives, and the gradient of each in its own rows."""
    rows = rows.detach().requires_grad_()
    values = problem(rows)
    return values.detach(), torch.autograd.grad(values.sum(), rows)[0]


def written_out(model, graph, rows):
    """The objective of the new entity, example by example, with a model that has its row."""
    larger = with_rows(model, rows)
    known = list(range(NEW))
    total = torch.zeros((), dtype=torch.float64)

    def loss(example, target, *, share):
        head, relation, tail = (torch.tensor([int(id)]) for id in example)
        scores = (
            larger.score_tails(head, relation)[0]
            if target == "tail"
            else larger.score_heads(relation, tail)[0]
        )
        given, answer = (int(head), int(tail)) if target == "tail" else (int(tail), int(head))
        if given == NEW:  # which is no candidate for its own queries
            return share * (torch.logsumexp(scores[known], 0) - scores[answer])
        with_new = share * (torch.logsumexp(scores, 0) - scores[answer])
        without = share * (torch.logsumexp(scores[known], 0) - scores[answer])
        return with_new if answer == NEW else with_new - without

    own = [triple for triple in NEW_TRIPLES.numpy() if triple[0] != triple[2]]
    examples = np.concatenate([np.array(own), graph.train])
    if model.reciprocal:
        examples = with_reciprocals(examples, 2)
    for example in examples:
        for target in ("tail",) if model.reciprocal else ("tail", "head"):
            total = total + loss(example, target, share=1.0 if model.reciprocal else 0.5)
        if NEW in example[[0, 2]]:
            f = larger.factors(*(torch.tensor([int(id)]) for id in example))
            total = total + WEIGHT * DURA.per_triple(f)[0]
    return total


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_the_objective_is_the_training_loss_up_to_a_constant(kind, reciprocal, graph):
    model = model_of(kind, graph, reciprocal=reciprocal)
    problem = problem_of(model, graph)
    with torch.no_grad():
        here = random_rows(model, seed=1)
        there = random_rows(model, seed=2)
        expected = written_out(model, graph, here) - written_out(model, graph, there)
        torch.testing.assert_close((problem(here) - problem(there))[0], expected)
        total = problem(here) - sum(queries.losses(here) for queries in problem.negative_queries)
        torch.testing.assert_close(problem.triple_losses(here, len(NEW_TRIPLES)).sum(), total[0])


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_the_problem_is_strongly_convex_and_solved(kind, reciprocal, graph):
    model = model_of(kind, graph, reciprocal=reciprocal)
    problem = problem_of(model, graph)
    here = random_rows(model)
    direction = random_rows(model, seed=3)
    step = 1e-5
    value, gradient = value_and_gradient(problem, here)
    with torch.no_grad():
        difference = (problem(here + step * direction) - problem(here - step * direction)) / (
            2 * step
        )
    torch.testing.assert_close((gradient * direction).sum(), difference[0], rtol=1e-6, atol=1e-7)
    hessian = torch.autograd.functional.hessian(lambda rows: problem(rows)[0], here).reshape(
        here.numel(), -1
    )
    # Each example adds λ λ1 ‖row‖²; the loop adds none, and the two rows of CP have half of the
    # examples each.
    num_examples = 3 if model.two_entity_tables or not reciprocal else 6
    if model.two_entity_tables and not reciprocal:
        num_examples = 1
    assert float(torch.linalg.eigvalsh(hessian)[0]) >= 2 * WEIGHT * PLAIN * num_examples - 1e-9
    least, gradient = value_and_gradient(problem, problem.minimum(problem.start()))
    assert float(gradient.abs().max()) < 1e-6
    assert float(least) < float(value)


@pytest.mark.parametrize("kind", BILINEAR)
def test_float32_is_precise_enough(kind, graph):
    """A solution to four digits gives the same predictions as one to ten."""
    exact, single = (
        problem_of(model, graph) for model in (model_of(kind, graph), model_of(kind, graph).float())
    )
    expected, rows = (problem.minimum(problem.start()) for problem in (exact, single))
    assert rows.dtype == torch.float32
    assert float((rows - expected).norm()) < 3e-3 * float(expected.norm())


@pytest.mark.parametrize(
    ("regularizer", "keeps", "ridge"),
    [
        (DURA, True, 0.0),
        (kg.Frobenius(0.1), True, 0.0),
        (kg.N3(0.1), True, RIDGE),
        (kg.BasicDURA(0.1), True, RIDGE),
        (kg.DURA(0.1, plain=0.0), True, RIDGE),
        (kg.DURA(0.0), False, RIDGE),
        (kg.RegP1(0.1), False, RIDGE),
        (kg.UnweightedDURA(0.1), False, RIDGE),
        (kg.NoRegularizer(), False, RIDGE),
    ],
)
def test_a_ridge_replaces_missing_squares_of_the_rows(regularizer, keeps, ridge, graph):
    penalty = Penalty.of(regularizer)
    assert (penalty.regularizer is not None, penalty.ridge) == (keeps, ridge)
    problem = problem_of(model_of(kg.CP, graph), graph, regularizer=regularizer)
    _, gradient = value_and_gradient(problem, problem.minimum(problem.start()))
    assert float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("kind", [kg.CP, kg.QuatE, kg.RESCAL])
@pytest.mark.parametrize(
    "regularizer", [kg.Frobenius(0.1), kg.N3(0.1), kg.BasicDURA(0.1), kg.NoRegularizer()]
)
def test_every_regularizer_has_the_gradient_of_its_objective(kind, regularizer, graph):
    if kind is kg.RESCAL and isinstance(regularizer, kg.N3):
        pytest.skip("N3 is for diagonal models")
    model = model_of(kind, graph)
    problem = problem_of(model, graph, regularizer=regularizer)
    here = random_rows(model)
    direction = random_rows(model, seed=8)
    step = 1e-5
    _, gradient = value_and_gradient(problem, here)
    with torch.no_grad():
        difference = (problem(here + step * direction) - problem(here - step * direction)) / (
            2 * step
        )
    torch.testing.assert_close((gradient * direction).sum(), difference[0], rtol=1e-6, atol=1e-7)


def test_an_answer_that_is_no_candidate_is_added_to_the_normalizer(graph):
    model = model_of(kg.ComplEx, graph)
    context = FrozenContext.of(model, graph, recipe=recipe_of()).with_new_entities(2, graph.train)
    context = replace(
        context, new_rows=torch.cat([random_rows(model, seed=8), random_rows(model, seed=9)])
    )
    problem = EmbeddingProblem.of(
        torch.tensor([NEW]), torch.tensor([(NEW, 0, 3), (NEW, 1, NEW + 1)]), context
    )
    [queries] = [group for group in problem.groups if group.candidates is not None]
    assert queries.is_extra.tolist() == [False, True]
    rows = random_rows(model)
    with torch.no_grad():
        larger = with_rows(model, torch.cat([rows, context.new_rows[1:]]))
        scores = larger.score_tails(torch.tensor([NEW]), torch.tensor([1]))[0]
        expected = torch.logsumexp(scores[[*range(NEW), NEW + 1]], 0) - scores[NEW + 1]
        penalty = context.penalty(queries._factors(rows[:, 0], context))[queries.pairs[1]]
        torch.testing.assert_close(queries.losses(rows, context)[1] - penalty, expected)


def test_answers_are_weighted_by_frequency_as_in_training(graph):
    context = FrozenContext.of(
        model_of(kg.CP, graph), graph, recipe=recipe_of(frequency_weight=0.4)
    )
    train = np.concatenate([graph.train, NEW_TRIPLES[:3].numpy().astype(np.int32)])
    weights = context.with_new_entities(1, train).answer_weights
    counts = np.bincount(train[:, [0, 2]].reshape(-1))
    expected = 0.4 * counts / counts.max() + 0.6
    expected /= expected[train[:, [0, 2]]].mean()
    np.testing.assert_allclose(weights.numpy(), expected)


def test_a_known_entity_is_left_out_of_the_normalizers(graph):
    model = model_of(kg.ComplEx, graph)
    context = FrozenContext.of(model, graph)
    negatives = context.queries[0].without(4, context)
    others = [id for id in range(12) if id != 4]
    expected = torch.logsumexp(negatives.mapped @ model.tail_table[others].T, dim=1)
    torch.testing.assert_close(negatives.normalizers, expected)
    assert float(negatives.weights.sum()) == 2 * len(graph.train) - 2 * int(
        (graph.train[:, [0, 2]] == 4).any(1).sum()
    )


def test_a_sample_of_the_training_examples_is_weighted_to_stand_for_all(graph):
    [queries] = training_queries(model_of(kg.CP, graph), graph.train, most=10)
    assert len(queries.answers) == 10
    assert queries.weight * 10 == 2 * len(graph.train)


@pytest.mark.parametrize(
    ("num_entities", "expected"), [(100, 5_000), (10_000_000, 2_500), (100_000_000, 1_000)]
)
def test_the_larger_the_entity_table_the_fewer_examples_are_sampled(num_entities, expected):
    with torch.device("meta"):
        model = kg.ComplEx(kg.GraphShape(num_entities, 1), dim=2)
    assert num_examples(model) == expected


# -- several entities --------------------------------------------------------

RECIPE = kg.Recipe(
    regularizer=RegularizerConfig.of(kg.DURA(0.05, plain=0.5, mapped=1.5)),
    loss=kg.OneVsAll(frequency_weight=0.3),
)
# Of the new entities 12 to 15 three have triples with known ones, and some with each other.
TRIPLES = np.array(
    [
        (12, 0, 3),
        (12, 0, 4),
        (5, 1, 12),
        (12, 1, 13),
        (13, 0, 14),
        (5, 1, 14),
        (14, 1, 14),
        (0, 0, 14),
        (13, 1, 15),
    ],
    dtype=np.int32,
)
INDEPENDENT = torch.tensor([12, 14])  # which have no triple with each other


def context_of(kind, graph, *, reciprocal=True, dtype=torch.float64, device="cpu"):
    """A context in which all new entities have random rows."""
    model = (
        kind(graph.shape, dim=3, init_scale=0.7, reciprocal=reciprocal, seed=1)
        .to(device, dtype)
        .eval()
    )
    context = FrozenContext.of(model, graph, recipe=RECIPE)
    context = context.with_new_entities(4, np.concatenate([graph.train, TRIPLES]))
    noise = torch.randn(
        context.new_rows.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return replace(context, new_rows=noise.to(context.new_rows))


def problems_of(context):
    """One of each entity, and one of both."""
    triples = torch.from_numpy(TRIPLES).long()
    single = [EmbeddingProblem.of(entity[None], triples, context) for entity in INDEPENDENT]
    return single, EmbeddingProblem.of(INDEPENDENT, triples, context)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_a_batch_has_the_objective_of_each_entity(kind, reciprocal, graph, monkeypatch):
    monkeypatch.setattr(inductive, "MAX_SCORES", 20)  # one mapped entity per block
    single, batch = problems_of(context_of(kind, graph, reciprocal=reciprocal))
    rows = batch.context.new_rows[INDEPENDENT - 12]
    values = torch.cat([problem(rows[[row]]) for row, problem in enumerate(single)])
    torch.testing.assert_close(batch(rows), values)
    starts = torch.cat([problem.start() for problem in single])
    torch.testing.assert_close(batch.start(), starts)


@pytest.mark.parametrize("kind", BILINEAR)
def test_a_batch_has_the_solution_of_each_entity(kind, graph):
    single, batch = problems_of(context_of(kind, graph))
    rows = batch.minimum(batch.start())
    for row, problem in zip(rows, single, strict=True):
        alone = problem.minimum(problem.start())[0]
        torch.testing.assert_close(row, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reciprocal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_size_of_batches_does_not_matter(reciprocal, graph, monkeypatch):
    """Also where an entity is connected through another new one only, and where one has a triple
    with itself.
    """
    context = context_of(kg.ComplEx, graph, reciprocal=reciprocal)
    expected = embed_entities(TRIPLES, context)
    monkeypatch.setattr(inductive, "MAX_SCORES", 1)
    single = embed_entities(TRIPLES, context)
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=1e-6)


def test_entities_with_common_triples_agree(graph):
    triples = np.array([(12, 0, 3), (12, 1, 13), (13, 0, 14), (5, 1, 14)], dtype=np.int32)
    model = kg.DistMult(graph.shape, dim=3, init_scale=0.7, seed=1).double().eval()
    context = FrozenContext.of(model, graph).with_new_entities(
        3, np.concatenate([graph.train, triples])
    )
    rows = embed_entities(triples, context)
    context = replace(context, new_rows=rows)
    for entity in (12, 13, 14):
        problem = EmbeddingProblem.of(
            torch.tensor([entity]), torch.from_numpy(triples).long(), context
        )
        best = problem.minimum(problem.start())[0]
        torch.testing.assert_close(rows[entity - 12], best, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("kind", BILINEAR)
def test_a_gpu_finds_the_same_rows_as_a_cpu(kind, graph):
    expected, rows = (
        embed_entities(TRIPLES, context_of(kind, graph, dtype=torch.float32, device=device)).cpu()
        for device in ("cpu", "cuda")
    )
    assert float((rows - expected).norm()) < 3e-3 * float(expected.norm())
