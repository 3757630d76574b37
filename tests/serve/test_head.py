"""HEAD has the status and the headers of GET, and no body."""

import pytest

ADDRESSES = [
    "/",
    "/?find=tail&head=Twenty&relation=likes",
    "/entity/Twenty",
    "/entity/nobody",
    "/facts",
    "/run",
    "/docs",
    "/openapi.json",
    "/search?q=thing",
    "/static/style.css",
    "/health",
    "/api/tails?head=Twenty&relation=likes",
    "/api/tails?head=Twenty",
    "/nowhere",
]


@pytest.mark.parametrize("path", ADDRESSES)
def test_head_is_get_without_its_body(client, path):
    expected = client.get(path)
    reply = client.head(path)
    assert reply.content == b""
    assert reply.status_code == expected.status_code
    for reply_of_both in (reply, expected):
        del reply_of_both.headers["date"]
    assert reply.headers == expected.headers


def test_a_stream_is_not_made_for_head(client):
    """The next completion need not wait for it."""
    for _ in range(3):
        assert client.head("/api/complete?top=1000").status_code == 200
    assert client.get("/api/complete?top=1").status_code == 200
