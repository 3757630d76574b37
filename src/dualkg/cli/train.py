"""What `train` and `resume` do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from dualkg.cli import options, show
from dualkg.data import Graph
from dualkg.data.places import stem
from dualkg.errors import RequestError
from dualkg.evaluation.metrics import COLUMNS
from dualkg.files import write_text
from dualkg.training import Recipe, Run, RunFolder, load_recipe, resume, train_recipe, train_seeds
from dualkg.training.recipe import parse_changes
from dualkg.training.start import default_recipe, load_recipe_graph, spread


@dataclass(frozen=True)
class TrainRequest:
    """The words of a `dualkg train`."""

    source: str
    short: dict[str, Any]
    columns: str | None
    changes: Sequence[str]
    seeds: int
    out: Path | None
    overwrite: bool
    device: str | None


def run_training(request: TrainRequest, *, as_json: bool) -> None:
    recipe, graph = make_recipe(request)
    out = request.out or Path("runs") / _run_name(request.source)
    for sentence in graph.notes.sentences():
        show.err.print(f"[dim]{escape(sentence)}[/dim]")
    show.err.print(f"[dim]{escape(describe(recipe, graph))}[/dim]")
    if request.seeds > 1:
        _train_seeds(recipe, graph, request, out, as_json=as_json)
        return
    with show.watching(f"{graph.name} {recipe.model.name}") as watch:
        run = train_recipe(
            recipe, graph=graph, device=request.device, out=out, overwrite=request.overwrite, watch=watch
        )
    tell(run, as_json=as_json)


def run_resume(path: Path, *, device: str | None, threads: int | None, as_json: bool) -> None:
    """Go on with as many threads as before, so that the weights come out the same."""
    folder = RunFolder(path)
    folder.check_is_run()
    options.set_threads(threads or folder.saved_environment.get("threads"))
    with show.watching(path.name) as watch:
        run = resume(path, device=device, watch=watch)
    tell(run, as_json=as_json)


def make_recipe(request: TrainRequest) -> tuple[Recipe, Graph]:
    """The recipe that a request means, and the graph it names."""
    changes = {name: value for name, value in request.short.items() if value is not None}
    if request.columns:
        changes["data.columns"] = options.columns_of(request.columns)
    changes |= parse_changes(request.changes)
    if request.source.endswith(".toml"):
        recipe = load_recipe(Path(request.source), changes=changes)
        return recipe, load_recipe_graph(recipe)
    data = {name: value for name, value in changes.items() if name.startswith("data.")}
    if "data.graph" in data:
        raise RequestError(f"The graph is {request.source}, so data.graph is not set. Name the one you mean first.")
    asked = Recipe().with_changes({**data, "data.graph": request.source})
    graph = load_recipe_graph(asked)
    return default_recipe(asked.data, graph, changes), graph


def describe(recipe: Recipe, graph: Graph) -> str:
    """What is about to be trained, in a line."""
    model, regularizer, training = recipe.model, recipe.regularizer, recipe.training
    dual = "" if model.dual == "none" else f", its dual on the {model.dual} side"
    kept_small = "no regularizer" if regularizer.name == "none" else f"{regularizer.name} {regularizer.weight:g}"
    return (
        f"Training {model.name} (dim {model.dim}{dual}) with {kept_small} on the {len(graph.train):,} triples of "
        f"{graph.name}: {training.epochs} epochs in batches of {training.batch_size}."
    )


def tell(run: Run, *, as_json: bool) -> None:
    if as_json:
        reports = {split: report.as_dict() for split, report in run.reports.items()}
        show.print_json({"run": str(run.folder), "reports": reports})
        return
    show.print_metrics({f"{run.graph.name} {split}": report.metrics for split, report in run.reports.items()})
    show.err.print(f"\nKept in [bold]{escape(str(run.folder))}[/bold]. Ask it something:", soft_wrap=True)
    asked = run.graph.test[0] if len(run.graph.test) else run.graph.train[0]
    head, relation = run.graph.entities.spoken(int(asked[0])), run.graph.relations.spoken(int(asked[1]))
    command = shlex.join(["dualkg", "predict", str(run.folder), "--head", head, "--relation", relation])
    show.err.print(f"  {command}", markup=False, soft_wrap=True)


def _train_seeds(recipe: Recipe, graph: Graph, request: TrainRequest, out: Path, *, as_json: bool) -> None:
    with show.watching(f"{graph.name} {recipe.model.name}") as watch:
        reports = train_seeds(
            recipe, request.seeds, out=out, graph=graph, device=request.device, overwrite=request.overwrite, watch=watch
        )
    tests = {seed: report["test"]["metrics"] for seed, report in reports.items()}
    if not len(graph.test):
        raise RequestError(f"{graph.name} has no test triples to report on; the runs are kept in {out}.")
    spreads = {name: spread([metrics[key] for metrics in tests.values()]) for name, key in COLUMNS.items()}
    summary = {
        "graph": graph.name,
        "split": "test",
        "seeds": list(tests),
        **{COLUMNS[name]: {"mean": mean, "sd": sd} for name, (mean, sd) in spreads.items()},
    }
    write_text(out / "summary.json", json.dumps(summary, indent=1))
    if as_json:
        show.print_json({"run": str(out), **summary})
    else:
        show.print_spread(tests, spreads)
        show.err.print(f"\nKept in [bold]{escape(str(out))}[/bold].")


def _run_name(source: str) -> str:
    """`recipes/umls/complex-dura.toml` → umls-complex-dura; `mine.tsv.gz` → mine."""
    path = Path(source)
    if path.suffix != ".toml":
        return stem(path)
    folders = path.resolve().parts[:-1]
    below = folders[len(folders) - folders[::-1].index("recipes") :] if "recipes" in folders else ()
    return "-".join([*below, path.stem])
