"""Campaign `server`: ordinary clients of a server, while others break the rules of HTTP.

64 connections ask ordinary queries all the time: alone (quiet), beside a kind of abuse, alone
again, and so on. Half of the abusers share the address of the ordinary clients. The latencies
beside a kind of abuse are compared with those of the quiet phases before and after it.

What is measured is what the server makes others wait for, so server and ordinary clients have
priority over abusers and all else on the machine, in quiet phases, too, if the system allows it (as
root): on a machine with two cores, abusers that open 10,000 connections take a core by their own
work.
"""

import asyncio
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

from benchmarks.torture.common import ENVIRONMENT, ROOT, TRACEBACK, dualkg, failure

CLIENTS = 64
PAUSE = 0.5  # mean seconds between two requests of a client
OTHER_ADDRESS = "127.0.0.2"  # of every second abuser
NUM_ABUSERS = {
    "slow headers": 1050,
    "slow bodies": 1000,
    "aborted streams": 16,
    "aborted requests": 16,
    "slow readers": 100,
    "malformed": 16,
    "idle": 10_000,
}
MAX_WAIT = 10.0  # seconds an ordinary client waits for a response
Seconds = Callable[[], float]  # that are left


# -- HTTP by hand: a client must be able to break the rules ------------------


async def connect(
    port: int, source: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    local = None if source is None else (source, 0)
    return await asyncio.open_connection("127.0.0.1", port, local_addr=local)


def head_of(path: str, *, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; `ConnectionError` if the server closed the connection first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise ConnectionError(str(error)) from None
    return int(status.split()[1]), headers, body


# -- ordinary clients --------------------------------------------------------


async def ordinary_client(
    port: int, paths: list[str], left: Seconds, found: dict[str, Any], seed: int
) -> None:
    """Send requests with pauses over one connection.

    It is opened again when the server has closed it between two requests.
    """
    chance = random.Random(seed)
    connection = None
    await asyncio.sleep(chance.uniform(0, PAUSE))
    while left() > 0:
        path = chance.choice(paths)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(MAX_WAIT):
                for _ in range(2):
                    if connection is None or connection[0].at_eof():
                        connection = await connect(port)
                        reused = False
                    else:
                        reused = True
                    try:
                        connection[1].write(head_of(path))
                        status, _, body = await read_response(connection[0])
                        break
                    except (ConnectionError, OSError):
                        connection[1].close()
                        connection = None
                        # A request on a reused connection may be sent again (RFC 9112, 9.3.1).
                        if not reused:
                            raise
                        found["sent_again"] += 1
            found["seconds"].append(time.perf_counter() - started)
            found["statuses"][str(status)] += 1
            if status != 200:
                found["failures"].append(f"{path}: {status} {body[:200]!r}")
        except (ConnectionError, OSError, TimeoutError, UnboundLocalError) as error:
            found["failures"].append(
                f"{path}: {error!r} after {time.perf_counter() - started:.2f} s"
            )
            connection = None
        await asyncio.sleep(chance.uniform(0, 2 * PAUSE))
    if connection:
        connection[1].close()


async def health_check(port: int, left: Seconds, found: dict[str, Any]) -> None:
    """`/health` over a new connection, several times a second."""
    while left() > 0:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(MAX_WAIT):
                reader, writer = await connect(port)
                writer.write(head_of("/health", headers="Connection: close\r\n"))
                status, _, _ = await read_response(reader)
                writer.close()
            found["health_seconds"].append(time.perf_counter() - started)
            if status != 200:
                found["failures"].append(f"/health: {status}")
        except (ConnectionError, OSError, TimeoutError) as error:
            found["failures"].append(
                f"/health: {error!r} after {time.perf_counter() - started:.2f} s"
            )
        await asyncio.sleep(0.25)


def ordinary_clients(port: int, paths: list[str], seconds: float, seed: int) -> dict[str, Any]:
    """Latencies, statuses and failures of the ordinary clients, in a process of its own."""
    found: dict[str, Any] = {
        "seconds": [], "health_seconds": [], "statuses": Counter(), "failures": [], "sent_again": 0
    }  # fmt: skip

    async def run() -> None:
        end = time.monotonic() + seconds

        def left() -> float:
            return end - time.monotonic()

        clients = [
            ordinary_client(port, paths, left, found, seed + number) for number in range(CLIENTS)
        ]
        await asyncio.gather(health_check(port, left, found), *clients)

    asyncio.run(run())
    found["num_failures"], found["failures"] = len(found["failures"]), found["failures"][:10]
    return found


# -- abusers: each opens a connection again when it was closed ---------------


async def slow_headers(port: int, source: str | None, left: Seconds, chance: random.Random) -> str:
    reader, writer = await connect(port, source)
    return await _drip(
        reader, writer, b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ", left
    )


async def slow_bodies(port: int, source: str | None, left: Seconds, chance: random.Random) -> str:
    reader, writer = await connect(port, source)
    return await _drip(
        reader,
        writer,
        head_of("/api/score", method="POST", headers="Content-Length: 100000\r\n") + b"[",
        left,
    )


async def _drip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: bytes, left: Seconds
) -> str:
    """Send the start of a request and then a byte each second; the answer that ends it."""
    writer.write(start)
    answer = asyncio.ensure_future(read_response(reader))
    try:
        while left() > 0:
            done, _ = await asyncio.wait([answer], timeout=1)
            if done:
                status, headers, _ = answer.result()
                return str(status) if "retry-after" in headers else f"{status} without Retry-After"
            writer.write(b"x")
        return "held to the end"
    finally:
        answer.cancel()
        writer.close()


async def aborted_streams(
    port: int, source: str | None, left: Seconds, chance: random.Random
) -> str:
    """Begin a completion and reset the connection after a while."""
    reader, writer = await connect(port, source)
    writer.write(head_of("/api/complete?top=10000"))
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(chance.randrange(1, 5000)), chance.uniform(0, 2))
    return _reset(writer)


