"""Refused requests and their messages."""

import pytest

from dualkg.errors import RequestError
from dualkg.serve.limits import Limits
from dualkg.serve.server import bind, check_access
from tests.processes import until

TAILS = {"head": "thing 30", "relation": "likes"}


REFUSED = [
    (
        {"head": "Twnty"},
        404,
        "No entity is named 'Twnty' among the 40 known. Did you mean 'Twenty'",
    ),
    (
        {"relation": "like"},
        404,
        "No relation is named 'like' among the 3 known. Did you mean 'likes'?",
    ),
    ({"run": "other"}, 404, "No served run is named 'other'. Available: 'calibrated', 'plain'."),
    ({"k": 0}, 422, "k must be at least 1; got '0'."),
    ({"k": 1001}, 422, "k must be at most 1,000; got '1001'."),
    ({"k": "ten"}, 422, "k must be an integer; got 'ten'."),
    ({"known": "hide"}, 422, "known must be 'mark' or 'omit'; got 'hide'."),
    ({"head": "x" * 2001}, 422, "head must have at most 2,000 characters; got 2,001."),
]


@pytest.mark.parametrize(("wrong", "status", "message"), REFUSED)
def test_a_wrong_query_gets_a_message(client, wrong, status, message):
    reply = client.get("/api/tails", params=TAILS | wrong)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("where", "params", "status", "message"),
    [
        ("/api/tails", {"head": "thing 30"}, 422, "relation is missing."),
        ("/api/prediction-set", {"relation": "likes"}, 422, "entity is missing."),
        (
            "/api/prediction-set",
            {"entity": "Twenty", "relation": "likes", "coverage": 1},
            422,
            "coverage must be below 1.0; got '1'.",
        ),
        (
            "/api/complete",
            {"run": "plain", "min_probability": 0.5},
            200,
            "min_probability needs a calibration",
        ),
        ("/api/compare", {"a": "plain", "b": "other"}, 404, "No served run is named 'other'."),
        ("/api/nothing", {}, 404, "There is nothing at this address. /docs lists all addresses."),
    ],
)
def test_a_wrong_request_gets_a_message(client, where, params, status, message):
    reply = client.get(where, params=params)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)


def test_the_message_is_that_of_the_command_line(client, run_cli, run_folders):
    result = run_cli("predict", run_folders[0], "--head", "Twnty", "--relation", "likes")
    assert result.code == 2
    reply = client.get("/api/tails", params=TAILS | {"head": "Twnty"})
    assert result.err == f"dualkg: {reply.json()['error']}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "The body is not JSON: "),
        (b"{}", "triples is missing."),
        (b'{"triples": []}', "triples must have at least 1 items; got 0."),
        (b'{"triples": [["a", "b"]]}', "triples.0.2 is missing."),
        (b'{"triples": [[1.5, "likes", "a"]]}', "triples.0.0 must be text; got '1.5'."),
        (b'{"triples": [["\\ud800", "likes", "a"]]}', "triples.0.0 must be text; got '\\ud800'."),
        (
            b'{"triples": [' + b",".join([b"[0,0,0]"] * 1001) + b"]}",
            "triples must have at most 1,000 items; got 1,001.",
        ),
    ],
)
def test_a_wrong_body_gets_a_message(client, body, message):
    reply = client.post("/api/score", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(message)


@pytest.mark.parametrize("path", ["/api/score", "/api/decisions"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 100_000, "it is nested too deeply."),
        (b'{"a":' * 5000 + b"0" + b"}" * 5000, "it is nested too deeply."),
        (b'{"triples": [["\xff", "likes", "a"]]}', "'utf-8' codec can't decode byte 0xff"),
        (b"9" * 5000, "Exceeds the limit"),
    ],
)
def test_a_body_that_no_parser_reads(client, path, body, reason):
    reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(f"The body cannot be read as JSON: {reason}")


def test_ids_out_of_range(client):
    reply = client.post("/api/score", json={"triples": [[0, 0, 40]]})
    assert (reply.status_code, reply.json()["error"]) == (
        404,
        "There is no entity 40: ids go from 0 to 39.",
    )
    reply = client.post("/api/score", json={"triples": [[0, 0, -(10**30)]]})
    assert reply.status_code in (404, 422)


def test_a_wrong_method(client):
    reply = client.post("/api/tails")
    assert (reply.status_code, reply.json()["error"]) == (
        405,
        "This address accepts GET; got POST.",
    )
    reply = client.delete("/api/decisions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, POST")
    assert reply.json()["error"] == "This address accepts GET, POST; got DELETE."


