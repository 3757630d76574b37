"""Sampled softmax on tables that several processes divide gives what one process gives."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dualkg as kg
from dualkg.data.graph import Graph
from dualkg.kernels import cpu
from dualkg.kernels.scores import Targets
from dualkg.models.partial import PartialModel
from dualkg.tables.base import TABLE_NAMES, DeviceTables, local_tables
from dualkg.tables.gradients import SparseGradients
from dualkg.tables.processes import Processes
from dualkg.tables.shard import Shard
from dualkg.training.distributed import build_trainer, group_shard
from dualkg.training.fused import SampledFusedStep
from dualkg.training.recipe import Recipe
from dualkg.training.steps import ReferenceStep
from dualkg.training.trainer import Trainer
from dualkg.training.updates import OnePassAdagrad, sum_rows
from tests.training.test_distributed import (
    _assert_same,
    _model,
    _whole_gradients,
    adagrad,
    batch_of,
    graph_of,
    in_processes,
)
from tests.training.test_sampled_fused import queries_with_hits

LOSSES = {
    "uniform": kg.SampledSoftmax(num_negatives=9),
    "log-uniform": kg.SampledSoftmax(num_negatives=9, distribution="log-uniform"),
    "weights": kg.SampledSoftmax(num_negatives=9, frequency_weight=0.9, relation_weight=0.5),
}

Case = tuple[str, bool, str, bool]  # model, reciprocal or not, side of the dual, grouped or not


def grouped(batch: torch.Tensor) -> torch.Tensor:
    """The triples of one query next to each other."""
    order = sorted(range(len(batch)), key=lambda i: tuple(batch[i, :2].tolist()))
    return batch[order]


def step_of(
    group: Processes, graph: Graph, case: Case, loss: kg.SampledSoftmax
) -> SampledFusedStep:
    """The step of one of several processes."""
    name, reciprocal, dual, is_grouped = case
    tables = DeviceTables(group_shard(group, graph))
    part = PartialModel(_model(graph, name, reciprocal, dual, squared=True, tables=tables))
    bound = loss.bind(part, graph, batch_size=64, seed=0, grouped_by_query=is_grouped)
    regularizer = kg.DURA(0.3) if part.embedding.has_adjoint else kg.NoRegularizer()
    return SampledFusedStep(part, bound, regularizer, OnePassAdagrad(part.parameters(), 0.1))


def dense_gradients(step: SampledFusedStep) -> dict[str, torch.Tensor | None]:
    gradients = {key: table.grad for key, table in step.model.named_parameters()}
    names = {id(table): key for key, table in step.model.named_parameters()}
    for table, positions, rows in step.tables.take():
        total = torch.zeros_like(table.detach())
        gradients[names[id(table)]] = total.index_add_(0, positions, rows)
    return gradients


def cases(*, all_of_them: bool) -> Iterator[Case]:
    yield "ComplEx", True, "none", True
    yield "CP", False, "none", False
    yield "TransE", True, "none", True
    if all_of_them:
        yield from itertools.product(
            ("ComplEx", "CP", "RESCAL", "TransE"), (True, False), ("none",), (True, False)
        )
        yield "ComplEx", True, "tail", True


def compare_gradients(group: Processes, num_entities: int, all_of_them: bool) -> None:
    graph = graph_of(num_entities)
    for case in cases(all_of_them=all_of_them):
        name, reciprocal, dual, is_grouped = case
        for loss_name, loss in LOSSES.items():
            batch = batch_of(graph, reciprocal, loss)
            if is_grouped:
                batch = grouped(batch)
            build = partial(_model, graph, name, reciprocal, dual, squared=True)
            step = step_of(group, graph, case, loss)
            expected = _whole_gradients(
                build(), graph, batch, loss, step.regularizer, grouped=is_grouped
            )
            step._prepare(batch)
            objective = step.gradients(batch)
            shard = group_shard(group, graph)
            _assert_same(expected, objective, dense_gradients(step), shard, (case, loss_name))


def compare_steps(group: Processes, graph: Graph, expected: dict[str, torch.Tensor]) -> None:
    """Weights after 16 steps, in which rows of the same batch are read and updated."""
    shard = group_shard(group, graph)
    step = step_of(group, graph, ("ComplEx", True, "none", True), LOSSES["uniform"])
    step.optimizer = adagrad(step.scored)
    take_steps(step, graph)
    for key, table in step.model.named_parameters():
        rows = expected[key][shard.ids] if key in TABLE_NAMES else expected[key]
        torch.testing.assert_close(table.detach(), rows, rtol=0, atol=1e-11)


def take_steps(step: Any, graph: Graph) -> None:
    batch = grouped(batch_of(graph, True, LOSSES["uniform"]))
    for number in range(16):
        step(batch.roll(-5 * number, 0)[:16], 0.02)


def count_numbers(group: Processes) -> None:
    """The numbers that are sent are those of docs/distributed.md, whatever the negatives are."""
    graph = graph_of(50)
    sizes: list[int] = []
    all_reduce = Shard.all_reduce

    def counted(shard: Shard, values: torch.Tensor, reduction: Any = "sum") -> torch.Tensor:
        sizes.append(values.numel())
        return all_reduce(shard, values, reduction)

    Shard.all_reduce = counted  # type: ignore[method-assign]
    for num_negatives, reciprocal, is_grouped in itertools.product(
        (5, 40), (True, False), (True, False)
    ):
        loss = kg.SampledSoftmax(num_negatives=num_negatives)
        batch = batch_of(graph, reciprocal, loss)
        num_queries = len(batch)
        if is_grouped:
            batch = grouped(batch)
            num_queries = len(batch[:, :2].unique(dim=0))
        step = step_of(group, graph, ("ComplEx", reciprocal, "none", is_grouped), loss)
        sizes.clear()
        step(batch, 0.1)
        size = len(batch)
        width = step.model.entities.shape[1]
        expected = 2 * size * width + num_queries * width + num_queries + size
        if not reciprocal:
            expected += size * width + 2 * size
        assert sum(sizes) == expected

        # Autograd takes the triples of a query one by one.
        reference = ReferenceStep(step.scored, step.loss, step.regularizer, step.optimizer)
        sizes.clear()
        reference.gradients(batch)
        expected = 3 * size * width + 2 * size
        assert sum(sizes) == (expected if reciprocal else expected + size * width + 2 * size)


def train(group: Processes, expected: list[float]) -> None:
    """A recipe is trained by the fast step, and its losses are those of one process."""
    trainer = build_trainer(*recipe_and_graph(), group)
    assert trainer.engine.step == "fused"
    trainer.run()
    losses = [entry["loss"] for entry in trainer.progress.history]
    # In float32, Adagrad's first steps amplify rounding.
    assert losses == pytest.approx(expected, rel=1e-4)


def recipe_and_graph() -> tuple[Recipe, Graph]:
    changes = {
        "data.graph": "world",
        "model.name": "ComplEx",
        "model.dim": 8,
        "loss.name": "SampledSoftmax",
        "loss.num_negatives": 100,
        "regularizer.name": "DURA",
        "regularizer.weight": 0.01,
        "training.batch_size": 500,
        "training.epochs": 2,
        "training.order": "queries",
        "validation.every": 0,
    }
    return Recipe().with_changes(changes), kg.load_graph("world")


def compare_all(group: Processes, weights: dict[str, torch.Tensor], losses: list[float]) -> None:
    for num_entities in (7, 1):
        compare_gradients(group, num_entities, all_of_them=group.count > 2)
    compare_steps(group, graph_of(7), weights)
    count_numbers(group)
    train(group, losses)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_take_the_steps_of_one(world_size: int, tmp_path: Path) -> None:
    graph = graph_of(7)
    model = _model(graph, "ComplEx", True, "none")
    bound = LOSSES["uniform"].bind(model, graph, batch_size=64, seed=0)
    take_steps(ReferenceStep(model, bound, kg.DURA(0.3), adagrad(model)), graph)
    weights = {key: table.detach() for key, table in model.named_parameters()}
    trainer = Trainer.of_recipe(*recipe_and_graph(), device=torch.device("cpu"))
    trainer.run()
    losses = [entry["loss"] for entry in trainer.progress.history]
    in_processes(world_size, compare_all, weights, losses, folder=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_exchanged_sums_give_the_softmax_of_one_process(scale, dtype):
    """Compiled and plain, on queries with up to five answers, a third of which are negatives."""
    scores, positives, hits, targets = queries_with_hits(scale)
    targets = targets._replace(weights=targets.weights.to(dtype))
    table = torch.nn.Parameter(torch.zeros(5, 2))
    local = SparseGradients(local_tables(5), {"head": table})
    shard = SparseGradients(DeviceTables(Shard(5)), {"head": table})
    expected = scores.double()
    of_one = local.sampled_softmax_(expected, positives.double(), hits, targets)
    own = scores.to(dtype)
    of_shard = shard.sampled_softmax_(own, positives.to(dtype), hits, targets)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for found, wanted in zip((own, *of_shard), (expected, *of_one), strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_by_hand(dtype):
    """Two targets of one query, and three negatives, the second of which is the first target.

    The top is 4, of the second target. Without its own answer, the first has (1 + 3) / 4; the
    second has (1 + 2 + 3) / 4.
    """
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype).log()
    positives = torch.tensor([2.0, 4.0], dtype=dtype).log()
    targets = Targets(torch.tensor([7, 9]), torch.ones(2, dtype=dtype), torch.tensor([0, 2]))
    hits = torch.tensor([1, -1])
    tops, totals = cpu.sampled_exponentials_(scores, positives, hits, targets)
    torch.testing.assert_close(tops, torch.tensor([4.0], dtype=dtype).log())
    torch.testing.assert_close(totals, torch.tensor([1.0, 1.5], dtype=dtype))
    torch.testing.assert_close(scores, torch.tensor([[0.25, 0.5, 0.75]], dtype=dtype))


def test_a_process_without_negatives_has_sums_of_zero():
    for dtype in (torch.float32, torch.float64):
        scores = torch.zeros(2, 0, dtype=dtype)
        positives = torch.tensor([1.0, -2.0], dtype=dtype)
        targets = Targets.one_each(torch.tensor([3, 4]), torch.ones(2, dtype=dtype))
        hits = torch.tensor([-1, -1])
        tops, totals = cpu.sampled_exponentials_(scores, positives, hits, targets)
        assert torch.equal(tops, positives)
        assert torch.equal(totals, torch.zeros(2, dtype=dtype))
        ids, sums = sum_rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=dtype))
        assert ids.shape == (0,)
        assert sums.shape == (0, 3)
