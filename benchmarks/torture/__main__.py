"""Run the campaigns of `make torture`, and save figures in benchmarks/results/reliability.json.

    python -m benchmarks.torture                          # all of them, two minutes each
    python -m benchmarks.torture races power --minutes 5 --seed 3
    python -m benchmarks.torture --hours 1                # one hour in all
    python -m benchmarks.torture kills --seed 4 --add     # more of what is saved

A campaign is a module beside this one, listed in `FIGURES`, with `campaign(*, minutes, seed) ->
dict`: plain figures, and `failures`, a list with what repeats each. The exit status is 1 if there
is one.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.torture.common import MAX_FAILURES, ROOT
from dualkg.files import locked, read_json, write_text

RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "promises.md"
BEGIN = "<!-- made from reliability.json: begin -->\n"
END = "<!-- made from reliability.json: end -->\n"
# The campaigns, and the figures of each that the page shows.
FIGURES = {
    "kills": ("kills", "num_syncs_and_renames_killed_at"),
    "power": ("states", "different_states", "cuts", "events"),
    "faults": ("cases",),
    "inputs": ("inputs", "past_the_first_parser", "longest_seconds", "most_mib"),
    "moves": ("moves",),
    "swaps": ("swaps",),
    "damage": ("files",),
    "memory": ("commands",),
    "races": ("races", "processes", "refused with a message"),
    "server": (
        "num_requests",
        "num_abusive_connections",
        "p99_ratio",
        "p99_worst_ratio",
        "memory_growth",
    ),
    "api": ("num_operations", "num_requests"),
    "greedy": ("num_requests", "p99_worst_ratio"),
}


# Figures that are no sums.
WORST = re.compile(
    r"ratio|_ms$|^most_|^longest_|^share_|^first$|growth|^num_syncs_and_renames|^num_operations"
)


def names() -> list[str]:
    """The names of the campaigns."""
    return sorted(FIGURES)


def environment() -> dict[str, Any]:
    from dualkg.training.environment import _commit, processor

    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def run(name: str, *, minutes: float, seed: int) -> dict[str, Any]:
    """One campaign; an exception of its own is a failure."""
    started = time.monotonic()
    try:
        figures = import_module(f"benchmarks.torture.{name}").campaign(minutes=minutes, seed=seed)
    except Exception:
        figures = {"failures": [{"campaign": name, "traceback": traceback.format_exc()}]}
    failures = figures.pop("failures", [])
    return {
        **figures,
        "num_failures": len(failures),
        "failures": failures[:MAX_FAILURES],
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "on": environment(),
    }


def joined(saved: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The sums of a campaign and of one more part of it; each part keeps its seed and its commit.

    Percentiles and ratios cannot be added: the larger is kept, which is the worse.
    """
    parts = [*saved.get("parts", [_part(saved)]), _part(result)]
    return {**_added(saved, result), "parts": parts, **{key: result[key] for key in ("on", "seed")}}


def _part(result: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
    return {**numbers, "commit": result["on"]["commit"]}


def _added(before: Any, new: Any, key: str = "") -> Any:
    if isinstance(before, dict) and isinstance(new, dict):
        keys = [*before, *(key for key in new if key not in before)]
        return {
            key: _added(before[key], new[key], key)
            if key in before and key in new
            else before.get(key, new.get(key))
            for key in keys
        }
    if isinstance(before, bool):
        return before and new
    if isinstance(before, list) and isinstance(new, list):
        return [*before, *new][:MAX_FAILURES]
    if not isinstance(before, int | float) or not isinstance(new, int | float):
        return new
    return max(before, new) if WORST.search(key) else round(before + new, 1)


def with_table(page: str, results: dict[str, Any]) -> str:
    """The page with a row for each campaign that was run."""
    lines = ["| campaign | figures | failures | minutes | commit |", "|---|---|--:|--:|---|"]
    for name in sorted(results):
        result = results[name]
        figures = []
        for key in FIGURES[name]:
            if key in result:
                label = key.removeprefix("num_").replace("_", " ")
                figures.append(f"{label} {_formatted(result[key])}")
        minutes = f"{result['seconds'] / 60:.1f}"
        counts: Counter[str] = Counter()
        for part in result.get("parts", []):
            counts[part["commit"]] += part.get(FIGURES[name][0], 0)
        commits = [f"{commit} ({count:,})" for commit, count in counts.items()]
        commit = ", ".join(commits) or result["on"]["commit"]
        lines.append(
            f"| `{name}` | {', '.join(figures)} | {result['num_failures']} | {minutes} | {commit} |"
        )
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(lines)
    return f"{before}{BEGIN}{table}\n{END}{after}"


def _formatted(figure: float) -> str:
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torture", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "campaigns", nargs="*", metavar="CAMPAIGN", help=f"one of {', '.join(names())}"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes of each campaign")
    parser.add_argument("--hours", type=float, help="hours of all campaigns together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--add", action="store_true", help="add to the saved figures; choose another seed"
    )
    choices = parser.parse_args()
    unknown = set(choices.campaigns) - set(names())
    if unknown:
        parser.error(
            f"there is no campaign {', '.join(sorted(unknown))}; there are {', '.join(names())}"
        )
    chosen = choices.campaigns or names()
    minutes = 60 * choices.hours / len(chosen) if choices.hours else choices.minutes
    if len(chosen) == 1:
        return run_and_save(
            chosen[0], minutes=minutes, seed=choices.seed, out=choices.out, add=choices.add
        )

    # Each campaign has its own process. The commit is that of the beginning, because the results of
    # the first campaign change the source tree.
    os.environ["DUALKG_COMMIT"] = environment()["commit"] or ""
    options = ["--minutes", str(minutes), "--seed", str(choices.seed), "--out", str(choices.out)]
    options += ["--add"] if choices.add else []
    statuses = []
    for name in chosen:
        line = [sys.executable, "-m", "benchmarks.torture", name, *options]
        # A campaign that a signal ended has a negative status.
        statuses.append(abs(subprocess.run(line, cwd=ROOT, check=False).returncode))
    return max(statuses)


def run_and_save(name: str, *, minutes: float, seed: int, out: Path, add: bool = False) -> int:
    """Run a campaign and save its figures, or add them; the exit status is 1 after a failure."""
    print(f"{name}: {minutes:.3g} minutes, seed {seed}", file=sys.stderr, flush=True)
    result = run(name, minutes=minutes, seed=seed)
    with locked(out, wait=True):
        saved = read_json(out) if out.exists() else {}
        saved[name] = joined(saved[name], result) if add and name in saved else result
        write_text(out, json.dumps(saved, indent=1, sort_keys=True) + "\n")
        if out == RESULTS:
            write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), saved))
    print(json.dumps({name: result}, indent=1))
    return 1 if result["num_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
