"""The program `dualkg`: its commands, and how errors become a sentence and an exit status."""

from __future__ import annotations

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
from dualkg.cli.complete import complete, ensemble, export, extend, index
from dualkg.cli.evaluate import calibrate, compare, evaluate
from dualkg.cli.inspect import inspect
from dualkg.cli.predict import explain, predict, serve
from dualkg.cli.train import check, resume, train, tune
from dualkg.cli.training_display import TrainingDisplay
from dualkg.cli.words import as_options
from dualkg.errors import (
    DualkgError,
    close_settings,
    out_of_memory,
    shortened,
    visible,
)
from dualkg.files import write_text
from dualkg.logs import log_to_stderr

HELP = "Knowledge-graph completion: train a model on triples, evaluate it, predict missing triples."
WIDE_TERMINAL = 105  # columns
REPORT_SECONDS = 10.0  # in which another process has reported an error, or never does
GC_THRESHOLD = 1_000_000  # allocations before the garbage collector runs
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
    help=HELP,
    epilog="Start with: dualkg demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main(commands: typer.Typer = app) -> None:
    """Run a command, and exit without a traceback.

    The status is 1 if the command failed, 2 if the request was wrong, and 130 after Ctrl-C, which
    is how a server is ended: that exits with 0.
    """
    _prepare_process()
    try:
        with nullcontext() if cli.stderr.is_terminal else log_to_stderr():
            commands()
    except DualkgError as error:
        if error.silent:
            _let_report(error)
            sys.exit(error.exit_code)
        _exit(as_options(str(error)), error.exit_code)
    except KeyboardInterrupt:
        _exit("stopped. Resume a training with: dualkg resume RUN", 130)
    except OSError as error:
        reason = f"{error.strerror or error}."
        sentence = f"{error.filename}: {reason}" if error.filename else reason
        _exit(shortened(sentence), 1)
    except UnicodeEncodeError as error:  # half of a character, as in a name that is no text
        _exit(shortened(f"'{error.object}' cannot be written as {error.encoding}."), 2)
    except Exception as error:
        shortage = out_of_memory(error)
        if shortage is None:
            raise
        _exit(as_options(str(shortage)), shortage.exit_code)


def _let_report(error: DualkgError) -> None:
    """Give the process that reports an error the time to do so.

    When one process has ended, torchrun ends all others, this one as well: so the one that reports
    has to be the first. A user who stops a training has stopped all processes already.
    """
    from dualkg.training.errors import InterruptedRunError
    from dualkg.training.shutdown import LAUNCHED_BY_TORCHRUN

    if LAUNCHED_BY_TORCHRUN in os.environ and not isinstance(error, InterruptedRunError):
        time.sleep(REPORT_SECONDS)


