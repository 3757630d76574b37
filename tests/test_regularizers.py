"""The paper's regularizers on numbers worked out on paper, for real, complex and full-matrix
relations.
"""

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.regularizers import REGULARIZERS, dura_of_all_triples
from paper.nuclear import nuclear_bound
from tests.families import BILINEAR
from tests.models import odd_models as odd
from tests.models.test_by_hand import ONE, ZERO, model_by_hand
from tests.raising import refused

# With the numbers of tests/models/test_by_hand.py, for one triple:
#           ‖h‖² ‖t‖² ‖hR‖² ‖tRᵀ‖² ‖R‖²
# CP           5    5    13     37   10
# ComplEx      5    5    50     50   10
# RESCAL       5    5   149    116   30
# SimplE       5    5  3.25   3.25   10
# QuatE        5    7     5      7    4   of r as it is stored
# With all four triples of the two entities, of x = (1, 2) and y = (2, 1), the means are:
#           ‖x‖² ‖y‖² ‖xR‖² ‖yR‖² ‖xRᵀ‖² ‖yRᵀ‖²   means: plain 5 and 5, mapped
# CP           5    5    13    37     13     37            25 and 25
# ComplEx      5    5    50    50     50     50            50 and 50
# RESCAL       5    5   149    89    146    116           119 and 131
# SimplE       5    5  3.25  9.25   9.25   3.25          6.25 and 6.25
# A relation of QuatE changes no length.
EXPECTED = {
    "CP": {
        "Frobenius": 5 + 10 + 5,
        "N3": (1 + 8) + (27 + 1) + (8 + 1),
        "BasicDURA": 13 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (13 + 37),
        "UnweightedDURA": 0.5 * (5 + 5) + 1.5 * (25 + 25),
        "RegP1": (1 + 3) + (5 + 3),  # |(3, −2) − (2, 1)| and |(6, −1) − (1, 2)|
    },
    "ComplEx": {
        "Frobenius": 5 + 10 + 5,
        "N3": 5**1.5 + 10**1.5 + 5**1.5,
        "BasicDURA": 50 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (50 + 50),
        "UnweightedDURA": 0.5 * (5 + 5) + 1.5 * (50 + 50),
        "RegP1": 5 + 5,  # |5+5i − (2+i)| = |3+4i| and |5+5i − (1+2i)| = |4+3i|
    },
    "RESCAL": {
        "Frobenius": 5 + 30 + 5,
        "BasicDURA": 149 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (149 + 116),
        "UnweightedDURA": 0.5 * (5 + 5) + 1.5 * (119 + 131),
        "RegP1": (5 + 9) + (3 + 8),  # |(7, 10) − (2, 1)| and |(4, 10) − (1, 2)|
    },
    "SimplE": {  # each number is a coordinate
        "Frobenius": 5 + 10 + 5,
        "N3": (1 + 8) + (27 + 1) + (8 + 1),
        "BasicDURA": 3.25 + 5,
        "DURA": 0.5 * (5 + 5) + 1.5 * (3.25 + 3.25),
        "UnweightedDURA": 0.5 * (5 + 5) + 1.5 * (6.25 + 6.25),
        "RegP1": (3 + 0.5) + (0.5 + 3),  # |(−1, 1.5) − (2, 1)| and |(1.5, −1) − (1, 2)|
    },
    "QuatE": {
        "Frobenius": 5 + 4 + 7,
        "N3": 5**1.5 + 8 + 7**1.5,
        "BasicDURA": 5 + 7,
        "DURA": 0.5 * (5 + 7) + 1.5 * (5 + 7),
        "UnweightedDURA": 0.5 * (6 + 6) + 1.5 * (6 + 6),
        "RegP1": 3 + 3,
    },
}
EXPECTED["TuckER"] = EXPECTED["RESCAL"]  # the same matrix
CASES = [(model, name, value) for model, row in EXPECTED.items() for name, value in row.items()]


def build(name: str, weight: float) -> kg.Regularizer:
    uneven = {"plain": 0.5, "mapped": 1.5} if name in ("DURA", "UnweightedDURA") else {}
    return REGULARIZERS[name](weight, **uneven)


@pytest.mark.parametrize(("model", "name", "value"), CASES)
def test_value_by_hand(model, name, value):
    factors = model_by_hand(model).factors(ZERO, ZERO, ONE)
    torch.testing.assert_close(
        build(name, 0.1)(factors), torch.tensor(0.1 * value), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", [name for name in REGULARIZERS if name != "none"])
def test_it_is_a_mean_over_the_triples_of_the_batch(name):
    model = kg.ComplEx(kg.GraphShape(5, 2), dim=3, init_scale=1.0)
    ids = torch.tensor([[0, 1, 2], [3, 0, 4], [3, 0, 3]])
    together = build(name, 0.7)(model.factors(*ids.T))
    apart = [build(name, 0.7)(model.factors(*row[None].T)) for row in ids]
    torch.testing.assert_close(together, torch.stack(apart).mean())


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("model", BILINEAR)
def test_the_gradient_is_finite_at_zero(model, name):
    if name == "N3" and model in ("RESCAL", "TuckER"):
        pytest.skip("N3 does not apply to matrices; another test reads why")
    made = BILINEAR[model](kg.GraphShape(3, 1), dim=2, init_scale=0.0)
    ids = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1, 0])
    value = build(name, 1.0)(made.factors(*ids))
    if value.requires_grad:
        value.backward()
    assert value.item() == 0
    for parameter in made.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_no_regularizer_is_zero():
    assert kg.NoRegularizer()(model_by_hand("CP").factors(ZERO, ZERO, ONE)).item() == 0


