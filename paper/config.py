"""Options of a reproduction, the runs that it trains where they are missing, and the studies of these runs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualkg.analysis.figures import Drawing
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.files import read_json, write_text
from dualkg.training.api import OnProgress, choose_device, load_recipe_graph, train_seeds
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import Run, RunFolder, environment, load_run
from paper.records import Record, is_uncommitted, load_record, recipe_without_seed, record_runs
from paper.registry import FOLDER, GRAPHS, PUBLISHED_GRAPHS, ResultTable, Row, graph_named, recipe_of, rows_with_recipes
from paper.tables import Table

Results = Any  # whatever JSON holds
FB15K237 = ("FB15k-237",)
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


@dataclass(frozen=True)
class Study:
    """A study: a function that measures it on a graph, and functions that make its tables and its figure.

    The docstring of `measure` is the help of its command. A figure of data that the results do not contain, such as
    positions in the plane, is returned by `measure`.
    """

    name: str
    measure: Callable[[Config, Graph], tuple[Results, Drawing | None]]
    tables: Callable[[Results, str], list[Table]]
    draw: Callable[[Results, str], Drawing] | None = None
    graphs: tuple[str, ...] = PUBLISHED_GRAPHS
    several_seeds: bool = False

    def run(self, config: Config) -> list[Table]:
        """Measure it on the graphs of the configuration, and save results and figure."""
        with optional_import("matplotlib", purpose="A figure"):  # before a long computation
            import matplotlib.figure  # noqa: F401
        with optional_import("scikit-learn", purpose="A figure"):
            import sklearn.manifold  # noqa: F401
        tables = []
        for name in config.graphs(self.graphs):
            graph = load_graph(name)
            results, drawing = self.measure(config, graph)
            made = environment(choose_device(config.device), fingerprint=graph.fingerprint)
            self.save(self.path(config.records, graph.name), graph.name, made, results, drawing)
            tables += self.tables(results, graph.name)
        return tables

    def path(self, records: Path, graph: str) -> Path:
        return records / "figures" / f"{self.name}-{graph.lower()}.json"

    def saved(self, records: Path) -> list[Path]:
        """The files of saved results, by graph."""
        paths = [self.path(records, graph) for graph in dict.fromkeys((*GRAPHS, *self.graphs))]
        return [path for path in paths if path.exists()]

    def save(
        self, path: Path, graph: str, environment: dict[str, Any], results: Results, drawing: Drawing | None = None
    ) -> None:
        drawing = self.draw(results, graph) if self.draw else drawing
        if drawing:
            drawing.save(path.with_suffix(""))
        caption = {"caption": drawing.caption} if drawing else {}
        saved = {"graph": graph, "environment": environment, **caption, "results": results}
        write_text(path, json.dumps(saved, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def redraw(self, path: Path) -> None:
        """Draw the figure of saved results again."""
        saved = read_json(path)
        if self.draw:
            self.save(path, saved["graph"], saved["environment"], saved["results"])

    def page(self, path: Path) -> str:
        """Tables, figure and caption of saved results as Markdown."""
        saved = read_json(path)
        first, *others = self.tables(saved["results"], saved["graph"])
        figure = [f"![{first.title}](figures/{path.stem}.png)", saved["caption"]] if "caption" in saved else []
        return "\n\n".join([first.as_markdown(), *figure, *(table.as_markdown() for table in others)])
