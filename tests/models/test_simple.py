"""SimplE: its score, and pairs of numbers that are not complex coordinates."""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.training.engines import Job, kernels_know_relations


def test_the_score_is_the_mean_of_two_of_cp():
    """The formula of the paper, with the halves of the rows written out."""
    model = kg.SimplE(kg.GraphShape(5, 2), dim=3, reciprocal=False, init_scale=1.0).double()
    ids = torch.cartesian_prod(torch.arange(5), torch.arange(2), torch.arange(5)).T
    as_head, as_tail = model.entities.chunk(2, dim=-1)
    forward, inverse = model.relations.chunk(2, dim=-1)
    h, r, t = ids
    one = (as_head[h] * forward[r] * as_tail[t]).sum(-1)
    other = (as_head[t] * inverse[r] * as_tail[h]).sum(-1)
    torch.testing.assert_close(model.score(*ids), (one + other) / 2)


def test_each_number_has_its_own_modulus():
    model = kg.SimplE(kg.GraphShape(2, 1), dim=2)
    numbers = torch.tensor([[3.0, -1.0, 4.0, 0.0]])
    assert model.modulus(numbers).tolist() == [[3, 1, 4, 0]]


@pytest.mark.parametrize(
    ("regularizer", "known"), [(kg.DURA(0.1), True), (kg.N3(0.1), False), (kg.RegP1(0.1), False)]
)
def test_kernels_require_sums_of_squares_for_separate_moduli(regularizer, known):
    model = kg.SimplE(kg.GraphShape(2, 1), dim=2)
    assert (
        kernels_know_relations(Job(model, kg.OneVsAll(relation_weight=1.0), regularizer, "Adagrad"))
        == known
    )


def test_complex_arrays_are_refused_by_simple():
    table = np.ones((2, 3), dtype=np.complex64)
    with pytest.raises(kg.RequestError, match="entities"):
        kg.from_arrays(
            "SimplE",
            entities=table,
            relations=table,
            entity_names=["a", "b"],
            relation_names=["r", "s"],
        )
