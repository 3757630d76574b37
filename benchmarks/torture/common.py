"""What the campaigns share: the time they have, the program under test, and a small run to work on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
TRACEBACK = "Traceback (most recent call last)"
MAX_FAILURES = 20  # that are saved with all details


def rounds(minutes: float, *, most: int | None = None) -> Iterator[int]:
    """Numbers from 0, for as long as there is time; at least one."""
    end, number = time.monotonic() + 60 * minutes, 0
    while number == 0 or (time.monotonic() < end and (most is None or number < most)):
        yield number
        number += 1


def dualkg(*words: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command; its output is read by `communicate`."""
    line = [sys.executable, "-m", "dualkg", *map(str, words)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=cwd, env=ENVIRONMENT, text=True, **{**pipes, **options})


def write_triples(path: Path, *, num_entities: int = 40) -> Path:
    """A graph that trains in a second."""
    kinds = {"colour": 4, "shape": 5, "size": 3}
    rows = [f"thing{i}\t{kind}\t{kind}{i % values}\n" for kind, values in kinds.items() for i in range(num_entities)]
    path.write_text("".join(rows), encoding="utf-8")
    return path


def failure(campaign: str, **details: Any) -> dict[str, Any]:
    """One failure, with all that repeats it; long texts are cut."""
    return {"campaign": campaign, **{key: str(value)[-2000:] for key, value in details.items()}}
