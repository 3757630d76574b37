"""Refused requests and their messages."""

import errno

import pytest

from dualkg.errors import DivergedError, InvalidValue, UnknownName
from dualkg.inference.entity_paths import GraphNotInMemory, SameEntity
from dualkg.serve.errors import (
    HTTP,
    CompletionRunning,
    DecisionsRefused,
    DuplicateRunName,
    IncompleteQuery,
    InvalidAddress,
    InvalidTimeLimit,
    InvalidToken,
    NoRunsToServe,
    NothingToCompareWith,
    QueueFull,
    ServerStopping,
    StillInTraining,
    TimeLimitExceeded,
    UnknownNameError,
    UnknownRunError,
    UnprotectedHost,
    UnsavedRun,
    UnusableHost,
    UnusablePort,
)
from dualkg.serve.limits import Limits
from dualkg.serve.replies import error_reply
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
        (b'{"a":' * 100_000 + b"0" + b"}" * 100_000, "it is nested too deeply."),
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
        "This address accepts GET, HEAD; got POST.",
    )
    reply = client.delete("/api/decisions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD, POST")
    assert reply.json()["error"] == "This address accepts GET, HEAD, POST; got DELETE."


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
    client = client_of(Limits(seconds=0.2), runs=blocked.runs)
    with blocked:
        reply = client.get("/api/tails", params=TAILS)
    assert reply.status_code == 503
    assert reply.json()["error"] == "The request took longer than its limit of 0.2 seconds."
    until(lambda: client.get("/api/tails", params=TAILS).status_code == 200)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/secret/run"),
            500,
            "The server could not read or write a file: Read-only file system.",
        ),
        (
            MemoryError("/secret/run"),
            503,
            "The server has not enough memory for this request. Ask for less, or try later.",
        ),
    ],
)
def test_a_disk_or_a_memory_that_fails_has_no_traceback(
    client_of, served, monkeypatch, capfd, error, status, message
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dualkg.serve.runs._details", fail)
    reply = client_of(runs=served).get("/api/run")
    assert (reply.status_code, reply.json()["error"]) == (status, message)
    log = capfd.readouterr().err
    assert "/secret/run" in log
    assert "Traceback" not in log


def test_an_unexpected_exception_is_not_shown(client_of, failing, capfd):
    reply = client_of(runs=failing).get("/api/tails", params=TAILS)
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
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[2001:db8::1]:80",
    "",
    ":80",
    "[::1].evil.example",
    "[::1%.evil.example]",
    "]::1[",
    "::1",
    "localhost:80@evil.example",
    "localhost@evil.example",
    "localhost,evil.example",
    "evil.example#localhost",
    "localhost..",
    "127.0.0.1:80:80",
    "127.0.0.1:999999",
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
    with pytest.raises(UnprotectedHost) as error:
        check_access(host, None)
    assert error.value.host == host
    check_access(host, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_a_loopback_host_needs_no_token(host):
    check_access(host, None)


@pytest.mark.parametrize("token", ["", "  ", "schlüssel", "a\nb"])
def test_a_token_must_fit_into_a_header(token):
    with pytest.raises(InvalidToken):
        check_access("127.0.0.1", token)


def test_a_port_in_use():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnusablePort) as error:
            bind("127.0.0.1", port)
    assert (error.value.port, error.value.host) == (port, "127.0.0.1")
    assert error.value.reason == "Address already in use"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 64 + ".example", "\udc80"])
def test_a_host_without_an_address(host):
    with pytest.raises(UnusableHost) as error:
        bind(host, 0)
    assert error.value.host == host


