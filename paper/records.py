"""Records: what is saved of the runs behind a published number, and the training of them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

import dualkg as kg
from dualkg.analysis.records import load_recipes, load_recorded_ranks, read_record, run_folders
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import Floats
from dualkg.files import atomic_folder, locked, read_json, write_text
from dualkg.inference.api import open_run
from dualkg.training.api import OnProgress, choose_device, load_recipe_graph, spread
from dualkg.training.environment import commit_of_checkout, environment
from dualkg.training.run_folder import RunFolder
from dualkg.workflows import train_seeds
from paper import registry
from paper.registry import FOLDER, ResultTable, Row, recipe_of, rows_with_recipes

T = TypeVar("T")
RECORDS = FOLDER / "records"
RUNS = Path("runs/paper")


@dataclass(frozen=True)
class Record:
    """One recipe and its runs, one per seed."""

    folder: Path
    recipe: kg.Recipe
    graph: str
    data: str  # the fingerprint of the graph that the runs were trained on
    runs: list[dict[str, Any]]

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @cached_property
    def ranks(self) -> Floats:
        return load_recorded_ranks(self.folder, self.seeds)

    @cached_property
    def test_metrics(self) -> list[kg.Metrics]:
        """One per seed; as saved in record.json where the ranks were not saved."""
        if not (self.folder / "ranks.parquet").exists():
            return [kg.Metrics.from_dict(run["test"]) for run in self.runs]
        return [kg.Metrics.of(ranks) for ranks in self.ranks]

    def values(self, name: str) -> list[float]:
        """A test metric, one per seed."""
        return [getattr(metrics, name) for metrics in self.test_metrics]

    def cost(self, name: str) -> float | None:
        """The mean of a cost over the seeds that were trained alone on their device.

        It is over all seeds if none was trained alone.
        """
        costs = [run["costs"] for run in self.runs]
        undisturbed = [run_costs for run_costs in costs if not run_costs.get("shared_device")]
        values = [run_costs.get(name) for run_costs in undisturbed or costs]
        measured = [value for value in values if value is not None]
        if not measured:
            return None
        mean, _ = spread(measured)
        return mean

    @property
    def times_are_bounds(self) -> bool:
        """Whether times are upper bounds: all runs shared their device with other work."""
        return all(run["costs"].get("shared_device") for run in self.runs)


def load_record(folder: Path) -> Record:
    # The record is read before the recipe, because the absence of a recipe says less.
    record = read_record(folder)
    recipe = kg.load_recipe(folder / "recipe.toml")
    return Record(folder, recipe, **record)


def record_runs(
    runs: Sequence[Path],
    folder: Path,
    *,
    earlier: Record | None = None,
    shared_device: bool = False,
) -> Record:
    """Write a record of runs of one recipe, one per seed.

    The runs of an `earlier` record of the recipe are taken over. `shared_device` marks the times
    as upper bounds, because other work ran on the same device.
    """
    folders = [run for path in runs for run in run_folders(path) if run.finished]
    if not folders:
        raise RequestError("A record needs at least one finished run, and there is none.")
    recipes = load_recipes(folders)
    seeds = [recipe.training.seed for recipe in recipes]
    if len(set(seeds)) < len(seeds):
        listed = ", ".join(map(str, seeds))
        raise RequestError(f"A record has each seed once; the seeds of the runs are {listed}.")

    ranks = dict(zip(earlier.seeds, earlier.ranks, strict=True)) if earlier else {}
    summaries = dict(zip(earlier.seeds, earlier.runs, strict=True)) if earlier else {}
    for seed, run in zip(seeds, folders, strict=True):
        _check_unchanged(run)
        ranks[seed] = run.load_ranks("test").mean
        summaries[seed] = _summary(run, seed, shared_device=shared_device)
    record = {
        "graph": folders[0].saved_reports()["test"]["graph"],
        "data": folders[0].saved_environment["data"],
        "runs": [summaries[seed] for seed in sorted(summaries)],
    }
    columns = {}
    for seed in sorted(ranks):
        # Twice the rank is an integer: a rank is the mean over ties.
        columns[f"seed-{seed}"] = (2 * ranks[seed]).reshape(-1).astype("int32")

    # Ranks, recipe and record belong together, so the folder is replaced as a whole.
    with locked(folder), atomic_folder(folder, existing="replace") as fresh:
        pq.write_table(
            pa.table(columns),
            fresh / "ranks.parquet",
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
        )
        write_text(fresh / "recipe.toml", recipe_without_seed(recipes[0]))
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        write_text(fresh / "record.json", f"{text}\n")
    return load_record(folder)


def _check_unchanged(run: RunFolder) -> None:
    if run.sparsity.exists():
        raise RequestError(
            f"{run.path} was sparsified after training; only runs as they were trained are "
            "recorded."
        )
    if any("sample" in report for report in run.saved_reports().values()):
        raise RequestError(
            f"{run.path} has ranks of a sample; only runs with the ranks of all triples are "
            "recorded."
        )
    if is_uncommitted(run.saved_environment):
        commit = run.saved_environment["commit"]
        raise RequestError(
            f"{run.path} was trained from a source tree with uncommitted changes ({commit}), so "
            "nobody could train it again. Commit the changes, train again, and record that run."
        )


def _summary(run: RunFolder, seed: int, *, shared_device: bool) -> dict[str, Any]:
    history = read_json(run.history)
    costs = {"training_seconds": round(sum(entry["seconds"] for entry in history), 3)}
    if run.costs.exists():
        costs.update(read_json(run.costs))
    if shared_device:
        costs["shared_device"] = True
    environment = dict(run.saved_environment)
    environment.pop("data", None)

    reports = run.saved_reports()
    test = reports["test"]
    return {
        "seed": seed,
        "epochs": len(history),
        "costs": costs,
        "environment": environment,
        "valid": reports["valid"]["metrics"],
        "test_bounds": {
            "optimistic_mrr": test["optimistic"]["mrr"],
            "pessimistic_mrr": test["pessimistic"]["mrr"],
        },
    }


def load_records(root: Path) -> dict[str, Record]:
    """All records below a folder, by their path in it."""
    folders = [path.parent for path in sorted(root.rglob("record.json"))]
    return {folder.relative_to(root).as_posix(): load_record(folder) for folder in folders}


def recipe_without_seed(recipe: kg.Recipe) -> str:
    """A recipe as text with its seed set to 0: equal for runs that differ in their seeds alone."""
    return recipe.with_changes({"training.seed": 0}).as_toml()


def recipe_digest(*recipes: kg.Recipe) -> str:
    """Digits that tell recipes from others, whatever their seeds are."""
    text = "".join(recipe_without_seed(recipe) for recipe in recipes)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_uncommitted(environment: dict[str, Any]) -> bool:
    """Whether a run was trained from a source tree with uncommitted changes."""
    return str(environment.get("commit")).endswith("-dirty")


@dataclass(frozen=True)
class Config:
    """Which graph, seeds and rows to reproduce, on which device, and where to save the results."""

    dataset: str | None = None  # None: the graphs of the paper
    seeds: int = 3
    rows: tuple[str, ...] = ()  # all if empty
    records: Path = RECORDS
    runs: Path = RUNS
    device: str | None = None
    shared_device: bool = False
    epochs: int | None = None  # of the path network in studies; None: those of its recipe
    earlier: tuple[dict[str, Any], ...] = ()  # results of a study that were saved before
    log: Callable[[str], None] = lambda text: None
    on_progress: OnProgress | None = None

    def missing_seeds(self, **values: Any) -> list[int]:
        """The seeds without an earlier result that has these values."""
        found = {result["seed"] for result in self.earlier if values.items() <= result.items()}
        return [seed for seed in range(self.seeds) if seed not in found]

    def graphs(self, default: tuple[str, ...], others: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The names of the graphs: the one of `--dataset`, ignoring case, or the default ones.

        `others` can be named, too.
        """
        if self.dataset is None:
            return default
        names = (*registry.GRAPHS, *default, *others)
        return (registry.spelled(self.dataset, names, kind="graph of these tables"),)

    def on_each_graph(self, graphs: Sequence[str], work: Callable[[str], T]) -> list[T]:
        """The results of some work on each graph.

        Graphs that are neither here nor can be downloaded are left out, and named, unless all are.
        """
        results = []
        absent: RequestError | None = None
        for name in graphs:
            try:
                results.append(work(name))
            except RequestError as error:
                absent = error
                if len(graphs) > 1:
                    self.log(f"{name} is left out: {error}")
        if absent is not None and not results:
            raise absent
        return results

    def trained_run(self, row: Row, graph: kg.Graph, seed: int) -> Path:
        """The folder of a finished run with its weights, trained if it is missing."""
        folder = self.runs / row.record_name(graph.name) / f"seed-{seed}"
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed})
        saved = RunFolder(folder).recipe
        if saved.exists() and kg.load_recipe(saved) != recipe:
            raise RequestError(
                f"{folder} has an older recipe of {row.name}. Move it away, or use another `runs`."
            )
        train_seeds(
            recipe,
            1,
            out=folder.parent,
            graph=graph,
            device=self.device,
            on_progress=self.on_progress,
        )
        return folder

    def load_trained(self, row: Row, graph: kg.Graph, seed: int) -> kg.Run:
        """A trained run with its model on the device."""
        self.log(f"{row.name} on {graph.name}, seed {seed}.")
        return open_run(self.trained_run(row, graph, seed), device=self.device)

    def train_table(self, table: ResultTable, graph: str) -> dict[str, Record]:
        """Train and record the missing seeds of the rows of a table on one graph.

        Returns all records by name.
        """
        rows = rows_with_recipes(table.rows, graph)
        missing = [row.name for row in table.rows if row.recipe and row not in rows]
        self._check_pairs(table, graph, rows=rows, missing=missing)
        if missing:
            self.log(f"Left out, because there is no recipe on {graph}: {', '.join(missing)}.")

        selected = [table.row(name) for name in self.rows] or rows
        records = {}
        data = None
        for row in rows:
            if row in selected:
                if data is None:
                    data = load_recipe_graph(recipe_of(row, graph))
                records[row.record_name(graph)] = self._train_row(row, data, graph)
        return records

    def _check_pairs(
        self, table: ResultTable, graph: str, *, rows: Sequence[Row], missing: Sequence[str]
    ) -> None:
        """Refuse a graph on which no pair of rows can be compared."""
        names = {row.name for row in rows}
        for pair in table.pairs:
            if not set(pair) & set(missing) and set(pair) & names:
                return
        raise RequestError(
            f"The table {table.name} compares rows, and on {graph} no pair has both recipes."
        )

    def _train_row(self, row: Row, data: kg.Graph, graph: str) -> Record:
        recipe = recipe_of(row, graph)
        folder = self.records / row.record_name(graph)
        record = find_record(folder, recipe, data)
        recorded_seeds = record.seeds if record else []
        seeds = sorted(set(range(self.seeds)) - set(recorded_seeds))
        if record and not seeds:
            return record

        check_committed()
        numbers = ", ".join(map(str, seeds))
        self.log(f"{row.name} on {graph}: {recipe.training.epochs} epochs, seed {numbers}.")
        runs = [self.trained_run(row, data, seed) for seed in seeds]
        return record_runs(runs, folder, earlier=record, shared_device=self.shared_device)


