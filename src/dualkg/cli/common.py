"""What the commands share: options, the wrapper of every command, tables, JSON, progress bars."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

import dualkg as kg
from dualkg.cli.words import as_options
from dualkg.errors import JSON_ESCAPES, InvalidValue, RequestError, visible
from dualkg.extras import trusted_code
from dualkg.logs import describe_time_left


class SafeConsole(Console):
    """A console on which no name moves the cursor, changes colours or reverses a line."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=visible(segment.text, lines=True))


stdout = SafeConsole(highlight=False)
stderr = SafeConsole(stderr=True, highlight=False)

# Commands that torchrun may start.
IN_PROCESSES = ("train", "resume", "evaluate", "predict", "complete", "index", "export")
OTHER_FORMATS = (".jpg", ".jpeg", ".pdf", ".eps", ".gif", ".webp")  # of pictures
MAX_WIDTH = 1000  # columns of a table that is wider than the terminal
PADDING = 2
MIN_BAR_WIDTH = 8
TEXT_WIDTH = 100  # of what is beside a bar
MAX_BAR_WIDTH = 40
COLUMNS_HELP = "Columns or JSON keys of head, relation and tail, by name or number: s,p,o or 1,3,2."
DELIMITER_HELP = (
    "What separates the columns of text: tab, space, comma, semicolon, pipe, or a character."
)
MAX_SIZE_HELP = (
    "Size that a compressed file may expand to (default: 16G, and 100 times its own size)."
)

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
Columns = Annotated[str | None, Option(help=COLUMNS_HELP)]
Delimiter = Annotated[str | None, Option(help=DELIMITER_HELP)]
MaxSize = Annotated[str | None, Option(help=MAX_SIZE_HELP)]


def one_process_only(what: str) -> RequestError:
    """The error for what several processes cannot do together: a command, maybe with options."""
    return RequestError(
        f"dualkg {what} works in one process. Start it without torchrun; several processes train, "
        "resume, evaluate, predict, complete, index and export."
    )


def check_processes(command: str) -> None:
    """Refuse a command in several processes that do not share its work."""
    # Looked up first, as the rest imports PyTorch.
    if os.environ.get("WORLD_SIZE", "1") in ("", "1") or command in IN_PROCESSES:
        return
    if kg.workflows.num_processes() > 1:
        error = one_process_only(command)
        error.silent = not kg.workflows.is_first_process()
        raise error


class Result(NamedTuple):
    """What --json prints: one document, or a document a line.

    The command exits with the `status`.
    """

    data: Any
    json_lines: bool = False
    status: int = 0


# A command yields its result, and then prints tables unless --json is given.
Output = Iterator[Result]
Command = Callable[..., Output | None]


# -- the wrapper of every command --------------------------------------------


def command(
    *, trust_code: bool = True, threads: bool = True, as_json: bool = True
) -> Callable[[Command], Callable[..., None]]:
    """Add --trust-code, --threads and --json to a command.

    The wrapper sets trust and threads, runs the command, and prints JSON or tables.
    """
    annotations: dict[str, Any] = {}
    if trust_code:
        annotations["trust_code"] = TrustCode
    if threads:
        annotations["threads"] = Threads
    if as_json:
        annotations["as_json"] = Json

    def wrap(function: Command) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
            for name, annotation in annotations.items()
            if name not in signature.parameters
        ]

        @functools.wraps(function)
        def run(**options: Any) -> None:
            check_processes(function.__name__)
            values = {parameter.name: options.pop(parameter.name, None) for parameter in added}
            set_threads(values.get("threads"))
            with trusted_code(bool(values.get("trust_code"))):
                output = function(**options) or iter(())
                result = next(output, None)
                if result and values.get("as_json"):
                    _print_json(result)
                else:
                    # The rest of the command prints tables.
                    next(output, None)
            if result and result.status:
                raise typer.Exit(result.status)

        parameters = [*signature.parameters.values(), *added]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


def _print_json(result: Result) -> None:
    documents = result.data if result.json_lines else [result.data]
    indent = None if result.json_lines else 1
    for document in documents:
        text = json.dumps(document, indent=indent, ensure_ascii=False)
        print(text.translate(JSON_ESCAPES))


def silence() -> None:
    """Print no more, as a process that is not the first of several."""
    stdout.quiet = True
    stderr.quiet = True
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it is open until the process ends
    logging.getLogger("dualkg").setLevel(logging.CRITICAL)


def set_threads(threads: object) -> None:
    """Set the number of CPU threads; it may come from a file, and anything else is ignored."""
    if isinstance(threads, int) and threads > 0:
        import torch

        torch.set_num_threads(threads)


# -- values of options -------------------------------------------------------


def parse_columns(text: str | None) -> list[str | int] | None:
    """`s,p,o` or `1,3,2` → the columns of head, relation and tail."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or len(set(parts)) < 3:
        raise InvalidValue(
            "columns", expected="three columns, all different: head,relation,tail", found=text
        )
    return [int(part) if part.isdecimal() else part for part in parts]


def parse_numbers(
    option: str, text: str, *, expected: str = "a list of numbers such as 0,0.5,0.9"
) -> list[float]:
    """`0,0.5,0.9` → [0.0, 0.5, 0.9]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValue(option, expected=expected, found=text) from None


