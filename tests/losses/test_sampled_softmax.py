"""Sampled softmax: values worked out by hand, an unbiased normalizer, and the limit of all
entities.
"""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.losses.negative_sampling import Draws
from dualkg.losses.softmax import BoundOneVsAll, BoundSampledSoftmax, SampledSoftmax
from dualkg.tables.shard import Shard


class Fixed(BoundSampledSoftmax):
    """With given negatives in place of drawn ones."""

    def sample(self, draws):
        return torch.tensor([0, 1, 1]), torch.log(torch.tensor([1.0, 2.0, 2.0]))


def model_with(tails, **options):
    """DistMult of width 1 with the head entity 1 and the relation 1, so that a tail scores its own
    number.
    """
    model = kg.DistMult(kg.GraphShape(len(tails), 1), dim=1, reciprocal=True, **options)
    with torch.no_grad():
        model.entities.copy_(torch.tensor(tails)[:, None])
        model.relations.fill_(1.0)
    return model


def test_by_hand():
    """Negatives 0, 1, 1 with the counts 1, 2, 2 sum to e⁰ + e^(ln 4)/2 + e^(ln 4)/2 = 5; the answer
    has e^(ln 3).
    """
    model = model_with([0.0, math.log(4), math.log(3), 1.0])
    loss = Fixed(SampledSoftmax(num_negatives=3), 4)
    f = model.factors(torch.tensor([3]), torch.tensor([0]), torch.tensor([2]))
    assert loss(model, f).item() == pytest.approx(math.log((3 + 5) / 3), rel=1e-6)


def test_a_negative_equal_to_the_answer_is_left_out():
    model = model_with([0.0, math.log(4), math.log(3), 1.0])
    f = model.factors(torch.tensor([3]), torch.tensor([0]), torch.tensor([1]))
    assert Fixed(SampledSoftmax(), 4)(model, f).item() == pytest.approx(
        math.log((4 + 1) / 4), rel=1e-6
    )


@given(st.integers(2, 40), st.integers(0, 5))
def test_the_probabilities_of_ranks_sum_to_1(num_entities, seed):
    ranks = np.arange(num_entities)
    assert np.sum(np.log((ranks + 2) / (ranks + 1)) / np.log(num_entities + 1)) == pytest.approx(1)


class AllValues:
    """Draws of which negative j of row v is v: every value that can be drawn, once for each
    negative.
    """

    batch = torch.zeros(())

    def entities(self, num, num_entities, *, shared):
        return torch.arange(num_entities)[:, None].expand(num_entities, num)


@given(st.integers(1, 40), st.integers(1, 60))
def test_stratified_samples_draw_every_entity_equally_often(num_entities, num):
    """Over all values of all draws, each entity occurs n times, as without strata."""
    negatives, _ = BoundSampledSoftmax(SampledSoftmax(num_negatives=num), num_entities).sample(
        AllValues()
    )
    assert (
        torch.bincount(negatives.flatten(), minlength=num_entities).tolist() == [num] * num_entities
    )


@given(st.integers(1, 10_000), st.integers(1, 300), st.integers(1, 9), st.integers(0, 5))
def test_processes_own_equally_many_uniform_negatives(num_entities, num, world_size, seed):
    """The share of each process is as the number of its rows, and at most one more or less at each
    end of them.
    """
    ids = torch.zeros(2, dtype=torch.long)
    draws = Draws.of(model_with([0.0]).factors(ids, ids, ids), seed=seed)
    negatives, _ = BoundSampledSoftmax(SampledSoftmax(num_negatives=num), num_entities).sample(
        draws
    )
    for shard in (Shard(num_entities, rank, world_size) for rank in range(world_size)):
        owned = int((shard.positions(negatives) >= 0).sum())
        assert abs(owned - num * shard.size / num_entities) <= 2


