"""The bfloat16 step against the reference step, on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dualkg as kg
from dualkg.regularizers import REGULARIZERS
from dualkg.tables.base import DeviceTables, local_tables
from dualkg.tables.processes import Processes
from dualkg.training.distributed import group_shard
from dualkg.training.engines import Job, kernels_know_relations
from dualkg.training.steps import CudaGraphStep, ReferenceStep
from dualkg.training.trainer import Trainer
from dualkg.training.updates import OnePassAdagrad
from tests.families import BILINEAR
from tests.training.test_distributed import batch_of, graph_of, in_processes
from tests.training.test_fused import ALL_CASES, BY_QUERY, batches, build, grouped_by_query

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

from dualkg.training.gpu_step import OneVsAllBf16Step, SampledBf16Step

pytestmark = pytest.mark.gpu

KERNEL_CASES = [
    case
    for case in ALL_CASES
    if kernels_know_relations(
        Job(
            BILINEAR[case[0]](kg.GraphShape(2, 1), dim=1),
            kg.OneVsAll(relation_weight=float(case[2] in ("relations", "both"))),
            REGULARIZERS[case[1]](0.1),
            "Adagrad",
        )
    )
]


def bf16_step(*case: object) -> OneVsAllBf16Step:
    return build(OneVsAllBf16Step, *case, dtype=torch.float32, device="cuda")


def gradients_of(
    step: OneVsAllBf16Step, batch: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective, and what a step subtracts where the sums of squares are 10¹² and the rate is
    their root.
    """
    before = {name: table.detach().clone() for name, table in step.model.named_parameters()}
    for table in step.model.parameters():
        step.optimizer.state[table]["sum"].fill_(1e12)
    objective = step(batch, 1e6)
    return objective, {
        name: before[name] - table.detach() for name, table in step.model.named_parameters()
    }


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_gradients_are_close_to_the_reference(small_graph, case):
    for batch in batches(small_graph, case[3], 4):
        plain = build(ReferenceStep, *case, small_graph, dtype=torch.float32, device="cuda")
        objective = plain.objective(batch.cuda())
        objective.backward()
        found, gradients = gradients_of(bf16_step(*case, small_graph), batch.cuda())
        torch.testing.assert_close(found, objective.detach(), rtol=0.01, atol=0.01)
        for name, table in plain.model.named_parameters():
            assert (table.grad - gradients[name]).abs().max() <= 0.03 * table.grad.abs().max()


SETTINGS = ((True, False), ("uniform", "log-uniform"), (0.0, 0.5), (0.0, 0.5), (True, False))
SAMPLED = list(itertools.product(BILINEAR, *SETTINGS))[::5]  # each setting with each other


def sampled_step(graph: kg.Graph, case: Any, kind: Any = SampledBf16Step) -> Any:
    name, reciprocal, distribution, frequency_weight, relation_weight, row_sums = case
    model = BILINEAR[name](graph, dim=5, reciprocal=reciprocal, seed=1, init_scale=0.5).cuda()
    weights = {"frequency_weight": frequency_weight, "relation_weight": relation_weight}
    loss = kg.SampledSoftmax(num_negatives=19, distribution=distribution, **weights)
    if not kernels_know_relations(Job(model, loss, kg.DURA(0.1), "Adagrad")):
        pytest.skip("kernels do not know these relations")
    optimizer = OnePassAdagrad(
        model.parameters(), 0.1, row_sums=model.entity_tables if row_sums else ()
    )
    return kind(model, loss.bind(model, graph, batch_size=32, seed=3), kg.DURA(0.1), optimizer)


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_gradients_of_sampled_softmax_are_close_to_the_reference(small_graph, case):
    """Rows occur several times in a batch, and negatives among its heads and tails."""
    for batch in batches(small_graph, case[1], 4):
        plain, step = (
            sampled_step(small_graph, case, kind) for kind in (ReferenceStep, SampledBf16Step)
        )
        objective = plain.objective(batch.cuda())
        objective.backward()
        found, gradients = gradients_of(step, batch.cuda())
        torch.testing.assert_close(found, objective.detach(), rtol=0.01, atol=0.01)
        for name, table in plain.model.named_parameters():
            assert (table.grad - gradients[name]).abs().max() <= 0.03 * table.grad.abs().max()


