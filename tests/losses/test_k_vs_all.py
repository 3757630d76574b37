"""The loss of queries with all their answers, by hand and against the loss of triples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.losses.queries import TrainingAnswers
from dualkg.losses.softmax import BoundKvsAll, BoundOneVsAll, Dropouts
from dualkg.training.batches import one_of_each_query
from tests.conftest import graph_of

CPU = torch.device("cpu")
some_triples = st.sets(
    st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 8)), min_size=1, max_size=40
)


class Scores(kg.DistMult):
    """Scores of entities that are given."""

    def __init__(self, shape, scores):
        super().__init__(shape, dim=1)
        self.given = scores

    def tail_scores(self, f):
        return self.given[: len(f.heads)]


def queries_of(graph):
    triples = with_reciprocals(graph.train, graph.shape.num_relations).astype("int64")
    return torch.from_numpy(one_of_each_query(triples)), torch.from_numpy(triples)


def test_k_vs_all_by_hand():
    """Query 0 has answers 1 and 2, query 1 has answer 0; chances 1/6, 2/6 and 3/6, and all
    alike.
    """
    train = torch.tensor([[0, 0, 1], [0, 0, 2], [1, 0, 0]]).numpy()
    scores = torch.tensor([[0.0, math.log(2), math.log(3)], [0.0, 0.0, 0.0]])
    model = Scores(kg.GraphShape(3, 1), scores)
    answers = TrainingAnswers(train, model.shape, device=CPU)
    f = model.factors(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([1, 0]))
    first = (math.log(3) + math.log(2)) / 2
    second = math.log(3)

    def loss(**choices):
        return BoundKvsAll(answers, max_answers=3, **choices)(model, f).item()

    assert loss() == pytest.approx((first + second) / 2)
    assert loss(count_exponent=1.0) == pytest.approx((2 * first + second) / 3)
    assert loss(count_exponent=0.5) == pytest.approx(
        (math.sqrt(2) * first + second) / (math.sqrt(2) + 1)
    )
    spread = (math.log(6) + math.log(3) + math.log(2)) / 3
    assert loss(label_smoothing=0.3) == pytest.approx((0.7 * first + 0.3 * spread + second) / 2)


@given(some_triples)
def test_with_exponent_1_the_loss_equals_1_vs_all(train):
    graph = graph_of(train, num_entities=9, num_relations=3)
    model = kg.ComplEx(graph.shape, dim=3, init_scale=1.0).double()
    queries, triples = queries_of(graph)
    answers = TrainingAnswers(graph.train, graph.shape, device=CPU)
    for smoothing in (0.0, 0.2):
        loss = BoundKvsAll(
            answers,
            answers.max_answers(len(queries)),
            count_exponent=1.0,
            label_smoothing=smoothing,
        )
        expected = BoundOneVsAll(label_smoothing=smoothing)(model, model.factors(*triples.T))
        torch.testing.assert_close(loss(model, model.factors(*queries.T)), expected)


def test_every_query_is_one_example(small_graph):
    queries, triples = queries_of(small_graph)
    examples = [tuple(row) for row in queries[:, :2].tolist()]
    assert len(set(examples)) == len(examples)
    assert set(examples) == {tuple(row) for row in triples[:, :2].tolist()}


@given(some_triples, st.data())
def test_answers_of_queries_are_those_of_train(train, data):
    graph = graph_of(train, num_entities=9, num_relations=3)
    queries, triples = queries_of(graph)
    chosen = queries[
        data.draw(st.lists(st.integers(0, len(queries) - 1), min_size=1, max_size=5, unique=True))
    ]
    answers = TrainingAnswers(graph.train, graph.shape, device=CPU)
    found = answers.of(chosen[:, 0], chosen[:, 1], capacity=answers.max_answers(len(chosen)))
    for number, (head, relation, _) in enumerate(chosen.tolist()):
        expected = {t for h, r, t in triples.tolist() if (h, r) == (head, relation)}
        here = found.valid & (found.queries == number)
        assert sorted(found.entities[here].tolist()) == sorted(expected)
        assert found.counts[number] == len(expected)


def test_all_parameters_have_gradients_with_dropout(small_graph):
    model = kg.TuckER(small_graph.shape, dim=4, relation_dim=3, batch_norm=True)
    queries, _ = queries_of(small_graph)
    answers = TrainingAnswers(small_graph.train, small_graph.shape, device=CPU)
    loss = BoundKvsAll(
        answers,
        answers.max_answers(20),
        dropouts=Dropouts(mapped=0.3, given=0.2),
        label_smoothing=0.1,
    )
    loss(model, model.factors(*queries[:20].T)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert (model.entities.grad != 0).any(1).all()
