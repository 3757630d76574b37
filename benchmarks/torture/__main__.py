"""Run the campaigns of `make torture` and save their figures in
`benchmarks/results/reliability.json`.

    python -m benchmarks.torture                          # all of them, two minutes each
    python -m benchmarks.torture races power --minutes 5 --seed 3
    python -m benchmarks.torture --hours 1                # one hour in all

A campaign is a module beside this one with `campaign(*, minutes, seed) -> dict`: plain figures, and
`failures`, a list with what repeats each. The exit status is 1 if there is one.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
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
FIGURES = {  # what the page shows of a campaign
    "kills": ("kills", "num_syncs_and_renames_killed_at"),
    "power": ("states", "different_states", "cuts", "events"),
    "faults": ("cases",),
    "inputs": ("inputs", "past_the_first_parser", "longest_seconds", "most_mib"),
    "races": ("races", "processes", "refused with a message"),
    "server": (
        "num_requests",
        "num_abusive_connections",
        "p99_ratio",
        "p99_worst_ratio",
        "memory_growth",
    ),
    "api": ("num_operations", "num_requests"),
}


def names() -> list[str]:
    here = Path(__file__)
    return sorted(
        file.stem
        for file in here.parent.glob("*.py")
        if file.stem not in (here.stem, "common", "__init__")
    )


def environment() -> dict[str, Any]:
    from dualkg.training.run import _commit, processor

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
    about = {"seed": seed, "seconds": round(time.monotonic() - started, 1), "on": environment()}
    return {**figures, "num_failures": len(failures), "failures": failures[:MAX_FAILURES], **about}


def with_table(page: str, results: dict[str, Any]) -> str:
    """The page with a row for each campaign that was run."""
    lines = ["| campaign | figures | failures | minutes | commit |", "|---|---|--:|--:|---|"]
    for name in sorted(results):
        found = results[name]
        shown = {
            key.removeprefix("num_").replace("_", " "): found[key]
            for key in FIGURES[name]
            if key in found
        }
        figures = ", ".join(f"{key} {_shown(figure)}" for key, figure in shown.items())
        time = f"{found['seconds'] / 60:.1f}"
        lines.append(
            f"| `{name}` | {figures} | {found['num_failures']} | {time} | {found['on']['commit']} |"
        )
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{chr(10).join(lines)}\n{END}{rest.split(END)[1]}"


def _shown(figure: float) -> str:
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
    choices = parser.parse_args()
    if unknown := set(choices.campaigns) - set(names()):
        parser.error(
            f"there is no campaign {', '.join(sorted(unknown))}; there are {', '.join(names())}"
        )
    chosen = choices.campaigns or names()
    minutes = 60 * choices.hours / len(chosen) if choices.hours else choices.minutes
    failed = 0
    if len(chosen) > 1:  # each in a process of its own
        common = ["--minutes", str(minutes), "--seed", str(choices.seed), "--out", str(choices.out)]
        line = [sys.executable, "-m", "benchmarks.torture"]
        os.environ["DUALKG_COMMIT"] = (
            environment()["commit"] or ""
        )  # the results of the first change the source tree
        return max(
            [
                subprocess.run([*line, name, *common], cwd=ROOT, check=False).returncode
                for name in chosen
            ]
        )
    for name in chosen:
        print(f"{name}: {minutes:.3g} minutes, seed {choices.seed}", file=sys.stderr, flush=True)
        result = run(name, minutes=minutes, seed=choices.seed)
        failed += result["num_failures"]
        with locked(choices.out, wait=True):
            saved = read_json(choices.out) if choices.out.exists() else {}
            saved[name] = result
            write_text(choices.out, json.dumps(saved, indent=1, sort_keys=True) + "\n")
            if choices.out == RESULTS:
                write_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), saved))
        print(json.dumps({name: result}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
