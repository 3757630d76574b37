"""`complete`: the most plausible triples that a graph does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from dualkg.cli import options, show
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.answers.completion import Check, Completion

SHOWN = 10


def complete(
    run: options.RunPath,
    out: Annotated[Path | None, typer.Option(help="A new file: .tsv or .parquet.")] = None,
    top: Annotated[int | None, typer.Option(help="How many triples (default: 10,000; with --check 100,000)")] = None,
    relation: Annotated[list[str] | None, typer.Option(help="Only of this relation; repeatable.")] = None,
    head: Annotated[list[str] | None, typer.Option(help="Only with this head; repeatable.")] = None,
    min_probability: Annotated[float, typer.Option(help="None that is less probable.")] = 0.0,
    types: Annotated[
        bool, typer.Option("--types", help="Only heads and tails that the relation has in train.")
    ] = False,
    loops: Annotated[
        bool, typer.Option("--loops", help="Also triples of an entity with itself; else only where train has such.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="No list: count the test triples that stand in one made without them.")
    ] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Write the most plausible triples that the graph does not have; stopped, the same command goes on."""
    options.set_threads(threads)
    narrowing: dict[str, Any] = {"relations": relation or None, "heads": head or None, "types": types, "loops": loops}
    if check:
        if out is not None or min_probability:
            raise RequestError("--check writes no list. Leave out --out and --min-probability.")
        found = check_run(run, top=100_000 if top is None else top, device=device, **narrowing)
        show.print_json(found.as_dict()) if as_json else print_check(found)
        return
    if out is None:
        raise RequestError("Name a file for the new triples, such as --out new.tsv.")
    choices = {"top": 10_000 if top is None else top, "min_probability": min_probability, **narrowing}
    made = complete_run(run, out, device=device, **choices)
    if as_json:
        show.print_json({"out": str(out), "triples": len(made), "best": made.table().slice(0, SHOWN).to_pylist()})
        return
    print_best(made)
    show.err.print(f"\n{len(made):,} new triples are in [bold]{escape(str(out))}[/bold].", soft_wrap=True)


def complete_run(path: Path, out: Path, *, device: str | None, **choices: Any) -> Completion:
    """Make the list and write it; beside it, while it is made, what was done so far."""
    from dualkg.answers.beliefs import ensure_calibration
    from dualkg.answers.completion import check_file
    from dualkg.answers.completion import complete as make_list
    from dualkg.training import load_run
    from dualkg.training.start import choose_device

    run = load_run(path)
    check_file(out, run.graph)
    model = run.model.to(choose_device(device))
    part = out.with_name(f"{out.name}.part")
    try:
        with _progress(f"Completing {run.graph.name}") as watch:
            made = make_list(model, run.graph, calibration=ensure_calibration(run), watch=watch, part=part, **choices)
    except KeyboardInterrupt:
        show.err.print("dualkg: stopped. The same command goes on from there.")
        raise typer.Exit(130) from None
    made.save(out)
    return made


def check_run(path: Path, *, top: int, device: str | None, **choices: Any) -> Check:
    from dualkg.answers.beliefs import ensure_calibration
    from dualkg.answers.completion import sizes_up_to, study
    from dualkg.training import load_run
    from dualkg.training.start import choose_device

    run = load_run(path)
    model = run.model.to(choose_device(device))
    with _progress(f"Completing {run.graph.name}") as watch:
        calibration = ensure_calibration(run)
        return study(model, run.graph, sizes=sizes_up_to(top), calibration=calibration, watch=watch, **choices)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; nothing where stderr is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=show.err, transient=True)
    task = bar.add_task(escape(title), total=None)
    with bar:
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def print_best(made: Completion) -> None:
    """The first of a list, by what people call them."""
    table = show.plain_table("rank", "head", "relation", "tail", "probability", "score", left=4)
    for column in table.columns[1:4]:  # names may be long, and numbers must stay in sight
        column.no_wrap, column.overflow = False, "fold"
    for row in made.table().slice(0, SHOWN).to_pylist():
        names = (Text(row.get(f"{part}_label") or row[part]) for part in ("head", "relation", "tail"))
        table.add_row(f"{row['rank']}", *names, f"{row['probability']:.4f}", f"{row['score']:.3f}")
    show.out.print(table)


def print_check(found: Check) -> None:
    table = show.plain_table("top", "test triples in it", "promised", "by degree", "at random", left=0)
    for size, hits, promised, degree, chance in zip(
        found.sizes, found.found, found.expected or (), found.by_degree, found.at_random, strict=True
    ):
        table.add_row(f"{size:,}", f"{hits:,}", f"{promised:,.1f}", f"{degree:,.1f}", f"{chance:,.3g}")
    show.out.print(table)
    show.out.print(f"\n[dim]{found.num_test:,} test triples among {found.num_triples:,} that could be new[/dim]")
