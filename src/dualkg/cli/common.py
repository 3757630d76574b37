"""What the commands share: options, the wrapper around every command, tables, JSON and progress
bars.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

import dualkg as kg
from dualkg.errors import JSON_ESCAPES, RequestError, visible
from dualkg.extras import trusted_code
from dualkg.files import read_json


class SafeConsole(Console):
    """A console on which no name moves the cursor, changes colours or reverses a line."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=visible(segment.text, lines=True))
            )


stdout = SafeConsole(highlight=False)
stderr = SafeConsole(stderr=True, highlight=False)

RunPath = Annotated[
    Path, Argument(metavar="RUN", help="Folder of a trained run or ensemble.", show_default=False)
]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1 (default: a GPU if available).")]
Threads = Annotated[int | None, Option(min=1, help="Number of CPU threads (default: all cores).")]
TrustCode = Annotated[
    bool,
    Option("--trust-code", help="Import classes that the files name and dualkg does not have."),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
SplitName = Annotated[Literal["train", "valid", "test"], Option(help="Split to evaluate on.")]
By = Annotated[
    Literal["relation", "direction", "cardinality"] | None, Option(help="Also report by groups.")
]
Track = Annotated[
    list[str] | None, Option(help="Track in tensorboard, mlflow or wandb; repeatable.")
]
Columns = Annotated[
    str | None,
    Option(
        help="Columns or JSON keys of head, relation and tail, by name or number: s,p,o or 1,3,2."
    ),
]
Delimiter = Annotated[
    str | None,
    Option(
        help="What separates the columns of text: tab, space, comma, semicolon, pipe, or a character."
    ),
]
MaxSize = Annotated[
    str | None,
    Option(
        help="Size that a compressed file may expand to (default: 16G, and 100 times its own size)."
    ),
]
SETTINGS = {  # options of `train` by the keys of a recipe that they set
    "model.name": "--model",
    "loss.name": "--loss",
    "regularizer.name": "--regularizer",
    "regularizer.weight": "--weight",
    "model.dim": "--dim",
    "training.epochs": "--epochs",
    "training.batch_size": "--batch-size",
    "optimizer.name": "--optimizer",
    "optimizer.learning_rate": "--lr",
    "validation.patience": "--patience",
    "training.seed": "--seed",
    "training.engine": "--engine",
}


class Result(NamedTuple):
    """What --json prints: `data` as one document, or as lines; and the status with which the
    command exits.
    """

    data: Any
    json_lines: bool = False
    status: int = 0


Output = Iterator[
    Result
]  # of a command, which yields its result and then prints tables, unless --json is given
Command = Callable[..., Output | None]


def command(
    *, trust_code: bool = True, threads: bool = True, as_json: bool = True
) -> Callable[[Command], Callable[..., None]]:
    """Add --trust-code, --threads and --json to a command; set trust and threads, run it, and print
    JSON or tables.
    """

    def wrap(function: Command) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        wanted = {
            "trust_code": (trust_code, TrustCode),
            "threads": (threads, Threads),
            "as_json": (as_json, Json),
        }
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
            for name, (adds, annotation) in wanted.items()
            if adds and name not in signature.parameters
        ]

        @functools.wraps(function)
        def run(**options: Any) -> None:
            values = {
                parameter.name: options.pop(parameter.name, parameter.default)
                for parameter in added
            }
            set_threads(values.get("threads"))
            with trusted_code(bool(values.get("trust_code"))):
                output = function(**options) or iter(())
                result = next(output, None)
                if result and values.get("as_json"):
                    for document in result.data if result.json_lines else [result.data]:
                        indent = None if result.json_lines else 1
                        print(
                            json.dumps(document, indent=indent, ensure_ascii=False).translate(
                                JSON_ESCAPES
                            )
                        )
                else:
                    next(output, None)
            if result and result.status:
                raise typer.Exit(result.status)

        parameters = [*signature.parameters.values(), *added]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


def silence() -> None:
    """Print no more, as a process that is not the first of several."""
    stdout.quiet = stderr.quiet = True
    logging.getLogger("dualkg").setLevel(logging.CRITICAL)


def set_threads(threads: int | None) -> None:
    if isinstance(threads, int) and threads > 0:  # it may come from a file
        import torch

        torch.set_num_threads(threads)


def load_on_device(path: Path, device: str | None) -> kg.Run:
    """Load a run and move its model to a device."""
    run = kg.load_run(path)
    run.model.to(kg.training.api.choose_device(device))
    return run


def parse_columns(text: str | None) -> list[str | int] | None:
    """`s,p,o` or `1,3,2` → the columns of head, relation and tail."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or len(set(parts)) < 3:
        raise RequestError(
            f"--columns should name three columns, all different, head,relation,tail; got '{text}'."
        )
    return [int(part) if part.isdecimal() else part for part in parts]


def as_options(sentence: str) -> str:
    """A sentence of the library with options in place of Python's keywords: `--columns 1,2,3` for
    `columns=(1, 2, 3)`.

    Sentences are cached with a graph, so they cannot know who reads them.
    """

    def option(found: re.Match[str]) -> str:
        value = found[2].strip("()").replace("', '", ",").replace(", ", ",").strip("'")
        return f"--{found[1].replace('_', '-')} {shlex.quote(value)}"

    sentence = sentence.replace("trust_code=True", "--trust-code").replace("--set: No ", "No ")
    sentence = re.sub(
        r"--set: (\w+\.\w+) should",
        lambda key: f"{SETTINGS.get(key[1], key[0][:-7])} should",
        sentence,
    )
    return re.sub(
        r"\b(columns|delimiter|labels|split|max_size)=(\([^()]*\)|'[^']*')", option, sentence
    )


def parse_numbers(option: str, text: str) -> list[float]:
    """`0,0.5,0.9` → [0.0, 0.5, 0.9]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(
            f"{option} should be a list of numbers such as 0,0.5,0.9; got '{text}'."
        ) from None


