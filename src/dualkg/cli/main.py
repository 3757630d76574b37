"""The commands."""

from __future__ import annotations

import atexit
import gc
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from dualkg.cli import analysis, options, output
from dualkg.cli import complete as index
from dualkg.cli.complete import complete, extend
from dualkg.cli.evaluate import calibrate, check_task, compare, evaluate_task
from dualkg.cli.predict import explain
from dualkg.cli.serve import serve
from dualkg.cli.train import tune
from dualkg.errors import DualkgError

NEW_OBJECTS = 1_000_000  # that are made before garbage is looked for among them

app = typer.Typer(
    name="dualkg",
    help="Complete knowledge graphs: train a model on triples, rank it honestly, ask it for new facts.",
    epilog="Start with: dualkg demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main(commands: typer.Typer = app) -> None:
    """Run a command; a user's mistake is a sentence and an exit code, never a traceback."""
    _spare_what_is_loaded()
    for stream in (sys.stdout, sys.stderr):  # a file's name need not be text, but it must be shown
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        commands()
    except DualkgError as error:
        print(f"dualkg: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("dualkg: stopped. A run that had begun goes on with: dualkg resume RUN", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"dualkg: {where}{error.strerror or error}.", file=sys.stderr)
        sys.exit(1)


def _spare_what_is_loaded() -> None:
    """Look for garbage seldom, and not at the end.

    Torch alone makes some 200,000 objects that stay as long as the process: to go through them again and again takes
    most of a second. Where it is there already, as in tests, nothing is changed.
    """
    if "torch" not in sys.modules:
        gc.set_threshold(NEW_OBJECTS)
        atexit.register(gc.freeze)


@app.command()
def demo(
    threads: options.Threads = None,
    device: options.Device = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the output as this SVG file.", hidden=True)] = None,
) -> None:
    """Train ComplEx with and without DURA on the bundled graph, and ask it a few questions."""
    from dualkg.cli.demo import run_demo

    options.set_threads(threads)
    run_demo(device=device, picture=picture)


@app.command()
def datasets(as_json: options.Json = False) -> None:
    """List the graphs that are known by name."""
    rows = output.known_graphs()
    if as_json:
        output.print_json(rows)
    else:
        output.print_datasets(rows)


@app.command()
def train(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A recipe (.toml), a graph's name, or a folder or file of triples.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model, such as ComplEx or RotatE, or package.module:Class.")
    ] = None,
    regularizer: Annotated[
        str | None, typer.Option(help="none, Frobenius, N3, BasicDURA, DURA, UnweightedDURA or RegP1.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="The regularizer's weight, the paper's λ.")] = None,
    dim: Annotated[int | None, typer.Option(help="Size of an embedding.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How often every triple is seen.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the initial weights and the batches.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with so many seeds and report mean ± sd.")] = 1,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a choice of the recipe: training.batch_size=1000.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="How to split a single file (default: 80/10/10)")] = None,
    columns: options.Columns = None,
    labels: Annotated[str | None, typer.Option(help="A file of names and the labels people know them by.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="reference or fast (default: fast where it applies); both take the same steps.")
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Train a model and keep it, with its report, in a folder."""
    from dualkg.cli.train import TrainRequest, run_training

    options.set_threads(threads)
    request = TrainRequest(
        source=source,
        short={
            "model.name": model,
            "regularizer.name": regularizer,
            "regularizer.weight": weight,
            "model.dim": dim,
            "training.epochs": epochs,
            "training.seed": seed,
            "training.engine": engine,
            "data.split": split,
            "data.labels": labels,
        },
        columns=columns,
        changes=changes or [],
        seeds=seeds,
        out=out,
        overwrite=overwrite,
        device=device,
    )
    run_training(request, as_json=as_json)


@app.command()
def resume(
    run: options.RunPath, device: options.Device = None, threads: options.Threads = None, as_json: options.Json = False
) -> None:
    """Go on with a run that was interrupted or killed."""
    from dualkg.cli.train import run_resume

    run_resume(run, device=device, threads=threads, as_json=as_json)


app.command()(tune)


@app.command()
def evaluate(
    run: options.RunPath,
    split: options.Split = "test",
    by: options.By = None,
    task: Annotated[str, typer.Option(help="link (heads and tails), classification, or relation.")] = "link",
    negatives: Annotated[
        Path | None, typer.Option(help="False triples for classification (default: sampled)", show_default=False)
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Rank a split: filtered, both directions, ties at their mean. Or another task."""
    from dualkg.cli.predict import evaluate_run

    options.set_threads(threads)
    options.check_split(split)
    options.check_by(by)
    check_task(task, by=by, negatives=negatives)
    if task != "link":
        evaluate_task(run, task, split=split, by=by, negatives=negatives, device=device, as_json=as_json)
        return
    report = evaluate_run(run, split=split, device=device)
    if as_json:
        print(report.as_json())
    else:
        output.print_report(report, by=by)


app.command()(calibrate)
app.command()(compare)
app.command()(complete)


@app.command()
def predict(
    run: options.RunPath,
    head: Annotated[str | None, typer.Option(help="The head's name.")] = None,
    relation: Annotated[str | None, typer.Option(help="The relation's name.")] = None,
    tail: Annotated[str | None, typer.Option(help="The tail's name.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many answers.")] = 10,
    new: Annotated[bool, typer.Option("--new", help="Leave out what the graph already has.")] = False,
    coverage: Annotated[
        float | None, typer.Option(help="As many new answers as hold the missing one so often: 0.9 is 90 %.")
    ] = None,
    searched: Annotated[
        Path | None, typer.Option("--index", help="Look for tails and heads in this index of the run.")
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Ask for the missing one of head, relation and tail; give all three for a score."""
    from dualkg.cli.predict import ask

    options.set_threads(threads)
    question, answers = ask(
        run, head, relation, tail, top=top, new=new, device=device, coverage=coverage, index=searched
    )
    if as_json:
        output.print_json({"question": question, "answers": [answer.as_dict() for answer in answers]})
    else:
        output.print_answers(question, answers)


@app.command()
def similar(
    run: options.RunPath,
    entity: Annotated[str, typer.Argument(help="The entity's name.")],
    top: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    as_json: options.Json = False,
) -> None:
    """The entities whose embeddings are nearest."""
    from dualkg.cli.predict import nearest

    answers = nearest(run, entity, top=top)
    if as_json:
        output.print_json([answer.as_dict() for answer in answers])
    else:
        output.print_answers(f"like {entity}", answers, score="cosine", known=False)


@app.command()
def export(
    run: options.RunPath,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    format: Annotated[str, typer.Option(help="numpy, tsv or safetensors.")] = "numpy",
) -> None:
    """Write the embeddings for other programs."""
    from dualkg.inference.export import export as write
    from dualkg.training.run import load_run

    for path in write(load_run(run), out, format=format):
        print(path)


app.add_typer(analysis.app)
app.add_typer(index.app)
app.command()(explain)
app.command()(extend)
app.command()(serve)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from importlib import metadata

        print(metadata.version("dualkg"))
        raise typer.Exit
