"""What is counted while serving, and the text that Prometheus reads."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, TextIO

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class Counts:
    """Requests by route and status, their seconds by route, and the batches that answered them.

    A route is that of the OpenAPI description, never an address as it came: there are few of them.
    """

    def __init__(self) -> None:
        self._started = time.time()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._within: Counter[tuple[str, float]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_batches = 0
        self._num_questions = 0
        self._largest = 0
        self.under_way = 0

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests[route, status] += 1
        self._seconds[route] += seconds
        for bound in BOUNDS:
            if seconds <= bound:
                self._within[route, bound] += 1

    def batch(self, size: int) -> None:
        self._num_batches += 1
        self._num_questions += size
        self._largest = max(self._largest, size)

    def text(self, entities: dict[str, int]) -> str:
        """In Prometheus' format; `entities` has the number of entities of each run."""
        return "".join(f"{line}\n" for line in self._lines(entities))

    def _lines(self, entities: dict[str, int]) -> Iterator[str]:
        yield from _about("dualkg_requests_total", "counter", "Requests by route and status.")
        for (route, status), number in sorted(self._requests.items()):
            yield _line("dualkg_requests_total", number, route=route, status=str(status))
        yield from _about("dualkg_request_seconds", "histogram", "Seconds that requests took.")
        for route, seconds in sorted(self._seconds.items()):
            whole = sum(number for (other, _), number in self._requests.items() if other == route)
            for bound in BOUNDS:
                number = self._within[route, bound]
                yield _line("dualkg_request_seconds_bucket", number, route=route, le=f"{bound:g}")
            yield _line("dualkg_request_seconds_bucket", whole, route=route, le="+Inf")
            yield _line("dualkg_request_seconds_sum", round(seconds, 6), route=route)
            yield _line("dualkg_request_seconds_count", whole, route=route)
        single: dict[str, tuple[str, str, float]] = {
            "dualkg_requests_under_way": ("gauge", "Requests that are not answered yet.", self.under_way),
            "dualkg_batches_total": ("counter", "Batches of questions answered together.", self._num_batches),
            "dualkg_questions_total": ("counter", "Questions answered in batches.", self._num_questions),
            "dualkg_largest_batch": ("gauge", "Questions of the largest batch.", self._largest),
            "dualkg_start_time_seconds": ("gauge", "When the server began.", round(self._started, 3)),
        }
        for name, (kind, about, value) in single.items():
            yield from _about(name, kind, about)
            yield _line(name, value)
        yield from _about("dualkg_entities", "gauge", "Entities of each run.")
        for run, number in entities.items():
            yield _line("dualkg_entities", number, run=run)


def _about(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, number: float, **labels: str) -> str:
    written = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{name}{{{written}}} {number}" if labels else f"{name} {number}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


LONGEST = 500  # letters of an address


class Journal:
    """Lines on stderr. A line end, a quote or a terminal's command in an address is written as JSON escapes it."""

    def __init__(self, *, requests: bool = False, file: TextIO | None = None) -> None:
        self._requests, self._file = requests, file

    def request(self, method: str, path: str, status: int, seconds: float) -> None:
        if self._requests:
            self._write({"method": method, "path": path[:LONGEST], "status": status, "ms": round(seconds * 1000, 2)})

    def failure(self, route: str, trace: str) -> None:
        """Something that should not have happened; always written."""
        self._write({"failed": route, "trace": trace})

    def _write(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=self._file or sys.stderr, flush=True)
