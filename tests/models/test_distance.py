"""Distance models: scores worked out by hand, all pairs against single ones, and what they
refuse.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.models import distance
from dualkg.models import distance as se
from dualkg.regularizers import REGULARIZERS
from dualkg.training.engines import choose_engine
from tests.families import DISTANCE
from tests.models.test_contract import all_triples, build

SHAPE = kg.GraphShape(7, 3)
ONE = kg.GraphShape(2, 1)


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def score_of(model: kg.Model, *, entities, relations) -> float:
    """The score of (entity 0, relation 0, entity 1) with these rows."""
    model.entities.data = torch.tensor(entities)
    model.relations.data = torch.tensor(relations)
    zero = torch.tensor([0])
    return model.score(zero, zero, torch.tensor([1])).item()


@pytest.mark.parametrize(("norm", "expected"), [(1, -5.0), (2, -math.sqrt(13)), ("squared", -13.0)])
def test_transe_by_hand(norm, expected):
    """(1, 2) + (0, −1) − (3, −2) = (−2, 3)."""
    model = kg.TransE(ONE, dim=2, reciprocal=False, norm=norm)
    assert score_of(
        model, entities=[[1.0, 2.0], [3.0, -2.0]], relations=[[0.0, -1.0]]
    ) == pytest.approx(expected)


@pytest.mark.parametrize(("norm", "expected"), [(1, -5.0), (2, -5.0), ("squared", -25.0)])
def test_rotate_by_hand(norm, expected):
    """A quarter turn takes 1 + 2i to −2 + i; from there to 1 + 5i it is −3 − 4i, of modulus 5."""
    model = kg.RotatE(ONE, dim=1, reciprocal=False, norm=norm, init_scale=0.25)
    quarter = math.sqrt(3) * 0.25 / 2
    assert score_of(
        model, entities=[[1.0, 2.0], [1.0, 5.0]], relations=[[quarter]]
    ) == pytest.approx(expected)


def test_mode_by_hand():
    """(1, 2)∘(−2, ½) − (1, −3) = (−3, 4), of length 5: relations squared_scale, and may turn
    about.
    """
    model = kg.ModE(ONE, dim=2, reciprocal=False, norm=2)
    assert score_of(
        model, entities=[[1.0, 2.0], [1.0, -3.0]], relations=[[-2.0, 0.5]]
    ) == pytest.approx(-5)


def test_se_by_hand():
    """(1, 2)·[[0, 1], [1, 0]] = (2, 1), and (3, 1)·2 = (6, 2): apart by 4 + 1."""
    model = kg.SE(ONE, dim=2, reciprocal=False)
    swap = [0.0, 1.0, 1.0, 0.0]
    double = [2.0, 0.0, 0.0, 2.0]
    assert score_of(
        model, entities=[[1.0, 2.0], [3.0, 1.0]], relations=[swap + double]
    ) == pytest.approx(-5)


def test_hake_by_hand():
    """Moduli 2·(3 + ½) = 7 and 4·(1 − ½) = 2 are 5 apart; angles π/2 + π/6 and π/3 are π/3, whose
    half has sine ½.
    """
    model = kg.HAKE(
        ONE, dim=1, reciprocal=False, init_scale=1.0, modulus_weight=2.0, phase_weight=0.5
    )
    turn = math.sqrt(3)
    found = score_of(
        model, entities=[[2.0, turn / 2], [4.0, turn / 3]], relations=[[-3.0, 0.5, turn / 6]]
    )
    assert found == pytest.approx(-(2 * 5 + 0.5 * turn * 0.5))


def test_one_learning_rate_suits_phase_weight_and_angles_of_hake():
    """Adam moves each number by its rate: half of 0.1·√3, the number of half a turn, shrinks by
    0.01, which is 12 %.
    """
    model = kg.HAKE(ONE, dim=1, reciprocal=False, init_scale=0.1, phase_weight=0.5)
    model.entities.data = torch.tensor([[1.0, 0.0], [1.0, 0.05]])
    model.relations.data = torch.tensor([[1.0, 0.0, 0.0]])
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    (-model.score(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))).sum().backward()
    adam.step()
    assert model.entities[1, 1].item() == pytest.approx(0.05 - 0.01)
    assert model.scales[1].item() == pytest.approx(0.5 * 0.1 * math.sqrt(3) - 0.01)


@pytest.mark.parametrize(("stored", "used"), [(-9.0, -3.0), (4.0, 1.0), (-1.0, -1.0)])
def test_the_bias_of_hake_stays_between_minus_the_modulus_and_one(stored, used):
    model = kg.HAKE(ONE, dim=1, reciprocal=False)
    model.relations.data = torch.tensor([[3.0, stored, 0.0]])
    _, bias, _ = model._relation(torch.tensor([0]))
    assert bias.item() == used


def test_murp_by_hand():
    """On a line the ball's distance is twice that of tangents: from R h = 2·0.3 to t ⊕ r = 0.5 −
    0.2, that is 0.6.
    """
    model = kg.MuRP(ONE, dim=1, reciprocal=False)
    found = score_of(model, entities=[[0.3, 0.25, 9.0], [0.5, 9.0, 0.5]], relations=[[2.0, -0.2]])
    assert found == pytest.approx(-((2 * 0.3) ** 2) + 0.25 + 0.5)


@pytest.mark.parametrize("name", DISTANCE)
@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_candidates_are_scored_as_among_all(name, side, reciprocal):
    model = build(name, reciprocal=reciprocal)
    heads = torch.tensor([0, 3, 3, 6])
    relations = torch.tensor([2, 0, 1, 0])
    tails = torch.tensor([5, 1, 0, 2])
    f = model.factors(heads, relations, tails)
    every = (
        model.score_tails(heads, relations)
        if side == "tail"
        else model.score_heads(relations, tails)
    )
    own = torch.tensor([[0, 1], [6, 6], [2, 0], [5, 3]])
    torch.testing.assert_close(model.candidate_scores(f, own, side), every.gather(1, own))
    shared = torch.tensor([4, 0, 4])
    torch.testing.assert_close(model.candidate_scores(f, shared, side), every[:, shared])
    fresh = model.factors(heads, relations, tails)
    torch.testing.assert_close(model.candidate_scores(fresh, shared, side), every[:, shared])


@pytest.mark.parametrize("name", ["RotatE", "HAKE", "MuRP", "ComplEx", "CP"])
@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("candidates", [[4, 0, 4], [[0, 1], [6, 6], [2, 0]]])
def test_a_joint_look_up_has_the_gradient_of_three(name, side, candidates):
    """The first look-up of a batch brings its heads and tails along; after one of them it is by
    itself.
    """
    model = build(name, reciprocal=False)
    ids = torch.tensor(candidates)
    batch = torch.tensor([[0, 1, 5], [3, 0, 3], [6, 1, 0]])
    gradients = []
    for gather_before in (False, True):
        f = model.factors(*batch.unbind(-1))
        if gather_before:
            assert f.head.shape == f.tail.shape
        model.zero_grad()
        found = (
            model.candidate_scores(f, ids, side).square().sum() + model.triple_scores(f).exp().sum()
        )
        found.backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for together, apart in zip(*gradients, strict=True):
        torch.testing.assert_close(together, apart)


@given(st.sampled_from(list(DISTANCE)), st.integers(1, 200), st.booleans())
def test_chunked_distances_equal_unchunked_ones(name, differences, compiled):
    """All pairs at once, with autograd over the differences, against parts that are made again, and
    against kernels.
    """
    model = build(name)
    one, other = (torch.randn(size, model.entities.shape[1]).requires_grad_() for size in (3, 5))
    upstream = torch.randn(3, 5)
    whole = model.distance(one.unsqueeze(1), other)
    expected = torch.autograd.grad(whole, (one, other), upstream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(distance.DIFFERENCES, "cpu", differences)
        if not compiled:
            patch.setattr("dualkg.kernels.cpu.HAS_NUMBA", False)
        found = model.distances(one, other)
        gradients = torch.autograd.grad(found, (one, other), upstream)
    torch.testing.assert_close(found, whole)
    for mine, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("side", ["tail", "head"])
@pytest.mark.parametrize("at_once", [1, 2 * 21, 2**22])
def test_squared_distances_of_se_by_products_equal_those_by_differences(monkeypatch, side, at_once):
    """Relation by relation, two at a time and all at once, with gradients; some relations are not
    in the batch.
    """
    monkeypatch.setattr(se, "DIFFERENCES", {"cpu": at_once})
    model = kg.SE(kg.GraphShape(7, 5), dim=3, norm="squared", reciprocal=False, init_scale=0.5)
    given = torch.tensor([0, 3, 3, 6, 2])
    relations = torch.tensor([4, 0, 2, 0, 4])
    products = (
        model.score_tails(given, relations)
        if side == "tail"
        else model.score_heads(relations, given)
    )
    every = torch.arange(7).expand(5, 7)
    ends = (
        (given[:, None].expand(5, 7), every)
        if side == "tail"
        else (every, given[:, None].expand(5, 7))
    )
    differences = model.score(
        ends[0].flatten(), relations.repeat_interleave(7), ends[1].flatten()
    ).view(5, 7)
    torch.testing.assert_close(products, differences)
    upstream = torch.randn(5, 7)
    gradients = [
        torch.autograd.grad(scores, tuple(model.parameters()), upstream)
        for scores in (products, differences)
    ]
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("norm", [1, 2, "squared"])
@pytest.mark.parametrize("name", ["TransE", "RotatE", "ModE", "SE"])
def test_the_gradient_at_distance_zero_is_finite(name, norm):
    model = DISTANCE[name](SHAPE, dim=3, norm=norm)
    model.entities.data.zero_()
    model.relations.data.zero_()
    loss = -model.score_tails(torch.tensor([0, 1]), torch.tensor([0, 0])).sum()
    loss.backward()
    assert loss == 0
    assert all(
        torch.isfinite(table.grad).all() for table in model.parameters() if table.grad is not None
    )


@pytest.mark.parametrize("dim", [1, 2, 20])
def test_a_translation_across_the_ball_is_finite(dim):
    """Where 1 + 2⟨t, r⟩ + ‖t‖²‖r‖² would be nothing in float32."""
    torch.set_default_dtype(torch.float32)
    model = kg.MuRP(SHAPE, dim=dim)
    model.entities.data[0, 0] = 8.0
    model.relations.data[0, dim] = -8.0
    some = torch.tensor([0, 1])
    first = torch.tensor([0, 0])
    scores = torch.cat([model.score_tails(some, first), model.score_heads(first, some)])
    scores.sum().backward()
    assert torch.isfinite(scores).all()
    assert torch.isfinite(model.score(some, first, some)).all()
    assert all(torch.isfinite(table.grad).all() for table in model.parameters())


@pytest.mark.parametrize("length", [0.5, 2.0])
def test_distances_of_all_pairs_in_the_ball_are_accurate_in_float32(length):
    exact = kg.MuRP(kg.GraphShape(50, 3), dim=20)
    for part in (exact.entities.data[:, :20], exact.relations.data[:, 20:]):
        part.copy_(torch.nn.functional.normalize(torch.randn_like(part), dim=-1) * length)
    rounded = kg.MuRP(exact.shape, dim=20).float()
    rounded.load_state_dict(exact.state_dict())
    entities = torch.arange(50)
    relations = torch.arange(50) % 6
    for ask, ids in (
        ("score_tails", (entities, relations)),
        ("score_heads", (relations, entities)),
    ):
        mine = getattr(rounded, ask)(*ids)
        true = getattr(exact, ask)(*ids)
        assert ((mine - true) / true).abs().max() < 1e-3


def test_full_turns_do_not_change_entity_vectors_of_hake():
    model = kg.HAKE(SHAPE, dim=3, init_scale=0.5)
    before = model.entity_vectors().detach().clone()
    model.entities.data[:, 3:] += 2 * model.half_turn
    torch.testing.assert_close(model.entity_vectors().detach(), before)


@pytest.mark.parametrize("name", ["HAKE", "MuRP"])
def test_dropout_requires_euclidean_coordinates(name, small_graph):
    torch.set_default_dtype(torch.float32)
    with pytest.raises(kg.RequestError, match="Dropout"):
        kg.train(
            DISTANCE[name](small_graph.shape, dim=2),
            small_graph,
            epochs=1,
            loss=kg.OneVsAll(dropout=0.5),
        )


def test_a_core_larger_than_memory_is_refused():
    with pytest.raises(kg.RequestError):
        kg.TuckER(SHAPE, dim=200_000)


def test_points_stay_inside_the_ball():
    torch.set_default_dtype(torch.float32)
    model = kg.MuRP(SHAPE, dim=4, init_scale=50.0)
    scores = model.score(*all_triples(model))
    scores.sum().backward()
    assert torch.isfinite(scores).all()
    assert all(torch.isfinite(table.grad).all() for table in model.parameters())


def test_dura_of_transe_uses_the_translation_and_its_inverse():
    """h = (1, 0), r = (1, 2), t = (0, 1): ‖h‖² + ‖t‖² = 2, ‖h + r‖² = 8, ‖t − r‖² = 2."""
    model = kg.TransE(ONE, dim=2, reciprocal=False)
    model.entities.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    model.relations.data = torch.tensor([[1.0, 2.0]])
    ids = [torch.tensor([id]) for id in (0, 0, 1)]
    assert kg.DURA(1.0, plain=10, mapped=1)(model.factors(*ids)).item() == pytest.approx(
        10 * 2 + 8 + 2
    )


# What a model's vectors do not mean.
UNDEFINED = {
    "SE": {"BasicDURA", "DURA", "RegP1"},
    "HAKE": {"Frobenius", "BasicDURA", "DURA", "RegP1"},
    "MuRP": {"Frobenius", "BasicDURA", "DURA", "RegP1"},
}


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("name", DISTANCE)
def test_regularizers_that_a_model_does_not_define_are_refused(name, regularizer):
    model = build(name)
    refused = (
        UNDEFINED.get(name, set()) | {"UnweightedDURA"} | ({"N3"} if name != "ModE" else set())
    )
    f = model.factors(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    chosen = REGULARIZERS[regularizer](0.5)
    if (name == "SE" and regularizer in UNDEFINED["SE"]) or regularizer in refused:
        with pytest.raises(kg.RequestError):
            chosen(f)
    else:
        assert torch.isfinite(chosen(f))


@pytest.mark.parametrize("name", DISTANCE)
def test_a_distance_has_no_dual_and_no_fused_step(name):
    with pytest.raises(kg.RequestError):
        kg.Dual(build(name))
    recipe = kg.Recipe().with_changes({"training.engine": "fast"})
    with pytest.raises(kg.RequestError, match="needs a model whose scores are one product"):
        choose_engine(recipe, build(name), kg.NoRegularizer())


def test_invalid_options_are_refused():
    for norm in (3, True):
        with pytest.raises(InvalidValue) as refused:
            kg.TransE(SHAPE, dim=2, norm=norm)
        assert (refused.value.setting, refused.value.found) == ("norm", norm)
    with pytest.raises(InvalidValue) as refused:
        kg.RotatE(SHAPE, dim=2, init_scale="xavier")
    assert (refused.value.setting, refused.value.found) == ("init_scale", "xavier")


@pytest.mark.parametrize("reciprocal", [True, False])
def test_rotate_is_the_dual_of_a_complex_whose_relations_have_modulus_one(reciprocal):
    rotate = kg.RotatE(SHAPE, dim=4, reciprocal=reciprocal, norm="squared", init_scale=0.5)
    primal = kg.ComplEx(SHAPE, dim=4, reciprocal=reciprocal)
    angles = rotate.angles(rotate.relations.detach())
    primal.entities.data = rotate.entities.data
    primal.relations.data = torch.cat([angles.cos(), angles.sin()], dim=-1)
    ids = all_triples(rotate)
    torch.testing.assert_close(rotate.score(*ids), kg.Dual(primal, "tail").score(*ids))
    torch.testing.assert_close(
        rotate.score(*ids), kg.Dual(primal, "head").score(*ids)
    )  # |r| = 1 keeps lengths


@pytest.mark.parametrize("reciprocal", [True, False])
def test_mode_draws_the_same_signs_for_a_relation_and_its_inverse(reciprocal):
    signs = kg.ModE(SHAPE, dim=50, reciprocal=reciprocal, seed=1).relations.detach()
    assert ((signs.abs() - 1).abs() < 0.1).all()
    assert {-1.0, 1.0} == set(signs[0].sign().tolist())
    if reciprocal:
        there, back = signs.sign().chunk(2)
        assert torch.equal(there, back)


def test_mode_is_the_dual_of_a_distmult():
    mode = kg.ModE(SHAPE, dim=4, norm="squared")
    primal = kg.DistMult(SHAPE, dim=4)
    primal.entities.data = mode.entities.data
    primal.relations.data = mode.relations.data
    ids = all_triples(mode)
    torch.testing.assert_close(mode.score(*ids), kg.Dual(primal, "tail").score(*ids))
