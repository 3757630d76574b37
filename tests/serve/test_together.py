"""Questions answered together are answered as each alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.inference.predictor import QUERY_TYPES, Query
from dualkg.serve.batching import BusyError, OneByOne, Together
from dualkg.serve.metrics import Counts

SIZES = {"tails": "er", "heads": "re", "relations": "ee", "triple": "ere", "similar": "e"}


def questions(kind, graph, number=60):
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


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert [(a.id, a.name, a.split) for a in one] == [(a.id, a.name, a.split) for a in other]
        assert [a.score for a in one] == pytest.approx([a.score for a in other], abs=1e-4)
        assert [a.probability for a in one] == pytest.approx([a.probability for a in other], abs=1e-4)


@pytest.mark.parametrize("kind", QUERY_TYPES)
@pytest.mark.parametrize("name", ["calibrated", "plain"])
def test_many_at_once_are_as_each_alone(served, kind, name):
    run = served.get(name)
    asked = questions(kind, run.run.graph)
    found = run.predictor.predict(kind, asked)
    assert_same(found, [run.predictor.predict(kind, [question])[0] for question in asked])


@pytest.mark.parametrize("model", [kg.DistMult, kg.TransE, kg.RESCAL])
def test_models_without_inverse_relations_too(small_graph, model):
    predictor = kg.Predictor(model(small_graph.shape, dim=4, reciprocal=False, init_scale=1.0), small_graph)
    for kind in QUERY_TYPES:
        asked = questions(kind, small_graph, 20)
        found = predictor.predict(kind, asked)
        assert_same(found, [predictor.predict(kind, [question])[0] for question in asked])


def test_what_waits_is_one_batch(served):
    run, counts = served.get("calibrated"), Counts()
    asked = [(kind, question) for kind in QUERY_TYPES for question in questions(kind, run.run.graph, 20)]

    async def all_at_once(asker):
        await asker.start()
        try:
            return await asyncio.gather(*(asker.ask(run, kind, question) for kind, question in asked))
        finally:
            await asker.stop()

    found = asyncio.run(all_at_once(Together(most_waiting=1000, counts=counts)))
    assert_same(found, asyncio.run(all_at_once(OneByOne())))
    assert counts._num_questions == 100
    assert counts._num_batches == len(QUERY_TYPES)
    assert counts._largest == 20


def test_one_that_fails_does_not_spoil_the_others(served):
    run = served.get("plain")
    asked = [Query((0, 0), k=3), Query((0, 0), k=-1), Query((1, 0), k=3)]

    async def ask():
        asker = Together(most_waiting=10, counts=Counts())
        await asker.start()
        found = await asyncio.gather(*(asker.ask(run, "tails", one) for one in asked), return_exceptions=True)
        await asker.stop()
        return found

    first, second, third = asyncio.run(ask())
    assert len(first) == len(third) == 3
    assert isinstance(second, RequestError)
    assert str(second) == "k must be at least 1; got -1."


def test_more_than_may_wait_is_refused(served):
    run = served.get("plain")

    async def ask():
        asker = Together(most_waiting=2, counts=Counts())
        asks = [asyncio.ensure_future(asker.ask(run, "tails", Query((0, 0)))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="2 questions wait already"):
            await asks[2]
        asks[0].cancel()  # its reader has gone away
        await asyncio.sleep(0)
        await asker.start()
        found = await asks[1]
        await asker.stop()
        return found

    assert len(asyncio.run(ask())) == 10


def test_a_large_question_leaves_the_rest_for_the_next_batch(served, monkeypatch):
    from dualkg.serve import batching

    monkeypatch.setattr(batching, "MOST_ANSWERS", 30)
    run, counts = served.get("plain"), Counts()

    async def ask():
        asker = Together(most_waiting=100, counts=counts)
        await asker.start()
        found = await asyncio.gather(*(asker.ask(run, "tails", Query((0, 0), k=10)) for _ in range(9)))
        await asker.stop()
        return found

    assert len(asyncio.run(ask())) == 9
    assert (counts._num_batches, counts._largest) == (3, 3)