@pytest.mark.parametrize("row_sums", [True, False])
def test_a_captured_step_of_sampled_softmax_equals_the_eager_step(small_graph, row_sums):
    """Batches of one size are replayed; each draws its own negatives."""
    case = "ComplEx", True, "log-uniform", 0.0, 0.0, row_sums
    eager = sampled_step(small_graph, case)
    captured = CudaGraphStep(sampled_step(small_graph, case))
    random = torch.Generator().manual_seed(0)
    for _ in range(8):
        columns = [
            torch.randint(high, (40,), generator=random)
            for high in (30, 2 * small_graph.shape.num_relations, 30)
        ]
        batch = torch.stack(columns, dim=1).cuda()
        torch.testing.assert_close(captured(batch, 0.1), eager(batch, 0.1), rtol=1e-3, atol=1e-4)
    assert captured.graph is not None
    for one, other in zip(eager.model.parameters(), captured.step.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def compare_shards(group: Processes, num_entities: int) -> None:
    """Gradients of a step on shards, which communicate by gloo, against those of the whole model in
    float32.
    """
    graph = graph_of(num_entities)
    for name, reciprocal, grouped in itertools.product(BILINEAR, (True, False), (True, False)):
        job = Job(BILINEAR[name](graph, dim=8), kg.OneVsAll(), kg.DURA(0.1), "Adagrad")
        if not kernels_know_relations(job) or (grouped and not reciprocal):
            continue
        loss = kg.OneVsAll(frequency_weight=0.5, dropout=0.0 if grouped else 0.3)
        options: dict[str, Any] = {"dim": 8, "reciprocal": reciprocal, "seed": 1, "init_scale": 0.5}
        whole = BILINEAR[name](graph, **options).cuda()
        batch = batch_of(graph, reciprocal, loss).cuda()
        binding: dict[str, Any] = {"batch_size": len(batch), "seed": 0, "grouped_by_query": grouped}
        objective = ReferenceStep(
            whole, loss.bind(whole, graph, **binding), kg.DURA(0.1), None
        ).objective(batch)  # type: ignore[arg-type]
        objective.backward()
        shard = group_shard(group, graph)
        part = BILINEAR[name].with_tables(DeviceTables(shard), graph, **options).cuda()
        bound = loss.bind(part, graph, **binding)
        optimizer = OnePassAdagrad(part.parameters(), 0.1)
        step = OneVsAllBf16Step(part, bound, kg.DURA(0.1), optimizer)
        found, gradients = gradients_of(step, batch)
        torch.testing.assert_close(found, objective.detach(), rtol=0.01, atol=0.01)
        for key, table in whole.named_parameters():
            expected = table.grad[shard.ids.cuda()] if key in ("entities", "tails") else table.grad
            assert torch.all((expected - gradients[key]).abs() <= 0.03 * table.grad.abs().max()), (
                name,
                grouped,
                key,
            )


@pytest.mark.parametrize(("world_size", "num_entities"), [(1, 23), (2, 23), (3, 2)])
def test_gradients_of_shards_are_close_to_the_reference(world_size, num_entities, tmp_path):
    in_processes(world_size, compare_shards, num_entities, folder=tmp_path)


def compare_sampled_shards(group: Processes, num_entities: int) -> None:
    """Gradients of sampled softmax, each process with its own negatives, against one process."""
    graph = graph_of(num_entities)
    for name, reciprocal, distribution in itertools.product(
        ("ComplEx", "CP", "RESCAL"), (True, False), ("uniform", "log-uniform")
    ):
        loss = kg.SampledSoftmax(num_negatives=20, distribution=distribution)
        options: dict[str, Any] = {"dim": 8, "reciprocal": reciprocal, "seed": 1, "init_scale": 0.5}
        batch = batch_of(graph, reciprocal, loss).cuda()
        shard = group_shard(group, graph)
        steps = []
        for tables in (local_tables(num_entities), DeviceTables(shard)):
            model = BILINEAR[name].with_tables(tables, graph, **options).cuda()
            bound = loss.bind(model, graph, seed=3)
            optimizer = OnePassAdagrad(model.parameters(), 0.1)
            steps.append(SampledBf16Step(model, bound, kg.DURA(0.1), optimizer))
        expected, whole = gradients_of(steps[0], batch)
        objective, gradients = gradients_of(steps[1], batch)
        torch.testing.assert_close(objective, expected, rtol=1e-3, atol=1e-4)
        for key, gradient in whole.items():
            rows = gradient[shard.ids.cuda()] if key in ("entities", "tails") else gradient
            assert torch.all((rows - gradients[key]).abs() <= 0.01 * gradient.abs().max()), key


@pytest.mark.parametrize(("world_size", "num_entities"), [(1, 23), (2, 23), (3, 2)])
def test_sampled_softmax_of_shards_is_that_of_one_process(world_size, num_entities, tmp_path):
    in_processes(world_size, compare_sampled_shards, num_entities, folder=tmp_path)


@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("loss", BY_QUERY)
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "SimplE", "TuckER"])
def test_gradients_grouped_by_query_are_close_to_the_reference(small_graph, name, loss, capacity):
    """Also after a step on other triples, and with a capacity for more queries than there are."""
    if name in ("RESCAL", "TuckER") and loss.split()[0] in ("relations", "both"):
        pytest.skip("relations that are matrices are not predicted by kernels")
    case = name, "DURA", loss, True, small_graph
    for other, batch in zip(
        grouped_by_query(small_graph, 5)[1:], grouped_by_query(small_graph, 4), strict=True
    ):
        plain = build(ReferenceStep, *case, dtype=torch.float32, device="cuda")
        objective = plain.objective(batch.cuda())
        objective.backward()
        step = bf16_step(*case)
        step.capacity = capacity
        step(other.cuda(), 0.0)
        found, gradients = gradients_of(step, batch.cuda())
        torch.testing.assert_close(found, objective.detach(), rtol=0.01, atol=0.01)
        for table, one in plain.model.named_parameters():
            assert (one.grad - gradients[table]).abs().max() <= 0.03 * one.grad.abs().max()


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "TuckER"])
def test_a_step_does_not_depend_on_the_one_before(small_graph, name, reciprocal):
    """After a step on other triples, the gradient is that of a first step."""
    one, other = batches(small_graph, reciprocal, 4)[2:]
    step = bf16_step(name, "DURA", "plain", reciprocal, small_graph)
    step(other.cuda(), 0.0)
    _, after = gradients_of(step, one.cuda())
    _, fresh = gradients_of(bf16_step(name, "DURA", "plain", reciprocal, small_graph), one.cuda())
    for table in fresh:
        torch.testing.assert_close(after[table], fresh[table], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["RESCAL", "TuckER"])
