"""Options of a reproduction, and the runs that it trains where they are missing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.training.api import OnProgress, choose_device, load_recipe_graph, train_seeds
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import Run, RunFolder, environment, load_run
from paper.records import Record, is_uncommitted, load_record, recipe_without_seed, record_runs
from paper.registry import FOLDER, ResultTable, Row, graph_named, recipe_of, rows_with_recipes

RECORDS = FOLDER / "records"
RUNS = Path("runs/paper")


@dataclass(frozen=True)
class Config:
    """Which graph, seeds and rows to reproduce, on which device, and where to save records and runs."""

    dataset: str | None = None  # None: the graphs of the paper
    seeds: int = 3
    rows: tuple[str, ...] = ()  # all if empty
    records: Path = RECORDS
    runs: Path = RUNS
    device: str | None = None
    shared_device: bool = False
    log: Callable[[str], None] = lambda text: None
    on_progress: OnProgress | None = None

    def graphs(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the graphs: the one of `--dataset`, or the default ones."""
        return (graph_named(self.dataset, default),) if self.dataset else default

    def trained_run(self, row: Row, graph: Graph, seed: int) -> Path:
        """The folder of a finished run with its weights, trained if it is missing."""
        folder = self.runs / row.record_name(graph.name) / f"seed-{seed}"
        recipe, saved = recipe_of(row, graph.name).with_changes({"training.seed": seed}), RunFolder(folder).recipe
        if saved.exists() and load_recipe(saved) != recipe:
            raise RequestError(f"{folder} has an older recipe of {row.name}. Move it away, or use another --runs.")
        train_seeds(recipe, 1, out=folder.parent, graph=graph, device=self.device, on_progress=self.on_progress)
        return folder

    def load_trained(self, row: Row, graph: Graph, seed: int) -> Run:
        """A trained run with its model on the device."""
        self.log(f"{row.name} on {graph.name}, seed {seed}.")
        run = load_run(self.trained_run(row, graph, seed))
        run.model.to(choose_device(self.device))
        return run

    def train_table(self, table: ResultTable, graph: str) -> dict[str, Record]:
        """Train and record the missing seeds of the rows of a table on one graph; all records by name."""
        rows = rows_with_recipes(table.rows, graph)
        missing = [row.name for row in table.rows if row.recipe and row not in rows]
        if not any(row.name in pair for row in rows for pair in table.pairs if not set(pair) & set(missing)):
            raise RequestError(f"The table {table.name} compares rows, and on {graph} no pair has both recipes.")
        if missing:
            self.log(f"Left out, because there is no recipe on {graph}: {', '.join(missing)}.")
        selected = [table.row(name) for name in self.rows]
        records, data = {}, None
        for row in [row for row in rows if not selected or row in selected]:
            recipe, name = recipe_of(row, graph), row.record_name(graph)
            data = data or load_recipe_graph(recipe)
            record = find_record(self.records / name, recipe, data)
            seeds = sorted(set(range(self.seeds)) - set(record.seeds if record else ()))
            if record is None or seeds:
                check_committed()
                self.log(f"{row.name} on {graph}: {recipe.training.epochs} epochs, seed {', '.join(map(str, seeds))}.")
                runs = [self.trained_run(row, data, seed) for seed in seeds]
                record = record_runs(runs, self.records / name, earlier=record, shared_device=self.shared_device)
            records[name] = record
        return records


def find_record(folder: Path, recipe: Recipe, graph: Graph) -> Record | None:
    """The record of this recipe on this data, if there is one with its ranks."""
    if not (folder / "record.json").exists():
        return None
    record = load_record(folder)
    same = recipe_without_seed(record.recipe) == recipe_without_seed(recipe) and record.data == graph.fingerprint
    return record if same and record.ranks_path.exists() else None


def check_committed() -> None:
    """Refuse to train for a record from a source tree with uncommitted changes, before any time is spent."""
    found = environment(choose_device("cpu"), fingerprint="")
    if is_uncommitted(found):
        raise RequestError(
            f"The source tree has uncommitted changes ({found['commit']}), so its numbers could not be reproduced. "
            f"Commit or stash them first."
        )
