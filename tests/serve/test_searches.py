"""Searches that clients share, and results that are kept."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from fastapi import Request

from dualkg.errors import InvalidValue
from dualkg.inference.completion import complete
from dualkg.serve import background, facts
from dualkg.serve.app import application
from dualkg.serve.entity_facts import Remarker
from dualkg.serve.served import ServedRuns
from dualkg.serve.service import RequestContext
from tests.processes import until


def lines_of(reply):
    assert reply.status_code == 200
    return [json.loads(line) for line in reply.text.splitlines()]


def gated(served, name="calibrated"):
    """A run whose searches wait for a gate; with the sizes of those that were started."""
    starts = []
    gate = Event()

    def waiting(*args, on_progress, **options):
        starts.append(options["top"])
        while not gate.wait(0.01):
            on_progress(1, 4)
        return complete(*args, on_progress=on_progress, **options)

    return ServedRuns([replace(served.get(name), complete=waiting)]), starts, gate


def triples_of(lines):
    parts = ("head", "relation", "tail")
    return [[line[part]["id"] for part in parts] for line in lines if line["kind"] == "triple"]


def test_two_clients_share_a_search_and_its_result_is_kept(client_of, served):
    runs, starts, gate = gated(served)
    client = client_of(runs=runs)
    params = {"top": 9, "types": False}
    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(client.get, "/api/complete", params=params)
        until(lambda: starts)
        second = clients.submit(client.get, "/api/complete", params={**params, "top": 5})
        assert client.get("/api/complete", params={"top": 9}).status_code == 503
        gate.set()
        nine, five = (triples_of(lines_of(reply.result())) for reply in (first, second))
    assert (len(nine), five) == (9, nine[:5])
    again = lines_of(client.get("/api/complete", params={**params, "top": 3}))
    assert again[0]["kind"] == "progress"
    assert triples_of(again) == nine[:3]
    assert starts == [9]
    # More triples, and other options, are another search.
    assert (
        len(triples_of(lines_of(client.get("/api/complete", params={**params, "top": 12})))) == 12
    )
    assert lines_of(client.get("/api/complete", params={"top": 9}))[-1]["kind"] == "end"
    assert starts == [9, 12, 9]


def test_a_search_ends_when_the_last_follower_has_left(served):
    """Stop of one client does not end the search of another."""
    runs, starts, gate = gated(served)
    service = application(runs).state.service
    context = RequestContext(Request({"type": "http"}), service, runs.default)
    options = {"top": 4, "types": False}

    async def run() -> None:
        first, second, third = (facts.completion(context, options) for _ in range(3))
        assert (await anext(first)).kind == "progress"
        assert (await anext(second)).kind == "progress"
        await first.aclose()
        assert service.searches.running.locked()
        assert (await anext(second)).kind == "progress"
        await second.aclose()
        while service.searches.running.locked():
            await asyncio.sleep(0.01)
        # A search that was stopped has no result, and is done again.
        gate.set()
        lines = [line async for line in third]
        assert lines[-1].num_triples == 4

    asyncio.run(run())
    assert starts == [4, 4]


def test_results_that_are_kept_are_bounded(served, monkeypatch):
    monkeypatch.setattr(background, "MAX_KEPT_TRIPLES", 20)
    service = application(served).state.service

    async def run() -> list[int]:
        kept = []
        for relation in (0, 1, 2, 0):
            options = {"top": 8, "types": False, "relations": [relation]}
            context = RequestContext(Request({"type": "http"}), service, served.get("calibrated"))
            lines = [line async for line in facts.completion(context, options)]
            assert lines[-1].num_triples == 8
            kept.append(len(service.searches._kept))
        return kept

    assert asyncio.run(run()) == [1, 2, 2, 2]


def test_a_search_that_fails_is_no_result(client_of, served):
    def broken(*args, **options):
        raise InvalidValue("top", expected="something else", found=0)

    client = client_of(runs=ServedRuns([replace(served.default, complete=broken)]))
    for _ in range(2):
        [line] = lines_of(client.get("/api/complete"))
        assert line["kind"] == "error"


def test_remarks_are_made_for_the_lines_that_are_sent(served, monkeypatch):
    """A client who leaves after a line does not take the time of all remarks."""
    monkeypatch.setattr(facts, "REMARKS_AT_ONCE", 3)
    service = application(served).state.service
    run = served.get("calibrated")
    context = RequestContext(Request({"type": "http"}), service, run)
    remarks_of = Remarker.of_triples
    sizes = []

    def counted(remarker, triples):
        sizes.append(len(triples))
        return remarks_of(remarker, triples)

    monkeypatch.setattr(Remarker, "of_triples", counted)
    options = {"top": 8, "types": False}

    async def requests() -> None:
        lines = [line async for line in facts.completion(context, options)]
        triples = [line for line in lines if line.kind == "triple"]
        assert sizes == [3, 3, 2]
        ids = [(line.head.id, line.relation.id, line.tail.id) for line in triples]
        for line, remarks in zip(triples, remarks_of(run.remarker, ids), strict=True):
            remarked = line.model_copy()
            remarked.remark(run.graph, remarks)
            assert line == remarked

        sizes.clear()
        again = facts.completion(context, options)
        while (await anext(again)).kind != "triple":
            pass
        await again.aclose()
        assert sizes == [3]

    asyncio.run(requests())