def test_relations_that_are_not_in_the_batch_do_not_change(small_graph, name):
    step = bf16_step(name, "Frobenius", "plain", True, small_graph)
    before = step.model.relations.detach().clone()
    step(torch.tensor([[0, 1, 2], [1, 4, 0]]).cuda(), 0.1)
    assert (step.model.relations != before).any(dim=1).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("name", ["CP", "ComplEx", "RESCAL", "TuckER"])
def test_a_captured_step_equals_the_eager_step(small_graph, name):
    """With other batch sizes in between, and a learning rate that changes with each step."""
    loss = "plain" if name in ("RESCAL", "TuckER") else "both"
    eager = bf16_step(name, "DURA", loss, True, small_graph)
    captured = bf16_step(name, "DURA", loss, True, small_graph)
    captured = CudaGraphStep(captured)
    for number, batch in enumerate(
        [batches(small_graph, True, 4)[3], *batches(small_graph, True, 4)] * 5
    ):
        rate = 0.1 / (number + 1)
        one = eager(batch.cuda(), rate)
        other = captured(batch.cuda(), rate)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert captured.graph is not None
    for one, other in zip(eager.model.parameters(), captured.step.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_resumed_run_multiplies_by_the_restored_weights(small_graph, tmp_path):
    """The bfloat16 copies must be of the restored tables, not of those that the model was built
    with.
    """
    recipe = kg.Recipe().with_changes(
        {"training.batch_size": 32, "model.dim": 8, "model.reciprocal": False}
    )

    def trainer(seed: int) -> Trainer:
        model = kg.CP(small_graph.shape, dim=8, reciprocal=False, seed=seed).cuda()
        return Trainer(model, small_graph, recipe, kg.DURA(0.1))

    trainer(1).save(tmp_path / "checkpoint.safetensors")
    resumed = trainer(2)
    resumed.restore(tmp_path / "checkpoint.safetensors")
    tables = resumed.step.step.tables.tables
    for name in ("entities", "tails"):
        assert torch.equal(
            tables[name].copy[:30, :8], resumed.model.get_parameter(name).detach().bfloat16()
        )


@pytest.mark.parametrize("order", ["triples", "queries", "sampled"])
@pytest.mark.parametrize("dim", [7, 40])
@pytest.mark.parametrize("name", BILINEAR)
def test_the_losses_of_a_run_are_close_to_the_reference(small_graph, name, dim, order):
    """Batches of an odd size with a short last one, trained from a recipe."""
    changes = {
        "model.name": name,
        "model.dim": dim,
        "training.batch_size": 33,
        "training.epochs": 15,
    }
    if order == "sampled":
        changes |= {"loss.name": "SampledSoftmax", "loss.num_negatives": 20}
    else:
        changes["training.order"] = order
    changes |= {"regularizer.name": "DURA", "regularizer.weight": 0.01, "model.init_scale": 0.3}
    losses = []
    for engine in ("auto", "reference"):
        recipe = kg.Recipe().with_changes({**changes, "training.engine": engine})
        run = kg.train_recipe(recipe, graph=small_graph, device="cuda")
        losses.append([entry["loss"] for entry in run.history])
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