@pytest.mark.parametrize("distribution", ["uniform", "log-uniform"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_sample_estimates_sums_over_all_entities_without_bias(distribution, shared):
    """Σ value / expected count over many draws is near the sum of all values; every entity is
    drawn.
    """
    num_entities = 7
    values = torch.arange(1.0, 8.0)
    by_frequency = torch.tensor([3, 0, 1, 2, 6, 5, 4]) if distribution == "log-uniform" else None
    settings = SampledSoftmax(num_negatives=20_000, distribution=distribution, shared=shared)
    loss = BoundSampledSoftmax(settings, num_entities, by_frequency)
    ids = torch.arange(2)
    draws = Draws.of(
        model_with([0.0] * 7).factors(ids, torch.zeros(2, dtype=torch.long), ids), seed=1
    )
    negatives, log_counts = loss.sample(draws)
    assert negatives.shape == ((20_000,) if shared else (2, 20_000))
    estimates = (values[negatives] / log_counts.exp()).sum(-1)
    assert estimates.flatten().tolist() == pytest.approx([28.0] * estimates.numel(), rel=0.05)
    assert set(negatives.flatten().tolist()) == set(range(7))
    if (
        by_frequency is not None
    ):  # ranks 0 and 1 have the probabilities log 2 / log 8 and log 1.5 / log 8
        counts = Counter(negatives.flatten().tolist())
        assert counts[3] / negatives.numel() == pytest.approx(1 / 3, abs=0.02)
        assert counts[0] / negatives.numel() == pytest.approx(math.log(1.5) / math.log(8), abs=0.02)


@pytest.mark.parametrize("reciprocal", [True, False])
def test_with_many_negatives_the_loss_is_near_that_of_the_full_softmax(reciprocal):
    graph = kg.load_graph("world")
    torch.manual_seed(0)
    model = kg.ComplEx(graph.shape, dim=4, reciprocal=reciprocal, init_scale=0.5)
    f = model.factors(*torch.from_numpy(graph.train[:50].astype(np.int64)).unbind(1))
    options = {"batch_size": 50, "seed": 0}
    full = (
        kg.OneVsAll(frequency_weight=0.5, relation_weight=2.0)
        .bind(model, graph, **options)(model, f)
        .item()
    )
    for distribution in ("uniform", "log-uniform"):
        sampled = SampledSoftmax(
            num_negatives=50_000,
            distribution=distribution,
            frequency_weight=0.5,
            relation_weight=2.0,
        )
        assert sampled.bind(model, graph, **options)(model, f).item() == pytest.approx(
            full, rel=2e-3
        )


class Counted(BoundSampledSoftmax):
    """With each entity in `counts` as often as it says there, of n draws in all."""

    counts: torch.Tensor
    probabilities: torch.Tensor

    def sample(self, draws):
        negatives = torch.arange(len(self.counts)).repeat_interleave(self.counts)
        return negatives, (self.counts.sum() * self.probabilities[negatives]).log()


@pytest.mark.parametrize("distribution", ["uniform", "log-uniform"])
def test_the_expected_gradient_approaches_that_of_the_full_softmax(distribution):
    """By all samples of n out of three entities and their multinomial probabilities; the bias
    decreases as 1 / n.
    """
    ranks = torch.arange(3, dtype=torch.float64)
    probabilities = torch.log1p(1 / (ranks + 1)) / math.log(4)
    probabilities = (
        probabilities if distribution == "log-uniform" else torch.full_like(probabilities, 1 / 3)
    )
    model = model_with([0.3, -1.0, 0.8]).double()
    f = (torch.tensor([2, 0]), torch.tensor([0, 0]), torch.tensor([1, 2]))

    def gradient(loss) -> torch.Tensor:
        return torch.autograd.grad(loss(model, model.factors(*f)), model.entities)[0]

    full = gradient(BoundOneVsAll())
    biases = []
    for num in (4, 8, 16):
        expected = torch.zeros_like(full)
        total = 0.0
        for first, second in ((a, b) for a in range(num + 1) for b in range(num + 1 - a)):
            counts = torch.tensor([first, second, num - first - second])
            orders = math.factorial(num) // math.prod(
                math.factorial(count) for count in counts.tolist()
            )
            probability = orders * float(probabilities.pow(counts).prod())
            loss = Counted(SampledSoftmax(num_negatives=num), 3)
            object.__setattr__(loss, "counts", counts)
            object.__setattr__(loss, "probabilities", probabilities)
            expected += probability * gradient(loss)
            total += probability
        assert total == pytest.approx(1)
        biases.append((expected - full).abs().max().item())
    assert biases[-1] < 0.03 * full.abs().max().item()
    assert all(1.8 < one / next_one < 2.8 for one, next_one in pairwise(biases)), biases


def test_training_reaches_the_answers(small_graph):
    """A random graph is learned by heart: half of its training triples rank near the top."""
    options = {"regularizer": "none", "epochs": 20, "batch_size": 40, "device": "cpu"}
    model = kg.ComplEx(small_graph, dim=32)
    kg.train(model, small_graph, loss=SampledSoftmax(num_negatives=8), **options)
    assert kg.evaluate(model, small_graph, split="train").mrr > 0.6


def test_a_batch_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        SampledSoftmax().check_training(reciprocal=True, batch_size=1)
