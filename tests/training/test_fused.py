"""The fused step against the reference step: the same steps, for every model, regularizer and
loss.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.kernels.scores import Targets
from dualkg.losses.softmax import BoundOneVsAll, Dropouts, frequency_weights
from dualkg.regularizers import REGULARIZERS, PlainAndMapped
from dualkg.tables.gradients import DenseGradients
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.steps import ReferenceStep
from tests.conftest import graph_of
from tests.families import BILINEAR, EMBEDDINGS
from tests.pairwise import every_nth, pairwise

LOSSES = {
    "plain": {},
    "weighted": {"entity_weights": True},
    "relations": {"relation_weight": 0.5},
    "both": {"entity_weights": True, "relation_weight": 2.0},
    "dropout": {"dropouts": Dropouts(mapped=0.4, seed=3)},
}
BY_QUERY = {
    f"{name} by query": {**choices, "grouped_by_query": True} for name, choices in LOSSES.items()
}
ALL_CASES = [
    case
    for case in itertools.product(BILINEAR, REGULARIZERS, LOSSES, [True, False])
    if case[1] != "N3" or BILINEAR[case[0]].diagonal  # as N3 needs
]
CASES = pairwise(ALL_CASES)


def build(
    kind,
    name,
    regularizer,
    loss,
    reciprocal,
    graph,
    *,
    optimizer="Adagrad",
    dtype=torch.float64,
    device="cpu",
):
    model = BILINEAR[name](graph.shape, dim=3, reciprocal=reciprocal, init_scale=0.5, seed=1).to(
        device, dtype
    )
    choices = dict((LOSSES | BY_QUERY)[loss])
    if choices.get("entity_weights"):
        choices["entity_weights"] = frequency_weights(
            graph.train, graph.shape.num_entities, 0.9
        ).to(device, dtype)
    uneven = (
        {"plain": 0.5, "mapped": 1.5}
        if issubclass(REGULARIZERS[regularizer], PlainAndMapped)
        else {}
    )
    chosen = REGULARIZERS[regularizer](0.1, **uneven)
    stepper = build_optimizer(
        Optimizer(name=optimizer), model.parameters(), one_pass=kind is not ReferenceStep
    )
    return kind(model, BoundOneVsAll(**choices), chosen, stepper)


def batches(graph: kg.Graph, reciprocal: bool, n: int) -> list[torch.Tensor]:
    """Batches of odd sizes, the last of one triple, with repeated entities and relations in
    each.
    """
    random = np.random.default_rng(0)
    relations = graph.shape.num_relations * (2 if reciprocal else 1)
    sizes = [7, 1, 13, 32, 5] * n
    draw = (random.integers(0, high, size) for size in sizes for high in (30, relations, 30))
    columns = [torch.from_numpy(column) for column in draw]
    return [torch.stack(columns[i : i + 3], dim=-1) for i in range(0, len(columns), 3)][:n]


def grouped_by_query(graph: kg.Graph, n: int) -> list[torch.Tensor]:
    """Such batches with one to five answers for each query, which may be repeated."""
    random = np.random.default_rng(1)
    found = []
    for batch in batches(graph, True, n):
        rows = torch.repeat_interleave(
            batch, torch.from_numpy(random.integers(1, 6, len(batch))), dim=0
        )
        rows[:, 2] = torch.from_numpy(random.integers(0, 30, len(rows)))
        found.append(rows)
    return found


def gradient_of(step: OneVsAllFusedStep, name: str) -> torch.Tensor:
    """The gradient that a fused step found for a table."""
    sides = {"entities": "head", "tails": "tail"}
    return (
        step.tables.gradient(sides[name]) if name in sides else step.model.get_parameter(name).grad
    )


@pytest.mark.parametrize(("name", "regularizer", "loss", "reciprocal"), CASES)
def test_ten_steps_end_at_the_same_weights(small_graph, name, regularizer, loss, reciprocal):
    plain, fused = (
        build(kind, name, regularizer, loss, reciprocal, small_graph)
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    for batch in batches(small_graph, reciprocal, 10):
        torch.testing.assert_close(plain(batch, 0.1), fused(batch, 0.1), rtol=1e-9, atol=1e-12)
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


@pytest.mark.parametrize(("name", "loss"), every_nth(2, BILINEAR, BY_QUERY))
def test_grouping_by_query_does_not_change_the_weights(small_graph, name, loss):
    plain, fused = (
        build(kind, name, "DURA", loss, True, small_graph)
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    for batch in grouped_by_query(small_graph, 10):
        torch.testing.assert_close(plain(batch, 0.1), fused(batch, 0.1), rtol=1e-9, atol=1e-12)
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


def test_each_query_is_scored_once(small_graph, monkeypatch):
    """A row of scores for each query if triples are grouped, otherwise for each triple."""
    rows = []
    scored = DenseGradients.cross_entropy

    def counted(self, side, images, targets, **keywords):
        rows.append(len(images))
        return scored(self, side, images, targets, **keywords)

    monkeypatch.setattr(DenseGradients, "cross_entropy", counted)
    batch = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 3], [4, 2, 3], [4, 2, 5], [0, 1, 4]])
    for loss in ("plain by query", "plain"):
        build(OneVsAllFusedStep, "ComplEx", "DURA", loss, True, small_graph)(batch, 0.1)
    assert rows == [4, 6]


# Squared distances: of models that have them, and of duals on the tail side.
SQUARED = pairwise(
    [
        *itertools.product(["TransE", "RotatE"], ["DURA", "Frobenius"], LOSSES, [True, False]),
        *itertools.product(["ModE"], ["DURA", "N3", "RegP1"], LOSSES, [True]),
        *itertools.product(
            ["dual of CP", "dual of ComplEx", "dual of RESCAL"], ["none", "DURA"], LOSSES, [True]
        ),
    ]
)


def build_squared(kind, name, regularizer, loss, reciprocal, graph):
    own = name.removeprefix("dual of ")
    options = {"init_scale": 0.5, "seed": 1} | ({} if own != name else {"norm": "squared"})
    model = EMBEDDINGS[own](graph.shape, dim=3, reciprocal=reciprocal, **options).double()
    model = model if own == name else kg.Dual(model, "tail")
    assert model.score_form == "squared distances"
    choices = dict((LOSSES | BY_QUERY)[loss])
    if choices.get("entity_weights"):
        choices["entity_weights"] = frequency_weights(
            graph.train, graph.shape.num_entities, 0.9
        ).double()
    stepper = build_optimizer(Optimizer(), model.parameters(), one_pass=kind is not ReferenceStep)
    return kind(model, BoundOneVsAll(**choices), REGULARIZERS[regularizer](0.1), stepper)


@pytest.mark.parametrize(("name", "regularizer", "loss", "reciprocal"), SQUARED)
def test_squared_distances_end_at_the_same_weights(
    small_graph, name, regularizer, loss, reciprocal
):
    case = name, regularizer, loss, reciprocal, small_graph
    plain, fused = (build_squared(kind, *case) for kind in (ReferenceStep, OneVsAllFusedStep))
    for batch in batches(small_graph, reciprocal, 10):
        torch.testing.assert_close(plain(batch, 0.1), fused(batch, 0.1), rtol=1e-9, atol=1e-11)
    for one, other in zip(plain.model.parameters(), fused.scored.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx"])
def test_blocks_of_a_batch_do_not_change_the_weights(small_graph, monkeypatch, name, reciprocal):
    monkeypatch.setattr("dualkg.tables.gradients.rows_at_once", lambda *_: 3)
    test_ten_steps_end_at_the_same_weights(small_graph, name, "DURA", "weighted", reciprocal)
    if reciprocal:
        test_grouping_by_query_does_not_change_the_weights(small_graph, name, "weighted by query")


@pytest.mark.parametrize(("name", "optimizer"), every_nth(2, BILINEAR, ["Adagrad", "Adam", "SGD"]))
def test_every_optimizer_takes_the_reference_steps(small_graph, name, optimizer):
    plain, fused = (
        build(kind, name, "DURA", "plain", True, small_graph, optimizer=optimizer)
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    for batch in batches(small_graph, True, 10):
        plain(batch, 0.1)
        fused(batch, 0.1)
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


@pytest.mark.parametrize(("name", "regularizer", "loss", "reciprocal"), CASES)
def test_float32_gradients_equal_the_reference(small_graph, name, regularizer, loss, reciprocal):
    plain, fused = (
        build(kind, name, regularizer, loss, reciprocal, small_graph, dtype=torch.float32)
        for kind in (ReferenceStep, OneVsAllFusedStep)
    )
    (batch,) = batches(small_graph, reciprocal, 4)[3:]
    plain.objective(batch).backward()
    fused.gradients(batch)
    for name, one in plain.model.named_parameters():
        other = gradient_of(fused, name)
        assert (one.grad - other).abs().max() <= 1e-5 * one.grad.abs().max()


def tables_of(images, table):
    """The tables of a model whose head table is given, with a poisoned gradient."""
    model = kg.DistMult(kg.GraphShape(len(table), 1), dim=1)
    model.entities.data = table
    tables = DenseGradients(model.tables, {"head": model.entities}, squared=False, bf16=False)
    tables.gradient("tail").fill_(torch.nan)
    return tables


def test_cross_entropy_by_hand():
    """Two candidates with scores 0 and log 3: the loss of the first is log 4, its gradient (−3/4,
    3/4).
    """
    images = torch.tensor([[1.0]])
    table = torch.tensor([[0.0], [float(np.log(3))]])
    tables = tables_of(images, table)
    found = tables.cross_entropy(
        "tail", images, Targets.one_each(torch.tensor([0]), torch.ones(1)), accumulate=False
    )
    assert found.loss.item() == pytest.approx(np.log(4))
    torch.testing.assert_close(tables.gradient("tail"), torch.tensor([[-0.75], [0.75]]))
    torch.testing.assert_close(found.mapped, torch.tensor([[0.75 * float(np.log(3))]]))


def test_the_loss_of_huge_scores_is_finite():
    images = torch.tensor([[1e4]])
    table = torch.tensor([[1.0], [-1.0]])
    tables = tables_of(images, table)
    found = tables.cross_entropy(
        "tail", images, Targets.one_each(torch.tensor([1]), torch.ones(1)), accumulate=False
    )
    assert torch.isfinite(found.loss)
    torch.testing.assert_close(tables.gradient("tail"), torch.tensor([[1e4], [-1e4]]))


@pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed"
)  # said once by a processor that has no such products
@pytest.mark.parametrize(
    ("name", "reciprocal", "regularizer"),
    pairwise(itertools.product(BILINEAR, [True, False], ["DURA", "UnweightedDURA"])),
)
def test_bfloat16_gradients_are_close_and_copies_are_updated(
    small_graph, name, reciprocal, regularizer
):
    plain, bf16 = (
        build(kind, name, regularizer, "both", reciprocal, small_graph, dtype=torch.float32)
        for kind in (ReferenceStep, partial(OneVsAllFusedStep, bf16=True))
    )
    for batch in batches(small_graph, reciprocal, 4):
        plain.optimizer.zero_grad()
        plain.objective(batch).backward()
        bf16.gradients(batch)
        for table, one in plain.model.named_parameters():
            assert (one.grad - gradient_of(bf16, table)).abs().max() <= 0.03 * one.grad.abs().max()
    bf16(batch, 0.1)
    assert torch.equal(bf16.tables.copies["head"], bf16.model.entities.detach().bfloat16())


@pytest.mark.parametrize("table", ["entities", "relations"])
def test_a_frozen_table_does_not_change(small_graph, table):
    model = kg.ComplEx(small_graph.shape, dim=2)
    model.get_parameter(table).requires_grad_(False)
    before = model.get_parameter(table).clone()
    kg.train(model, small_graph, epochs=1)
    assert torch.equal(before, model.get_parameter(table))


def test_only_the_relations_of_the_batch_change():
    graph = graph_of([(0, 0, 1), (1, 1, 2), (2, 2, 0)])
    step = build(OneVsAllFusedStep, "RESCAL", "DURA", "plain", True, graph)
    before = step.model.relations.detach().clone()
    step(torch.tensor([[0, 1, 2], [1, 4, 0]]), 0.1)
    changed = (step.model.relations != before).any(dim=1)
    assert changed.tolist() == [False, True, False, False, True, False]
