"""The paper's regularizers on numbers worked out on paper, for real, complex and full-matrix relations."""

from __future__ import annotations

import pytest
import torch

import dualkg as kg
from dualkg.models import MODELS
from dualkg.regularizers import REGULARIZERS
from tests.models.test_by_hand import ONE, ZERO, model_by_hand

# With the numbers of tests/models/test_by_hand.py, for one triple:
#           ‖h‖² ‖t‖² ‖hR‖² ‖tRᵀ‖² ‖R‖²
# CP           5    5    13     37   10
# ComplEx      5    5    50     50   10
# RESCAL       5    5   149    116   30
EXPECTED = {
    "CP": {
        "Frobenius": 5 + 10 + 5,
        "N3": (1 + 8) + (27 + 1) + (8 + 1),
        "BasicDURA": 13 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (13 + 37),
        "RegP1": (1 + 3) + (5 + 3),  # |(3, −2) − (2, 1)| and |(6, −1) − (1, 2)|
    },
    "ComplEx": {
        "Frobenius": 5 + 10 + 5,
        "N3": 5**1.5 + 10**1.5 + 5**1.5,
        "BasicDURA": 50 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (50 + 50),
        "RegP1": 5 + 5,  # |5+5i − (2+i)| = |3+4i| and |5+5i − (1+2i)| = |4+3i|
    },
    "RESCAL": {
        "Frobenius": 5 + 30 + 5,
        "BasicDURA": 149 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (149 + 116),
        "RegP1": (5 + 9) + (3 + 8),  # |(7, 10) − (2, 1)| and |(4, 10) − (1, 2)|
    },
}
CASES = [(model, name, value) for model, row in EXPECTED.items() for name, value in row.items()]


def build(name: str, weight: float) -> kg.Regularizer:
    return kg.DURA(weight, plain=0.5, mapped=1.5) if name == "DURA" else REGULARIZERS[name](weight)


@pytest.mark.parametrize(("model", "name", "value"), CASES)
def test_formula(model, name, value):
    factors = model_by_hand(model).factors(ZERO, ZERO, ONE)
    torch.testing.assert_close(build(name, 0.1)(factors), torch.tensor(0.1 * value), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in REGULARIZERS if name != "none"])
def test_it_is_a_mean_over_the_triples_of_the_batch(name):
    model = kg.ComplEx(kg.GraphShape(5, 2), dim=3, init_scale=1.0)
    ids = torch.tensor([[0, 1, 2], [3, 0, 4], [3, 0, 3]])
    together = build(name, 0.7)(model.factors(*ids.T))
    apart = [build(name, 0.7)(model.factors(*row[None].T)) for row in ids]
    torch.testing.assert_close(together, torch.stack(apart).mean())


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_finite_at_zero(model, name):
    if name == "N3" and model == "RESCAL":
        pytest.skip("N3 does not apply to RESCAL; another test reads why")
    made = MODELS[model](kg.GraphShape(3, 1), dim=2, init_scale=0.0)
    ids = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1, 0])
    value = build(name, 1.0)(made.factors(*ids))
    if value.requires_grad:
        value.backward()
    assert value.item() == 0
    for parameter in made.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_none_costs_nothing():
    assert kg.NoRegularizer()(model_by_hand("CP").factors(ZERO, ZERO, ONE)).item() == 0


def test_n3_explains_itself_to_a_model_with_matrices():
    with pytest.raises(kg.RequestError, match="relations are diagonal .* those of RESCAL are not. Use DURA"):
        kg.N3(0.1)(model_by_hand("RESCAL").factors(ZERO, ZERO, ONE))


@pytest.mark.parametrize("make", [lambda: kg.DURA(-1.0), lambda: kg.DURA(0.1, plain=-1), lambda: kg.N3(float("nan"))])
def test_a_negative_weight_is_refused(make):
    with pytest.raises(kg.RequestError, match="at least 0"):
        make()


def test_dura_regularizes_a_dual_by_its_primal_s_factors():
    model = model_by_hand("RESCAL")
    one = kg.DURA(0.1)(model.factors(ZERO, ZERO, ONE))
    other = kg.DURA(0.1)(kg.Dual(model, "head").factors(ZERO, ZERO, ONE))
    assert one.item() == other.item()