def test_a_large_body_is_not_read(client_of):
    client = client_of(Limits(body_bytes=1000))
    large = b'{"triples": [' + b" " * 2000 + b"]}"
    message = "A body must have at most 1,000 bytes. Send several requests."
    assert client.post("/api/score", content=large).json()["error"] == message
    in_parts = client.post(
        "/api/score", content=iter([large[:500], large[500:1200], large[1200:]])
    )  # without a declared length
    assert (in_parts.status_code, in_parts.json()["error"]) == (413, message)
    assert client.post("/api/score", json={"triples": [[0, 0, 0]]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/api/runs", {"X": "x" * 500}),
        (f"/api/runs?{'x' * 500}", {}),
        ("/api/runs", {f"X{n}": "" for n in range(100)}),
    ],
)
def test_large_heads_are_refused_unparsed(client_of, path, headers):
    client = client_of(Limits(header_bytes=500 if len(headers) < 100 else 2**16))
    reply = client.get(path, headers=headers)
    assert (reply.status_code, reply.headers["connection"]) == (431, "close")
    assert reply.json()["error"].startswith(
        "The address and headers of a request must have at most "
    )
    assert client.get("/api/runs").status_code == 200


def test_a_request_that_takes_too_long_is_cancelled(client_of, blocked):
    client = client_of(Limits(seconds=0.2))
    with blocked:
        reply = client.get("/api/tails", params=TAILS)
    assert reply.status_code == 503
    assert reply.json()["error"] == "The request took longer than its limit of 0.2 seconds."
    until(lambda: client.get("/api/tails", params=TAILS).status_code == 200)


def test_an_unexpected_exception_is_not_shown(client_of, monkeypatch, capfd):
    from dualkg.serve.service import RequestContext

    def fail(*args, **kwargs):
        raise ZeroDivisionError("with a\nline end")

    monkeypatch.setattr(RequestContext, "ids", fail)
    reply = client_of().get("/api/tails", params=TAILS)
    assert reply.status_code == 500
    assert reply.json()["error"] == "The server failed to answer. The error is in its log."
    lines = [line for line in capfd.readouterr().err.splitlines() if "ZeroDivisionError" in line]
    assert len(lines) == 1
    assert lines[0].startswith('{"failed": "/api/tails"')


def test_a_token_is_required(client_of):
    client = client_of(token="open sesame")
    for header in (
        {},
        {"Authorization": "Bearer open"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic !"},
    ):
        for address in ("/api/runs", "/docs", "/openapi.json", "/metrics", "/nothing"):
            reply = client.get(address, headers=header)
            assert reply.status_code == 401
            assert "Authorization: Bearer TOKEN" in reply.json()["error"]
    assert (
        client.get("/api/runs", headers={"Authorization": "Bearer open sesame"}).status_code == 200
    )
    assert client.get("/api/runs", auth=("anybody", "open sesame")).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert (
        client.get(
            "/api/runs", headers={"Authorization": "Bearer open sesame", "Host": "kg.example"}
        ).status_code
        == 200
    )


OTHER_HOSTS = [
    *(
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[2001:db8::1]:80",
        "",
        ":80",
    ),
    *(
        "[::1].evil.example",
        "[::1%.evil.example]",
        "]::1[",
        "::1",
        "localhost:80@evil.example",
        "localhost@evil.example",
    ),
    *(
        "localhost,evil.example",
        "evil.example#localhost",
        "localhost..",
        "127.0.0.1:80:80",
        "127.0.0.1:999999",
    ),
]


def test_other_host_names_are_refused_without_a_token(client):
    for host in OTHER_HOSTS:
        reply = client.get("/api/runs", headers={"Host": host})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("This server answers requests to localhost only.")
    for host in (
        "localhost:8000",
        "localhost:",
        "localhost.",
        "127.0.0.1",
        "127.9.9.9:1",
        "[::1]:8000",
        "LOCALHOST",
    ):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "kg.example"])
def test_a_public_host_needs_a_token(host):
    with pytest.raises(RequestError, match="Protect it with --token, or leave out --host."):
        check_access(host, None)
    check_access(host, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_a_loopback_host_needs_no_token(host):
    check_access(host, None)


@pytest.mark.parametrize("token", ["", "  ", "schlüssel", "a\nb"])
def test_a_token_must_fit_into_a_header(token):
    with pytest.raises(RequestError, match="A token must consist of ASCII"):
        check_access("127.0.0.1", token)


def test_a_port_in_use():
    result = "cannot be used: Address already in use. Choose another with --port."
    with bind("127.0.0.1", 0) as taken, pytest.raises(RequestError, match=result):
        bind("127.0.0.1", taken.getsockname()[1])
