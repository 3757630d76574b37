"""QuatE: relations as rotations, relations of zeros, and the training steps they allow."""

import pytest
import torch

import dualkg as kg
from dualkg.losses.softmax import BoundOneVsAll
from dualkg.training.engines import Job, kernels_know_relations
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep

SHAPE = kg.GraphShape(5, 2)
IDS = tuple(torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(5)).T)


def build(*, normalized: bool = True) -> kg.QuatE:
    return kg.QuatE(SHAPE, dim=3, init_scale=1.0, seed=2, normalized=normalized).double()


def test_normalized_relations_preserve_norms():
    f = build().factors(*IDS)
    for image, vector in ((f.mapped_head, f.head), (f.mapped_tail, f.tail)):
        torch.testing.assert_close(image.square().sum(-1), vector.square().sum(-1))


def test_scaling_a_normalized_relation_changes_no_score():
    model = build()
    before = model.score(*IDS)
    with torch.no_grad():
        model.relations *= 7
    torch.testing.assert_close(model.score(*IDS), before)
    model.normalized = False
    assert not torch.allclose(model.score(*IDS), before)


def test_composed_rotations_are_products_of_quaternions():
    """Rotating by r and then by s is rotating by r s."""
    model = build()
    h, r, s = (
        vectors.detach()[:1]
        for vectors in (model.entities, model.multipliers, model.multipliers[1:])
    )
    product = model._joined(model.times(model._parts(r), model._parts(s)))
    both = model.map_head(model.map_head(h, torch.tensor([0])), torch.tensor([1]))
    torch.testing.assert_close(
        both, model._joined(model.times(model._parts(h), model._parts(product)))
    )


@pytest.mark.parametrize("part", ["a whole relation", "one quaternion"])
def test_a_relation_of_zeros_has_finite_scores(part):
    model = build()
    with torch.no_grad():
        if part == "a whole relation":
            model.relations[1] = 0
        else:
            model.relations[1].view(4, 3)[:, 2] = 0
    scores = model.score_tails(*IDS[:2])
    loss = (
        scores.logsumexp(-1).sum()
        + kg.DURA(0.1)(model.factors(*IDS))
        + kg.UnweightedDURA(0.1)(model.factors(*IDS))
    )
    loss.backward()
    assert torch.isfinite(scores).all()
    assert all(torch.isfinite(table.grad).all() for table in model.parameters())
    if part == "a whole relation":
        assert not model.score(IDS[0], torch.ones_like(IDS[1]), IDS[2]).any()


def step(kind: type, *, normalized: bool, relation_weight: float = 0.0):
    model = build(normalized=normalized)
    optimizer = build_optimizer(Optimizer(), model.parameters(), one_pass=kind is OneVsAllFusedStep)
    return kind(model, BoundOneVsAll(relation_weight=relation_weight), kg.DURA(0.1), optimizer)


@pytest.mark.parametrize("normalized", [True, False])
def test_fused_step_equals_reference_step_with_and_without_normalization(normalized):
    plain, fused = (
        step(kind, normalized=normalized) for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    assert fused.without_autograd != normalized
    job = Job(fused.model, kg.OneVsAll(relation_weight=1.0), kg.DURA(0.1), "Adagrad")
    assert kernels_know_relations(job) != normalized
    batch = torch.stack(IDS, dim=-1)[::7]
    for _ in range(5):
        torch.testing.assert_close(plain(batch, 0.1), fused(batch, 0.1), rtol=1e-9, atol=1e-12)
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


def test_a_run_saves_whether_relations_are_normalized(small_graph, tmp_path):
    model = kg.QuatE(small_graph.shape, dim=2, normalized=False)
    run = kg.train(model, small_graph, epochs=1, out=tmp_path / "run")
    assert run.recipe.model.options == {"normalized": False}
    assert not kg.load_run(tmp_path / "run").model.normalized
