"""What a folder holds, by file: checksums of contents without times, which differ between runs."""

import hashlib
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.torture.common import weights_of

# Keys of times and memory. Lists of files and checksums also change with them, and are checked by
# themselves.
VOLATILE = re.compile(r"second|_at$|_mib$|^date$|_per_|^files$|^sha256$")
TRIALS = """
    select param_name, param_value, value
    from trials t join trial_params using (trial_id) join trial_values using (trial_id)
    where state = 'COMPLETE'
"""


def fingerprints(home: Path) -> dict[str, str]:
    """A checksum of each file, and the damage of each finished run, which must open."""
    from dualkg.training.ensemble import load_run
    from dualkg.training.run import RunFolder

    contents = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        if path.is_file():
            contents[name] = fingerprint(path)
        if (path / "environment.json").exists() and RunFolder(path).finished:
            damage = RunFolder(path).damage()
            if damage:
                contents[f"{name}: damage"] = str(damage)
            load_run(path)
    return contents


def fingerprint(path: Path) -> str:
    """A checksum of the content of a file without times."""
    return hashlib.sha256(_content(path)).hexdigest()[:12]


def _content(path: Path) -> bytes:
    if path.suffix == ".safetensors":
        parts: Any = weights_of(path)
    elif path.suffix == ".json":
        parts = without_times(json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".db":
        with closing(sqlite3.connect(path)) as database:
            parts = sorted(database.execute(TRIALS))
    elif path.name in ("trials.csv", "RESULTS.md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        parts = sorted(re.sub(r"\d+\.\d+ ?s?\b", "", line) for line in lines)
    else:
        return path.read_bytes()
    return repr(parts).encode()


def without_times(value: Any) -> Any:
    """A value of JSON without what differs between two runs of a command."""
    if isinstance(value, dict):
        keys = [key for key in sorted(value) if not VOLATILE.search(key)]
        return {key: without_times(value[key]) for key in keys}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\bin [\d.]+ s\b", "", value)
    return value


def raw(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder, without hidden ones."""
    contents = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            contents[path.relative_to(folder).as_posix()] = path.read_bytes()
    return contents


def difference(expected: dict[str, str], made: dict[str, str]) -> str:
    """What is wrong with each file, as JSON."""
    if "open" in made:
        return json.dumps({"open": made["open"]})
    wrong = dict.fromkeys(made.keys() - expected.keys(), "is left")
    wrong |= dict.fromkeys(expected.keys() - made.keys(), "is missing")
    for file in expected.keys() & made.keys():
        if expected[file] != made[file]:
            wrong[file] = "differs"
    return json.dumps(wrong)
