"""What `extend` does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from dualkg.cli import options, show

if TYPE_CHECKING:
    from dualkg.training import Run


def extend(
    run: options.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Triples of the new entities.", show_default=False)],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    columns: options.Columns = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Give new entities a place in a trained model, by a few triples of each."""
    from dualkg.answers.newcomers import extend_run

    options.set_threads(threads)
    made, note = extend_run(run, file, out=out, columns=options.columns_of(columns) if columns else None, device=device)
    if as_json:
        reports = {split: report.as_dict() for split, report in made.reports.items()}
        show.print_json({"run": str(made.folder), "extension": note, "reports": reports})
        return
    for sentence in note["remarks"]:
        show.err.print(f"[dim]{escape(sentence)}[/dim]")
    print_newcomers(note)
    show.out.print()
    show.print_metrics({f"{made.graph.name} {split}": report.metrics for split, report in made.reports.items()})
    tell_how_to_ask(made, note)


def print_newcomers(note: dict[str, Any], *, most: int = 10) -> None:
    table = show.plain_table("new", "triples")
    for name, number in list(note["entities"].items())[:most]:
        table.add_row(escape(name), f"{number:,}")
    if note["num_entities"] > most:
        table.add_row(f"and {note['num_entities'] - most:,} more", "")
    table.add_row("all", f"{note['num_triples']:,}", style="bold")
    show.out.print(table)


def tell_how_to_ask(run: Run, note: dict[str, Any]) -> None:
    """A question about the newcomer of the last triple."""
    show.err.print(f"\nKept in [bold]{escape(str(run.folder))}[/bold]. Ask it something:", soft_wrap=True)
    head, relation, tail = run.graph.train[-1].tolist()
    place, entity = ("--head", head) if run.graph.entities[head] in note["entities"] else ("--tail", tail)
    asked = [place, run.graph.entities.spoken(entity), "--relation", run.graph.relations.spoken(relation)]
    command = shlex.join(["dualkg", "predict", str(run.folder), *asked])
    show.err.print(f"  {command}", markup=False, soft_wrap=True)