def parse_hits(text: str | None) -> tuple[int, ...]:
    """`1,3,10,50` → (1, 3, 10, 50), the k of Hits@k."""
    parts = [part.strip() for part in (text or "1,3,10").split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise RequestError(
            f"--hits should be a list of whole numbers from 1, such as 1,3,10,50; got '{text}'."
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _cell(value: Any) -> Text:
    """1,234 for an integer, 0.1234 for another number, – for None; text as it is: a name may
    contain anything.
    """
    if isinstance(value, Text):
        return value
    if isinstance(value, (int, float)):
        return Text(f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    return Text("–" if value is None else visible(value))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: int = 1,
    bold: Container[int] = (),
) -> None:
    """Print a table without lines: `left` columns of names that may fold, then numbers that are
    never cut.

    `bold` are the numbers of rows.
    """
    cells = [[_cell(value) for value in row] for row in (columns, *rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(zip(*cells, strict=True)):
        width = max(cell.cell_len for cell in column)
        if number < left or not column[0]:
            table.add_column(column[0], overflow="fold", min_width=min(width, 12))
        else:
            table.add_column(column[0], justify="right", no_wrap=True, min_width=width)
    for number, row in enumerate(cells[1:]):
        table.add_row(*row, style="bold" if number in bold else None)
    needed = (
        Measurement.get(stdout, stdout.options.update(max_width=1000), table).minimum + 2
    )  # padding
    (stdout if needed <= stdout.width else SafeConsole(highlight=False, width=needed)).print(table)


def print_metrics(
    rows: dict[str, kg.Metrics],
    *,
    title: str = "",
    hits: Sequence[int] = (1, 3, 10),
    adjusted: bool = False,
) -> None:
    """Print MRR, Hits@k and mean ranks of each row; `adjusted` adds AMR and AMRI."""
    columns = [title, *kg.Metrics.titles(hits=hits, adjusted=adjusted)]
    print_table(
        columns,
        [[name, *metrics.row(hits=hits, adjusted=adjusted)] for name, metrics in rows.items()],
    )


def print_reports(run: kg.Run) -> None:
    print_metrics(
        {f"{run.graph.name} {split}": report.metrics for split, report in run.reports.items()}
    )


def note(text: str, *, style: str | None = "dim") -> None:
    """Print a line on stderr."""
    stderr.print(Text(as_options(text), style=style or ""), soft_wrap=True)


def note_saved(path: object, *, next_command: Sequence[str] = (), purpose: str = "") -> None:
    """Print on stderr where the result is saved, and a command to try next."""
    stderr.print(
        Text.assemble("\nSaved to ", (str(path), "bold"), f". {purpose}".rstrip()), soft_wrap=True
    )
    if next_command:
        stderr.print(Text(f"  {shlex.join(['dualkg', *next_command])}"), soft_wrap=True)


def print_run(run: kg.Run, option: str, entity: int, relation: int) -> None:
    """Print the reports of a new run, and a query to try: the entity is given as --head or
    --tail.
    """
    print_reports(run)
    query = [
        option,
        run.graph.entities.text(entity),
        "--relation",
        run.graph.relations.text(relation),
    ]
    note_saved(run.folder, next_command=["predict", str(run.folder), *query], purpose="Query it:")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, updated by `(done, total, text)`; it is only shown on a
    terminal.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    facts = TextColumn("{task.fields[text]}", markup=False)
    shown = stderr.is_terminal
    with Progress(
        *columns, facts, TimeRemainingColumn(), console=stderr, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(title, total=None, text="")
        yield lambda done, total, text="": bar.update(task, completed=done, total=total, text=text)


@contextmanager
def training_progress(
    title: str, run: Path | None = None, *, announce: str = ""
) -> Iterator[Callable[[Any], None]]:
    """A progress bar of automatic tuning, if there is any, in seconds of its budget; then one of
    the training.

    `announce` is printed when the first trial starts, after everything that may be refused. The
    first step of the training prints what was chosen and the engine, by the folder `run`.
    """
    bars: dict[str, Callable[..., None]] = {}
    with ExitStack() as stack:

        def on_progress(event: Any) -> None:
            if isinstance(event, kg.tuning.automatic.AutomaticProgress):
                if not bars:
                    if announce:
                        note(announce)
                    bars["tuning"] = stack.enter_context(progress_bar(f"Tuning {title}"))
                budget = event.budget_seconds and round(event.budget_seconds)
                bars["tuning"](round(event.spent_seconds), budget, f"s  {event.text}")
                return
            if "training" not in bars:
                stack.close()  # two bars cannot be drawn at once
                if run and bars:
                    note(read_json(run / "tuning.json")["summary"])
                if run and (engine := kg.training.RunFolder(run).saved_environment.get("engine")):
                    note(f"Engine: {engine}.")  # a launched trial has none
                bars["training"] = stack.enter_context(progress_bar(title))
            bars["training"](
                (event.epoch - 1) * event.steps + event.step, event.epochs * event.steps, event.text
            )

        yield on_progress
