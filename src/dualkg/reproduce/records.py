"""Records: what is kept of the runs behind a published number, and the tables that are made from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dualkg.errors import RequestError
from dualkg.evaluation.metrics import COLUMNS
from dualkg.files import write_text
from dualkg.training import RunFolder, load_recipe
from dualkg.training.start import spread


def record(runs: Sequence[Path], folder: Path) -> Path:
    """Keep what runs of one recipe came to: recipe, environment, seeds, times, reports, and the hash of their ranks."""
    folders = [RunFolder(path) for path in find_runs(runs)]
    recipes = [load_recipe(found.recipe) for found in folders]
    same = {recipe.with_changes({"training.seed": 0}).as_toml() for recipe in recipes}
    if len(same) != 1:
        raise RequestError(f"The runs {', '.join(str(path) for path in runs)} are not of one recipe.")
    kept = {
        "graph": folders[0].saved_reports()["test"]["graph"],
        "runs": [_summary(found, recipe.training.seed) for found, recipe in zip(folders, recipes, strict=True)],
    }
    write_text(folder / "recipe.toml", recipes[0].as_toml())
    write_text(folder / "record.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return folder


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The finished runs that are, or lie in, these folders."""
    found = []
    for path in paths:
        inside = sorted(path.glob("seed-*")) if not RunFolder(path).recipe.exists() else [path]
        found += [run for run in inside if RunFolder(run).finished]
    if not found:
        raise RequestError("There is no finished run to record.")
    return found


def _summary(folder: RunFolder, seed: int) -> dict[str, Any]:
    history = json.loads(folder.history.read_text(encoding="utf-8"))
    reports = folder.saved_reports()
    slim = {
        split: {key: value for key, value in report.items() if key != "by_relation"}
        for split, report in reports.items()
    }
    return {
        "seed": seed,
        "training_seconds": round(sum(entry["seconds"] for entry in history), 1),
        "epochs": len(history),
        "environment": folder.saved_environment,
        "ranks_sha256": {split: hashlib.sha256(folder.ranks(split).read_bytes()).hexdigest() for split in reports},
        "reports": slim,
    }


def load_records(root: Path) -> dict[str, dict[str, Any]]:
    """All records under a folder, by their path in it."""
    return {
        str(path.parent.relative_to(root)): json.loads(path.read_text(encoding="utf-8"))
        | {"recipe": load_recipe(path.parent / "recipe.toml")}
        for path in sorted(root.rglob("record.json"))
    }


def results_page(root: Path) -> str:
    """RESULTS.md: every record, as Markdown."""
    return "\n".join(
        [
            "# Results",
            "",
            "Made from the records in this folder by `make records`; do not edit. Filtered ranking of the test split,",
            "both directions, every test triple kept, ties at their mean. Where there are several seeds: mean ± sd.",
            "",
            results_table(root),
            "",
        ]
    )


def results_table(root: Path) -> str:
    """The records as a Markdown table."""
    lines = [
        f"| recipe | graph | model | dim | regularizer | seeds | {' | '.join(COLUMNS)} | valid MRR | training | on |",
        f"|---|---|---|--:|---|--:|{'--:|' * len(COLUMNS)}--:|--:|---|",
    ]
    for name, kept in load_records(root).items():
        recipe, runs = kept["recipe"], kept["runs"]
        regularizer = recipe.regularizer.name
        if regularizer != "none":
            regularizer += f" λ={recipe.regularizer.weight:g}"
        cells = [
            f"[{name}]({name}/recipe.toml)",
            kept["graph"],
            recipe.model.name,
            str(recipe.model.dim),
            regularizer,
            str(len(runs)),
            *(_spread(run["reports"]["test"]["metrics"][key] for run in runs) for key in COLUMNS.values()),
            _spread(run["reports"]["valid"]["metrics"]["mrr"] for run in runs),
            _seconds(run["training_seconds"] for run in runs),
            _hardware(runs[0]["environment"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    mean, sd = spread(found)
    return f"{mean:.4f}" if len(found) == 1 else f"{mean:.4f} ± {sd:.4f}"


def _seconds(values: Iterable[float]) -> str:
    mean, _ = spread(list(values))
    return f"{mean:.0f} s" if mean < 600 else f"{mean / 60:.0f} min"


def _hardware(environment: dict[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    threads = environment["threads"]
    return f"{threads} {'thread' if threads == 1 else 'threads'} of {environment['processor']}"
