"""Clients take turns: in the queue of queries, in threads, and with large requests."""

import asyncio
import time
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.inference.predictor import Query
from dualkg.serve.batching import FULL_QUEUES, MicroBatcher
from dualkg.serve.errors import QueueFull, ServerStopping
from dualkg.serve.fairness import FairQueue, FairThreads, Shares

COSTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=60)


@given(COSTS)
def test_all_items_are_taken_and_those_of_a_client_in_their_order(items):
    queue = FairQueue()
    for number, (client, cost) in enumerate(items):
        queue.put(client, (client, number), cost=cost)
    assert len(queue) == len(items)
    assert queue.num_clients == len({client for client, _ in items})
    taken = [queue.take() for _ in items]
    assert queue.take() is None
    for client in "abc":
        numbers = [number for owner, number in taken if owner == client]
        assert numbers == [number for number, (owner, _) in enumerate(items) if owner == client]


def test_who_has_used_least_comes_next():
    queue = FairQueue()
    for number in range(5):
        queue.put("greedy", f"greedy {number}", cost=100)
    queue.put("other", "other 0", cost=1)
    queue.put("other", "other 1", cost=1)
    taken = [queue.take() for _ in range(4)]
    assert taken == ["greedy 0", "other 0", "other 1", "greedy 1"]
    queue.put("late", "late 0", cost=1)
    assert [queue.take(), queue.take()] == ["late 0", "greedy 2"]


def test_a_client_that_comes_back_has_saved_nothing_up():
    queue = FairQueue()
    queue.put("early", "early", cost=1)
    queue.take()
    for number in range(10):
        queue.put("busy", number, cost=10)
    for _ in range(8):
        queue.take()
    for _ in range(5):
        queue.put("early", "early", cost=10)
    assert [queue.take() for _ in range(4)].count("early") <= 3


def test_clients_can_be_left_out():
    queue = FairQueue()
    queue.put("a", 1, cost=1)
    queue.put("b", 2, cost=1)
    assert queue.take(without=lambda client: client == "a") == 2
    assert queue.take(without=lambda client: client == "a") is None
    assert queue.take() == 1
    assert queue.waiting("a") == 0


def test_queries_of_one_client_do_not_fill_the_queue_of_others(served):
    run = served.get("plain")
    queries = [Query((0, 0, 1), k=1)] * 50

    async def ask():
        batcher = MicroBatcher(max_pending=50, on_batch=lambda size: None)
        greedy = [
            asyncio.ensure_future(
                batcher.predict_all(run.predictor, "triple", queries, client="greedy")
            )
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await greedy[1]
        other = asyncio.ensure_future(
            batcher.predict(run.predictor, "tails", Query((0, 0)), client="other")
        )
        await asyncio.sleep(0)
        await batcher.start()
        results = await greedy[0]
        predictions = await other
        await batcher.stop()
        return results, predictions

    results, predictions = asyncio.run(ask())
    assert len(results) == 50
    assert len(predictions) == 10


def test_if_all_queues_are_full_those_with_most_are_refused(served):
    run = served.get("plain")

    async def ask():
        batcher = MicroBatcher(max_pending=10, on_batch=lambda size: None)
        pending = []
        for number in range(FULL_QUEUES):
            queries = [Query((0, 0, 1), k=1)] * (15 if number == 0 else 10)
            pending.append(
                asyncio.ensure_future(
                    batcher.predict_all(run.predictor, "triple", queries, client=f"{number}")
                )
            )
        await asyncio.sleep(0)
        new = asyncio.ensure_future(
            batcher.predict(run.predictor, "tails", Query((0, 0)), client="new")
        )
        await asyncio.sleep(0)
        assert not new.done()
        await batcher.start()
        await asyncio.gather(new, *pending)
        await batcher.stop()

    asyncio.run(ask())


def test_one_client_does_not_take_all_threads():
    async def work():
        threads = FairThreads(2, most_of_one=1, name="test")
        blocked = Event()
        waiting = [
            asyncio.ensure_future(threads.run(blocked.wait, client="greedy")) for _ in range(3)
        ]
        await asyncio.sleep(0)
        assert await threads.run(lambda: 7, client="other") == 7
        waiting[1].cancel()
        blocked.set()
        assert await waiting[0]
        assert await waiting[2]
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, client="other")
        threads.stop()

    asyncio.run(work())


def test_threads_that_are_stopped_refuse_what_waits_and_what_comes():
    problems = []

    async def work():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: problems.append(context)
        )
        threads = FairThreads(1, most_of_one=1, name="test")
        blocked = Event()
        begun = asyncio.ensure_future(threads.run(blocked.wait))
        waiting = asyncio.ensure_future(threads.run(lambda: 7))
        await asyncio.sleep(0)
        threads.stop()
        with pytest.raises(ServerStopping):
            await waiting
        with pytest.raises(ServerStopping):
            await threads.run(lambda: 7)
        blocked.set()
        assert await begun

    asyncio.run(work())
    assert problems == []


def test_a_client_rests_for_what_it_used_beyond_its_share():
    async def use(active):
        shares = Shares()
        for number in range(active):
            shares.see(f"{number}")
        async with shares.turn("0"):
            await asyncio.sleep(0.1)
        started = time.monotonic()
        async with shares.turn("0"):
            return shares.share(), time.monotonic() - started

    share, waited = asyncio.run(use(4))
    assert share == 0.25
    assert waited > 0.1  # at least (0.1 - 0.05) / 0.25 seconds
    assert asyncio.run(use(1))[0] == 1


def test_work_of_a_client_is_done_one_after_the_other():
    async def use():
        shares = Shares()
        inside = 0
        most = 0

        async def turn(client):
            nonlocal inside, most
            async with shares.turn(client):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= 1

        await asyncio.gather(*(turn("one") for _ in range(5)))
        alone = most
        await asyncio.gather(turn("one"), turn("other"))
        return alone, most

    assert asyncio.run(use()) == (1, 2)


def test_one_name_is_searched_for_though_a_thousand_are_unknown(client, served, monkeypatch):
    search = served.default.name_search
    searched = []

    def count(name, *, limit):
        searched.append(name)
        return []

    monkeypatch.setattr(
        type(search), "search", lambda self, name, *, limit: count(name, limit=limit)
    )
    triples = [[f"unknown {number}", "likes", "thing 20"] for number in range(1000)]
    reply = client.post("/api/score", json={"triples": triples})
    assert reply.status_code == 404
    assert searched == ["unknown 0"]


def test_scores_of_many_triples_are_those_of_each(client):
    triples = [[number % 40, number % 3, (7 * number) % 40] for number in range(60)]
    together = client.post("/api/score", json={"triples": triples}).json()["scores"]
    for triple, score in list(zip(triples, together, strict=True))[::13]:
        [alone] = client.post("/api/score", json={"triples": [triple]}).json()["scores"]
        assert alone.keys() == score.keys()
        assert {**alone, "score": 0, "probability": 0} == {**score, "score": 0, "probability": 0}
        assert alone["score"] == pytest.approx(score["score"], abs=1e-4)