def _prepare_process() -> None:
    """Settle the garbage collector, the threads and the streams of a process of its own."""
    if "torch" not in sys.modules:
        # Torch makes 200,000 objects that live as long as the process; collecting them takes most
        # of a second.
        gc.set_threshold(GC_THRESHOLD)
        atexit.register(gc.freeze)
    # The name of a file need not be valid text.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
    with_dura, seconds_with = _train_demo(graph, {}, title="ComplEx with DURA", device=device)
    without, seconds_without = _train_demo(
        graph,
        {"regularizer.name": "none", "regularizer.weight": 0.0},
        title="ComplEx without",
        device=device,
    )
    cli.print_table(
        ["ComplEx, test split", "MRR", "H@1", "H@3", "H@10", "seconds"],
        [
            ["with DURA", *with_dura.report.metrics.row()[:4], f"{seconds_with:.0f}"],
            ["without", *without.report.metrics.row()[:4], f"{seconds_without:.0f}"],
        ],
    )
    console.print(
        "\nPredictions with DURA: [green]✓[/green] in the training triples, [bold cyan]★[/bold "
        "cyan] in the validation or test triples, the others new\n"
    )
    _print_demo_queries(kg.Predictor(with_dura.model, graph))
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
        # The picture loads no font from the network.
        write_text(picture, re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


def _train_demo(
    graph: kg.Graph, changes: dict[str, Any], *, title: str, device: str | None
) -> tuple[kg.Run, float]:
    """A short training on a graph, and its seconds."""
    from dualkg.training.api import data_of, default_recipe

    recipe = default_recipe(data_of(graph), graph, {**changes, "training.epochs": 10})
    started = time.perf_counter()
    with TrainingDisplay(title) as display:
        run = kg.train_recipe(
            recipe,
            graph=graph,
            device=device,
            on_event=lambda event: None,
            on_progress=display,
        )
    return run, time.perf_counter() - started


def _print_demo_queries(predictor: kg.Predictor) -> None:
    from dualkg.workflows.predict import predict_queries

    rows: list[list[Any]] = []
    answers = predict_queries(predictor, DEMO_QUERIES, top=5)
    for (head, relation, tail), predictions in zip(DEMO_QUERIES, answers, strict=True):
        names = Text(", ").join(_marked(prediction) for prediction in predictions)
        rows.append([f"({head or '?'}, {relation}, {tail or '?'})", names])
    cli.print_table(["query", "predictions"], rows, left=2)


def _marked(prediction: kg.Prediction) -> Text:
    if prediction.split == "train":
        return Text(f"{prediction.label} ✓", style="green")
    if prediction.known:
        return Text(f"{prediction.label} ★", style="bold cyan")
    return Text(prediction.label)


@cli.command(threads=False, trust_code=False)
def datasets() -> cli.Output:
    """List the graphs that can be loaded by name, and the recipes that ship with dualkg.

    Train one by its name: dualkg train fb15k-237/complex-dura.
    """
    from dualkg.data.catalogue import catalogue
    from dualkg.data.loading import BUNDLED, data_folder, load_graph, names_in_data_folder

    local = {name.casefold(): name for name in names_in_data_folder()}
    folder = str(data_folder())
    rows: list[dict[str, Any]] = [
        {
            "name": BUNDLED,
            **load_graph(BUNDLED).counts,
            "licence": "CC BY 4.0",
            "from": "bundled",
            "about": "countries, cities, languages",
        }
    ]
    for name, entry in catalogue().items():
        is_local = local.pop(name.casefold(), None) is not None
        rows.append(
            {
                "name": name,
                **entry.counts,
                "licence": entry.licence,
                "from": folder if is_local else "network",
                "about": entry.about,
                "address": entry.address,
                "checked_by": entry.checked_by,
                "checksum": entry.checksum,
                "sha256": entry.sha256,
                "md5": entry.md5,
                "note": entry.note,
            }
        )
    for name in local.values():
        rows.append({"name": name, "from": folder, "about": "not in the catalogue", "licence": ""})
    shipped = _recipe_rows()
    yield cli.Result({"datasets": rows, "recipes": shipped})

    _print_recipes(shipped)
    cli.stdout.print()
    _print_datasets(rows, folder)


def _print_recipes(rows: list[dict[str, Any]]) -> None:
    keys = ["graph", "model", "regularizer", "dim", "epochs"]
    table = [[row["name"], *(str(row[key]) for key in keys)] for row in rows]
    cli.print_table(["recipe", *keys], table, left=4)


def _print_datasets(rows: list[dict[str, Any]], folder: str) -> None:
    """The graphs, and whether they are in the folder of data or come from the network."""
    counts = ("entities", "relations", "train", "valid", "test", "triples")
    columns = ["name", *counts, "checked by", "from"]
    # The descriptions need a wide terminal.
    is_wide = cli.stdout.width >= WIDE_TERMINAL
    if is_wide:
        columns.append("description")
    table = []
    for row in rows:
        source = "DUALKG_DATA" if row["from"] == folder else row["from"]
        numbers = [row.get(key, "") for key in counts]
        cells = [row["name"], *numbers, row.get("checked_by", ""), source]
        if is_wide:
            cells.append(Text(row["about"], style="dim"))
        table.append(cells)
    cli.print_table(columns, table)
    cli.stdout.print(
        "\n[dim]Graphs with a number of triples have no published split: dualkg splits them.\n"
        "Licences, URLs and checksums: dualkg datasets --json[/dim]"
    )


def _recipe_rows() -> list[dict[str, Any]]:
    """The recipes that ship with dualkg, which are trained by name."""
    from dualkg.training.recipe import list_recipes, load_recipe

    rows = []
    for name in list_recipes():
        recipe = load_recipe(name)
        rows.append(
            {
                "name": name,
                "graph": recipe.data.graph,
                "model": recipe.model.name,
                "dim": recipe.model.dim,
                "regularizer": recipe.regularizer.name,
                "epochs": recipe.training.epochs,
            }
        )
    return rows


class SuggestingCommand(TyperCommand):
    """A command that names the nearest option where one is unknown: --lr for --learning-rate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # NoSuchOption of click, or of Typer's copy of it.
            if hasattr(error, "possibilities"):
                wrong = str(getattr(error, "option_name", "")).lstrip("-")
                similar_options = close_settings(wrong, self._long_options())
                if similar_options:
                    error.possibilities = [f"--{option}" for option in similar_options]
            raise

    def _long_options(self) -> list[str]:
        options = []
        for parameter in self.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    options.append(option.removeprefix("--"))
        return options


COMMANDS = (
    demo,
    datasets,
    inspect,
    train,
    resume,
    check,
    tune,
    evaluate,
    compare,
    calibrate,
    predict,
    explain,
    complete,
    extend,
    ensemble,
    index,
    export,
    serve,
)
for function in COMMANDS:
    app.command(cls=SuggestingCommand)(function)
