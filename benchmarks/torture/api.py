"""Campaign `api`: schemathesis sends requests to every operation of the API, and checks replies.

Its phases are examples, coverage of the description, fuzzing with valid and invalid values, and
chains of requests (stateful).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.torture.common import ENVIRONMENT, TRACEBACK, failure
from benchmarks.torture.served import started

# A refusal of large headers (431) is a refusal of wrong values too, and a busy server refuses with
# 503; the default of schemathesis has neither.
CONFIG = """\
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 413, 415, 422, 429, 431, 503]
"""


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Figures of one run of schemathesis against a server of two runs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = folder / "report.json"
        config = folder / "schemathesis.toml"
        config.write_text(CONFIG, encoding="utf-8")
        with started(folder, runs=2) as server:
            description = f"{server.address}/openapi.json"
            words = ["-m", "schemathesis.cli", "--config-file", config, "run", description]
            options: dict[str, object] = {
                "phases": "examples,coverage,fuzzing,stateful",
                "checks": "all",
                "max-time": max(30, round(60 * minutes)),
                "seed": seed,
                "request-timeout": 60,  # the map is computed at its first request
                "max-response-time": 60,
                "generation-database": "none",
                "report": "json",
                "report-json-path": report,
            }
            line = [sys.executable, *words, "--continue-on-failure", "--no-color"]
            line += [f"--{name}={value}" for name, value in options.items()]
            result = subprocess.run(
                list(map(str, line)),
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
                check=False,
                cwd=folder,
            )
        if not report.exists():
            return {"failures": [failure("api", output=result.stdout + result.stderr)]}
        figures = json.loads(report.read_text(encoding="utf-8"))
        log = server.log.read_text(encoding="utf-8", errors="replace")
    failures = []
    for kind in ("failures", "errors"):
        for details in figures[kind]:
            failures.append(failure("api", **{kind: json.dumps(details)}))
    if TRACEBACK in log or '"trace"' in log:
        failures.append(failure("api", log=log))
    return {
        "schemathesis": figures["schemathesis_version"],
        "num_operations": figures["operations"]["tested"],
        "num_requests": figures["test_cases"]["generated"],
        "phases": figures["phases"],
        "failures": failures,
    }
