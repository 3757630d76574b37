"""What `reproduce` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dualkg.cli import main
from dualkg.cli.common import (
    Device,
    Json,
    Threads,
    check_choice,
    note,
    note_saved,
    print_json,
    print_table,
    set_threads,
    stdout,
    training_progress,
)
from dualkg.errors import RequestError
from dualkg.files import write_text

if TYPE_CHECKING:
    from paper.sheets import Sheet


WHAT = (
    "main, regularizers, p1, ablations, beyond or cast (tables of trainings); datasets, hyperparameters, cost or "
    "duality (tables of facts); lambdas, tsne, figure1 or sparsity (figures); completion, calibration, forms, "
    "inductive_entities or reasons (what answers are worth)."
)
# What has no use for several seeds, and what it is instead.
OF_ONE_SEED = {
    "datasets": "counted from the data",
    "hyperparameters": "read from the recipes",
    "cost": "the time of a step",
    "lambdas": "a search, of one seed",
    "figure1": "drawn from one seed",
    "completion": "a list by one run",
    "calibration": "learned from one run",
    "forms": "one run in several forms",
}


app = typer.Typer(name="python -m paper", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=WHAT)],
    dataset: Annotated[str | None, typer.Option(help="One graph (default: WN18RR and FB15k-237)")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many trainings of every row (default: 3).")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Of a table of trainings only this row; repeatable.")] = None,
    records: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("records"),
    runs: Annotated[Path, typer.Option(help="Where runs are kept, with their weights.")] = Path("runs/reproduce"),
    beside_others: Annotated[
        bool, typer.Option("--beside-others", help="Keep that other work shares the device: times are bounds.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper: train what is missing, and show published beside measured."""
    from paper.pages import results_page
    from paper.plan import TABLES
    from paper.setting import Setting
    from paper.what import REPRODUCTIONS

    set_threads(threads)
    check_choice("WHAT", what, list(REPRODUCTIONS))
    if row and what not in TABLES:
        raise RequestError(f"--row is of tables of trainings: {', '.join(TABLES)}. {what} has no rows to choose from.")
    if seeds is not None and what in OF_ONE_SEED:
        raise RequestError(f"--seeds is of what is trained several times; {what} is {OF_ONE_SEED[what]}. Leave it out.")
    with training_progress(what) as on_progress:
        setting = Setting(
            dataset=dataset,
            seeds=3 if seeds is None else seeds,
            rows=tuple(row or ()),
            records=records,
            runs=runs,
            device=device,
            beside_others=beside_others,
            tell=note,
            on_progress=on_progress,
        )
        sheets = REPRODUCTIONS[what](setting)
    if as_json:
        print_json([sheet.as_dict() for sheet in sheets])
    else:
        for sheet in sheets:
            print_sheet(sheet)
    write_text(records / "RESULTS.md", results_page(records))  # after what was asked for: another record may be broken
    if not as_json:
        note_saved(records)


def print_sheet(sheet: Sheet) -> None:
    stdout.print(f"\n[bold]{escape(sheet.title)}[/bold]")
    print_table(sheet.columns, sheet.rows, left=sheet.num_left)
    for line in sheet.notes:
        stdout.print(f"[dim]{escape(line)}[/dim]")


if __name__ == "__main__":
    main(app)
