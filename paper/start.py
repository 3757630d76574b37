"""Where a reproduction starts: train what is missing, keep what it came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dualkg.analysis.records import Record, load_record, whatever_seed
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.training.api import OnProgress, load_recipe_graph, train_seeds
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import RunFolder
from paper.plan import Row, Table, recipe_of, rows_with_recipes
from paper.records import record

Tell = Callable[[str], None]


def reproduce(
    table: Table,
    graph: str,
    *,
    seeds: int,
    records: Path,
    runs: Path,
    only: Sequence[str] = (),
    device: str | None = None,
    beside_others: bool = False,
    tell: Tell = lambda text: None,
    on_progress: OnProgress | None = None,
) -> dict[str, Record]:
    """The rows of a table on one graph, or only some; seeds that a record has are not trained again."""
    found, loaded = {}, None
    rows = rows_with_recipes(table.rows, graph)
    missing = [row.name for row in table.rows if row.stem and row not in rows]
    if not any(row.name in pair for row in rows for pair in table.pairs if not set(pair) & set(missing)):
        raise RequestError(f"The table {table.name} compares rows, and on {graph} none has both its recipes.")
    if missing:
        tell(f"Without a recipe on {graph}, and left out: {', '.join(missing)}.")
    chosen = [table.row(name) for name in only]
    for row in [row for row in rows if not only or row in chosen]:
        recipe, name = recipe_of(row, graph), row.record_name(graph)
        loaded = loaded or load_recipe_graph(recipe)
        kept = find_record(records / name, recipe, loaded)
        absent = sorted(set(range(seeds)) - set(kept.seeds if kept else ()))
        if kept is None or absent:
            tell(f"{row.name} on {graph}: {recipe.training.epochs} epochs, seed {', '.join(map(str, absent))}.")
            trained = [
                trained_run(row, graph, loaded, seed=seed, runs=runs, device=device, on_progress=on_progress)
                for seed in absent
            ]
            kept = record(trained, records / name, beside=kept, beside_others=beside_others)
        found[name] = kept
    return found


def trained_run(
    row: Row,
    graph: str,
    loaded: Graph,
    *,
    seed: int,
    runs: Path,
    device: str | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """The folder of a finished run with its weights, which a record has not; trained where it is missing."""
    folder = runs / row.record_name(graph) / f"seed-{seed}"
    one, old = recipe_of(row, graph).with_changes({"training.seed": seed}), RunFolder(folder).recipe
    if old.exists() and load_recipe(old) != one:
        raise RequestError(f"{folder} is of an older recipe of {row.name}. Move it away, or use another --runs.")
    train_seeds(one, 1, out=folder.parent, graph=loaded, device=device, on_progress=on_progress)
    return folder


def find_record(folder: Path, recipe: Recipe, graph: Graph) -> Record | None:
    """The record of this recipe on this very data, with all its ranks, if there is one."""
    if not (folder / "record.json").exists():
        return None
    kept = load_record(folder)
    same = whatever_seed(kept.recipe) == whatever_seed(recipe) and kept.data == graph.fingerprint
    return kept if same and kept.ranks() is not None else None
