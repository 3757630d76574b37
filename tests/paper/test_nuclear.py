"""Theorem 1: the bound holds for any factors, and is reached by rebalanced ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue, RequestError
from paper.nuclear import nuclear_bound, rebalanced
from tests.models import odd_models as odd

MODELS = (kg.CP, kg.DistMult, kg.ComplEx)
LAMBDAS = st.floats(1e-3, 1e3)
ATOL = 1e-9


@st.composite
def models(draw, kinds=MODELS):
    """Any model of float64 factors, columns of very different lengths among them, some of zeros."""
    shape = kg.GraphShape(draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    dim = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(kinds))
    reciprocal = draw(st.booleans())
    model = kind(
        shape, dim=dim, reciprocal=reciprocal, init_scale=1.0, seed=draw(st.integers(0, 99))
    ).double()
    with torch.no_grad():
        for table in model.parameters():
            lengths = [draw(st.sampled_from((0.0, 1e-3, 0.5, 1.0, 30.0))) for _ in range(dim)]
            table.mul_(torch.tensor(lengths).double().repeat(kind.numbers_per_coordinate))
    return model


def factors(model):
    """H, R and T as matrices `(rows, dim)`, complex where the model is; T is conjugated, so that X
    is their product.
    """

    def numbers(table):
        if model.numbers_per_coordinate == 1:
            return table.detach()
        return torch.complex(*table.detach().chunk(2, dim=-1))

    return numbers(model.head_table), numbers(model.relations), numbers(model.tail_table).conj()


def tensor(model):
    return torch.einsum("id,jd,kd->ijk", *factors(model))


def all_ids(model):
    ranges = [
        torch.arange(n)
        for n in (model.shape.num_entities, model.num_relation_ids, model.shape.num_entities)
    ]
    return torch.cartesian_prod(*ranges).T


def scores(model):
    return model.score(*all_ids(model)).detach()


@given(models(), LAMBDAS, LAMBDAS)
def test_the_bound_is_above_the_sum_of_the_components(model, plain, mapped):
    found = nuclear_bound(model, plain=plain, mapped=mapped)
    lengths = [columns.abs().square().sum(0).sqrt() for columns in factors(model)]
    components = float((lengths[0] * lengths[1] * lengths[2]).sum())
    assert found.components == pytest.approx(components, rel=1e-9)
    assert found.bound >= components * (1 - 1e-9)


@given(models(), LAMBDAS, LAMBDAS)
def test_the_sum_is_dura_over_all_triples(model, plain, mapped):
    """Equation (9) taken apart into (8): every head with every relation and every tail, once."""
    dura = kg.DURA(1.0, plain=plain, mapped=mapped)
    whole = dura.per_triple(model.factors(*all_ids(model))).sum().detach()
    assert nuclear_bound(model, plain=plain, mapped=mapped).dura == pytest.approx(
        float(whole), rel=1e-9
    )


@given(models(), LAMBDAS, LAMBDAS)
def test_rebalancing_keeps_the_tensor_and_reaches_the_smallest_bound(model, plain, mapped):
    before = tensor(model).clone()
    balanced = rebalanced(model, plain=plain, mapped=mapped)
    size = float(before.abs().max()) + 1e-30
    torch.testing.assert_close(tensor(balanced), before, rtol=1e-9, atol=size * ATOL)
    torch.testing.assert_close(scores(balanced), scores(model), rtol=1e-9, atol=size * ATOL)
    torch.testing.assert_close(tensor(model), before, rtol=0, atol=0)  # what was given is as it was
    found = nuclear_bound(balanced, plain=plain, mapped=mapped)
    assert found.bound == pytest.approx(found.components, rel=1e-9)
    assert found.components == pytest.approx(nuclear_bound(model).components, rel=1e-9)


@given(models(), LAMBDAS, LAMBDAS, st.floats(0.01, 100))
def test_transformations_that_do_not_change_the_bound(model, plain, mapped, factor):
    before = nuclear_bound(model, plain=plain, mapped=mapped)
    weighted = nuclear_bound(model, plain=plain * factor, mapped=mapped * factor)
    assert weighted.bound == pytest.approx(before.bound, rel=1e-9)
    assert weighted.dura == pytest.approx(before.dura * factor, rel=1e-9)
    with torch.no_grad():
        for table in model.parameters():
            table.copy_(-table.flip(0))
    rotated = nuclear_bound(model, plain=plain, mapped=mapped)
    assert rotated.bound == pytest.approx(before.bound, rel=1e-9)
    twice = rebalanced(rebalanced(model, plain=plain, mapped=mapped), plain=plain, mapped=mapped)
    for one, other in zip(
        rebalanced(model, plain=plain, mapped=mapped).parameters(), twice.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=ATOL)


def by_hand(heads, relation, tails):
    """One component: CP of two entities and one relation without its reciprocal."""
    model = kg.CP(kg.GraphShape(2, 1), dim=1, reciprocal=False).double()
    values = {"entities": heads, "relations": [relation], "tails": tails}
    model.load_state_dict(
        {name: torch.tensor(column).double()[:, None] for name, column in values.items()}
    )
    return model


def test_one_component_by_hand():
    """‖h‖ = 5, |r| = 2, ‖t‖ = 1, λ1 = 1, λ2 = 4.

    Σ = 2 · (25 + 1) · (4 · 4 + 1 · 1) = 884; the divisor is 4 · 2 · √(1 · 4 · 1) = 16; the
    component is 5 · 2 · 1 = 10. Balanced: |r| = √(1/4) = ½, so ‖h‖² = ‖t‖² = 10 / ½ = 20, Σ = 2 ·
    40 · (4 · ¼ + 1) = 160, and 160 / 16 = 10.
    """
    model = by_hand([3.0, 4.0], 2.0, [0.0, 1.0])
    found = nuclear_bound(model, plain=1, mapped=4)
    assert (found.dura, found.bound, found.components) == (884, 55.25, 10)
    balanced = rebalanced(model, plain=1, mapped=4)
    found = nuclear_bound(balanced, plain=1, mapped=4)
    assert (found.dura, found.bound, found.components) == pytest.approx((160, 10, 10))
    assert balanced.relations.item() == pytest.approx(0.5)
    assert balanced.entities.flatten().tolist() == pytest.approx(
        [0.6 * math.sqrt(20), 0.8 * math.sqrt(20)]
    )
    assert balanced.tails.flatten().tolist() == pytest.approx([0.0, math.sqrt(20)])


def test_the_paper_s_statement_lacks_a_quarter():
    """X = 1 · 1 · 1 has norm 1; Theorem 1 as printed, without |E| and the 4, would say 1 + 1 + 1 +
    1.
    """
    model = kg.CP(kg.GraphShape(1, 1), dim=1, reciprocal=False)
    model.load_state_dict({name: torch.ones(1, 1) for name in ("entities", "relations", "tails")})
    found = nuclear_bound(model)
    assert (found.dura, found.bound) == (4, 1)


SHAPE = kg.GraphShape(3, 2)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (kg.RESCAL(SHAPE, dim=2), "RESCAL"),
        (kg.Dual(kg.CP(SHAPE, dim=2)), "the dual of CP"),
        (odd.Normalised(SHAPE, dim=2), "Normalised"),
    ],
)
def test_models_without_components_are_refused(model, name):
    with pytest.raises(RequestError, match=f"Theorem 1 holds for .*; the model is {name}."):
        rebalanced(model)


@pytest.mark.parametrize("setting", ["plain", "mapped"])
@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_invalid_weights_are_refused(setting, weight):
    with pytest.raises(InvalidValue, match=f"{setting}.* should be above 0 and finite"):
        nuclear_bound(kg.CP(SHAPE, dim=2), **{setting: weight})
