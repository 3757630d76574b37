"""The problem of embedding an unseen entity, compared with training losses that are written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.inference.extension import with_rows
from dualkg.inference.inductive import (
    RIDGE,
    EmbeddingProblem,
    FrozenContext,
    Penalty,
    log_normalizers,
    num_examples,
    training_queries,
)
from dualkg.inference.lbfgs import minimize
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
    value, gradient = problem.value_and_gradient(here)
    with torch.no_grad():
        difference = (problem(here + step * direction) - problem(here - step * direction)) / (
            2 * step * 4
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
    least, gradient = problem.value_and_gradient(minimize(problem, problem.start()))
    assert float(gradient.abs().max()) < 1e-8
    assert float(least) < float(value)


@pytest.mark.parametrize("kind", BILINEAR)
def test_float32_is_precise_enough(kind, graph):
    """A solution to four digits gives the same predictions as one to ten."""
    exact, single = (
        problem_of(model, graph) for model in (model_of(kind, graph), model_of(kind, graph).float())
    )
    expected, rows = (minimize(problem, problem.start()) for problem in (exact, single))
    assert rows.dtype == torch.float32
    assert float((rows - expected).norm()) < 3e-3 * float(expected.norm())


def test_log_normalizers_have_first_and_second_derivatives():
    """Explanations need the second ones."""
    random = torch.Generator().manual_seed(0)
    images, candidates = (
        torch.randn(num, 4, generator=random, dtype=torch.float64) for num in (3, 9)
    )
    expected = torch.logsumexp(images @ candidates.T, dim=-1)
    torch.testing.assert_close(log_normalizers(images, candidates), expected)
    images.requires_grad_()
    torch.testing.assert_close(log_normalizers(images, candidates), expected)
    assert torch.autograd.gradcheck(lambda some: log_normalizers(some, candidates), images)
    assert torch.autograd.gradgradcheck(lambda some: log_normalizers(some, candidates), images)


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
    _, gradient = problem.value_and_gradient(minimize(problem, problem.start()))
    assert float(gradient.abs().max()) < 1e-8


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
    _, gradient = problem.value_and_gradient(here)
    with torch.no_grad():
        difference = (problem(here + step * direction) - problem(here - step * direction)) / (
            2 * step * 4
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
