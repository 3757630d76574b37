"""What is refused, and the sentence that tells why."""

from __future__ import annotations

import time

import pytest

from dualkg.errors import RequestError
from dualkg.serve.limits import Limits
from dualkg.serve.server import bind, check_reach

TAILS = {"head": "thing 30", "relation": "likes"}


REFUSED = [
    ({"head": "Twnty"}, 404, "No entity is named 'Twnty' among the 40 known. Did you mean 'Twenty'"),
    ({"relation": "like"}, 404, "No relation is named 'like' among the 3 known. Did you mean 'likes'?"),
    ({"run": "other"}, 404, "No run that is served is named 'other'. There are: 'calibrated', 'plain'."),
    ({"k": 0}, 422, "At least one answer must be asked for; k is 0."),
    ({"k": 1001}, 422, "k is at most 1,000; '1001' came."),
    ({"k": "ten"}, 422, "k is a whole number; 'ten' came."),
    ({"known": "hide"}, 422, "Known answers are marked or left out: 'mark' or 'omit'; 'hide' came."),
    ({"head": "x" * 2001}, 422, "head has at most 2,000 letters; 2,001 came."),
]


@pytest.mark.parametrize(("wrong", "status", "sentence"), REFUSED)
def test_a_wrong_question_gets_a_sentence(client, wrong, status, sentence):
    reply = client.get("/api/tails", params=TAILS | wrong)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(sentence)


@pytest.mark.parametrize(
    ("where", "params", "status", "sentence"),
    [
        ("/api/tails", {"head": "thing 30"}, 422, "relation is missing."),
        ("/api/prediction-set", {"relation": "likes"}, 422, "entity is missing."),
        (
            "/api/prediction-set",
            {"entity": "Twenty", "relation": "likes", "coverage": 1},
            422,
            "coverage is below 1.0; '1' came.",
        ),
        ("/api/complete", {"run": "plain", "min_probability": 0.5}, 200, "min_probability needs a calibration"),
        ("/api/compare", {"a": "plain", "b": "other"}, 404, "No run that is served is named 'other'."),
        ("/api/nothing", {}, 404, "There is nothing at this address. What can be asked is at /docs."),
    ],
)
def test_a_wrong_request_gets_a_sentence(client, where, params, status, sentence):
    reply = client.get(where, params=params)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(sentence)


def test_the_sentence_is_the_command_line_s(client, run_cli, run_folders):
    told = run_cli("predict", run_folders[0], "--head", "Twnty", "--relation", "likes")
    assert told.code == 2
    reply = client.get("/api/tails", params=TAILS | {"head": "Twnty"})
    assert told.err == f"dualkg: {reply.json()['error']}\n"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "The body is not JSON: "),
        (b"{}", "triples is missing."),
        (b'{"triples": []}', "triples has at least 1 items; 0 came."),
        (b'{"triples": [["a", "b"]]}', "triples.0.2 is missing."),
        (b'{"triples": [' + b",".join([b"[0,0,0]"] * 1001) + b"]}", "triples has at most 1,000 items; 1,001 came."),
    ],
)
def test_a_wrong_body_gets_a_sentence(client, body, sentence):
    reply = client.post("/api/score", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(sentence)


def test_ids_that_are_not_there(client):
    reply = client.post("/api/score", json={"triples": [[0, 0, 40]]})
    assert (reply.status_code, reply.json()["error"]) == (404, "There is no entity 40: ids go from 0 to 39.")
    reply = client.post("/api/score", json={"triples": [[0, 0, -(10**30)]]})
    assert reply.status_code in (404, 422)


def test_another_method_is_told(client):
    reply = client.post("/api/tails")
    assert (reply.status_code, reply.json()["error"]) == (405, "This address is asked by GET; POST came.")


def test_a_large_body_is_not_read(client_of):
    client = client_of(Limits(body=1000))
    large = b'{"triples": [' + b" " * 2000 + b"]}"
    sentence = "A body has at most 1,000 bytes; more came. Ask in several requests."
    assert client.post("/api/score", content=large).json()["error"] == sentence
    in_parts = client.post(
        "/api/score", content=iter([large[:500], large[500:1200], large[1200:]])
    )  # of no said length
    assert (in_parts.status_code, in_parts.json()["error"]) == (413, sentence)
    assert client.post("/api/score", json={"triples": [[0, 0, 0]]}).status_code == 200


def test_an_address_without_end_is_not_read(client):
    """By the server where it comes in pieces (400), by a guard where it came whole (431)."""
    assert client.get("/api/runs", headers={"X": "x" * 2**17}).status_code in (400, 431)
    assert client.get("/api/runs").status_code == 200


def test_a_head_that_is_too_large_is_told(client_of):
    client = client_of(Limits(head=500))
    reply = client.get("/api/runs", headers={"X": "x" * 500})
    assert reply.status_code == 431
    assert reply.json()["error"] == "The address and headers of a request have at most 500 bytes; more came."
    assert client.get(f"/api/runs?{'x' * 500}").status_code == 431
    assert client.get("/api/runs").status_code == 200


def test_a_request_that_takes_too_long_is_given_up(client_of, monkeypatch):
    from dualkg.inference.predictor import Predictor

    answer = Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda *nouns: time.sleep(0.5) or answer(*nouns))
    client = client_of(Limits(seconds=0.2))
    reply = client.get("/api/tails", params=TAILS)
    assert reply.status_code == 503
    assert reply.json()["error"] == "The answer took longer than the 0.2 seconds that a request may take."
    monkeypatch.undo()
    time.sleep(0.5)
    assert client.get("/api/tails", params=TAILS).status_code == 200


