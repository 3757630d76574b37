"""The losses over sampled negatives: values worked out by hand, and what must not matter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.losses.negative_sampling import BoundSampledLoss, MarginRanking, NegativeSampling
from tests.losses.test_queries import answers_of
from tests.raising import refused

LOG2 = math.log(2)
LOG3 = math.log(3)
ALL = {"sampler": "in-batch", "filtered": False}


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def test_negative_sampling_by_hand():
    """σ(ln 3) = 3/4 for the triple; both negatives score −γ − ln 3 and −γ, with shares 1/4 and 3/4
    at temperature 1.
    """
    loss = NegativeSampling(margin=2.0)
    positive = torch.tensor([LOG3 - 2])
    negative = torch.tensor([[-LOG3 - 2, -2.0]])
    allowed = torch.tensor([[True, True]])
    torch.testing.assert_close(loss.weights(negative, allowed), torch.tensor([[0.25, 0.75]]))
    expected = -(math.log(3 / 4) + 0.25 * math.log(3 / 4) + 0.75 * math.log(1 / 2)) / 2
    assert loss.per_triple(positive, negative, allowed).tolist() == pytest.approx([expected])


def test_temperature_0_weights_all_negatives_equally():
    loss = NegativeSampling(margin=2.0, adversarial_temperature=0.0)
    negative = torch.tensor([[-LOG3 - 2, -2.0, 40.0]])
    allowed = torch.tensor([[True, True, False]])
    assert loss.weights(negative, allowed).tolist() == [[0.5, 0.5, 0.0]]
    expected = -(log_sigmoid(2.0) + (math.log(3 / 4) + math.log(1 / 2)) / 2) / 2
    assert loss.per_triple(torch.tensor([0.0]), negative, allowed).tolist() == pytest.approx(
        [expected]
    )


def test_a_triple_without_negatives_has_the_positive_term_alone():
    loss = NegativeSampling(margin=1.0)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert loss.weights(torch.ones(1, 3), nothing).tolist() == [[0.0, 0.0, 0.0]]
    assert loss.per_triple(torch.zeros(1), torch.ones(1, 3), nothing).tolist() == pytest.approx(
        [-log_sigmoid(1.0) / 2]
    )
    assert MarginRanking().per_triple(torch.zeros(1), torch.ones(1, 3), nothing).tolist() == [0.0]


def test_margin_ranking_by_hand():
    """γ − s⁺ + s⁻ of −1, 0.5 and 2 → 0, 0.5 and 2; of the first two alone, a mean of a quarter."""
    positive = torch.tensor([3.0, 3.0])
    negative = torch.tensor([[1.0, 2.5, 4.0]]).expand(2, 3)
    allowed = torch.tensor([[True, True, True], [True, True, False]])
    assert MarginRanking(margin=1.0).per_triple(
        positive, negative, allowed
    ).tolist() == pytest.approx([2.5 / 3, 0.25])


def test_adversarial_weights_have_no_gradient():
    """The gradient of the second term is p_i σ(γ + s_i) / 2: none passes through p."""
    negative = torch.tensor([[0.3, -1.2]], requires_grad=True)
    loss = NegativeSampling(margin=0.5, adversarial_temperature=2.0)
    loss.per_triple(torch.zeros(1), negative, torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    shares = torch.softmax(2 * negative.detach(), -1)
    torch.testing.assert_close(negative.grad, shares * torch.sigmoid(0.5 + negative.detach()) / 2)


def one_coordinate(reciprocal: bool = False) -> kg.Model:
    """Entities 1, 2, 3 and a relation 1: a score is the product of two numbers; by its inverse, ten
    times it.
    """
    model = kg.DistMult(kg.GraphShape(3, 1), dim=1, reciprocal=reciprocal)
    relations = torch.tensor([[1.0], [10.0]] if reciprocal else [[1.0]])
    model.load_state_dict({"entities": torch.tensor([[1.0], [2.0], [3.0]]), "relations": relations})
    return model


def test_the_loss_of_a_batch_by_hand():
    """Tails of (0, r, 1) and (1, r, 2) change places: scores 1·2 against 1·3, 2·3 against 2·2."""
    model = one_coordinate()
    f = model.factors(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([1, 2]))
    loss = MarginRanking(margin=1.5, **ALL)
    no_head = torch.zeros(1, dtype=torch.float64)
    tails_alone = BoundSampledLoss(loss, 3, head_probabilities=no_head)
    assert tails_alone(model, f).item() == pytest.approx((2.5 + 0) / 2)
    heads_alone = BoundSampledLoss(
        loss, 3, head_probabilities=no_head + 1
    )  # 1·2 against 2·2, 2·3 against 1·3
    assert heads_alone(model, f).item() == pytest.approx((3.5 + 0) / 2)
    model = one_coordinate(reciprocal=True)
    f = model.factors(
        torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1, 2])
    )  # 2 against 3, 60 against 40
    assert BoundSampledLoss(loss, 3)(model, f).item() == pytest.approx((2.5 + 0) / 2)


def test_subsampling_weights_triples_by_their_counts():
    """The triples of the batch above, the first with counts of 4 and 4, the second of 5 and 4."""
    model = one_coordinate()
    f = model.factors(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([1, 2]))
    known = answers_of([(0, 0, 1), (1, 0, 2), (1, 0, 0)], 3, 1)
    no_head = torch.zeros(1, dtype=torch.float64)
    loss = BoundSampledLoss(MarginRanking(margin=3.0, subsampling=True, **ALL), 3, known, no_head)
    first = 1 / math.sqrt(8)
    second = 1 / math.sqrt(9)
    assert loss(model, f).item() == pytest.approx((first * 4 + second * 1) / (first + second))


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "shared"])
def test_known_answers_have_no_gradient(kind, reciprocal):
    """Entity 4 is known for every query, and in no batch: its row would move if it were ever a
    negative.
    """
    found = [(h, 0, t) for h in range(3) for t in (3, 4)] + [(4, 0, t) for t in (3, 4)]
    known = answers_of(found, 6, 1)
    model = kg.ComplEx(kg.GraphShape(6, 1), dim=3, reciprocal=reciprocal, init_scale=1.0)
    settings = {"margin": 1.0, "sampler": kind, "num_negatives": 40}
    no_head = torch.zeros(1, dtype=torch.float64)
    batch = torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.full((3,), 3)
    BoundSampledLoss(NegativeSampling(**settings), 6, known, no_head)(
        model, model.factors(*batch)
    ).backward()
    assert model.entities.grad[4].tolist() == [0.0] * 6
    assert (model.entities.grad[5] != 0).all()
    model.zero_grad()
    unfiltered = BoundSampledLoss(NegativeSampling(**settings, filtered=False), 6, known, no_head)
    unfiltered(model, model.factors(*batch)).backward()
    assert (model.entities.grad[4] != 0).all()


scores = st.lists(st.floats(-50, 50), min_size=1, max_size=8)


@given(st.floats(-50, 50), scores, st.data())
def test_negatives_that_are_not_allowed_have_no_effect(positive, negative, data):
    allowed = data.draw(st.lists(st.booleans(), min_size=len(negative), max_size=len(negative)))
    others = [value if good else 50 - value for value, good in zip(negative, allowed, strict=True)]
    left = [value for value, good in zip(negative, allowed, strict=True) if good]
    for loss in (
        NegativeSampling(margin=3.0),
        NegativeSampling(adversarial_temperature=0.0),
        MarginRanking(),
    ):
        made = [
            loss.per_triple(
                torch.tensor([positive]).double(),
                torch.tensor(values).double().view(1, -1),
                torch.tensor(good, dtype=torch.bool).view(1, -1),
            ).item()
            for values, good in ((negative, allowed), (others, allowed), (left, [True] * len(left)))
        ]
        assert made[0] >= 0
        assert made == pytest.approx([made[0]] * 3, abs=1e-12)


def test_a_loss_has_no_state():
    """So a resumed run draws the same negatives."""
    model = kg.DistMult(kg.GraphShape(50, 2), dim=4, reciprocal=False, init_scale=1.0)
    batches = torch.randint(0, 2, (3, 20, 3), generator=torch.Generator().manual_seed(0))

    def new():
        return BoundSampledLoss(NegativeSampling(margin=1.0, num_negatives=4), 50, seed=9)

    loss = new()
    through = [loss(model, model.factors(*batch.T)).item() for batch in batches]
    again = [new()(model, model.factors(*batch.T)).item() for batch in batches.flip(0)]
    assert through == again[::-1]
    assert len(set(through)) == 3


@pytest.mark.parametrize("kind", [NegativeSampling, MarginRanking])
@pytest.mark.parametrize("sampler", ["shared", "uniform"])
def test_an_easy_graph_is_learned(kind, sampler):
    """Everyone's successor on a ring of twelve: all triples are seen, and end above every other
    tail.
    """
    size = 12
    triples = np.array([(i, 0, (i + 1) % size) for i in range(size)], dtype=np.int32)
    model = kg.ComplEx(kg.GraphShape(size, 1), dim=12, init_scale=0.1, seed=1)
    known = answers_of(triples, size, 1)
    settings = kind(margin=1.0, sampler=sampler, num_negatives=6)
    loss = BoundSampledLoss(settings, size, known)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    h, r, t = torch.from_numpy(triples).long().T
    for epoch in range(60):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
        optimizer.zero_grad()
        loss(model, model.factors(h[order], r[order], t[order])).backward()
        optimizer.step()
    assert model.score_tails(h, r).argmax(-1).tolist() == t.tolist()


@pytest.mark.parametrize("kind", [NegativeSampling, MarginRanking])
def test_a_margin_below_0_is_refused(kind):
    with refused(
        InvalidValue, setting="loss.margin", expected="greater than or equal to 0", found=-1.0
    ):
        kind(margin=-1.0)


def test_a_temperature_below_0_is_refused():
    with refused(
        InvalidValue,
        setting="loss.adversarial_temperature",
        expected="greater than or equal to 0",
        found=-0.5,
    ):
        NegativeSampling(adversarial_temperature=-0.5)
