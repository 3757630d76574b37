"""Rows are exchanged in the way that sends fewer bytes, with the same result."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dualkg as kg
from dualkg.models.partial import PartialModel
from dualkg.tables.base import DeviceTables
from dualkg.tables.processes import Processes
from dualkg.tables.shard import RowSources, Shard
from dualkg.training.steps import ReferenceStep
from tests.training.test_distributed import (
    _assert_same,
    _model,
    _whole_gradients,
    batch_of,
    in_processes,
)


def test_bytes_by_hand():
    """Four processes and 120 rows: 180 are sent in a ring, 3 times the most of a process else."""
    assert Shard(120, 0, 4).sends_rows(120, 59)
    assert not Shard(120, 0, 4).sends_rows(120, 60)  # a process has half of the rows
    assert not Shard(120, 0, 2).sends_rows(1, 1)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_received_rows_are_in_the_order_of_the_batch(num_processes):
    """What all processes would send, put next to each other."""
    ids = torch.tensor([4, 4, 0, 11, 3, 22, 4, 9, 1])
    table = torch.arange(23.0)[:, None]
    sent = []
    for process in range(num_processes):
        shard = Shard(23, process, num_processes)
        sources = RowSources.of(shard, ids)
        assert torch.equal((shard.positions(ids) >= 0).nonzero().squeeze(-1), sources.own)
        assert sources.counts[process] == len(sources.own)
        sent.append(table[ids[sources.own]])
    assert torch.equal(torch.cat(sent)[sources.places], table[ids])


class Sent:
    """Counts numbers in collectives."""

    def __init__(self) -> None:
        self.reduced: list[int] = []
        self.rows: list[int] = []
        all_reduce = dist.all_reduce
        all_to_all = dist.all_to_all_single

        def count_reduced(values: torch.Tensor, *arguments: Any) -> Any:
            self.reduced.append(values.numel())
            return all_reduce(values, *arguments)

        def count_rows(received: torch.Tensor, sent: torch.Tensor, *arguments: Any) -> Any:
            self.rows.append(sent.numel() // dist.get_world_size())
            return all_to_all(received, sent, *arguments)

        dist.all_reduce = count_reduced
        dist.all_to_all_single = count_rows


def graph_of_many_relations() -> kg.Graph:
    """30 relations, of which the first 20 triples have 7."""
    triples = [(f"e{i}", f"r{i % 7 if i < 20 else i - 13}", f"e{5 * i % 43}") for i in range(43)]
    return kg.Graph.from_triples(triples, valid=triples[:8], test=triples[8:16])


def compare(group: Processes) -> None:
    """Gradients, and the numbers that are sent, with rows sent by their owners and without."""
    sent = Sent()
    graph = graph_of_many_relations()
    num_entities = len(graph.entities)
    num_relations = 2 * len(graph.relations)
    for name, loss in (
        ("TransE", kg.OneVsAll()),
        ("RotatE", kg.SampledSoftmax(num_negatives=9, shared=False)),
        ("ComplEx", kg.SampledSoftmax(num_negatives=9)),
    ):
        batch = batch_of(graph, True, loss)
        # Entities are scored by mapped heads in TransE, and with the relations in RotatE.
        num_touched = len(batch[:, 1].unique()) if name == "RotatE" else 0
        whole = _model(graph, name, True, "none")
        expected = _whole_gradients(whole, graph, batch, loss, kg.NoRegularizer())
        for least_bytes in (0, 2**30):
            shard = Shard(num_entities, group.index, group.count, least_bytes=least_bytes)
            part = PartialModel(_model(graph, name, True, "none", tables=DeviceTables(shard)))
            bound = loss.bind(part, graph, batch_size=len(batch), seed=0)
            step = ReferenceStep(part, bound, kg.NoRegularizer(), None)  # type: ignore[arg-type]
            sent.reduced.clear()
            sent.rows.clear()
            objective = step.gradients(batch)
            gradients = {key: table.grad for key, table in part.embedding.named_parameters()}
            _assert_same(expected, objective, gradients, shard, (name, least_bytes))

            reads_relations = name != "ComplEx"
            width = part.embedding.relations.shape[1]
            if least_bytes:
                assert not sent.rows
                assert (num_relations * width in sent.reduced) == reads_relations
            else:
                # Distances to all entities need no tails of the batch.
                ids = batch[:, 0] if name == "TransE" else batch[:, ::2].flatten()
                num_own = int((shard.positions(ids) >= 0).sum())
                assert sum(sent.rows) == num_own * part.embedding.entities.shape[1], sent.rows
                assert num_relations * width not in sent.reduced
                assert (num_touched * width in sent.reduced) == reads_relations
                assert (num_relations in sent.reduced) == reads_relations


def test_both_ways_give_the_gradients_of_one_process(tmp_path: Path) -> None:
    in_processes(2, compare, folder=tmp_path)


@pytest.mark.slow
def test_three_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    in_processes(3, compare, folder=tmp_path)
