"""What `search` does."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualkg.cli import options, output
from dualkg.data.graph import Graph
from dualkg.data.locations import stem
from dualkg.errors import DualkgError, RequestError
from dualkg.evaluation.report import COLUMNS
from dualkg.files import write_text
from dualkg.training.api import default_recipe, load_recipe_graph, resume, spread, train_recipe, train_seeds
from dualkg.training.recipe import Recipe, load_recipe, parse_changes
from dualkg.training.run import Run, RunFolder

if TYPE_CHECKING:
    from dualkg.tuning.results import TuningProgress, TuningResult


def tune(
    space: Annotated[Path, typer.Argument(metavar="SPACE", help="A space (.toml): a recipe, and what to try in it.")],
    out: Annotated[Path | None, typer.Option(help="The search's folder (default: runs/search-NAME)")] = None,
    storage: Annotated[
        str | None, typer.Option(help="A database's URL, so that machines share a search (default: OUT/study.db)")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="So many trials side by side, each in a process.")] = 1,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Search for the recipe with the best validation MRR; called again, it goes on."""
    from dualkg.training.trainer import InterruptedRunError
    from dualkg.tuning.space import load_space
    from dualkg.tuning.tune import tune as run_search

    options.set_threads(threads)
    asked = load_space(space)
    out = out or Path("runs") / f"tune-{asked.name}"
    output.err.print(
        f"[dim]{asked.num_trials:,} trials ({asked.settings.method}) of {escape(asked.base.model.name)} on "
        f"{escape(asked.base.data.graph)}, kept in {escape(str(out))}.[/dim]"
    )
    try:
        with _watching(asked.name) as on_progress:
            result = run_search(asked, out=out, device=device, storage=storage, jobs=jobs, on_progress=on_progress)
    except InterruptedRunError as error:
        again = shlex.join(["dualkg", *sys.argv[1:]])
        raise InterruptedRunError(f"{error} Resume with: {again}") from None
    if result.best is None:
        why = next((row.error for row in result.trials if row.error), "all were pruned")
        raise DualkgError(f"No trial finished; see {out / 'trials.csv'}. The first error: {why}")
    if as_json:
        output.print_json({"folder": str(out), **result.as_dict()})
    else:
        _print(result, out)


def _print(result: TuningResult, out: Path) -> None:
    table = output.plain_table("trial", "valid MRR", *_short(list(result.space.dimensions)))
    for row in result.ranked[:10]:
        values = [
            escape(f"{row.params[name]:g}" if _number(row.params[name]) else str(row.params[name]))
            for name in result.space.dimensions
        ]
        table.add_row(str(row.number), f"{row.mrr:.4f}", *values)
    output.out.print(table)
    output.out.print()
    if result.importance is None:
        output.out.print("[dim]How much each choice matters needs 8 finished trials.[/dim]")
    else:
        weights = output.plain_table("choice", "importance")
        for name, share in result.importance.items():
            weights.add_row(escape(name), f"{share:.2f}")
        output.out.print(weights)
    told = result.as_dict()
    output.err.print(
        f"\n{told['finished']} trials finished, {told['pruned']} were pruned, {told['failed']} failed. Kept in "
        f"[bold]{escape(str(out))}[/bold]. Train the winner:",
        soft_wrap=True,
    )
    output.err.print(f"  {shlex.join(['dualkg', 'train', str(out / 'best.toml')])}", markup=False, soft_wrap=True)


def _short(names: list[str]) -> list[str]:
    """`regularizer.weight` → weight, where no other choice ends like that."""
    ends = [name.rpartition(".")[2] for name in names]
    return [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def _watching(title: str) -> Iterator[Callable[[TuningProgress], None]]:
    """A bar of trials on stderr, with the best so far; nothing where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        console=output.err,
        transient=True,
    )
    task = bar.add_task(escape(title), total=None, facts="")

    def on_progress(event: TuningProgress) -> None:
        facts = "" if event.best is None else f"best valid MRR {event.best:.4f}"
        if event.training:
            facts += f"  epoch {event.training.epoch}/{event.training.epochs}  loss {event.training.loss:.3f}"
        bar.update(task, total=event.num_trials, completed=event.num_done, facts=facts)

    with bar:
        yield on_progress


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
        output.err.print(f"[dim]{escape(sentence)}[/dim]")
    output.err.print(f"[dim]{escape(describe(recipe, graph))}[/dim]")
    if request.seeds > 1:
        _train_seeds(recipe, graph, request, out, as_json=as_json)
        return
    with output.watching(f"{graph.name} {recipe.model.name}") as on_progress:
        run = train_recipe(
            recipe, graph=graph, device=request.device, out=out, overwrite=request.overwrite, on_progress=on_progress
        )
    tell(run, as_json=as_json)


def run_resume(path: Path, *, device: str | None, threads: int | None, as_json: bool) -> None:
    """Go on with as many threads as before, so that the weights come out the same."""
    folder = RunFolder(path)
    folder.check_is_run()
    options.set_threads(threads or folder.saved_environment.get("threads"))
    with output.watching(path.name) as on_progress:
        run = resume(path, device=device, on_progress=on_progress)
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
        output.print_json({"run": str(run.folder), "reports": reports})
        return
    output.print_metrics({f"{run.graph.name} {split}": report.metrics for split, report in run.reports.items()})
    output.err.print(f"\nKept in [bold]{escape(str(run.folder))}[/bold]. Ask it something:", soft_wrap=True)
    asked = run.graph.test[0] if len(run.graph.test) else run.graph.train[0]
    head, relation = run.graph.entities.text(int(asked[0])), run.graph.relations.text(int(asked[1]))
    command = shlex.join(["dualkg", "predict", str(run.folder), "--head", head, "--relation", relation])
    output.err.print(f"  {command}", markup=False, soft_wrap=True)


def _train_seeds(recipe: Recipe, graph: Graph, request: TrainRequest, out: Path, *, as_json: bool) -> None:
    with output.watching(f"{graph.name} {recipe.model.name}") as on_progress:
        reports = train_seeds(
            recipe,
            request.seeds,
            out=out,
            graph=graph,
            device=request.device,
            overwrite=request.overwrite,
            on_progress=on_progress,
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
        output.print_json({"run": str(out), **summary})
    else:
        output.print_spread(tests, spreads)
        output.err.print(f"\nKept in [bold]{escape(str(out))}[/bold].")


def _run_name(source: str) -> str:
    """`recipes/umls/complex-dura.toml` → umls-complex-dura; `mine.tsv.gz` → mine."""
    path = Path(source)
    if path.suffix != ".toml":
        return stem(path)
    folders = path.resolve().parts[:-1]
    below = folders[len(folders) - folders[::-1].index("recipes") :] if "recipes" in folders else ()
    return "-".join([*below, path.stem])
