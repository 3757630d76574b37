"""What our limits on connections add to uvicorn's own: checks, latencies and memory by variant.

`dualkg` is the server as it is. `uvicorn` is plain uvicorn with limits of its own:
`limit_concurrency`, `h11_max_incomplete_event_size`, `timeout_keep_alive` and the backlog. Every
other variant is dualkg without one part, which shows the checks that the part is there for. Each
variant runs in a fresh process. Under load, ordinary clients send requests beside each kind of
abuse of the campaign `server` (`python -m benchmarks.torture server`). Everything is on loopback.
"""

import asyncio
import gc
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import measurement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the clients of benchmarks/torture

SERVE = ROOT / "src" / "dualkg" / "serve"
UNDER_LOAD = ("dualkg", "uvicorn", "without pauses between closings")
SECONDS = 6.0  # of each phase under load
MAX_WAIT = 10.0  # seconds after which a check has failed
MAX_TURN = 0.03  # seconds of processor time in which the event loop may do nothing else
HALF_HEAD = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nX-Half: "
RUNS = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
STYLE = b"GET /static/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /api/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MALFORMED = [
    b"\xff\x00nonsense\r\n\r\n",
    RUNS + b"nonsense\r\n\r\n",
    RUNS + b"\x00" * 1000,
    CHUNKED + b"zz\r\n",
    CHUNKED.replace(b"/api/score", b"/api/no") + b"5\r\nhello\r\nzz\r\n",
    POST.replace(b"1000", b"99999999") + b"x" * 100_000,
]
# A client in a process of its own, with its own limit of open files.
HOLD_CONNECTIONS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("held", flush=True)
sys.stdin.read()
"""


# -- the variants ------------------------------------------------------------


def without_heads() -> None:
    from dualkg.serve.connections import Connection
    from uvicorn.protocols.http.h11_impl import H11Protocol

    Connection.handle_events = H11Protocol.handle_events  # type: ignore[method-assign]


def without_quiet_refusals() -> None:
    from dualkg.serve.connections import Connection
    from uvicorn.protocols.http.h11_impl import H11Protocol

    Connection.send_400_response = H11Protocol.send_400_response  # type: ignore[method-assign]


def without_time_limit(*phases: str) -> Callable[[], None]:
    def change() -> None:
        from dualkg.serve import connections

        limit_of = connections._time_limit
        connections._time_limit = lambda phase, limits: (
            float("inf") if phase.name in phases else limit_of(phase, limits)
        )

    return change


def without_excess() -> None:
    from dualkg.serve import connections

    connections._excess = lambda *args, **options: []


def without_limit_of_clients() -> None:
    from dualkg.serve import connections

    close = connections.connections_to_close

    def close_of_all_clients(observations: Any, *, limits: Any, now: float) -> Any:
        unlimited = replace(limits, client_connections=limits.connections)
        return close(observations, limits=unlimited, now=now)

    connections.connections_to_close = close_of_all_clients


def without_grace(phase: str) -> Callable[[], None]:
    def change() -> None:
        from dualkg.serve.connections import GRACE, Phase

        del GRACE[Phase[phase]]

    return change


def without_idle_credit() -> None:
    from dualkg.serve import connections

    connections.IDLE_CREDIT = 0.0


def without_pauses() -> None:
    from dualkg.serve import connections

    connections.CLOSED_AT_ONCE = 10**9


def without_file_limit() -> None:
    from dualkg.serve import connections

    connections.within_file_limit = lambda limits: limits


def without_overload() -> None:
    from dualkg.serve.middleware import RequestMiddleware

    RequestMiddleware._overload = lambda self, exchange: None  # type: ignore[method-assign]


def nothing() -> None:
    pass


VARIANTS: dict[str, Callable[[], None]] = {
    "dualkg": nothing,
    "uvicorn": without_overload,
    "without the check of heads": without_heads,
    "without quiet refusals of malformed data": without_quiet_refusals,
    "without the time limit of heads": without_time_limit("HEAD"),
    "without the time limit of readers": without_time_limit("SENDING"),
    "without our time limit of idle connections": without_time_limit("IDLE"),
    "without the number of connections": without_excess,
    "without the number of connections of a client": without_limit_of_clients,
    "without grace for new connections": without_grace("HEAD"),
    "without grace for idle connections": without_grace("IDLE"),
    "without credit for idle connections": without_idle_credit,
    "without pauses between closings": without_pauses,
    "without the limit of open files": without_file_limit,
    "without the number of requests in progress": without_overload,
}


def server_of(variant: str, app: Any, limits: Any) -> Any:
    """The server of a variant; `VARIANTS` has changed the modules of this process already."""
    from dualkg.serve.server import server_for

    if variant != "uvicorn":
        return server_for(app, limits=limits)

    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=limits.idle_seconds,
        backlog=2048,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


# -- the checks, in the process of the server --------------------------------


@dataclass
class Client:
    """Connections to a server that runs in a thread of this process."""

    server: Any
    loop: asyncio.AbstractEventLoop  # of the server
    port: int
    finish: threading.Event  # which queries wait for
    stack: ExitStack = field(default_factory=ExitStack)

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=MAX_WAIT)
        self.stack.enter_context(connection)
        connection.sendall(sent)
        return connection

    def status(self, sent: bytes = RUNS) -> int:
        """The status of the response over a new connection; 0 if it is closed without one."""
        connection = self.connect(sent)
        try:
            return status_of(connection)
        finally:
            connection.close()


def status_of(connection: socket.socket) -> int:
    try:
        line = connection.recv(12)
    except (TimeoutError, ConnectionError):
        return 0
    return int(line[9:12]) if len(line) == 12 else 0


def ends(connection: socket.socket) -> bool:
    """Whether the server closes a connection in time."""
    deadline = time.monotonic() + MAX_WAIT
    try:
        while time.monotonic() < deadline:
            if not connection.recv(2**16):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def holds(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + MAX_WAIT
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def half_heads(client: Client) -> bool:
    for _ in range(120):
        client.connect(HALF_HEAD)
    return all(client.status() == 200 for _ in range(10))


def half_heads_of_one_client(client: Client) -> bool:
    """A client with too many is told so, although the server has room."""
    held = [client.connect(HALF_HEAD) for _ in range(60)]
    if not holds(lambda: len(select.select(held, [], [], 0)[0]) >= 40):
        return False
    return status_of(select.select(held, [], [], 0)[0][0]) == 429


def empty_connections(client: Client) -> bool:
    for _ in range(120):
        client.connect()
    return all(client.status() == 200 for _ in range(10))


def slow_head(client: Client) -> bool:
    return client.status(HALF_HEAD) == 503 and ends(client.connect())


def bytes_after_a_refusal(client: Client) -> bool:
    # A request to another host is refused before its body is read.
    refused = client.connect(POST.replace(b"localhost", b"other.example"))
    refused.settimeout(0.02)
    deadline = time.monotonic() + MAX_WAIT
    while time.monotonic() < deadline:
        try:
            refused.sendall(b"x")
            if not refused.recv(2**16):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def client_that_does_not_read(client: Client) -> bool:
    slow = client.connect()
    connections = client.server.server_state.connections
    if not holds(lambda: len(connections) == 1):
        return False
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    with suppress(BlockingIOError, ConnectionError):
        for _ in range(1000):
            slow.sendall(STYLE)
    return holds(lambda: not connections)


def many_header_lines(client: Client) -> bool:
    lines = b"".join(b"X-%d: y\r\n" % number for number in range(10_000))
    return client.status(RUNS[:-2] + lines + b"\r\n") == 431


def large_head(client: Client) -> bool:
    head = RUNS[:-2] + b"X-Large: " + b"x" * 1000 + b"\r\n\r\n"
    return client.status(head) == 431


def malformed(client: Client) -> bool:
    """Whether the log stays empty."""
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            for connection in [client.connect(sent) for sent in MALFORMED]:
                ends(connection)
            # A request to another host is refused before its body, which is malformed.
            refused = client.connect(CHUNKED.replace(b"localhost", b"other.example"))
            status_of(refused)
            refused.sendall(b"zz\r\n")
            ends(refused)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        return log.read() == b"" and client.status(HEALTH) == 200


def too_many_connections(client: Client) -> bool:
    """Those that are too many are closed with their reason."""
    held = [client.connect(HALF_HEAD) for _ in range(120)]
    if not holds(lambda: len(select.select(held, [], [], 0)[0]) >= 70):
        return False
    return status_of(select.select(held, [], [], 0)[0][0]) == 503


def requests_in_progress(client: Client) -> bool:
    """With two queries in progress, a third is refused, and monitoring is answered."""
    triple = b'{"triples": [[0, 0, 1]]}'
    query = b"POST /api/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    query += b"Content-Length: %d\r\n\r\n" % len(triple) + triple
    waiting = [client.connect(query) for _ in range(2)]
    is_refused = holds(lambda: client.status() == 429)
    is_monitored = client.status(HEALTH) == 200
    client.finish.set()
    return is_refused and is_monitored and all(status_of(one) == 200 for one in waiting)


def new_connection(client: Client) -> bool:
    """A connection has a moment to send its request, even if many others arrive."""
    connection = client.connect()
    time.sleep(0.15)
    for _ in range(60):
        client.connect()
    time.sleep(0.2)
    return sends_and_receives(connection)


def kept_connection(client: Client) -> bool:
    """A connection that has had a response survives others that arrive later."""
    connection = client.connect()
    if not sends_and_receives(connection):
        return False
    time.sleep(0.2)
    for _ in range(60):
        client.connect()
    time.sleep(0.25)
    return sends_and_receives(connection)


def sends_and_receives(connection: socket.socket) -> bool:
    """Whether a request over an open connection is answered."""
    received = b""
    try:
        connection.sendall(HEALTH)
        while not received.endswith(b'{"status":"ok"}'):
            part = connection.recv(2**16)
            if not part:
                return False
            received += part
    except OSError:
        return False
    return True


def many_closings(client: Client) -> bool:
    """While a thousand connections are closed, no request waits for long.

    Counted is the processor time of the event loop between two turns of another task, which does
    not depend on what else the machine does.
    """
    connections = client.server.server_state.connections
    for _ in range(1000):
        client.connect(HALF_HEAD)
    if not holds(lambda: len(connections) > 900):
        return False
    longest = 0.0

    async def observe() -> None:
        nonlocal longest
        deadline = time.monotonic() + MAX_WAIT
        while len(connections) > 10 and time.monotonic() < deadline:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    gc.disable()
    asyncio.run_coroutine_threadsafe(observe(), client.loop).result()
    gc.enable()
    measurement.log(f"longest turn: {1000 * longest:.1f} ms")
    return longest < MAX_TURN


def many_open_files(client: Client) -> bool:
    """Requests are answered while more connections are held than the soft limit of files."""
    words = [sys.executable, "-c", HOLD_CONNECTIONS, str(client.port), "600"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout
            readable, _, _ = select.select([holder.stdout], [], [], MAX_WAIT)
            return bool(readable) and all(client.status() == 200 for _ in range(5))
        finally:
            holder.kill()


@dataclass(frozen=True)
class Check:
    run: Callable[[Client], bool]
    limits: dict[str, Any] = field(default_factory=dict)
    is_blocked: bool = False  # whether queries wait
    open_files: int | None = None  # the soft limit


CHECKS = {
    "half headers shut nobody out": Check(half_heads, {"connections": 100}),
    "connections of a client are limited": Check(
        half_heads_of_one_client, {"connections": 1000, "client_connections": 20}
    ),
    "empty connections shut nobody out": Check(empty_connections, {"connections": 50}),
    "a header has a time limit": Check(slow_head, {"receive_seconds": 0.5}),
    "bytes after a response do not hold a connection": Check(
        bytes_after_a_refusal, {"idle_seconds": 1}
    ),
    "a client that does not read is cut off": Check(
        client_that_does_not_read, {"receive_seconds": 0.5, "idle_seconds": 0}
    ),
    "10,000 header lines are refused unparsed": Check(many_header_lines),
    "a large head is refused with its reason": Check(large_head, {"header_bytes": 500}),
    "malformed data leave nothing in the log": Check(
        malformed, {"receive_seconds": 0.5, "idle_seconds": 0}
    ),
    "requests in progress are limited, monitoring is answered": Check(
        requests_in_progress, {"client_connections": 2}, is_blocked=True
    ),
    "connections of all clients are limited": Check(too_many_connections, {"connections": 50}),
    "a new connection has a moment": Check(new_connection, {"client_connections": 20}),
    "a kept connection survives new ones": Check(kept_connection, {"client_connections": 20}),
    "a kept connection survives a flood": Check(kept_connection, {"connections": 20}),
    "requests are answered while a thousand connections are closed": Check(
        many_closings, {"connections": 2000, "client_connections": 10}, open_files=8192
    ),
    "connections beyond the soft limit of files": Check(many_open_files, open_files=256),
}


class BlockedPredictor:
    """A predictor whose queries wait for an event."""

    def __init__(self, predictor: Any, finish: threading.Event) -> None:
        self._predictor = predictor
        self._finish = finish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._predictor, name)

    def predict(self, *args: Any) -> Any:
        self._finish.wait(2 * MAX_WAIT)
        return self._predictor.predict(*args)


def check_variant(variant: str, run: str) -> dict[str, Any]:
    """The result of every check: whether it holds, and its seconds."""
    from dualkg.serve.service import ServedRuns

    VARIANTS[variant]()
    served = ServedRuns.load([Path(run)], device="cpu")
    results = {}
    for name, check in CHECKS.items():
        started = time.perf_counter()
        with soft_file_limit(check.open_files), client_of(variant, served, check) as client:
            try:
                holds_true = check.run(client)
            except OSError:  # such as too many open files
                holds_true = False
        seconds = round(time.perf_counter() - started, 2)
        results[name] = {"holds": holds_true, "seconds": seconds}
    return results


@contextmanager
def soft_file_limit(files: int | None) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def client_of(variant: str, served: Any, check: Check) -> Iterator[Client]:
    """A server with the limits of a check, and its client."""
    from dualkg.serve.limits import Limits

    from dualkg.serve.app import application
    from dualkg.serve.server import bind
    from dualkg.serve.service import ServedRuns

    finish = threading.Event()
    if check.is_blocked:
        run = served.default
        predictor: Any = BlockedPredictor(run.predictor, finish)
        served = ServedRuns([replace(run, predictor=predictor)])
    limits = Limits(**{"client_connections": 1000, **check.limits})
    app = application(served, limits=limits)
    listening = bind("127.0.0.1", 0)
    server = server_of(variant, app, replace(limits, shutdown_seconds=2))
    loop = asyncio.new_event_loop()
    serving = server.serve(sockets=[listening])
    thread = threading.Thread(target=loop.run_until_complete, args=[serving])
    thread.start()
    client = Client(server, loop, listening.getsockname()[1], finish)
    try:
        assert holds(lambda: server.started)
        yield client
    finally:
        client.stack.close()
        finish.set()
        server.should_exit = True
        thread.join()
        loop.close()
        listening.close()


# -- under load --------------------------------------------------------------


def serve_variant(variant: str, run: str) -> dict[str, Any]:
    """Serve a run until stdin ends; the address goes to stdout."""
    from dualkg.serve.limits import Limits

    from dualkg.serve.app import application
    from dualkg.serve.server import address_of, bind
    from dualkg.serve.service import ServedRuns

    VARIANTS[variant]()
    limits = Limits()
    app = application(ServedRuns.load([Path(run)], device="cpu"), limits=limits)
    listening = bind("127.0.0.1", 0)
    server = server_of(variant, app, limits)

    def stop_at_end() -> None:
        sys.stdin.read()
        server.should_exit = True
        server.force_exit = True

    threading.Thread(target=stop_at_end, daemon=True).start()
    print(address_of(listening), flush=True)
    server.run(sockets=[listening])
    return {"peak_mib": measurement.peak_mib()}


def load_variant(variant: str, run: Path, paths: list[str], *, seconds: float) -> dict[str, Any]:
    """Latencies and failures of ordinary clients, alone and beside each kind of abuse."""
    from benchmarks.torture.abusers import KINDS
    from benchmarks.torture.common import ENVIRONMENT
    from benchmarks.torture.served import Served, in_front
    from benchmarks.torture.server import judge, measure

    task = {"what": "serve", "variant": variant, "run": str(run)}
    words = [sys.executable, __file__, "--task", json.dumps(task)]
    log = run.parent / "stderr.txt"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=in_front,
        ) as process,
    ):
        assert process.stdout
        address = process.stdout.readline().strip()
        assert urlsplit(address).port
        server = Served(address, process.pid, log, paths)
        measure(server, min(3.0, seconds), 0)  # a warm-up
        quiet = [measure(server, seconds, 1)]
        abuse = []
        for number, kind in enumerate(KINDS, start=1):
            measurement.log(f"{variant}: {kind}")
            abuse.append(measure(server, seconds, 2 * number, kind=kind))
            quiet.append(measure(server, seconds, 2 * number + 1))
        out, _ = process.communicate("")
    num_failures = {
        kind: sum(phase["num_failures"] for phase in abuse if phase["kind"] == kind)
        for kind in KINDS
    }
    held = {phase["kind"]: phase["abusers"].get("held to the end", 0) for phase in abuse}
    text = log.read_text(encoding="utf-8", errors="replace")
    figures = judge(quiet, abuse, text)
    kept = ("num_requests", "num_abusive_connections", "latencies", "p99_ratios", "memory_mib")
    return {
        **{name: figures[name] for name in kept},
        "num_failures": num_failures,
        "num_failures_alone": sum(phase["num_failures"] for phase in quiet),
        "abusers_held_to_the_end": held,
        "log_bytes": len(text),
        **json.loads(out.splitlines()[-1]),
    }


def lines_of_code() -> dict[str, int]:
    """The lines that are there for the limits on connections."""
    return {
        name: len((SERVE / name).read_text(encoding="utf-8").splitlines())
        for name in ("connections.py", "limits.py")
    }


def checks_of(variant: str, run: Path) -> dict[str, Any]:
    """The checks of a variant, in a fresh process."""
    task = {"what": "check", "variant": variant, "run": str(run)}
    checks = measurement.in_fresh_process(Path(__file__), task)
    failed = [name for name, result in checks.items() if not result["holds"]]
    record: dict[str, Any] = {"checks": checks, "failed_checks": failed}
    if variant == "dualkg":
        record["lines"] = lines_of_code()
    return record


def main() -> None:
    choices = measurement.parser(__doc__).parse_args()
    if choices.task:
        task = dict(choices.task)
        tasks = {"check": check_variant, "serve": serve_variant}
        print(json.dumps(tasks[task.pop("what")](**task)))
        return

    under_load = {f"{variant}, under load": variant for variant in UNDER_LOAD}
    chosen = measurement.wanted([*VARIANTS, *under_load], choices.only)
    if choices.list:
        print(*chosen, sep="\n")
        return

    from benchmarks.torture.served import make_run

    folder = measurement.folder_of(choices)
    on = measurement.describe("cpu", commit=choices.commit)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        paths = make_run(run)
        for job in chosen:
            measurement.log(job)
            if job in under_load:
                seconds = 2.0 if choices.quick else SECONDS
                record = load_variant(under_load[job], run, paths, seconds=seconds)
            else:
                record = checks_of(job, run)
                measurement.log(f"{job}: {record['failed_checks']}")
            measurement.save("connections", job, record, on=on, folder=folder)


if __name__ == "__main__":
    main()