async def aborted_requests(
    port: int, source: str | None, left: Seconds, chance: random.Random
) -> str:
    """Send a whole request and reset the connection without reading."""
    _, writer = await connect(port, source)
    writer.write(
        head_of(chance.choice(["/api/runs", "/api/entities?q=fr", "/", "/static/style.css"]))
    )
    await asyncio.sleep(chance.uniform(0, 0.02))
    return _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> str:
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()
    return "aborted"


async def slow_readers(port: int, source: str | None, left: Seconds, chance: random.Random) -> str:
    """Long responses that are not read: few requests, since many would be work that slows others
    down by itself.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    if source:
        made.bind((source, 0))
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(made, ("127.0.0.1", port))
        made.send(head_of("/openapi.json") * 4)  # 230 KB, more than the system buffers
        await asyncio.sleep(max(0.1, min(30, left())))
        return "held"
    finally:
        made.close()


async def malformed(port: int, source: str | None, left: Seconds, chance: random.Random) -> str:
    """Bytes that are no request, or the end of one that is none."""
    reader, writer = await connect(port, source)
    starts = [
        chance.randbytes(chance.randrange(1, 2000)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /api/runs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        head_of("/api/score", method="POST", headers="Transfer-Encoding: chunked\r\n")
        + b"zz\r\n"
        + b"x" * 50,
        head_of("/api/score", method="POST", headers="Content-Length: 99999999\r\n")
        + b"\xff" * 70000,
        head_of("/api/no", method="POST", headers="Transfer-Encoding: chunked\r\n")
        + b"5\r\nhello\r\nnonsense\r\n",
        head_of("/health") + chance.randbytes(100),
        head_of("/api/score", method="POST", headers="Content-Length: 70000\r\n") + b"[" * 70000,
        head_of("/", headers="Upgrade: websocket\r\nConnection: upgrade\r\n"),
        head_of(
            "/", headers="".join(f"X-{number}: y\r\n" for number in range(chance.randrange(20_000)))
        ),
        head_of("/" + "%" * 3000),
    ]
    writer.write(chance.choice(starts))
    try:
        status, _, _ = await asyncio.wait_for(read_response(reader), 20)
    finally:
        writer.close()
    return f"{status} where 4xx was expected" if status >= 500 and status != 503 else "answered"


async def idle(port: int, source: str | None, left: Seconds, chance: random.Random) -> str:
    """Hold a connection without a byte."""
    reader, writer = await connect(port, source)
    try:
        await asyncio.wait_for(reader.read(1), max(0.1, min(30, left())))
    finally:
        writer.close()
    return "closed"


KINDS: dict[str, Callable[[int, str | None, Seconds, random.Random], Awaitable[str]]] = {
    "slow headers": slow_headers,
    "slow bodies": slow_bodies,
    "aborted streams": aborted_streams,
    "aborted requests": aborted_requests,
    "slow readers": slow_readers,
    "malformed": malformed,
    "idle": idle,
}


def abuse(kind: str, port: int, seconds: float, seed: int) -> dict[str, int]:
    """What the connections of one kind of abuser came to, in a process of its own."""
    outcomes: Counter[str] = Counter()

    async def abuser(number: int, left: Seconds) -> None:
        chance = random.Random(seed * 100_003 + number)
        source = OTHER_ADDRESS if number % 2 else None
        await asyncio.sleep(chance.uniform(0, seconds / 3))
        while left() > 0:
            try:
                outcomes[await KINDS[kind](port, source, left, chance)] += 1
            except (OSError, TimeoutError) as error:  # closed by the server
                outcomes[type(error).__name__] += 1
            await asyncio.sleep(chance.uniform(0, max(1.0, min(10.0, NUM_ABUSERS[kind] / 100))))

    async def run() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(
            *(abuser(number, lambda: end - time.monotonic()) for number in range(NUM_ABUSERS[kind]))
        )

    asyncio.run(run())
    return dict(outcomes)


# -- the server and the campaign ---------------------------------------------


def make_run(folder: Path) -> list[str]:
    """Train briefly on the bundled graph; the requests of ordinary clients."""
    import dualkg as kg
    from dualkg.inference.calibration import calibration_for

    graph = kg.load_graph("world")
    kg.train(
        kg.ComplEx(graph.shape, dim=16), graph, regularizer=kg.DURA(0.05), epochs=3, device="cpu"
    ).save(folder)
    calibration_for(kg.load_run(folder))
    queries = []
    for head, relation, _ in graph.test[:200]:
        queries.append((quote(graph.entities[head]), quote(graph.relations[relation])))
    paths = [f"/api/tails?head={head}&relation={relation}" for head, relation in queries]
    paths += [f"/api/entities?q={head[:4].replace('%', '')}" for head, _ in queries[:50]]
    paths += [f"/?head={head}&relation={relation}" for head, relation in queries[:20]]
    return [*paths, "/api/runs", "/api/decisions", "/static/style.css"]


def core_seconds(pid: int) -> tuple[float, float, float]:
    """Time now, and how long the event loop of a server has run and has waited for a core.

    The event loop runs in the main thread, and this file is of the main thread.
    """
    run, wait, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return time.monotonic(), int(run) / 1e9, int(wait) / 1e9


def in_front() -> None:
    """Give a process priority over all others, where that is allowed."""
    _set_priority(-10, -20)


def behind() -> None:
    _set_priority(19, 19)


def _set_priority(process: int, session: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, process)
    # With autogroups, Linux compares only processes of one session by their own priority.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(session), encoding="ascii")


def start_task(call: str, priority: Callable[[], None], **options: Any) -> "subprocess.Popen[str]":
    """Start `ordinary_clients` or `abuse` in a process; `results_of` it returns its results."""
    line = [sys.executable, "-m", "benchmarks.torture.server", call, json.dumps(options)]
    return subprocess.Popen(
        line,
        start_new_session=True,
        preexec_fn=priority,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )


def results_of(task: "subprocess.Popen[str]") -> dict[str, Any]:
    return dict(json.loads(task.communicate(timeout=300)[0]))


def measure(
    server: "Served", seconds: float, seed: int, *, kind: str | None = None
) -> dict[str, Any]:
    """Latencies of ordinary clients, alone or beside abusers.

    `loop_runs` and `loop_waits` are the shares of the time in which the event loop ran and waited
    for a core. Where the second grows and the first does not, it is the machine that has too much
    to do, not the server.
    """
    before = core_seconds(server.pid)
    common = {"port": server.port, "seconds": seconds, "seed": seed}
    clients = start_task("ordinary_clients", in_front, paths=server.paths, **common)
    abusers = start_task("abuse", behind, kind=kind, **common) if kind else None
    found = results_of(clients)
    passed, run, wait = (
        now - then for now, then in zip(core_seconds(server.pid), before, strict=True)
    )
    found |= {"loop_runs": round(run / passed, 3), "loop_waits": round(wait / passed, 3)}
    if abusers:
        found |= {
            "kind": kind,
            "abusers": results_of(abusers),
            "memory_mib": round(memory_kib(server.pid) / 1024, 1),
        }
    return found


def memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


@dataclass(frozen=True)
class Served:
    """A server that runs in a process of its own."""

    address: str
    pid: int
    log: Path
    paths: list[str]  # of ordinary requests

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0


@contextmanager
def started(folder: Path, *, runs: int = 1) -> Iterator[Served]:
    """`dualkg serve` of runs on the bundled graph; its stderr is a file in the folder."""
    paths = make_run(folder / "run")
    copies = [shutil.copytree(folder / "run", folder / f"run{number}") for number in range(1, runs)]
    log = folder / "stderr.txt"
    with log.open("wb") as errors:
        words = ["serve", folder / "run", *copies, "--port", 0, "--threads", 1]
        process = dualkg(
            *words, cwd=folder, stderr=errors, start_new_session=True, preexec_fn=in_front
        )
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')}")
        yield Served(address, process.pid, log, paths)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Each kind of abuse between two quiet phases.

    Each kind occurs twice, so that the second half shows growth of memory.
    """
    kinds = [*KINDS, *KINDS]
    share = max(2.0, minutes * 60 / (2 * len(kinds) + 1))
    with tempfile.TemporaryDirectory() as scratch, started(Path(scratch)) as server:
        # This request takes the most memory, so it is part of the warm-up.
        urlopen(f"{server.address}/api/complete?top=10000").read()
        measure(server, min(5.0, share), seed)
        quiet = [measure(server, share, seed)]
        abuse = []
        for number, kind in enumerate(kinds, 1):
            abuse.append(measure(server, share, seed + 2 * number, kind=kind))
            quiet.append(measure(server, share, seed + 2 * number + 1))
        log = server.log.read_text(encoding="utf-8", errors="replace")
    return {"seconds_a_phase": round(share, 1), **judge(quiet, abuse, log)}


