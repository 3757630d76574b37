"""What is written of each request: one line of JSON, whatever was asked."""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

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
