"""Several processes give what one gives: gradients, weights, ranks, checkpoints. Processes meet
through a file.
"""

import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dualkg as kg
from dualkg.data.graph import Graph
from dualkg.errors import DamagedFile, DualkgError
from dualkg.evaluation import ranking
from dualkg.evaluation.candidates import CandidateLists
from dualkg.files import file_record, read_json
from dualkg.inference.integrity import check_run
from dualkg.losses.base import BoundLoss
from dualkg.losses.rejected import WithRejected
from dualkg.models.base import EmbeddingModel, Factors, Model
from dualkg.models.bilinear import Dual
from dualkg.models.partial import PartialModel
from dualkg.regularizers import REGULARIZERS, Regularizer
from dualkg.tables.base import TABLE_NAMES, DeviceTables, EntityTables, local_tables
from dualkg.tables.checkpoints import DAMAGED_SHARD, shard_file
from dualkg.tables.liveness import Liveness
from dualkg.tables.processes import Processes
from dualkg.tables.shard import Shard
from dualkg.training import distributed, run
from dualkg.training.batches import one_of_each_query
from dualkg.training.distributed import build_trainer, expectation, group_shard
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.launcher import VARIABLES, num_processes
from dualkg.training.recipe import Recipe
from dualkg.training.run_folder import RunFolder
from dualkg.training.steps import ReferenceStep
from dualkg.training.trainer import Trainer
from dualkg.training.updates import OnePassAdagrad, optimizer_tensors
from tests.families import EMBEDDINGS
from tests.processes import COMMAND, FORKS, Started, group_environment, until
from tests.raising import refused


class Rejecting(kg.SampledSoftmax):
    """Sampled softmax where people have rejected two triples."""

    def bind(self, model: Model, graph: Graph, **options: Any) -> Any:
        num_entities, num_relations = model.shape
        sizes = torch.tensor([num_entities, num_relations, num_entities])
        rejected = torch.tensor([[0, 0, 1], [1, 2, 0]]) % sizes
        return WithRejected(super().bind(model, graph, **options), rejected)

    def rows_per_batch(self, model: Model, batch_size: int) -> None:
        """All rows: a rejected answer is compared with all entities."""


LOSSES = {
    "1-vs-all": kg.OneVsAll(),
    "1-vs-all without known answers": kg.OneVsAll(exclude_known=True),
    "rejected triples": Rejecting(num_negatives=5),
    "1-vs-all with all settings": kg.OneVsAll(
        label_smoothing=0.1,
        frequency_weight=0.5,
        dropout=0.3,
        head_dropout=0.2,
        relation_weight=0.7,
    ),
    "K-vs-all": kg.KvsAll(label_smoothing=0.1, count_exponent=0.5),
    "sampled softmax": kg.SampledSoftmax(num_negatives=5),
    "sampled softmax for each": kg.SampledSoftmax(
        num_negatives=5, shared=False, distribution="log-uniform"
    ),
    "negatives for each": kg.NegativeSampling(num_negatives=4),
    "shared negatives": kg.NegativeSampling(num_negatives=4, sampler="shared", subsampling=True),
    "in-batch negatives": kg.MarginRanking(sampler="in-batch"),
}


def graph_of(num_entities: int) -> Graph:
    """Random triples in which every entity occurs."""
    random = np.random.default_rng(num_entities)
    triples = [
        (f"e{h}", f"r{r % 3}", f"e{t}") for h, r, t in random.integers(0, num_entities, (40, 3))
    ]
    triples += [(f"e{i}", "r0", f"e{(i + 1) % num_entities}") for i in range(num_entities)]
    return Graph.from_triples(triples, valid=triples[:8], test=triples[8:16])