def test_n3_refuses_models_with_matrices():
    with pytest.raises(kg.RequestError, match="N3"):
        kg.N3(0.1)(model_by_hand("RESCAL").factors(ZERO, ZERO, ONE))


@pytest.mark.parametrize("kind", [kg.DURA, kg.BasicDURA, kg.RegP1])
def test_mapped_vectors_need_a_model_that_has_an_adjoint(kind):
    shape = kg.GraphShape(3, 2)
    with pytest.raises(kg.RequestError):
        kind(0.1).check(kg.SE(shape, dim=2))
    with pytest.raises(kg.RequestError):
        kind(0.1).check(odd.Scaled(shape, dim=2))
    kind(0.1).check(odd.ScaledWithAdjoint(shape, dim=2))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: kg.DURA(-1.0), "regularizer.weight"),
        (lambda: kg.DURA(0.1, plain=-1), "regularizer.plain"),
        (lambda: kg.N3(float("nan")), "regularizer.weight"),
    ],
)
def test_a_negative_weight_is_refused(make, setting):
    with refused(InvalidValue, setting=setting, expected="at least 0"):
        make()


class Flipped(kg.BilinearModel):
    """One's own: scales each coordinate and turns their order round. It writes its maps, and no
    sums.
    """

    def map_head(self, head, relations):
        return (head * self.relations[relations]).flip(-1)

    def map_tail(self, tail, relations):
        return tail.flip(-1) * self.relations[relations]


def all_triples(model: kg.Model) -> torch.Tensor:
    ranges = [
        torch.arange(n)
        for n in (model.shape.num_entities, model.num_relation_ids, model.shape.num_entities)
    ]
    return torch.cartesian_prod(*ranges).T


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", [*BILINEAR.values(), Flipped])
def test_unweighted_dura_is_dura_over_all_triples(kind, reciprocal):
    """The value and every gradient, against each triple taken one by one."""
    model = kind(kg.GraphShape(5, 2), dim=3, reciprocal=reciprocal, init_scale=1.0).double()
    unbatched = build("DURA", 0.7)(model.factors(*all_triples(model)))
    at_once = build("UnweightedDURA", 0.7)(model.factors(ZERO, ZERO, ONE))
    torch.testing.assert_close(at_once, unbatched, rtol=1e-12, atol=0)
    gradients = (
        torch.autograd.grad(value, model.parameters(), allow_unused=True, materialize_grads=True)
        for value in (unbatched, at_once)
    )
    for table, one, other in zip(model.parameters(), *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
        if kind is not kg.QuatE or table is not model.relations:  # whose relations change no length
            assert other.abs().sum(1).min() > 0  # every row, though the batch has two entities


@pytest.mark.parametrize("kind", [kg.CP, kg.DistMult, kg.ComplEx])
def test_unweighted_dura_times_its_triples_is_equation_9(kind):
    model = kind(kg.GraphShape(5, 2), dim=3, init_scale=1.0)
    tables = [model.head_table, model.relations, model.tail_table]
    heads, relations, tails = (table.detach().double() for table in tables)
    if kind is kg.ComplEx:
        heads, relations, tails = (
            torch.complex(*table.chunk(2, dim=-1)) for table in (heads, relations, tails)
        )
    norms = [
        torch.stack([(table * r).abs().square().sum() for r in relations]).sum()
        for table in (heads, tails)
    ]
    plain = (heads.abs().square() + tails.abs().square()).sum()
    printed = 5 * (norms[0] + norms[1] + 4 * plain)  # |E| Σ_j (‖H Rⱼ‖² + ‖T‖² + ‖T Rⱼᵀ‖² + ‖H‖²)
    mean = dura_of_all_triples(model, plain=1.0, mapped=1.0)
    assert (5 * 5 * 4 * mean).item() == pytest.approx(printed.item(), rel=1e-6)
    assert nuclear_bound(model).dura == pytest.approx(printed.item(), rel=1e-12)


def test_unweighted_dura_refuses_subclasses_of_models_with_a_closed_form():
    with pytest.raises(kg.RequestError, match="UnweightedDURA"):
        kg.UnweightedDURA(0.1).check(odd.TwoTables(kg.GraphShape(3, 2), dim=2))
    with pytest.raises(InvalidValue) as invalid:
        kg.UnweightedDURA(0.1, mapped=-2)
    assert (invalid.value.setting, invalid.value.found) == ("regularizer.mapped", -2)


def test_dura_of_a_dual_equals_dura_of_its_primal():
    model = model_by_hand("RESCAL")
    one = kg.DURA(0.1)(model.factors(ZERO, ZERO, ONE))
    other = kg.DURA(0.1)(kg.Dual(model, "head").factors(ZERO, ZERO, ONE))
    assert one.item() == other.item()
