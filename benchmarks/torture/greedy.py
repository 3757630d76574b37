"""Campaign `greedy`: seven ordinary clients of a server beside one that sends what takes longest.

Each client has an address of its own (127.0.0.2 and so on), as the server tells clients apart by
their addresses. The ordinary ones send queries with short pauses, alone and beside each kind of
greed, in phases of some seconds by turns, so that what else a machine does weighs on both alike.
The 99th percentile of their latencies, over all phases, should at most double.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.torture.clients import Connection, connect, head_of, read_response
from benchmarks.torture.common import ENVIRONMENT, ROOT, TRACEBACK, failure, rounds
from benchmarks.torture.served import Served, behind, in_front, started

NUM_ORDINARY = 7
PAUSE = 0.05  # mean seconds between two requests of an ordinary client
GREEDY = "127.0.0.9"
MAX_RATIO = 2.0
NUM_ITEMS = 1000  # the most that one request may have
JSON_HEADERS = "Content-Type: application/json\r\nContent-Length: {}\r\n"
NUM_AT_ONCE = 4  # connections of the greedy client
PHASE = 15.0  # most seconds of a phase


def _post(path: str, content: object) -> bytes:
    body = json.dumps(content).encode()
    return head_of(path, method="POST", headers=JSON_HEADERS.format(len(body))) + body


def _get(path: str) -> bytes:
    return head_of(path)


# What the greedy client sends, again and again, as fast as it is answered.
KINDS = {
    "scores": _post(
        "/api/score", {"triples": [[number % 900, 1, 7] for number in range(NUM_ITEMS)]}
    ),
    "unknown names": _post(
        "/api/decisions",
        {
            "decisions": [
                {"head": f"unknwn {n}", "relation": 0, "tail": 1, "verdict": "accepted"}
                for n in range(NUM_ITEMS)
            ]
        },
    ),
    "many predictions": _get(f"/api/tails?head=France&relation=borders&k={NUM_ITEMS}"),
    "name search": _get("/api/entities?q=unknwn%20nme&k=100"),
}


async def _exchange(connection: Connection, request: bytes) -> int:
    reader, writer = connection
    writer.write(request)
    status, _, _ = await read_response(reader)
    return status


async def _send(port: int, source: str, requests: list[bytes], end: float, pause: float) -> Any:
    """Send requests of one client until a time; their latencies and statuses."""
    draw = random.Random(source)
    latencies = []
    statuses: dict[str, int] = {}
    connection = await connect(port, source)
    while time.monotonic() < end:
        request = draw.choice(requests)
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(30):
                status = await _exchange(connection, request)
        except (OSError, TimeoutError) as error:
            connection[1].close()
            connection = await connect(port, source)
            statuses[type(error).__name__] = statuses.get(type(error).__name__, 0) + 1
            continue
        latencies.append(time.perf_counter() - begun)
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        if pause:
            await asyncio.sleep(draw.uniform(0, 2 * pause))
    connection[1].close()
    return latencies, statuses


async def _all(
    port: int, sources: list[str], requests: list[bytes], seconds: float, pause: float
) -> Any:
    end = time.monotonic() + seconds
    results = await asyncio.gather(
        *(_send(port, source, requests, end, pause) for source in sources)
    )
    latencies = sorted(latency for latencies, _ in results for latency in latencies)
    statuses: dict[str, int] = {}
    for _, of_client in results:
        for status, number in of_client.items():
            statuses[status] = statuses.get(status, 0) + number
    return {"latencies": latencies, "statuses": statuses}


def _task(kind: str, server: Served, seconds: float) -> "subprocess.Popen[str]":
    """Ordinary clients, or the greedy one, in a process of its own."""
    options = {"kind": kind, "port": server.port, "seconds": seconds, "paths": server.paths}
    line = [sys.executable, "-m", "benchmarks.torture.greedy", json.dumps(options)]
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=in_front if kind == "ordinary" else behind,
    )


def measure(server: Served, seconds: float, kind: str | None = None) -> dict[str, Any]:
    """Latencies of the ordinary clients, alone or beside the greedy one."""
    greedy = _task(kind, server, seconds + 1) if kind else None
    ordinary = _task("ordinary", server, seconds)
    phase = dict(json.loads(ordinary.communicate(timeout=seconds + 120)[0]))
    if greedy:
        answer = json.loads(greedy.communicate(timeout=seconds + 120)[0])
        phase["greedy_statuses"] = answer["statuses"]
    return phase


def percentile(latencies: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    return round(1000 * latencies[min(len(latencies) - 1, int(share * len(latencies)))], 2)


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Each kind of greed, before and after phases without; the time is divided among them."""
    phase_seconds = min(PHASE, max(3.0, minutes * 60 / (2 * len(KINDS))))
    alone: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    beside: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    order = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch, started(Path(scratch)) as server:
        measure(server, 3.0)
        for _ in rounds(minutes):
            for kind in order.sample(list(KINDS), len(KINDS)):
                alone[kind].append(measure(server, phase_seconds))
                beside[kind].append(measure(server, phase_seconds, kind))
        log = server.log.read_text(encoding="utf-8", errors="replace")

    figures = {kind: compared(alone[kind], beside[kind]) for kind in KINDS}
    failures = []
    for kind, figure in figures.items():
        if set(figure["statuses"]) != {"200"}:
            failures.append(failure("greedy", kind=kind, statuses=figure["statuses"]))
    if TRACEBACK in log:
        failures.append(failure("greedy", log=log))
    worst = max(figure["ratio"] for figure in figures.values())
    return {
        "num_requests": sum(figure["num_requests"] for figure in figures.values()),
        "p99_worst_ratio": worst,
        "held": {"p99 within 2x": worst <= MAX_RATIO},
        "kinds": figures,
        "failures": failures,
    }


def compared(alone: list[dict[str, Any]], beside: list[dict[str, Any]]) -> dict[str, Any]:
    """Latencies and statuses of the ordinary clients, over all phases alone and all beside."""
    quiet = sorted(latency for phase in alone for latency in phase["latencies"])
    latencies = sorted(latency for phase in beside for latency in phase["latencies"])
    p99_alone = percentile(quiet, 0.99)
    p99_beside = percentile(latencies, 0.99)
    return {
        "num_requests": len(quiet) + len(latencies),
        "p50_alone_ms": percentile(quiet, 0.5),
        "p99_alone_ms": p99_alone,
        "p50_ms": percentile(latencies, 0.5),
        "p99_ms": p99_beside,
        "ratio": round(p99_beside / p99_alone, 2),
        "statuses": added([phase["statuses"] for phase in [*alone, *beside]]),
        "greedy_statuses": added([phase["greedy_statuses"] for phase in beside]),
    }


def added(counts: list[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(of_phase) for of_phase in counts), Counter()))


def main(options: dict[str, Any]) -> None:
    kind = options["kind"]
    if kind == "ordinary":
        sources = [f"127.0.0.{number + 2}" for number in range(NUM_ORDINARY)]
        paths = [path for path in options["paths"] if path.startswith("/api/tails")]
        requests = [head_of(path) for path in paths]
        pause = PAUSE
    else:
        sources = [GREEDY] * NUM_AT_ONCE
        requests = [KINDS[kind]]
        pause = 0.0
    print(
        json.dumps(asyncio.run(_all(options["port"], sources, requests, options["seconds"], pause)))
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
