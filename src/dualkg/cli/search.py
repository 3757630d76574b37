"""What `search` does."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualkg.cli import options, show
from dualkg.errors import DualkgError

if TYPE_CHECKING:
    from dualkg.search import SearchMoment, SearchResult


def search(
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
    from dualkg.search import load_space
    from dualkg.search import search as run_search
    from dualkg.training import InterruptedRunError

    options.set_threads(threads)
    asked = load_space(space)
    out = out or Path("runs") / f"search-{asked.name}"
    show.err.print(
        f"[dim]{asked.num_trials:,} trials ({asked.choice.method}) of {escape(asked.base.model.name)} on "
        f"{escape(asked.base.data.graph)}, kept in {escape(str(out))}.[/dim]"
    )
    try:
        with _watching(asked.name) as watch:
            result = run_search(asked, out=out, device=device, storage=storage, jobs=jobs, watch=watch)
    except InterruptedRunError as error:
        again = shlex.join(["dualkg", *sys.argv[1:]])
        raise InterruptedRunError(f"{error} Go on with: {again}") from None
    if result.best is None:
        why = next((row.why for row in result.trials if row.why), "all were pruned")
        raise DualkgError(f"No trial came to its end; see {out / 'trials.csv'}. The first: {why}")
    if as_json:
        show.print_json({"folder": str(out), **result.as_dict()})
    else:
        _print(result, out)


def _print(result: SearchResult, out: Path) -> None:
    table = show.plain_table("trial", "valid MRR", *_short(list(result.space.dimensions)))
    for row in result.ranked[:10]:
        values = [
            escape(f"{row.values[name]:g}" if _number(row.values[name]) else str(row.values[name]))
            for name in result.space.dimensions
        ]
        table.add_row(str(row.number), f"{row.mrr:.4f}", *values)
    show.out.print(table)
    show.out.print()
    if result.importance is None:
        show.out.print(
            "[dim]How much each choice matters is told from 8 finished trials of different choices on.[/dim]"
        )
    else:
        weights = show.plain_table("choice", "importance")
        for name, share in result.importance.items():
            weights.add_row(escape(name), f"{share:.2f}")
        show.out.print(weights)
    told = result.as_dict()
    show.err.print(
        f"\n{told['finished']} trials finished, {told['pruned']} were pruned, {told['failed']} failed. Kept in "
        f"[bold]{escape(str(out))}[/bold]. Train the winner:",
        soft_wrap=True,
    )
    show.err.print(f"  {shlex.join(['dualkg', 'train', str(out / 'best.toml')])}", markup=False, soft_wrap=True)


def _short(names: list[str]) -> list[str]:
    """`regularizer.weight` → weight, where no other choice ends like that."""
    ends = [name.rpartition(".")[2] for name in names]
    return [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def _watching(title: str) -> Iterator[Callable[[SearchMoment], None]]:
    """A bar of trials on stderr, with the best so far; nothing where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        console=show.err,
        transient=True,
    )
    task = bar.add_task(escape(title), total=None, facts="")

    def watch(moment: SearchMoment) -> None:
        facts = "" if moment.best is None else f"best valid MRR {moment.best:.4f}"
        if moment.training:
            facts += f"  epoch {moment.training.epoch}/{moment.training.epochs}  loss {moment.training.loss:.3f}"
        bar.update(task, total=moment.num_trials, completed=moment.num_done, facts=facts)

    with bar:
        yield watch