NOBODY = UnknownName("entity", "nobody")
WORDS = [
    (UnknownNameError(NOBODY, part="head"), 404, "No entity is named 'nobody'."),
    (
        UnknownRunError("c", served=["a", "b"]),
        404,
        "No served run is named 'c'. Available: 'a', 'b'.",
    ),
    (
        IncompleteQuery(find="tail", missing=["head", "relation"]),
        400,
        "Name the head and the relation to find the tail.",
    ),
    (
        NothingToCompareWith(),
        400,
        "A comparison needs two runs, and one is served. Serve both: dualkg serve RUN RUN",
    ),
    (
        DecisionsRefused(),
        403,
        "This server was started with --read-only and accepts no decisions.",
    ),
    (UnsavedRun("a"), 400, "The run a has no folder to store decisions in. Save it first."),
    (
        StillInTraining(["a", "b"]),
        503,
        "a, b: still in training. /train shows how far that is.",
    ),
    (SameEntity("a"), 400, "A path is between two entities; both are 'a'."),
    (GraphNotInMemory("a"), 400, "a is larger than memory, and has no search for paths."),
    (ServerStopping(), 503, "The server is stopping."),
    (QueueFull(1000), 503, "1,000 queries are waiting already. Try again in a moment."),
    (
        CompletionRunning(),
        503,
        "Another completion is running. Try again when it has finished.",
    ),
    (
        TimeLimitExceeded("The request", seconds=0.5),
        503,
        "The request took longer than its limit of 0.5 seconds.",
    ),
    (
        InvalidValue("k", expected="at least 1", found=0),
        400,
        "k should be at least 1; 0 was given.",
    ),
    (DivergedError("A score is NaN."), 500, "A score is NaN."),
]


@pytest.mark.parametrize(("error", "status", "message"), WORDS)
def test_errors_are_worded_for_requests(error, status, message):
    reply = error_reply(error)
    assert (reply.status, reply.message) == (status, message)
    assert ("Retry-After" in reply.headers) == (status == 503)


def test_suggestions_of_a_reply():
    error = UnknownNameError(NOBODY, part="head", suggestions=["somebody"])
    assert error_reply(error).suggestions == ["somebody"]
    assert error_reply(UnknownRunError("c", served=["a", "b"])).suggestions == ["a", "b"]


START_UP = [
    (NoRunsToServe(), "Name at least one run to serve."),
    (
        DuplicateRunName("a"),
        "Two of the runs are named 'a'. Serve runs from folders with different names.",
    ),
    (InvalidTimeLimit("seconds", seconds=-1), "A time limit must be above 0 seconds; got -1."),
    (
        InvalidAddress("entity"),
        "An address must begin with a slash, such as /entity/France.json; got 'entity'.",
    ),
    (
        InvalidToken(),
        "A token must consist of ASCII letters, digits and punctuation, and must not be empty.",
    ),
    (
        UnprotectedHost("::"),
        "On :: other machines could reach the server. Protect it with token, or leave out host.",
    ),
    (UnusableHost("a.b", reason="Unknown"), "The host a.b cannot be used: Unknown."),
    (
        UnusablePort(80, host="::1", reason="Permission denied"),
        "Port 80 of ::1 cannot be used: Permission denied. Choose another with port.",
    ),
]


@pytest.mark.parametrize(("error", "message"), START_UP)
def test_errors_of_the_start_are_worded_for_python(error, message):
    assert str(error) == message


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        (HTTP.option("k"), "k"),
        (HTTP.option("k", 5), "k=5"),
        (HTTP.option("types", False), "types=false"),
        (HTTP.option("known", "omit"), "known=omit"),
        (HTTP.option("relations"), "relation"),
        (HTTP.option("token"), "--token"),
        (HTTP.option("read_only", True), "--read-only"),
        (HTTP.option("overwrite", False), "--no-overwrite"),
        (HTTP.option("out", "my run"), "--out 'my run'"),
        (HTTP.key("model.dim", 5), "model.dim = 5"),
        (HTTP.key("model.dim"), "model.dim"),
        (HTTP.call("calibrate", "runs/a", overwrite=True), "dualkg calibrate runs/a --overwrite"),
        (HTTP.call("complete", "runs/a"), "/api/complete"),
        (
            HTTP.call("complete", "runs/a", heads="Île de France", types=False),
            "/api/complete?head=%C3%8Ele+de+France&types=false",
        ),
    ],
)
def test_words_of_a_request(spelled, text):
    assert spelled == text
