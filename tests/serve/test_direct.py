"""Plain queries have the responses that FastAPI's way gives."""

import json

import pytest

from dualkg.serve.app import application
from dualkg.serve.server import request_once

PLAIN = [
    "/api/tails?head=thing%2015&relation=likes",
    "/api/tails?head=thing+15&relation=likes&known=omit&k=100",
    "/api/tails?head=Twenty&relation=is%20a&k=3",
    "/api/heads?relation=%3Cb%3Ebold%3C/b%3E&tail=%D7%A9%D7%9C%D7%95%D7%9D%20%D7%A2%D7%95%D7%9C%D7%9D",
    "/api/relations?head=thing%2015&tail=thing%2020&run=plain",
    "/api/tails?relation=likes&head=%20&k=007",
]
QUERY = "/api/tails?head=thing%2015&relation=likes"
OTHERS = [
    "/api/tails?head=thing%2015",
    "/api/tails?head=thing%2015&relation=",
    f"{QUERY}&k=101",
    f"{QUERY}&k=0",
    f"{QUERY}&k=1.5",
    f"{QUERY}&k=%D9%A3",
    f"{QUERY}&known=yes",
    f"{QUERY}&head=Twenty",
    f"{QUERY}&more=1",
    f"{QUERY}&run=other",
    "/api/tails?head=thing%20551&relation=likes",
    "/api/tails?head=%FF&relation=likes",
    f"/api/tails?head={'x' * 3000}&relation=likes",
]


@pytest.mark.parametrize("address", [*PLAIN, *OTHERS])
def test_responses_are_those_of_the_usual_way(served, address):
    """A parameter that nothing reads makes a query go the usual way."""
    reply = request_once(application(served), address)
    expected = request_once(application(served), f"{address}&unread=1")
    assert reply.status == expected.status
    assert reply.headers == expected.headers
    assert json.loads(reply.body) == json.loads(expected.body)
    assert list(json.loads(reply.body)) == list(json.loads(expected.body))


@pytest.mark.parametrize("address", PLAIN)
def test_plain_queries_need_no_checks_of_fastapi(served, address, monkeypatch):
    async def fail(**options):
        raise AssertionError("the query went the usual way")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", fail)
    assert request_once(application(served), address).status == 200
