"""Batches of inductive entities, compared with each entity on its own, and the solver."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference import inductive, lbfgs
from dualkg.inference.inductive import EmbeddingProblem, FrozenContext, embed_entities
from dualkg.inference.lbfgs import minimize
from dualkg.training.recipe import RegularizerConfig
from tests.conftest import graph_of

BILINEAR = [kg.CP, kg.DistMult, kg.ComplEx, kg.RESCAL, kg.SimplE, kg.QuatE, kg.TuckER]
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


@pytest.fixture
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    return graph_of(
        np.unique(np.stack([random.integers(0, n, 40) for n in (12, 2, 12)], axis=1), axis=0)
    )


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
def test_a_batch_has_the_objective_and_gradient_of_each_entity(
    kind, reciprocal, graph, monkeypatch
):
    monkeypatch.setattr(inductive, "MAX_SCORES", 20)  # one mapped entity per block
    single, batch = problems_of(context_of(kind, graph, reciprocal=reciprocal))
    rows = batch.context.new_rows[INDEPENDENT - 12]
    values, gradients = batch.value_and_gradient(rows)
    for position, problem in enumerate(single):
        one = slice(position, position + 1)
        value, gradient = problem.value_and_gradient(rows[one])
        torch.testing.assert_close(values[one], value)
        torch.testing.assert_close(gradients[one], gradient)
        torch.testing.assert_close(batch.start()[one], problem.start())
        selected = batch.select(torch.arange(2) == position)
        torch.testing.assert_close(selected.value_and_gradient(rows[one]), (value, gradient))


@pytest.mark.parametrize("kind", BILINEAR)
def test_a_batch_has_the_solution_of_each_entity(kind, graph):
    single, batch = problems_of(context_of(kind, graph))
    rows = minimize(batch, batch.start())
    for row, problem in zip(rows, single, strict=True):
        torch.testing.assert_close(row, minimize(problem, problem.start())[0], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "reciprocal"),
    [
        (kg.ComplEx, True),
        pytest.param(kg.CP, True, marks=pytest.mark.slow),
        pytest.param(kg.RESCAL, False, marks=pytest.mark.slow),
        pytest.param(kg.CP, False, marks=pytest.mark.slow),
        pytest.param(kg.ComplEx, False, marks=pytest.mark.slow),
        pytest.param(kg.RESCAL, True, marks=pytest.mark.slow),
    ],
)
def test_the_size_of_batches_does_not_matter(kind, reciprocal, graph):
    """Also where an entity is connected through another new one only, and where one has a triple
    with itself.
    """
    context = context_of(kind, graph, reciprocal=reciprocal)
    expected = embed_entities(TRIPLES, context)
    single = embed_entities(TRIPLES, context, max_batch=1)
    torch.testing.assert_close(single, expected, rtol=1e-6, atol=1e-7)


def test_entities_with_common_triples_are_embedded_in_turns(graph):
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
        best = minimize(problem, problem.start())[0]
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


@dataclass
class Quadratics:
    """Valleys of different length, Σ curvature (x − 1)² / 2, and how many points were evaluated
    each time.
    """

    curvatures: torch.Tensor
    evaluated: list[int]
    capturable = False

    def value_and_gradient(self, points):
        self.evaluated.append(len(points))
        differences = points - 1
        return (self.curvatures * differences.square()).sum(1) / 2, self.curvatures * differences

    def select(self, kept):
        return Quadratics(self.curvatures[kept], self.evaluated)


def test_minimize_finds_the_end_of_long_valleys_and_drops_converged_points():
    exponents = (0.5, 2, 3, 3)
    curvatures = torch.stack(
        [torch.logspace(0, exponent, 20, dtype=torch.float64) for exponent in exponents]
    )
    start = torch.zeros(4, 20, dtype=torch.float64)
    start[0] = 1  # which is its minimum
    quadratics = Quadratics(curvatures, [])
    minima = minimize(quadratics, start, tolerance=1e-9)
    torch.testing.assert_close(minima, torch.ones_like(minima), rtol=1e-7, atol=1e-7)
    assert quadratics.evaluated[0] == 4
    assert quadratics.evaluated[1] == 3
    assert quadratics.evaluated[-1] < 3


def test_minimize_finds_a_minimum_between_flat_sides():
    calls = []

    class Bend:
        """log(1 + exp(−9 x)) + x / 10."""

        capturable = False

        def value_and_gradient(self, points):
            calls.append(points)
            values = torch.nn.functional.softplus(-9 * points) + points / 10
            return values.sum(1), -9 * torch.sigmoid(-9 * points) + 0.1

        def select(self, kept):
            return self

    minimum = minimize(Bend(), torch.zeros(1, 1, dtype=torch.float64), tolerance=1e-9)
    assert float(minimum) == pytest.approx(np.log(89) / 9)
    assert len(calls) < 30


def direction_by_two_loops(steps, changes, gradient):
    """The recursion as it is usually written, of one objective."""
    factors = []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        factor = step.dot(gradient) / step.dot(change)
        factors.append(factor)
        gradient = gradient - factor * change
    if steps:
        gradient = gradient * steps[-1].dot(changes[-1]) / changes[-1].dot(changes[-1])
    for step, change, factor in zip(steps, changes, reversed(factors), strict=True):
        gradient = gradient + (factor - change.dot(gradient) / step.dot(change)) * step
    return -gradient


@pytest.mark.parametrize("num_steps", [0, 1, 5, 20, 23])
def test_the_direction_is_that_of_two_loops_over_the_last_steps(num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    roots = torch.randn(2, 30, 30, generator=generator, dtype=torch.float64)
    hessians = roots @ roots.mT + torch.eye(30, dtype=torch.float64)
    history = lbfgs._History.of(torch.zeros(2, 3, 10, dtype=torch.float64))
    steps = torch.randn(num_steps, 2, 30, generator=generator, dtype=torch.float64)
    changes = (hessians @ steps[..., None])[..., 0]
    for step, change in zip(steps, changes, strict=True):
        history = history.append(step.view(2, 3, 10), change.view(2, 3, 10))
    gradients = torch.randn(2, 3, 10, generator=generator, dtype=torch.float64)
    directions = history.direction(gradients)
    for one in range(2):
        last = slice(max(0, num_steps - 20), None)
        expected = direction_by_two_loops(
            list(steps[last, one]), list(changes[last, one]), gradients[one].flatten()
        )
        torch.testing.assert_close(directions[one].flatten(), expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25))
def test_no_two_entities_of_an_independent_set_share_a_triple(pairs):
    triples = torch.tensor([(one, 0, other) for one, other in pairs], dtype=torch.long).reshape(
        -1, 3
    )
    sets = [set(entities.tolist()) for entities in inductive._independent_sets(triples, 3)]
    joined = {(one, other) for one, other in pairs if one != other and min(one, other) >= 3}
    assert sorted(one for entities in sets for one in entities) == sorted(
        {end for pair in joined for end in pair}
    )
    assert not any({one, other} <= entities for one, other in joined for entities in sets)
