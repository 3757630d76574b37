"""Where a reproduction starts: train what is missing, keep what it came to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.reproduce.plan import Row, Table, recipe_of, rows_with_recipes
from dualkg.reproduce.records import Record, load_record, record, whatever_seed
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder
from dualkg.training.start import Watch, load_recipe_graph, train_seeds

Tell = Callable[[str], None]


def reproduce(
    table: Table,
    graph: str,
    *,
    seeds: int,
    records: Path,
    runs: Path,
    device: str | None = None,
    tell: Tell = lambda text: None,
    watch: Watch | None = None,
) -> dict[str, Record]:
    """The rows of a table on one graph; those that have a record of so many seeds are not trained again."""
    found, loaded = {}, None
    rows = rows_with_recipes(table, graph)
    missing = [row.name for row in table.rows if row not in rows]
    if not any(row.name in pair for row in rows for pair in table.pairs if not set(pair) & set(missing)):
        raise RequestError(f"The table {table.name} compares rows, and on {graph} none has both its recipes.")
    if missing:
        tell(f"Without a recipe on {graph}, and left out: {', '.join(missing)}.")
    for row in rows:
        recipe, name = recipe_of(row, graph), row.record_name(graph)
        loaded = loaded or load_recipe_graph(recipe)
        kept = find_record(records / name, recipe, loaded, seeds)
        if kept is None:
            tell(
                f"{row.name} on {graph}: {recipe.training.epochs} epochs, {seeds} {'seed' if seeds == 1 else 'seeds'}."
            )
            kept = train_row(row, graph, loaded, seeds=seeds, records=records, runs=runs, device=device, watch=watch)
        found[name] = kept
    return found


def train_row(
    row: Row,
    graph: str,
    loaded: Graph,
    *,
    seeds: int,
    records: Path,
    runs: Path,
    device: str | None = None,
    watch: Watch | None = None,
) -> Record:
    """Train a row with so many seeds, or what is missing of them, and keep a record."""
    name, recipe = row.record_name(graph), recipe_of(row, graph)
    for seed in range(seeds):
        old = RunFolder(runs / name / f"seed-{seed}")
        if old.recipe.exists() and whatever_seed(load_recipe(old.recipe)) != whatever_seed(recipe):
            raise RequestError(f"{old.path} is of an older recipe of {row.name}. Move it away, or use another --runs.")
    train_seeds(recipe, seeds, out=runs / name, graph=loaded, device=device, watch=watch)
    return record([runs / name / f"seed-{seed}" for seed in range(seeds)], records / name)


def trained_run(
    row: Row,
    graph: str,
    loaded: Graph,
    *,
    seed: int,
    runs: Path,
    device: str | None = None,
    watch: Watch | None = None,
) -> Path:
    """The folder of a finished run with its weights, which a record has not; trained where it is missing."""
    folder = runs / row.record_name(graph) / f"seed-{seed}"
    one = recipe_of(row, graph).with_changes({"training.seed": seed})
    train_seeds(one, 1, out=folder.parent, graph=loaded, device=device, watch=watch)
    return folder


def find_record(folder: Path, recipe: Recipe, graph: Graph, seeds: int) -> Record | None:
    """The record of this recipe on this very data with enough seeds, if there is one."""
    if not (folder / "record.json").exists():
        return None
    kept = load_record(folder)
    same = whatever_seed(kept.recipe) == whatever_seed(recipe) and kept.data == graph.fingerprint
    return kept if same and set(range(seeds)) <= set(kept.seeds) else None
