"""Campaign `api`: schemathesis generates requests to every operation of the API, in all its phases,
and checks replies.

Examples, coverage of the description, fuzzing with valid and invalid values, and chains of requests
(stateful).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.torture.common import ENVIRONMENT, TRACEBACK, failure
from benchmarks.torture.server import started

# A refusal of large headers is one of wrong values too; schemathesis counts only these by default,
# and 4xx without it.
CONFIG = "[checks.negative_data_rejection]\nexpected-statuses = [400, 401, 403, 404, 405, 413, 415, 422, 429, 431, 503]\n"


def campaign(*, minutes: float, seed: int) -> dict[str, Any]:
    """Figures of one run of schemathesis against a server of two runs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = folder / "report.json"
        config = folder / "schemathesis.toml"
        config.write_text(CONFIG, encoding="utf-8")
        with started(folder, runs=2) as server:
            words = [
                "-m",
                "schemathesis.cli",
                "--config-file",
                config,
                "run",
                f"{server.address}/openapi.json",
            ]
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
        found = json.loads(report.read_text(encoding="utf-8"))
        log = server.log.read_text(encoding="utf-8", errors="replace")
    failures = [
        failure("api", **{kind: json.dumps(one)})
        for kind in ("failures", "errors")
        for one in found[kind]
    ]
    if TRACEBACK in log or '"trace"' in log:
        failures.append(failure("api", log=log))
    return {
        "schemathesis": found["schemathesis_version"],
        "num_operations": found["operations"]["tested"],
        "num_requests": found["test_cases"]["generated"],
        "phases": found["phases"],
        "failures": failures,
    }