def judge(quiet: list[dict[str, Any]], abuse: list[dict[str, Any]], log: str) -> dict[str, Any]:
    """The figures of the campaign, and what did not hold.

    Phase i of abuse is between the quiet phases i and i + 1.
    """
    latencies = latencies_by_kind(quiet, abuse)
    ratios = {}
    for kind, both in latencies.items():
        ratios[kind] = round(both["abuse"]["p99_ms"] / both["quiet"]["p99_ms"], 2)
    overall = {"quiet": percentiles(quiet), "abuse": percentiles(abuse)}
    memory = [phase["memory_mib"] for phase in abuse]
    settled = memory[len(memory) // 3 :]
    growth = round(max(settled) / min(settled) - 1, 4)
    phases = [*abuse, *quiet]
    return {
        "num_requests": sum(sum(phase["statuses"].values()) for phase in phases),
        "num_sent_again": sum(phase["sent_again"] for phase in phases),
        "num_abusive_connections": sum(sum(phase["abusers"].values()) for phase in abuse),
        "latencies": {"all": overall, **latencies},
        "p99_ratio": round(overall["abuse"]["p99_ms"] / overall["quiet"]["p99_ms"], 2),
        "p99_ratios": ratios,
        "p99_worst_ratio": max(ratios.values()),
        "loop": {"quiet": loop_shares(quiet), "abuse": loop_shares(abuse)},
        # Latencies depend on what else the machine does, so they are figures and not failures.
        "held": {"p99 within 2x": max(ratios.values()) <= 2, "memory within 2 %": growth <= 0.02},
        "memory_mib": memory,
        "memory_growth": growth,
        "failures": failures_of(quiet, abuse, log),
        "phases": [summary(phase) for phase in phases],
    }


def failures_of(
    quiet: list[dict[str, Any]], abuse: list[dict[str, Any]], log: str
) -> list[dict[str, Any]]:
    """Failed requests of ordinary clients, unexpected answers to abusers, and tracebacks."""
    failures = []
    named_phases = [(phase["kind"], phase) for phase in abuse]
    named_phases += [("quiet", phase) for phase in quiet]
    for name, phase in named_phases:
        for problem in phase["failures"]:
            failures.append(failure("server", phase=name, what=problem))
    for phase in abuse:
        for outcome, number in phase["abusers"].items():
            if "without" in outcome or "expected" in outcome:
                problem = f"{number} abusers got {outcome}"
                failures.append(failure("server", phase=phase["kind"], what=problem))
    if TRACEBACK in log or '"trace"' in log:
        failures.append(failure("server", log=log))
    return failures


def latencies_by_kind(
    quiet: list[dict[str, Any]], abuse: list[dict[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Percentiles of the phases of each kind of abuse, and of the quiet phases around them."""
    latencies = {}
    for kind in dict.fromkeys(phase["kind"] for phase in abuse):
        numbers = [number for number, phase in enumerate(abuse) if phase["kind"] == kind]
        quiet_numbers = {*numbers, *(number + 1 for number in numbers)}
        latencies[kind] = {
            "quiet": percentiles([quiet[number] for number in sorted(quiet_numbers)]),
            "abuse": percentiles([abuse[number] for number in numbers]),
        }
    return latencies


def loop_shares(phases: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the shares of time that the event loop runs, and waits for a core."""
    return {
        name: statistics.median(phase[name] for phase in phases)
        for name in ("loop_runs", "loop_waits")
    }


def summary(phase: dict[str, Any]) -> dict[str, Any]:
    """A phase with percentiles instead of all its latencies."""
    figures = {name: value for name, value in phase.items() if "seconds" not in name}
    return figures | percentiles([phase])


def percentiles(phases: list[dict[str, Any]]) -> dict[str, float]:
    """Latencies of all requests of some phases, in ms, and of those to `/health`."""
    figures: dict[str, float] = {}
    for name in ("", "health_"):
        values = sorted(value for phase in phases for value in phase[f"{name}seconds"])
        for percent in (50, 99):
            index = min(len(values) - 1, len(values) * percent // 100)
            milliseconds = round(1000 * values[index], 2) if values else math.nan
            figures[f"{name}p{percent}_ms"] = milliseconds
    return {**figures, "num_latencies": sum(len(phase["seconds"]) for phase in phases)}


if __name__ == "__main__":
    calls = {"ordinary_clients": ordinary_clients, "abuse": abuse}
    print(json.dumps(calls[sys.argv[1]](**json.loads(sys.argv[2]))))
