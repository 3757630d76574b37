"""A folder with triples and runs of every state, and what files of a folder hold."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import dualkg as kg

CPU = ("--device", "cpu", "--threads", 1)
SMALL = ("--dim", 2, "--epochs", 2, "--batch-size", 60, "--engine", "reference", *CPU)
SAVED = ("--set=training.checkpoint_seconds=0", "--set=validation.every=1")
TRAIN = ("train", "mine.tsv", "--no-tune", *SMALL, *SAVED)
# Names of values that differ between two runs of one command, and lists of files with checksums,
# which differ with them.
VOLATILE = re.compile(r"second|_at$|_mib$|^date$|_per_|^files$|^sha256$|^run$|identity")
NUM_THINGS = 40


def write_triples(path: Path) -> None:
    num_values = {"colour": 4, "shape": 5, "size": 3}
    lines = []
    for relation, count in num_values.items():
        for number in range(NUM_THINGS):
            lines.append(f"thing{number}\t{relation}\t{relation}{number % count}\n")
    path.write_text("".join(lines), encoding="utf-8")


def make(home: Path) -> None:
    """Write triples, a calibrated run, another run, and one that was interrupted."""
    write_triples(home / "mine.tsv")
    (home / "new-triples.tsv").write_text("new\tcolour\tcolour1\nnew\tshape\tshape2\n")
    (home / "queries.tsv").write_text("thing1\tcolour\t?\n?\tshape\tshape2\n")
    recipe = kg.Recipe().with_changes(
        {
            "data.graph": "mine.tsv",
            "model.dim": 2,
            "training.epochs": 3,
            "training.batch_size": 60,
            "training.engine": "reference",
            "training.checkpoint_seconds": 0.0,
        }
    )
    run = kg.train_recipe(recipe, out=home / "run", device="cpu")
    kg.calibrate(run)
    kg.train_recipe(recipe.with_changes({"training.seed": 1}), out=home / "other", device="cpu")

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        changes = {"training.seed": 2}
        stopped = home / "stopped"
        kg.train_recipe(recipe.with_changes(changes), out=stopped, on_progress=stop, device="cpu")


def contents(home: Path) -> dict[str, Any]:
    """What each file holds, without times; hidden files are left out."""
    found = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = content(path)
    return found


def content(path: Path) -> Any:
    """What a file holds, without times."""
    if path.suffix == ".safetensors":
        return {name: table.tobytes() for name, table in sorted(load_file(path).items())}
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text(encoding="utf-8")))
    return path.read_bytes()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        names = [name for name in value if not VOLATILE.search(name)]
        return {name: without_times(value[name]) for name in names}
    if isinstance(value, list):
        return [without_times(part) for part in value]
    if isinstance(value, str):
        return re.sub(r"\bin [\d.]+ s\b", "", value)
    return value