def check_figure(path: Path | None, *, option: str) -> None:
    """Refuse a name that no figure can have, before it is drawn as PNG and SVG."""
    if path is None:
        return
    if path.suffix in OTHER_FORMATS or path.name in ("", ".."):
        raise InvalidValue(
            option, expected="a name without a suffix, or with .png or .svg", found=str(path)
        )


def parse_hits(text: str | None) -> tuple[int, ...]:
    """`1,3,10,50` → (1, 3, 10, 50), the k of Hits@k."""
    parts = [part.strip() for part in (text or "1,3,10").split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidValue(
            "hits", expected="a list of whole numbers from 1, such as 1,3,10,50", found=text
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


# -- tables ------------------------------------------------------------------


def _cell(value: Any) -> Text:
    """1,234 for an integer, 0.1234 for another number, – for None.

    Text stays as it is: a name may contain anything.
    """
    if isinstance(value, Text):
        return value
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:.4f}")
    return Text("–" if value is None else visible(value))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: int = 1,
    bold: Container[int] = (),
) -> None:
    """Print a table without lines.

    The first `left` columns have names that may fold; numbers are never cut. `bold` are the
    numbers of rows.
    """
    cells = [[_cell(value) for value in row] for row in (columns, *rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(zip(*cells, strict=True)):
        title = column[0]
        width = max(cell.cell_len for cell in column)
        if number < left or not title:
            table.add_column(title, overflow="fold", min_width=min(width, 12))
        else:
            table.add_column(title, justify="right", no_wrap=True, min_width=width)
    for number, row in enumerate(cells[1:]):
        table.add_row(*row, style="bold" if number in bold else None)

    unlimited = stdout.options.update(max_width=MAX_WIDTH)
    needed = Measurement.get(stdout, unlimited, table).minimum + PADDING
    console = stdout
    if needed > stdout.width:
        console = SafeConsole(highlight=False, width=needed)
    console.print(table)


def print_metrics(
    rows: dict[str, kg.Metrics],
    *,
    title: str = "",
    hits: Sequence[int] = (1, 3, 10),
    adjusted: bool = False,
) -> None:
    """Print MRR, Hits@k and mean ranks of each row; `adjusted` adds AMR and AMRI."""
    columns = [title, *kg.Metrics.titles(hits=hits, adjusted=adjusted)]
    cells = [[name, *metrics.row(hits=hits, adjusted=adjusted)] for name, metrics in rows.items()]
    print_table(columns, cells)


def print_reports(run: kg.Run) -> None:
    rows = {f"{run.graph.name} {split}": report.metrics for split, report in run.reports.items()}
    print_metrics(rows)
    for split, report in run.reports.items():
        if report.sample:
            stdout.print(f"[dim]Ranked of {split}: {report.sample}.[/dim]")


def print_run(run: kg.Run, option: str, entity: int, relation: int) -> None:
    """Print the reports of a new run, and a query to try.

    The entity of the query is given by an option, --head or --tail.
    """
    print_reports(run)
    query = [
        option,
        run.graph.entities.text(entity),
        "--relation",
        run.graph.relations.text(relation),
    ]
    note_saved(run.folder, next_command=["predict", str(run.folder), *query], purpose="Query it:")


# -- lines on stderr ---------------------------------------------------------


def note(text: str, *, style: str | None = "dim") -> None:
    """Print a line on stderr."""
    stderr.print(Text(as_options(text), style=style or ""), soft_wrap=True)


def command_line(*words: object) -> str:
    """A command as people type it."""
    return shlex.join(["dualkg", *map(str, words)])


def note_saved(path: object, *, next_command: Sequence[str] = (), purpose: str = "") -> None:
    """Print on stderr where the result is saved, and a command to try next."""
    line = Text.assemble("\nSaved to ", (str(path), "bold"), f". {purpose}".rstrip())
    stderr.print(line, soft_wrap=True)
    if next_command:
        stderr.print(Text(f"  {command_line(*next_command)}"), soft_wrap=True)


class TimeLeftColumn(ProgressColumn):
    """The time left that a bar was given, or else its own estimate, in words."""

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        text = task.fields["time_left"] or describe_time_left(task.time_remaining)
        return Text(text, style="progress.remaining")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, updated by `(done, total, text, time_left)`.

    Without `time_left`, such as "about 3 min left", the bar estimates it. It is only shown on a
    terminal.
    """
    cut_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=min(max(MIN_BAR_WIDTH, stderr.width - TEXT_WIDTH), MAX_BAR_WIDTH)),
        TimeLeftColumn(table_column=Column(no_wrap=True)),
        # The text comes last, and is cut where the terminal ends.
        TextColumn("{task.fields[text]}", markup=False, table_column=cut_column),
        console=stderr,
        expand=True,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with progress:
        task = progress.add_task(title, total=None, text="", time_left="")

        def update(done: float, total: float | None, text: str = "", time_left: str = "") -> None:
            if not text and total:
                text = f"{done:,} of {total:,}"
            progress.update(task, completed=done, total=total, text=text, time_left=time_left)

        yield update
