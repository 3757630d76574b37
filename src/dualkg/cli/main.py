"""The program `dualkg`: its commands, and how errors become a sentence and an exit status."""

import atexit
import gc
import io
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import Option
from typer.core import TyperCommand

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.cli.analysis import inspect, nuclear_norm, sparsify, sparsity
from dualkg.cli.complete import complete, ensemble, export, extend, index
from dualkg.cli.evaluate import calibrate, compare, evaluate
from dualkg.cli.predict import explain, predict, predict_queries, serve, similar
from dualkg.cli.train import check, gather, resume, train, tune
from dualkg.errors import DualkgError, close_settings, shortened, visible
from dualkg.files import write_text
from dualkg.logs import log_to_stderr

GC_THRESHOLD = 1_000_000  # allocations before the garbage collector runs
# How often an idle OpenMP thread looks for work before it sleeps. By default it keeps its core from
# other threads and processes for longer; on a very busy machine training takes twice as long
# (benchmarks/contention.py).
SPIN_COUNT = "10000"
DEMO_QUERIES = (
    ("Khartoum", "located_in", None),
    ("Luxembourg", "borders", None),
    ("Palau", "currency", None),
    ("Kenya", "part_of", None),
    ("New Zealand", "celebrates", None),
    (None, "official_language", "Arabic"),
)

app = typer.Typer(
    name="dualkg",
    help="Knowledge-graph completion: train a model on triples, evaluate it, predict missing triples.",
    epilog="Start with: dualkg demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main(commands: typer.Typer = app) -> None:
    """Run a command; exit with 1 if it failed, 2 if the request was wrong, 130 after Ctrl-C,
    without a traceback.
    """
    if "torch" not in sys.modules:
        # Torch makes 200,000 objects that live as long as the process; collecting them takes most
        # of a second.
        gc.set_threshold(GC_THRESHOLD)
        atexit.register(gc.freeze)
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    for stream in (sys.stdout, sys.stderr):  # a file name need not be valid text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with nullcontext() if cli.stderr.is_terminal else log_to_stderr():
            commands()
    except DualkgError as error:
        if error.silent:
            sys.exit(error.exit_code)
        _exit(cli.as_options(str(error)), error.exit_code)
    except KeyboardInterrupt:
        _exit("stopped. Resume a training with: dualkg resume RUN", 130)
    except OSError as error:
        _exit(
            shortened(
                f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}."
            ),
            1,
        )


def _exit(sentence: str, status: int) -> None:
    print(f"dualkg: {visible(sentence, lines=True)}", file=sys.stderr)
    sys.exit(status)