def find_record(folder: Path, recipe: kg.Recipe, graph: kg.Graph) -> Record | None:
    """The record of this recipe on this data, if there is one with its ranks."""
    if not (folder / "record.json").exists() or not (folder / "ranks.parquet").exists():
        return None
    record = load_record(folder)
    if record.data != graph.fingerprint:
        return None
    if recipe_without_seed(record.recipe) != recipe_without_seed(recipe):
        return None
    return record


def check_committed() -> None:
    """Refuse to train for a record unless its commit is known and has this source tree."""
    source = environment(choose_device("cpu"), fingerprint="")
    commit = source["commit"]
    if commit is None:
        raise RequestError(
            "The source tree is in no git checkout, so a record could not say which commit its "
            "numbers are from. Set the variable DUALKG_COMMIT to it."
        )
    if is_uncommitted(source):
        raise _uncommitted(commit)
    # A copy of the tree has no checkout, and the variable DUALKG_COMMIT is all there is.
    checkout = commit_of_checkout()
    if checkout is None:
        return
    if checkout.endswith("-dirty"):
        raise _uncommitted(checkout)
    if not (checkout.startswith(commit) or commit.startswith(checkout)):
        raise RequestError(
            f"DUALKG_COMMIT is {commit}, and the source tree is at {checkout}. Unset the variable "
            "in a checkout."
        )


def _uncommitted(commit: str) -> RequestError:
    return RequestError(
        f"The source tree has uncommitted changes ({commit}), so its numbers could not be "
        "reproduced. Commit or stash them first."
    )
