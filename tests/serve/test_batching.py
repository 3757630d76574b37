"""Queries answered in a micro-batch have the same predictions as alone."""

import asyncio

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.predictor import QUERY_TYPES, Query
from dualkg.serve.batching import MAX_RECENT_K, MicroBatcher
from dualkg.serve.errors import BusyError
from dualkg.serve.service import ServerMetrics

SIZES = {"tails": "er", "heads": "re", "relations": "ee", "triple": "ere", "similar": "e"}


def queries(kind, graph, number=60):
    random = np.random.default_rng(1)
    most = {"e": len(graph.entities), "r": len(graph.relations)}
    return [
        Query(
            tuple(int(random.integers(most[part])) for part in SIZES[kind]),
            k=int(random.integers(1, 60)),
            known="omit" if random.random() < 0.5 else "mark",
        )
        for _ in range(number)
    ]


def sizes(metrics):
    """Queries, batches, and queries of the largest batch."""
    values = {}
    for line in metrics.text().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.split()
            values[name.removeprefix("dualkg_")] = float(value)
    return values["queries_total"], values["batches_total"], values["largest_batch"]


def assert_same(batched, alone):
    """Compare the predictions of each query."""
    for a, b in zip(batched, alone, strict=True):
        assert [(p.id, p.name, p.split) for p in a] == [(p.id, p.name, p.split) for p in b]
        assert [p.score for p in a] == pytest.approx([p.score for p in b], abs=1e-4)
        assert [p.probability for p in a] == pytest.approx([p.probability for p in b], abs=1e-4)


@pytest.mark.parametrize("kind", QUERY_TYPES)
@pytest.mark.parametrize("name", ["calibrated", "plain"])
def test_a_batch_has_the_predictions_of_each_query_alone(served, kind, name):
    run = served.get(name)
    given = queries(kind, run.run.graph)
    batched = run.predictor.predict(kind, given)
    assert_same(batched, [run.predictor.predict(kind, [query])[0] for query in given])


@pytest.mark.parametrize("model", [kg.DistMult, kg.TransE, kg.RESCAL])
def test_a_batch_for_models_without_inverse_relations(small_graph, model):
    predictor = kg.Predictor(
        model(small_graph.shape, dim=4, reciprocal=False, init_scale=1.0), small_graph
    )
    for kind in QUERY_TYPES:
        given = queries(kind, small_graph, 20)
        batched = predictor.predict(kind, given)
        assert_same(batched, [predictor.predict(kind, [query])[0] for query in given])


def test_pending_queries_are_one_batch_per_kind(served):
    run = served.get("calibrated")
    metrics = ServerMetrics({})
    given = [(kind, query) for kind in QUERY_TYPES for query in queries(kind, run.run.graph, 20)]

    async def all_at_once(batcher):
        await batcher.start()
        try:
            return await asyncio.gather(
                *(batcher.predict(run.predictor, kind, query) for kind, query in given)
            )
        finally:
            await batcher.stop()

    batching = MicroBatcher(max_pending=1000, on_batch=metrics.batch, max_predictions=10**6)
    alone = MicroBatcher(max_pending=1000, on_batch=lambda size: None, max_predictions=1)
    batched = asyncio.run(all_at_once(batching))
    assert_same(batched, asyncio.run(all_at_once(alone)))
    assert sizes(metrics) == (100, len(QUERY_TYPES), 20)


def test_a_query_that_fails_does_not_fail_the_others(served):
    run = served.get("plain")
    given = [Query((0, 0), k=3), Query((0, 0), k=-1), Query((1, 0), k=3)]

    async def ask():
        batcher = MicroBatcher(max_pending=10, on_batch=ServerMetrics({}).batch)
        await batcher.start()
        predictions = (batcher.predict(run.predictor, "tails", query) for query in given)
        results = await asyncio.gather(*predictions, return_exceptions=True)
        await batcher.stop()
        return results

    first, second, third = asyncio.run(ask())
    assert len(first) == len(third) == 3
    assert isinstance(second, InvalidValue)
    assert (second.setting, second.found) == ("k", -1)


def test_a_full_queue_refuses_queries(served):
    run = served.get("plain")

    async def ask():
        batcher = MicroBatcher(max_pending=2, on_batch=ServerMetrics({}).batch)
        asks = [
            asyncio.ensure_future(batcher.predict(run.predictor, "tails", Query((0, 0))))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="2 queries are waiting already"):
            await asks[2]
        asks[0].cancel()  # its client has disconnected
        await asyncio.sleep(0)
        await batcher.start()
        predictions = await asks[1]
        await batcher.stop()
        return predictions

    assert len(asyncio.run(ask())) == 10


def test_a_large_batch_leaves_the_rest_for_the_next_one(served):
    run = served.get("plain")
    metrics = ServerMetrics({})

    async def ask():
        batcher = MicroBatcher(max_pending=100, on_batch=metrics.batch, max_predictions=30)
        await batcher.start()
        results = await asyncio.gather(
            *(batcher.predict(run.predictor, "tails", Query((0, 0), k=10)) for _ in range(9))
        )
        await batcher.stop()
        return results

    assert len(asyncio.run(ask())) == 9
    assert sizes(metrics) == (9, 3, 3)


def in_turn(run, given, metrics=None):
    """The predictions of queries, each sent after the answer to the one before."""
    metrics = metrics or ServerMetrics({})

    async def ask():
        batcher = MicroBatcher(max_pending=10, on_batch=metrics.batch)
        await batcher.start()
        answers = [await batcher.predict(run.predictor, "tails", query) for query in given]
        await batcher.stop()
        return answers

    return asyncio.run(ask())


def test_a_repeated_query_is_not_computed_again(served):
    metrics = ServerMetrics({})
    query = Query((0, 0), k=3)
    first, other, again = in_turn(served.get("plain"), [query, Query((1, 0), k=3), query], metrics)
    assert again == first != other
    assert again is not first  # one may change its answer
    assert sizes(metrics) == (2, 2, 1)


def test_repeated_queries_for_many_predictions_are_computed_again(served):
    metrics = ServerMetrics({})
    in_turn(served.get("plain"), [Query((0, 0), k=MAX_RECENT_K + 1)] * 2, metrics)
    assert sizes(metrics) == (2, 2, 1)


def test_the_predictions_of_recent_queries_are_kept(served, monkeypatch):
    monkeypatch.setattr("dualkg.serve.batching.MAX_RECENT", 2)
    metrics = ServerMetrics({})
    first, second, third = (Query((entity, 0), k=3) for entity in range(3))
    # The third replaces the second, which was used longer ago than the first.
    in_turn(served.get("plain"), [first, second, first, third, first, second], metrics)
    assert sizes(metrics) == (4, 4, 1)


def test_products_of_batches_leave_a_core_to_the_event_loop(served, monkeypatch):
    numbers = []

    async def ask():
        batcher = MicroBatcher(max_pending=10, on_batch=lambda size: None)
        await batcher.start()
        monkeypatch.setattr(
            "dualkg.serve.batching.predict_batch",
            lambda batch: numbers.append(torch.get_num_threads()) or [[[]] for _ in batch],
        )
        await batcher.predict(served.get("plain").predictor, "tails", Query((0, 0)))
        await batcher.stop()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        asyncio.run(ask())
        assert (numbers, torch.get_num_threads()) == ([2], 3)
    finally:
        torch.set_num_threads(before)