@app.callback(invoke_without_command=True)
def callback(
    version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(kg.__version__)
        raise typer.Exit


@cli.command(as_json=False, trust_code=False)
def demo(
    picture: Annotated[
        Path | None, Option(help="Also save the output as this SVG file.", hidden=True)
    ] = None,
    device: cli.Device = None,
) -> None:
    """Train ComplEx with and without DURA on the bundled graph `world` and answer some queries."""
    console = cli.stdout
    graph = kg.load_graph("world")
    if picture:
        console.record = True
        console.width = 96
    counts = graph.counts
    console.print(
        f"[bold]world[/bold]: {counts['entities']:,} entities, {counts['relations']} relations, "
        f"{counts['train']:,} training triples, {counts['test']:,} test triples\n"
    )
    models = {}
    rows = list[list[Any]]()
    no_regularizer = {"regularizer.name": "none", "regularizer.weight": 0.0}
    for name, changes in {"with DURA": {}, "without": no_regularizer}.items():
        data = kg.training.recipe.Data(graph="world")
        recipe = kg.training.api.default_recipe(data, graph, {**changes, "training.epochs": 10})
        started = time.perf_counter()
        with cli.training_progress(f"ComplEx {name}") as on_progress:
            run = kg.train_recipe(recipe, graph=graph, device=device, on_progress=on_progress)
        models[name] = run.model
        rows.append([name, *run.report.metrics.row()[:4], f"{time.perf_counter() - started:.0f}"])
    cli.print_table(["ComplEx, test split", "MRR", "H@1", "H@3", "H@10", "seconds"], rows)
    console.print(
        "\nPredictions with DURA: [green]✓[/green] in the training triples, [bold cyan]★[/bold "
        "cyan] in the validation or test triples, the others new\n"
    )
    predictor = kg.Predictor(models["with DURA"], graph)
    rows = []
    answers = predict_queries(predictor, DEMO_QUERIES, top=5)
    for (head, relation, tail), predictions in zip(DEMO_QUERIES, answers, strict=True):
        rows.append(
            [
                f"({head or '?'}, {relation}, {tail or '?'})",
                Text(", ").join(map(_marked, predictions)),
            ]
        )
    cli.print_table(["query", "predictions"], rows, left=2)
    console.print(
        "\n[dim]Train a run and query it:[/dim]"
        "\n  dualkg train world"
        "\n  dualkg predict runs/world --head Kenya --relation borders"
        "\n[dim]Add probabilities and explore it in a browser:[/dim]"
        "\n  dualkg calibrate runs/world"
        "\n  dualkg serve runs/world --open",
        soft_wrap=True,
    )
    if picture:
        svg = console.export_svg(title="dualkg demo")
        write_text(
            picture, re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
        )  # loads no font from the network


def _marked(prediction: Any) -> Text:
    if prediction.split == "train":
        return Text(f"{prediction.label} ✓", style="green")
    return (
        Text(f"{prediction.label} ★", style="bold cyan")
        if prediction.known
        else Text(prediction.label)
    )


@cli.command(threads=False, trust_code=False)
def datasets() -> cli.Output:
    """List the graphs that can be loaded by name."""
    from dualkg.data.loading import (
        BUNDLED,
        catalogue,
        data_folder,
        load_graph,
        names_in_data_folder,
    )

    local = {name.casefold(): name for name in names_in_data_folder()}
    folder = str(data_folder())
    bundled = {"licence": "CC BY 4.0", "from": "bundled", "about": "countries, cities, languages"}
    rows: list[dict[str, Any]] = [{"name": BUNDLED, **load_graph(BUNDLED).counts, **bundled}]
    for name, entry in catalogue().items():
        source = folder if local.pop(name.casefold(), None) else "network"
        facts = {
            "licence": entry.licence,
            "from": source,
            "about": entry.about,
            "address": entry.address,
        }
        rows.append(
            {"name": name, **entry.counts, **facts, "sha256": entry.sha256, "note": entry.note}
        )
    rows += [
        {"name": name, "from": folder, "about": "not in the catalogue", "licence": ""}
        for name in local.values()
    ]
    yield cli.Result(rows)
    counts = ("entities", "relations", "train", "valid", "test")
    columns = ["name", *counts, "from", "description"]
    cells = []
    for row in rows:
        source = "DUALKG_DATA" if row["from"] == folder else row["from"]
        numbers = [row.get(key, "") for key in counts]
        cells.append([row["name"], *numbers, source, Text(row["about"], style="dim")])
    wide = len(columns) if cli.stdout.width >= 105 else -1
    cli.print_table(columns[:wide], [row[:wide] for row in cells])
    cli.stdout.print("\n[dim]Licences, URLs and checksums: dualkg datasets --json[/dim]")


@cli.command(threads=False, trust_code=False)
def recipes() -> cli.Output:
    """List the recipes that ship with dualkg; train one with: dualkg train
    fb15k-237/complex-dura.
    """
    from dualkg.training.recipe import list_recipes, load_recipe

    data = []
    for name in list_recipes():
        recipe = load_recipe(name)
        facts = {"graph": recipe.data.graph, "model": recipe.model.name, "dim": recipe.model.dim}
        facts |= {"regularizer": recipe.regularizer.name, "epochs": recipe.training.epochs}
        data.append({"name": name, **facts})
    columns = ["name", "graph", "model", "regularizer", "dim", "epochs"]
    rows = [[str(row[key]) for key in columns] for row in data]
    yield cli.Result(data)
    cli.print_table(columns, rows, left=4)


class SuggestingCommand(TyperCommand):
    """A command that names the nearest option where one is unknown: --lr for --learning-rate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption of click, or of Typer's copy of it
                options = [
                    option[2:]
                    for one in self.params
                    for option in one.opts
                    if option.startswith("--")
                ]
                near = close_settings(str(getattr(error, "option_name", "")).lstrip("-"), options)
                error.possibilities = [f"--{option}" for option in near] or error.possibilities
            raise


for function in (
    *(
        demo,
        datasets,
        inspect,
        recipes,
        train,
        resume,
        gather,
        check,
        tune,
        evaluate,
        compare,
        calibrate,
        predict,
    ),
    *(
        similar,
        explain,
        complete,
        extend,
        ensemble,
        index,
        export,
        sparsify,
        sparsity,
        nuclear_norm,
        serve,
    ),
):
    app.command(cls=SuggestingCommand)(function)
