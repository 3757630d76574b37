"""Many inductive_entities at once, against each of them alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.inference import inductive, inductive_solver
from dualkg.inference.inductive import FrozenContext, Problem
from dualkg.inference.inductive_solver import Crowd, embed_entities, least_of_each, minimise, minimise_each
from dualkg.training.registry import describe_regularizer
from tests.conftest import graph_of

BILINEAR = [kg.CP, kg.DistMult, kg.ComplEx, kg.RESCAL, kg.SimplE, kg.QuatE, kg.TuckER]
RECIPE = kg.Recipe(
    regularizer=describe_regularizer(kg.DURA(0.05, plain=0.5, mapped=1.5)), loss=kg.Loss(frequency_weight=0.3)
)
# Of the inductive_entities 12 to 15 three have triples with entities that are known, and some with each other.
TRIPLES = np.array(
    [(12, 0, 3), (12, 0, 4), (5, 1, 12), (12, 1, 13), (13, 0, 14), (5, 1, 14), (14, 1, 14), (0, 0, 14), (13, 1, 15)],
    dtype=np.int32,
)
ALONE = torch.tensor([12, 14])  # which have no triple with each other


@pytest.fixture
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    return graph_of(np.unique(np.stack([random.integers(0, n, 40) for n in (12, 2, 12)], axis=1), axis=0))


def context_of(kind, graph, *, reciprocal=True, dtype=torch.float64, device="cpu"):
    model = kind(graph.shape, dim=3, init_scale=0.7, reciprocal=reciprocal, seed=1).to(device, dtype).eval()
    context = FrozenContext.of(model, graph, recipe=RECIPE).with_inductive_entities(
        4, np.concatenate([graph.train, TRIPLES])
    )
    noise = torch.randn(
        context.inductive_entities.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return replace(context, inductive_entities=noise.to(context.inductive_entities))


def problems_and_crowd(context):
    """Of those who are alone, when all have rows."""
    triples, problems = torch.from_numpy(TRIPLES).long(), []
    for entity in ALONE.tolist():
        mine = triples[(triples[:, [0, 2]] == entity).any(1)]
        bystanding = min(1.0, len(mine) / context.usual_triples)
        problems.append(Problem.of(entity, mine, context, bystanding=bystanding))
    return problems, Crowd.of(ALONE, triples, torch.ones(16, dtype=torch.bool), context)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_a_crowd_has_the_objective_and_the_slope_of_each(kind, reciprocal, graph, monkeypatch):
    monkeypatch.setattr(inductive, "SCORES_AT_ONCE", 20)  # so that images are scored one at a time
    problems, crowd = problems_and_crowd(context_of(kind, graph, reciprocal=reciprocal))
    rows = crowd.context.inductive_entities[ALONE - 12]
    values, slopes = crowd.slopes(rows)
    for place, problem in enumerate(problems):
        value, slope = problem.slope(rows[place])
        torch.testing.assert_close(values[place], value / problem.num_triples)
        torch.testing.assert_close(slopes[place], slope / problem.num_triples)
        torch.testing.assert_close(crowd.start()[place], problem.start())


@pytest.mark.parametrize("kind", BILINEAR)
def test_a_crowd_is_solved_as_each_alone(kind, graph):
    problems, crowd = problems_and_crowd(context_of(kind, graph))
    found = minimise_each(crowd, crowd.start())
    for row, problem in zip(found, problems, strict=True):
        torch.testing.assert_close(row, minimise(problem, problem.start()), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", [kg.CP, kg.ComplEx, kg.RESCAL])
def test_newcomers_are_the_same_in_crowds_and_one_by_one(kind, reciprocal, graph, monkeypatch):
    """Also where one is known by another inductive_entity alone, and one has a triple with itself."""
    context = context_of(kind, graph, reciprocal=reciprocal)
    wanted = embed_entities(TRIPLES, context)
    monkeypatch.setattr(inductive_solver, "are_solved_together", lambda inductive_entities: True)
    monkeypatch.setattr(inductive_solver, "MOST_AT_ONCE", 2)
    torch.testing.assert_close(embed_entities(TRIPLES, context), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("kind", BILINEAR)
def test_on_a_gpu_newcomers_end_where_they_do_on_a_cpu(kind, graph):
    wanted, found = (
        embed_entities(TRIPLES, context_of(kind, graph, dtype=torch.float32, device=device)).cpu()
        for device in ("cpu", "cuda")
    )
    assert float((found - wanted).norm()) < 3e-3 * float(wanted.norm())


def test_descents_in_step_each_end_where_they_should():
    """Valleys of different length, one function that is flat beyond its least point, one begun at its end."""
    curvatures = torch.stack([torch.logspace(0, exponent, 20, dtype=torch.float64) for exponent in (0.5, 2, 3)])

    def functions(points):
        gaps = points[:3] - 1
        valleys = (curvatures * gaps.square()).sum(1) / 2, curvatures * gaps
        bend = points[3:]
        bent = torch.nn.functional.softplus(-9 * bend) + bend / 10, -9 * torch.sigmoid(-9 * bend) + 0.1
        return torch.cat([valleys[0], bent[0].sum(1)]), torch.cat([valleys[1], bent[1]])

    start = torch.zeros(4, 20, dtype=torch.float64)
    start[0] = 1
    found = least_of_each(functions, start, tolerance=1e-9)
    torch.testing.assert_close(found[:3], torch.ones_like(found[:3]), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[3], torch.full_like(found[3], np.log(89) / 9), rtol=1e-7, atol=1e-7)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25))
def test_no_two_of_a_turn_have_a_triple_with_each_other(pairs):
    triples = torch.tensor([(one, 0, other) for one, other in pairs], dtype=torch.long).reshape(-1, 3)
    turns = [set(turn.tolist()) for turn in inductive_solver._turns(triples, 3)]
    joined = {(one, other) for one, other in pairs if one != other and min(one, other) >= 3}
    assert sorted(one for turn in turns for one in turn) == sorted({end for pair in joined for end in pair})
    assert not any({one, other} <= turn for one, other in joined for turn in turns)
