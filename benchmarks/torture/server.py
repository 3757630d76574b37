"""Campaign `server`: ordinary clients of a server, while others break the rules of HTTP.

64 connections ask ordinary queries all the time: alone (quiet), beside a kind of abuse, alone
again, and so on. Half of the abusers share the address of the ordinary clients. The latencies
beside a kind of abuse are compared with those of the quiet phases before and after it.

What is measured is what the server makes others wait for, so server and ordinary clients have
priority over abusers and all else on the machine, in quiet phases, too, if the system allows it (as
root): on a machine with two cores, abusers that open 10,000 connections take a core by their own
work.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.torture.abusers import KINDS
from benchmarks.torture.common import ENVIRONMENT, ROOT, TRACEBACK, failure
from benchmarks.torture.served import (
    Served,
    behind,
    in_front,
    loop_clock,
    memory_mib,
    started,
)


def measure(
    server: Served, seconds: float, seed: int, *, kind: str | None = None
) -> dict[str, Any]:
    """Latencies of ordinary clients, alone or beside abusers.

    `loop_runs` and `loop_waits` are the shares of the time in which the event loop ran and waited
    for a core. Where the second grows and the first does not, it is the machine that has too much
    to do, not the server.
    """
    before = loop_clock(server.pid)
    common = {"port": server.port, "seconds": seconds, "seed": seed}
    clients = start_task("clients", in_front, paths=server.paths, **common)
    abusers = start_task("abusers", behind, kind=kind, **common) if kind else None
    phase = results_of(clients)
    clock = loop_clock(server.pid).since(before)
    phase["loop_runs"] = round(clock.run / clock.passed, 3)
    phase["loop_waits"] = round(clock.waited / clock.passed, 3)
    if abusers:
        phase["kind"] = kind
        phase["abusers"] = results_of(abusers)
        phase["memory_mib"] = memory_mib(server.pid)
    return phase


def start_task(
    module: str, priority: Callable[[], None], **options: Any
) -> "subprocess.Popen[str]":
    """Start `clients` or `abusers` in a process; `results_of` it returns its results."""
    line = [sys.executable, "-m", f"benchmarks.torture.{module}", json.dumps(options)]
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
    output, _ = task.communicate(timeout=300)
    return dict(json.loads(output))


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