def in_processes(
    world_size: int, function: Callable[..., None], *arguments: Any, folder: Path
) -> None:
    """Call a function with its shard-making process in each of some processes; an exception of any
    fails.
    """
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    started = [
        FORKS.Process(target=_member, args=(rank, world_size, str(meeting), function, arguments))
        for rank in range(world_size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * world_size


def _member(
    rank: int,
    world_size: int,
    meeting: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    liveness = Liveness(store, rank, world_size)
    function(Processes(rank, world_size, torch.device("cpu"), liveness=liveness), *arguments)
    dist.destroy_process_group()


# -- shards ------------------------------------------------------------------


@pytest.mark.parametrize("num_entities", [1, 2, 5, 50, 331])
def test_every_entity_is_in_one_shard(num_entities: int) -> None:
    for world_size in (1, 2, 3, 7):
        shards = [Shard(num_entities, rank, world_size) for rank in range(world_size)]
        ids = torch.cat([shard.ids for shard in shards])
        assert sorted(ids.tolist()) == list(range(num_entities))
        for shard in shards:
            assert shard.positions(shard.ids).tolist() == list(range(shard.size))


def test_neighbours_are_in_different_shards() -> None:
    """Frequent entities often have low ids."""
    counts = [
        int((Shard(10_000, rank, 8).positions(torch.arange(1000)) >= 0).sum()) for rank in range(8)
    ]
    assert max(counts) - min(counts) <= 4


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("scale", [0.5, "xavier"])
@pytest.mark.parametrize("largest_in_order", [2**28, 100])
def test_a_shard_has_the_initial_weights_of_the_whole(
    name: str, scale: Any, largest_in_order: int
) -> None:
    """Drawn in order, and row by row."""
    if scale == "xavier" and name in ("RotatE", "HAKE"):
        pytest.skip("stores angles in units of init_scale")

    def build(tables: EntityTables) -> EmbeddingModel:
        options: dict[str, Any] = {"dim": 6, "seed": 3, "init_scale": scale}
        return EMBEDDINGS[name].with_tables(tables, kg.GraphShape(331, 5), **options)

    limits = {"largest_in_order": largest_in_order}
    whole = build(local_tables(331, **limits)).state_dict()
    shard = Shard(331, 1, 4)
    part = build(DeviceTables(shard, block_rows=16, **limits)).state_dict()
    for key, table in whole.items():
        assert torch.equal(part[key], table[shard.ids] if key in TABLE_NAMES else table)
    by_blocks = local_tables(331, device=torch.device("cpu"), block_rows=16, **limits)
    again = build(by_blocks).state_dict()
    assert all(torch.equal(again[key], table) for key, table in whole.items())
    # An operation with a tensor of the host would fail.
    elsewhere = build(local_tables(331, device=torch.device("meta"), **limits))
    assert elsewhere.entities.device.type == "meta"
    in_order = build(local_tables(331)).entities
    assert torch.equal(in_order, whole["entities"]) == (largest_in_order == 2**28)


# -- gradients ---------------------------------------------------------------


Case = tuple[
    str, bool, str, str, str
]  # model, reciprocal or not, loss, side of the dual, regularizer


def cases(*, all_of_them: bool) -> Iterator[Case]:
    if not all_of_them:
        yield from (("ComplEx", loss == "K-vs-all", loss, "none", "DURA") for loss in LOSSES)
        yield from (
            ("TransE", True, loss, "none", "none") for loss in ("1-vs-all", "negatives for each")
        )
        yield "RESCAL", True, "sampled softmax", "head", "DURA"
        yield "TuckER", False, "1-vs-all", "none", "UnweightedDURA"
        return
    for name, reciprocal, loss, regularizer in itertools.product(
        EMBEDDINGS, (True, False), LOSSES, REGULARIZERS
    ):
        yield name, reciprocal, loss, "none", regularizer
    for name, side, loss in itertools.product(("ComplEx", "RESCAL"), ("tail", "head"), LOSSES):
        yield name, True, loss, side, "DURA"


def compare_gradients(group: Processes, num_entities: int, all_of_them: bool) -> None:
    graph = graph_of(num_entities)
    for name, reciprocal, loss_name, side, regularizer_name in cases(all_of_them=all_of_them):
        regularizer = _regularizer(regularizer_name)
        build = partial(_model, graph, name, reciprocal, side)
        if _is_undefined(build(), regularizer, LOSSES[loss_name], reciprocal):
            continue
        batch = batch_of(graph, reciprocal, LOSSES[loss_name])
        expected = _whole_gradients(build(), graph, batch, LOSSES[loss_name], regularizer)
        shard = group_shard(group, graph)
        part = PartialModel(build(tables=DeviceTables(shard)))
        loss = LOSSES[loss_name].bind(part, graph, batch_size=len(batch), seed=0)
        sampled = LOSSES[loss_name].rows_per_batch(part, len(batch)) is not None
        for sparse in (False, True) if sampled and not regularizer.reads_whole_tables else (False,):
            part.zero_grad(set_to_none=True)
            step = ReferenceStep(part, loss, regularizer, None, sparse)  # type: ignore[arg-type]
            objective = step.gradients(batch)
            found = {key: table.grad for key, table in part.embedding.named_parameters()}
            assert (
                not (sparse and shard.size and found["entities"] is not None)
                or found["entities"].is_sparse
            )
            _assert_same(
                expected,
                objective,
                found,
                shard,
                (name, reciprocal, loss_name, side, regularizer_name),
            )


def compare_fused_gradients(group: Processes, num_entities: int, all_of_them: bool) -> None:
    graph = graph_of(num_entities)
    models = EMBEDDINGS if all_of_them else ["ComplEx", "CP", "TransE"]
    for name, reciprocal, dual, grouped in itertools.product(
        models, (True, False), ("none", "tail"), (True, False)
    ):
        if dual == "tail" and name not in ("ComplEx", "RESCAL"):
            continue
        build = partial(_model, graph, name, reciprocal, dual, squared=True)
        if build().score_form is None or (grouped and not reciprocal):
            continue
        for loss in (
            kg.OneVsAll(),
            kg.OneVsAll(frequency_weight=0.5, dropout=0.3, relation_weight=0.7),
        ):
            regularizer = kg.DURA(0.3) if build().embedding.has_adjoint else kg.NoRegularizer()
            batch = batch_of(graph, reciprocal, loss)
            expected = _whole_gradients(build(), graph, batch, loss, regularizer, grouped=grouped)
            shard = group_shard(group, graph)
            part = PartialModel(build(tables=DeviceTables(shard)))
            bound = loss.bind(part, graph, batch_size=len(batch), seed=0, grouped_by_query=grouped)
            step = OneVsAllFusedStep(
                part, bound, regularizer, OnePassAdagrad(part.parameters(), 0.1)
            )
            objective = step.gradients(batch)
            found = {key: table.grad for key, table in part.embedding.named_parameters()}
            found |= {
                "entities": step.tables.gradient("head"),
                "tails": step.tables.gradient("tail"),
            }
            _assert_same(expected, objective, found, shard, (name, reciprocal, dual, grouped))


def _model(
    graph: Graph,
    name: str,
    reciprocal: bool,
    side: str,
    *,
    squared: bool = False,
    tables: EntityTables | None = None,
) -> Model:
    norm: dict[str, Any] = (
        {"norm": "squared"} if squared and name in ("TransE", "RotatE", "ModE") else {}
    )
    tables = tables or local_tables(len(graph.entities))
    options: dict[str, Any] = {"dim": 4, "reciprocal": reciprocal, "seed": 1, "init_scale": 0.5}
    made = EMBEDDINGS[name].with_tables(tables, graph, **options, **norm)
    return (made if side == "none" else Dual(made, side)).double()  # type: ignore[arg-type]


def _regularizer(name: str) -> Regularizer:
    return REGULARIZERS[name]() if name == "none" else REGULARIZERS[name](0.3)


def _is_undefined(model: Model, regularizer: Regularizer, loss: Any, reciprocal: bool) -> bool:
    if (loss.examples == "queries" and not reciprocal) or (
        isinstance(model, Dual) and getattr(loss, "dropout", 0)
    ):
        return True
    try:
        regularizer.check(model.embedding)
    except kg.RequestError:
        return True
    return not model.embedding.euclidean and bool(getattr(loss, "dropout", 0))


def batch_of(graph: Graph, reciprocal: bool, loss: Any) -> torch.Tensor:
    batch = torch.from_numpy(graph.train.astype(np.int64))[:20]
    if reciprocal:
        inverse = torch.stack([batch[:, 2], batch[:, 1] + len(graph.relations), batch[:, 0]], 1)
        batch = torch.cat([batch, inverse])
    return (
        torch.from_numpy(one_of_each_query(batch.numpy())) if loss.examples == "queries" else batch
    )


def _whole_gradients(
    model: Model,
    graph: Graph,
    batch: torch.Tensor,
    loss: Any,
    regularizer: Regularizer,
    *,
    grouped: bool = False,
) -> dict[str, torch.Tensor]:
    bound = loss.bind(model, graph, batch_size=len(batch), seed=0, grouped_by_query=grouped)
    step = ReferenceStep(model, bound, regularizer, None)  # type: ignore[arg-type]
    objective = step.objective(batch)
    objective.backward()
    found = {
        key: table.grad
        for key, table in model.embedding.named_parameters()
        if table.grad is not None
    }
    return {"objective": objective.detach(), **found}


def _assert_same(
    expected: dict[str, Any], objective: Any, found: dict[str, Any], shard: Shard, case: object
) -> None:
    assert abs(float(expected["objective"] - objective)) < 1e-12, case
    for key, table in expected.items():
        if key != "objective":
            rows = table[shard.ids] if key in TABLE_NAMES else table
            gradient = (
                found[key].to_dense()
                if found[key] is not None and found[key].is_sparse
                else found[key]
            )
            assert torch.allclose(gradient, rows, rtol=0, atol=1e-12), (case, key)


# -- classes of one's own, which know nothing of processes -------------------


class SquaredError(kg.Loss):
    """The squared distance of all scores, of both sides, to those that answers should have."""

    scale: float = 0.1

    def bind(self, model: Model, graph: Graph, **options: Any) -> BoundLoss:
        def loss(model: Model, f: Factors) -> torch.Tensor:
            scores = model.tail_scores(f)
            wanted = torch.nn.functional.one_hot(f.tails, scores.shape[1]).to(scores.dtype)
            best = scores.max(dim=1).values.square().sum()
            return ((scores - wanted).square().sum() + self.scale * best) / len(f.heads)

        return loss


class Shifted(kg.BilinearModel):
    """⟨h∘r, t⟩ + Σ r · tanh(t): scores of all entities read the relations directly."""

    def map_head(self, head: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        return head * self.relations[relations]

    def map_tail(self, tail: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        return self.map_head(tail, relations)

    def triple_scores(self, f: Factors) -> torch.Tensor:
        return super().triple_scores(f) + (f.relation * f.tail.tanh()).sum(-1)

    def tail_scores(self, f: Factors) -> torch.Tensor:
        return super().tail_scores(f) + f.relation @ self.tail_table.tanh().T


class FourthPowers(Regularizer):
    """Σ h⁴ + Σ (hR)⁴."""

    def per_triple(self, f: Factors) -> torch.Tensor:
        return f.head.pow(4).sum(-1) + f.mapped_head.pow(4).sum(-1)


def compare_own_classes(group: Processes, num_entities: int) -> None:
    graph = graph_of(num_entities)
    shard = group_shard(group, graph)
    options: dict[str, Any] = {"dim": 4, "seed": 1, "init_scale": 0.5}
    for loss in (SquaredError(), kg.OneVsAll(), kg.SampledSoftmax(num_negatives=5)):
        regularizer = FourthPowers(0.3)
        batch = batch_of(graph, True, loss)
        whole = Shifted(graph, **options).double()
        expected = _whole_gradients(whole, graph, batch, loss, regularizer)
        built = Shifted.with_tables(DeviceTables(shard), graph, **options).double()
        part = PartialModel(built)
        bound = loss.bind(part, graph, batch_size=len(batch), seed=0)
        step = ReferenceStep(part, bound, regularizer, None)  # type: ignore[arg-type]
        objective = step.gradients(batch)
        gradients = {key: table.grad for key, table in part.embedding.named_parameters()}
        _assert_same(expected, objective, gradients, shard, type(loss).__name__)


def train_own_classes(group: Processes, expected: float | None) -> float:
    """Train by a trainer of several processes, which gets the classes of the test."""
    graph = kg.load_graph("world")
    recipe = Recipe().with_changes({"training.epochs": 1, "training.batch_size": 500})
    recipe = recipe.model_copy(update={"loss": SquaredError()})
    shard = group_shard(group, graph)
    tables = local_tables(len(graph.entities)) if expected is None else DeviceTables(shard)
    model: Model = Shifted.with_tables(tables, graph, dim=4, seed=1, init_scale=0.5).double()
    if expected is not None:
        model = PartialModel(model)
    trainer = Trainer(model, graph, recipe, FourthPowers(0.1), group=group)
    trainer.run()
    loss: float = trainer.progress.history[-1]["loss"]
    mrr = float((1 / ranking.rank(model.eval(), graph, split="valid").mean).mean())
    assert expected is None or abs(loss + mrr - expected) < 1e-9
    return loss + mrr


def compare_both(group: Processes, all_of_them: bool) -> None:
    """Seven entities are split unevenly; of a single one, all but one process have none."""
    for compare, num_entities in itertools.product(
        (compare_gradients, compare_fused_gradients), (7, 1)
    ):
        compare(group, num_entities, all_of_them)
    for num_entities in (7, 1):
        compare_own_classes(group, num_entities)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_all_models(world_size: int, tmp_path: Path) -> None:
    in_processes(world_size, compare_both, True, folder=tmp_path)


def adagrad(model: Model) -> OnePassAdagrad:
    """Where a gradient is 0 but for rounding, as that of a bias that a softmax cancels, a step is
    rounding / ε.
    """
    return OnePassAdagrad(model.parameters(), 0.02, eps=1e-6)


# -- what is sent ------------------------------------------------------------


def count_numbers(group: Processes) -> None:
    graph = graph_of(50)
    sent = 0
    all_reduce = Shard.all_reduce

    def counted(shard: Shard, values: torch.Tensor, reduction: Any = "sum") -> torch.Tensor:
        nonlocal sent
        sent += values.numel()
        return all_reduce(shard, values, reduction)

    Shard.all_reduce = counted  # type: ignore[method-assign]
    for reciprocal in (True, False):
        tables = DeviceTables(group_shard(group, graph))
        batch = batch_of(graph, reciprocal, kg.OneVsAll())
        part = PartialModel(_model(graph, "ComplEx", reciprocal, "none", tables=tables))
        loss = kg.OneVsAll().bind(part, graph, batch_size=len(batch), seed=0)
        step = OneVsAllFusedStep(part, loss, kg.DURA(0.1), OnePassAdagrad(part.parameters(), 0.1))
        sent = 0
        step(batch, 0.1)
        size = len(batch)
        width = part.embedding.entities.shape[1]
        assert sent == (3 * size * width + 2 * size if reciprocal else 4 * size * width + 4 * size)


def share_relations(group: Processes) -> None:
    """Machines of several kinds round differently, and agree again at the end of an epoch."""
    tables = DeviceTables(group_shard(group, graph_of(7)))
    state = {name: torch.full((2,), float(group.index)) for name in ("entities", "relations")}
    tables.synchronize(state)
    assert state["relations"].tolist() == [0, 0]
    assert state["entities"].tolist() == [group.index, group.index]


# -- ranks -------------------------------------------------------------------


def compare_ranks(group: Processes) -> None:
    graph = kg.load_graph("world")
    random = np.random.default_rng(0)
    lengths = random.integers(0, 30, 2 * len(graph.valid))
    listed = random.integers(0, len(graph.entities), lengths.sum(), dtype=np.int32)
    lists = CandidateLists(listed, np.concatenate([[0], lengths.cumsum()]))
    restricted: tuple[dict[str, Any], ...] = ({"type_constrained": True}, {"candidates": lists})
    for name, ties in (("ComplEx", True), ("ComplEx", False), ("RotatE", False)):
        options = {"dim": 8, "seed": 1, "init_scale": 0.5, "reciprocal": not ties}
        build = partial(EMBEDDINGS[name].with_tables, **options)

        def made(tables: EntityTables, build: Any = build, ties: bool = ties) -> Model:
            model: Model = build(tables, graph)
            with torch.no_grad():
                for table in model.parameters():
                    table.copy_((table * 2).round() if ties else table)
            return model

        shard = group_shard(group, graph)
        whole = made(local_tables(len(graph.entities)))
        expected = ranking.rank(whole, graph, split="valid")
        for max_columns in (2**20, 300):
            part = PartialModel(made(DeviceTables(shard, max_columns=max_columns)))
            found = ranking.rank(part, graph, split="valid")
            assert np.array_equal(found.optimistic, expected.optimistic)
            assert np.array_equal(found.pessimistic, expected.pessimistic)
        for candidates in restricted:
            of_one = ranking.rank(whole, graph, split="valid", **candidates)
            found = ranking.rank(part, graph, split="valid", **candidates)
            assert np.array_equal(found.optimistic, of_one.optimistic)
            assert np.array_equal(found.pessimistic, of_one.pessimistic)
            assert np.array_equal(found.num_candidates, of_one.num_candidates)
        samples = [
            kg.evaluate(model, graph, split="valid", queries=60).ranks for model in (whole, part)
        ]
        assert np.array_equal(samples[0].optimistic, samples[1].optimistic)
        assert np.array_equal(samples[0].triples, samples[1].triples)
        assert not ties or (expected.optimistic != expected.pessimistic).any()
    with torch.no_grad():
        part.embedding.entities[:1] = torch.nan
    with pytest.raises(kg.DivergedError, match="NaN or infinity"):
        ranking.rank(part, graph, split="valid")


# -- training and checkpoints ------------------------------------------------

CHANGES = {
    "data.graph": "world",
    "model.name": "ComplEx",
    "model.dim": 8,
    "regularizer.name": "DURA",
    "regularizer.weight": 0.05,
    "training.epochs": 1,
    "training.batch_size": 256,
    "validation.every": 1,
    "validation.keep": "best",
}


def _trainer(group: Processes, recipe: Recipe, graph: Graph) -> Trainer:
    """A trainer in float64."""
    made = build_trainer(recipe, graph, group)
    model = made.model.double()
    regularizer = recipe.regularizer.build()
    return Trainer(model, graph, recipe, regularizer, group=group, store=made.store)


def train_some_steps(
    group: Processes,
    changes: dict[str, Any],
    path: Path,
    first: int,
    last: int,
    compare: tuple[Path, float] | None,
) -> None:
    """Resume at step `first` and save at step `last`, or compare with weights of one process up to
    a difference.
    """
    recipe = Recipe().with_changes(changes)
    graph = kg.load_graph("world")
    trainer = _trainer(group, recipe, graph)
    shard = group_shard(group, graph)
    if first:
        trainer.restore(path)
        saved = [torch.load(file) for file in sorted(path.parent.glob("state-*.pt"))]
        order = torch.cat([state["ids"] for state in saved]).argsort()[shard.ids]
        for key, value in _state(trainer).items():
            is_table = value.dim() > 0 and key.startswith(("model/entities", "optimizer/0."))
            whole = torch.cat([state[key] for state in saved])[order] if is_table else saved[0][key]
            assert torch.equal(value, whole), key
    assert trainer.progress.step == first
    sentence = r"Each process has [\d,]+ of 1,945 entities\."
    assert re.match(sentence, expectation(trainer))
    for number, batch in enumerate(trainer.batches(0)):
        if first <= number < last:
            trainer.step(batch, 0.1)
            trainer.progress.step = number + 1
    if compare is None:
        trainer.save(path)
        if group.first:
            for file in path.parent.glob("state-*.pt"):
                file.unlink()
        group.on_first(lambda: None)
        torch.save({"ids": shard.ids, **_state(trainer)}, path.parent / f"state-{group.index}.pt")
        return
    for key, table in torch.load(compare[0]).items():
        rows = table[shard.ids] if key == "entities" else table
        assert float((trainer.model.embedding.state_dict()[key] - rows).abs().max()) < compare[1]


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of this process and the state of its optimizer."""
    groups = {
        "model": trainer.model.embedding.state_dict(),
        "optimizer": optimizer_tensors(trainer.optimizer),
    }
    return {
        f"{group}/{name}": value
        for group, tensors in groups.items()
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    ("optimizer", "world_sizes", "steps", "difference"),
    [
        pytest.param("Adagrad", [2, 3], 64, 1e-10, marks=pytest.mark.slow),
        pytest.param("Adam", [3, 2], 64, 1e-10, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_resumed_by_another_number_of_processes(
    optimizer: str, world_sizes: list[int], steps: int, difference: float, tmp_path: Path
) -> None:
    """What is loaded has the bits of what was saved. Later steps add up in another order, and
    Adagrad and Adam divide the difference by roots of small sums: after 64 steps it is 1e-12.
    """
    changes = {**CHANGES, "optimizer.name": optimizer, "training.batch_size": 200}
    recipe = Recipe().with_changes(changes)
    graph = kg.load_graph("world")
    whole = Trainer.of_recipe(recipe, graph, device=torch.device("cpu"))
    whole = Trainer(whole.model.double(), graph, recipe, recipe.regularizer.build())
    for batch in itertools.islice(whole.batches(0), steps):
        whole.step(batch, 0.1)
    torch.save(whole.model.state_dict(), tmp_path / "expected.pt")
    path = tmp_path / "checkpoint"
    part = steps // (len(world_sizes) + 1)
    done = 0
    for world_size in world_sizes:
        in_processes(
            world_size, train_some_steps, changes, path, done, done + part, None, folder=tmp_path
        )
        done += part
    compare = tmp_path / "expected.pt", difference
    train_some_steps(Processes(0, 1, torch.device("cpu")), changes, path, done, steps, compare)


def train_world(group: Processes, expected: float | None) -> float:
    """Train in float64 to the end, and compare the test MRR with that of one process."""
    changes = {
        **CHANGES,
        "model.dim": 16,
        "training.epochs": 6,
        "validation.every": 0,
        "validation.keep": "last",
    }
    recipe = Recipe().with_changes(changes)
    graph = kg.load_graph("world")
    if expected is None:
        trainer = Trainer.of_recipe(recipe, graph, device=group.device)
        trainer = Trainer(trainer.model.double(), graph, recipe, recipe.regularizer.build())
    else:
        trainer = _trainer(group, recipe, graph)
    trainer.run()
    found = float((1 / ranking.rank(trainer.model.eval(), graph, split="test").mean).mean())
    assert expected is None or abs(found - expected) < 1e-9
    return found


@pytest.mark.slow
def test_a_whole_training_ends_with_the_mrr_of_one_process(tmp_path: Path) -> None:
    expected = train_world(Processes(0, 1, torch.device("cpu")), None)
    assert expected > 0.3
    in_processes(2, train_world, expected, folder=tmp_path)


def test_two_checkpoints_are_kept_and_an_incomplete_one_is_not_used(tmp_path: Path) -> None:
    group = Processes(0, 1, torch.device("cpu"))
    path = tmp_path / "checkpoint"
    for last in (1, 2, 3):
        train_some_steps(group, CHANGES, path, last - 1, last, None)
    (path / "000004").mkdir()  # as a kill in a save leaves it
    (path / "000004" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    train_some_steps(group, CHANGES, path, 3, 4, None)
    assert sorted(found.name for found in path.iterdir()) == ["000003", "000005", "latest.json"]
    [file] = (path / "000005").iterdir()
    file.write_bytes(b"damaged")
    with refused(DamagedFile, path=file, reason=DAMAGED_SHARD, silent=False):
        train_some_steps(group, CHANGES, path, 4, 5, None)


def change_bytes(file: Path) -> None:
    """Change 64 bytes of the numbers, which are finite before and after."""
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(number ^ 1 for number in content[-64:])
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def add(file: Path) -> None:
    shutil.copyfile(file, file.with_name("shard-00002-model-00001-of-00001.safetensors"))


@pytest.mark.parametrize("damage", [change_bytes, cut, add, Path.unlink])
def test_a_damaged_shard_is_not_resumed_from(tmp_path: Path, damage: Callable[[Path], None]):
    group = Processes(0, 1, torch.device("cpu"))
    path = tmp_path / "checkpoint"
    train_some_steps(group, CHANGES, path, 0, 1, None)
    [file] = (path / "000001").iterdir()
    damage(file)
    damaged = file.with_name("shard-00002-model-00001-of-00001.safetensors")
    with refused(DamagedFile, path=damaged if damage is add else file):
        train_some_steps(group, CHANGES, path, 1, 2, None)


def test_check_reads_the_shards_of_an_unfinished_run(tmp_path: Path) -> None:
    changes = {"data.graph": "x", "training.epochs": 3, "training.checkpoint_seconds": 0}
    recipe = Recipe().with_changes({**CHANGES, **changes})
    group = Processes(0, 1, torch.device("cpu"))

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distributed.train_in_processes(
            recipe, graph_of(50), group, out=tmp_path / "run", on_progress=stop
        )
    (check,) = check_run(tmp_path / "run")
    assert check.ok
    assert "checkpoint" in [file.file for file in check.files]
    shards = sorted((tmp_path / "run" / "checkpoint").glob("*/*.safetensors"))
    change_bytes(shards[-1])
    (check,) = check_run(tmp_path / "run")
    assert [file.file for file in check.files if file.damaged] == ["checkpoint"]


def test_callbacks_are_called_where_a_run_of_several_processes_is_resumed(tmp_path: Path) -> None:
    changes = {"data.graph": "x", "training.epochs": 2, "training.checkpoint_seconds": 0}
    recipe = Recipe().with_changes({**CHANGES, **changes})
    group = Processes(0, 1, torch.device("cpu"))

    class Epochs(kg.Callback):
        def __init__(self) -> None:
            self.stops = True
            self.seen: list[int] = []

        def on_epoch(self, epoch: int, metrics: Any) -> None:
            self.seen.append(epoch)
            if self.stops:
                raise KeyboardInterrupt

    epochs = Epochs()
    with pytest.raises(KeyboardInterrupt):
        distributed.train_in_processes(
            recipe, graph_of(50), group, out=tmp_path / "run", callbacks=[epochs]
        )
    epochs.stops = False
    kg.resume(tmp_path / "run", callbacks=[epochs])
    assert epochs.seen[0] == 1
    assert epochs.seen[-1] == 2
    assert len(epochs.seen) > 1


def save_and_damage(group: Processes, path: Path) -> None:
    """A checkpoint of two processes; the shard of the second is damaged, which both find."""
    train_some_steps(group, CHANGES, path, 0, 1, None)
    folder = path / "000001"
    records = read_json(path / "latest.json", checksum=True)["files"]
    assert records == {file.name: file_record(file) for file in sorted(folder.iterdir())}
    assert len(records) == group.count
    file = shard_file(folder, 1)
    group.on_first(lambda: change_bytes(file))
    with refused(DamagedFile, path=file, silent=not group.first):
        train_some_steps(group, CHANGES, path, 1, 2, None)


def test_all_processes_refuse_the_damaged_shard_of_one(tmp_path: Path) -> None:
    in_processes(2, save_and_damage, tmp_path / "checkpoint", folder=tmp_path)


def test_best_weights_of_batch_normalization_are_restored(tmp_path: Path) -> None:
    """Two layers have parameters of the same names."""
    own = {"model.name": "TuckER", "model.options.batch_norm": True, "regularizer.name": "none"}
    recipe = Recipe().with_changes({**CHANGES, **own})
    graph = kg.load_graph("world")
    before, after = (
        build_trainer(recipe, graph, Processes(0, 1, torch.device("cpu"))) for _ in range(2)
    )
    before.best = {
        name: torch.rand_like(value) for name, value in before.weights.state_dict().items()
    }
    before.save(tmp_path / "checkpoint")
    after.restore(tmp_path / "checkpoint")
    assert after.best.keys() == before.best.keys()
    assert all(torch.equal(value, before.best[name]) for name, value in after.best.items())


# -- weights in several files ------------------------------------------------


def train_a_run(group: Processes, path: Path) -> None:
    recipe = Recipe().with_changes({**CHANGES, "data.graph": "x"})
    distributed.train_in_processes(recipe, graph_of(50), group, out=path)


def compare_all_and_train(group: Processes, path: Path, expected: float) -> None:
    """Gradients and ranks are those of one process, and messages those of the documentation."""
    compare_both(group, all_of_them=False)
    compare_ranks(group)
    count_numbers(group)
    share_relations(group)
    train_own_classes(group, expected)
    train_a_run(group, path)


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """In one test, because processes take seconds to start."""
    own = train_own_classes(Processes(0, 1, torch.device("cpu")), None)
    path = tmp_path / "shards"
    in_processes(2, compare_all_and_train, path, own, folder=tmp_path)
    expected = kg.load_run(path).model.state_dict()
    identity = RunFolder(path).identity()
    run.gather(path)
    assert RunFolder(path).identity() == identity
    files = {found.name for found in path.iterdir()}
    assert "weights.safetensors" in files
    assert not any("-of-" in name or "index" in name for name in files)
    assert check_run(path)[0].ok
    found = kg.load_run(path).model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with pytest.raises(kg.RequestError, match="are in one file already"):
        run.gather(path)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", ["report.json", "history.json", "ranks-test.parquet"])
def test_a_finished_run_with_damaged_results_is_evaluated_again(
    tmp_path: Path, name: str, gathered: bool
) -> None:
    path = tmp_path / "run"
    train_a_run(Processes(0, 1, torch.device("cpu")), path)
    expected = kg.load_run(path)
    mrr = expected.report.mrr
    if gathered:
        run.gather(path)
    (path / name).write_bytes(b"damaged")
    (check,) = check_run(path)
    assert not check.ok
    with pytest.raises(kg.RequestError, match="damaged" if not gathered else "is finished"):
        distributed.resume_in_processes(path)
    found = kg.resume(path)
    assert found.history == expected.history
    assert found.report.mrr == mrr
    assert check_run(path)[0].ok
    assert not list(path.glob("weights*-of-*")) + list(path.glob("*.index.json"))


@pytest.mark.parametrize(
    "name", ["weights-00001-of-00001.safetensors", "weights.safetensors.index.json"]
)
def test_a_finished_run_with_damaged_weights_is_trained_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run"
    train_a_run(Processes(0, 1, torch.device("cpu")), path)
    (path / name).write_bytes(b"damaged")
    assert not check_run(path)[0].ok
    with pytest.raises(kg.RequestError, match="train it again"):
        kg.resume(path)


def test_weights_of_another_number_of_processes_are_removed(tmp_path: Path) -> None:
    group = Processes(0, 1, torch.device("cpu"))
    path = tmp_path / "run"
    train_a_run(group, path)
    folder = RunFolder(path)
    shutil.copy(
        folder.weights_of_process(0, 1), folder.weights_of_process(1, 2)
    )  # of two processes that were killed at the end
    folder.checkpoint_folder.mkdir()
    folder.finish_in_parts(kg.load_run(path), 1)
    assert not folder.weights_of_process(1, 2).exists()
    assert check_run(path)[0].ok


def test_weights_in_several_files_are_a_member_of_an_ensemble(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train_a_run(Processes(0, 1, torch.device("cpu")), path)
    kg.Ensemble([path]).save(tmp_path / "ensemble")
    found = kg.load_run(tmp_path / "ensemble").report_on("test").metrics
    assert found.mrr == pytest.approx(kg.load_run(path).report_on("test").metrics.mrr)


def test_the_checkpoint_of_a_finished_run_is_removed(tmp_path: Path) -> None:
    group = Processes(0, 1, torch.device("cpu"))
    path = tmp_path / "run"
    train_a_run(group, path)
    left = RunFolder(path).checkpoint_folder / "000001"
    left.mkdir(parents=True)  # as a kill leaves it while it is removed
    with pytest.raises(kg.RequestError, match="is finished"):
        distributed.resume_in_processes(path)
    assert not left.parent.exists()


def test_a_signal_that_arrives_while_processes_agree_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Processes(0, 1, torch.device("cpu"))
    trainer = _trainer(group, Recipe().with_changes(CHANGES), kg.load_graph("world"))
    trainer.checkpoint_path = tmp_path / "checkpoint"
    agreed = Processes.any

    def interrupted(self: Processes, flag: bool) -> bool:
        answer = agreed(self, flag)
        # As by a signal in an all-reduce, after the flag was read.
        trainer.stop.requested = True
        return answer

    monkeypatch.setattr(Processes, "any", interrupted)
    assert not trainer._checkpoint_due()  # the others do not stop either
    assert trainer._checkpoint_due()
    with pytest.raises(kg.DualkgError, match="Stopped in epoch 1 of 1, all work saved"):
        trainer._pause()


# -- refusals ----------------------------------------------------------------


def test_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert num_processes() == 1
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(kg.RequestError, match="WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"):
        num_processes()
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert num_processes() == 2
    for rank in ("2", "x"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(kg.RequestError, match="RANK is a number from 0 to WORLD_SIZE − 1"):
            num_processes()


def test_a_lost_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others ended in a traceback."""
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *args, **options: None)
    met = (dist.HashStore(), 1, 2)
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([met]))
    lost = "[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
    told = "Process 1 of 2 has lost the others: .* dualkg resume RUN"
    for error in (RuntimeError(lost), dist.DistNetworkError(lost)):
        with pytest.raises(DualkgError, match=told), distributed.processes("cpu"):
            raise error
    with pytest.raises(RuntimeError, match="another"), distributed.processes("cpu"):
        raise RuntimeError("another")


class WholeTables(kg.DURA):
    """A regularizer of one's own."""

    reads_whole_tables = True


def test_what_cannot_be_split_is_refused() -> None:
    graph = graph_of(7)
    group = Processes(0, 1, torch.device("cpu"))
    tables = DeviceTables(group_shard(group, graph))
    model = PartialModel(kg.CP.with_tables(tables, graph, dim=4))
    with pytest.raises(kg.RequestError, match="WholeTables reads whole tables"):
        Trainer(model, graph, Recipe(), WholeTables(0.1), group=group)


# -- the command line --------------------------------------------------------

RECIPE = """
[data]
graph = "world"
[model]
dim = 16
[regularizer]
name = "DURA"
weight = 0.05
[training]
epochs = 12
batch_size = 200
checkpoint_seconds = 0
"""


def torchrun(*arguments: object, processes: int = 2, restarts: int = 0) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "dualkg",
        *map(str, arguments),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_killed_processes_are_restarted_and_the_end_is_the_same(tmp_path: Path) -> None:
    import subprocess

    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(kg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # sums on a GPU are in any order
    }
    (tmp_path / "r.toml").write_text(RECIPE)
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": environment,
        "text": True,
        "capture_output": True,
    }
    done = subprocess.run(torchrun("train", "r.toml", "--out", "whole"), **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world test") == 1
    assert (tmp_path / "whole" / "weights-00002-of-00002.safetensors").exists()
    options.pop("capture_output")
    command = torchrun("train", "r.toml", "--out", "killed", restarts=9)
    running = subprocess.Popen(
        command, **options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    pointer = RunFolder(tmp_path / "killed").checkpoint_folder / "latest.json"
    random = Random(0)
    killed = set[str]()
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")

    def saved_since(seen: str) -> bool:
        return (
            running.poll() is not None or (pointer.read_text() if pointer.exists() else "") != seen
        )

    for _ in range(5):
        until(lambda: len(set(children.read_text().split()) - killed) == 2)
        for _ in range(random.randrange(3)):
            seen = pointer.read_text() if pointer.exists() else ""
            until(partial(saved_since, seen))
        assert running.poll() is None, "the training has ended too early"
        victim = random.choice(sorted(set(children.read_text().split()) - killed, key=int))
        killed.update(children.read_text().split())  # torchrun ends the other
        os.kill(int(victim), signal.SIGKILL)
    assert running.wait() == 0
    assert len(killed) == 10
    whole, restarted = (
        kg.load_run(tmp_path / name).model.state_dict() for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[key], restarted[key]) for key in whole)
    assert not RunFolder(tmp_path / "killed").checkpoint_folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_in_the_middle_of_a_step_ends_the_others(
    tmp_path: Path, number: signal.Signals
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("epochs = 12", "epochs = 100_000"))
    run = tmp_path / "run"
    pointer = RunFolder(run).checkpoint_folder / "latest.json"
    environment = group_environment(2) | {"DUALKG_SILENCE": "5"}
    words = ("train", recipe, "--out", run)
    with (
        Started(COMMAND, *words, environment=environment | {"RANK": "0"}) as first,
        Started(COMMAND, *words, environment=environment | {"RANK": "1"}) as second,
    ):
        until(lambda: pointer.exists() or not first.running)
        second.signal(number)
        ended = first.finish()
    assert ended.code == 1, ended.err
    if number == signal.SIGSTOP:
        assert "Process 1 on" in ended.err
        assert "has shown no sign of life for 5 s" in ended.err
    else:
        assert "has lost the others" in ended.err or "no sign of life" in ended.err
    assert "Traceback" not in ended.err
