"""Scores and duals worked out by hand."""

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from tests.raising import refused

# h, the numbers of the relation, t; then s = ⟨hR, t⟩, −‖hR − t‖² and −‖tRᵀ − h‖²
BY_HAND = {
    # hR = (3, −2), tRᵀ = (6, −1)
    "CP": (kg.CP, [1, 2], [3, -1], [2, 1], 4, -(1 + 9), -(25 + 9)),
    "DistMult": (kg.DistMult, [1, 2], [3, -1], [2, 1], 4, -(1 + 9), -(25 + 9)),
    # h = 1+2i, r = 3−i, t = 2+i: h∘r = 5+5i, t∘r̄ = 5+5i, s = Re (5+5i)(2−i) = 15
    "ComplEx": (kg.ComplEx, [1, 2], [3, -1], [2, 1], 15, -(9 + 16), -(16 + 9)),
    # R = [[1, 2], [3, 4]]: hR = (7, 10), tRᵀ = (4, 10)
    "RESCAL": (kg.RESCAL, [1, 2], [1, 2, 3, 4], [2, 1], 24, -(25 + 81), -(9 + 64)),
    # one number as head and one as tail: s = ½ (1·3·1 + 2·(−1)·2), hR = ½ (2·(−1), 1·3), tRᵀ = ½
    # (1·3, 2·(−1))
    "SimplE": (kg.SimplE, [1, 2], [3, -1], [2, 1], -0.5, -(9 + 0.25), -(0.25 + 9)),
    # h = 1+2i, r = (1+i+j+k) / 2, t = 2+i+j+k: h r = (−1+3i−j+3k) / 2, t r̄ = (5−i−j−k) / 2
    "QuatE": (kg.QuatE, [1, 2, 0, 0], [1, 1, 1, 1], [2, 1, 1, 1], 1.5, -9, -9),
    # R = 1 · [[1, 0], [3, 2]] + 2 · [[0, 1], [0, 1]], which is RESCAL's
    "TuckER": (kg.TuckER, [1, 2], [1, 2], [2, 1], 24, -(25 + 81), -(9 + 64)),
}
CORE = torch.tensor([[[1, 0], [3, 2]], [[0, 1], [0, 1]]]).float()


def model_by_hand(name: str) -> kg.BilinearModel:
    """A model of two entities, 0 with the head's numbers and 1 with the tail's, and one
    relation.
    """
    kind, head, relation, tail, *_ = BY_HAND[name]
    model = kind(
        kg.GraphShape(2, 1), dim=len(head) // kind.numbers_per_coordinate, reciprocal=False
    )
    tables = {
        "entities": torch.tensor([head, tail]).float(),
        "relations": torch.tensor([relation]).float(),
    }
    if name == "CP":
        tables["tails"] = tables["entities"]
    if name == "TuckER":
        tables["core"] = CORE
    model.load_state_dict(tables)
    return model


ZERO = torch.tensor([0])
ONE = torch.tensor([1])


@pytest.mark.parametrize("name", BY_HAND)
def test_scores(name):
    model, (*_, primal, tail_dual, head_dual) = model_by_hand(name), BY_HAND[name]
    assert model.score(ZERO, ZERO, ONE).item() == primal
    assert kg.Dual(model, "tail").score(ZERO, ZERO, ONE).item() == tail_dual
    assert kg.Dual(model, "head").score(ZERO, ZERO, ONE).item() == head_dual


@pytest.mark.parametrize("name", BY_HAND)
def test_dual_is_twice_the_primal_less_two_norms(name):
    model = model_by_hand(name)
    f = model.factors(ZERO, ZERO, ONE)
    primal = model.score(ZERO, ZERO, ONE)
    for side, mapped, plain in (("tail", f.mapped_head, f.tail), ("head", f.mapped_tail, f.head)):
        expected = 2 * primal - mapped.square().sum() - plain.square().sum()
        torch.testing.assert_close(kg.Dual(model, side).score(ZERO, ZERO, ONE), expected)


def test_a_dual_shares_its_primal_s_parameters():
    model = model_by_hand("ComplEx")
    dual = kg.Dual(model)
    with torch.no_grad():
        model.entities[0] = 0
    assert dual.score(ZERO, ZERO, ONE).item() == -5


def test_a_dual_has_side_tail_or_head():
    with refused(InvalidValue, setting="side", expected="'tail' or 'head'", found="left"):
        kg.Dual(model_by_hand("CP"), "left")