def test_what_fails_unforeseen_is_no_traceback(client_of, monkeypatch, capfd):
    from dualkg.serve.state import ServedRun

    def fail(*nouns):
        raise ZeroDivisionError("with a\nline end")

    monkeypatch.setattr(ServedRun, "id_of", fail)
    reply = client_of().get("/api/tails", params=TAILS)
    assert reply.status_code == 500
    assert reply.json()["error"] == "The server failed to answer. What happened is written where it runs."
    lines = [line for line in capfd.readouterr().err.splitlines() if "ZeroDivisionError" in line]
    assert len(lines) == 1
    assert lines[0].startswith('{"failed": "/api/tails"')


def test_a_token_is_asked_for(client_of):
    client = client_of(token="open sesame")
    for header in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Bearer"}, {"Authorization": "Basic !"}):
        for address in ("/api/runs", "/docs", "/openapi.json", "/metrics", "/nothing"):
            reply = client.get(address, headers=header)
            assert reply.status_code == 401
            assert "Authorization: Bearer TOKEN" in reply.json()["error"]
    assert client.get("/api/runs", headers={"Authorization": "Bearer open sesame"}).status_code == 200
    assert client.get("/api/runs", auth=("anybody", "open sesame")).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert (
        client.get("/api/runs", headers={"Authorization": "Bearer open sesame", "Host": "kg.example"}).status_code
        == 200
    )


def test_another_host_s_name_is_refused_without_a_token(client):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[2001:db8::1]:80"):
        reply = client.get("/api/runs", headers={"Host": host})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("This server answers requests to localhost alone.")
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "kg.example"])
def test_to_be_reached_from_elsewhere_needs_a_token(host):
    with pytest.raises(RequestError, match="Give them a token with --token, or leave out --host."):
        check_reach(host, None)
    check_reach(host, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_this_machine_needs_none(host):
    check_reach(host, None)


@pytest.mark.parametrize("token", ["", "  ", "schlüssel", "a\nb"])
def test_a_token_that_no_header_can_hold(token):
    with pytest.raises(RequestError, match="A token is made of ASCII"):
        check_reach("127.0.0.1", token)


def test_a_port_that_is_taken():
    told = "cannot be had: Address already in use. Name another with --port."
    with bind("127.0.0.1", 0) as taken, pytest.raises(RequestError, match=told):
        bind("127.0.0.1", taken.getsockname()[1])
