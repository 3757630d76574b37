"""`sparsify`, `sparsity` and `bound`: what a trained model is like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from dualkg.cli import options, output

if TYPE_CHECKING:
    from dualkg.analysis.nuclear import NuclearBound
    from dualkg.analysis.sparsity import CurvePoint, Storage
    from dualkg.data.graph import Split


app = typer.Typer()


@app.command()
def sparsify(
    run: options.RunPath,
    share: Annotated[float, typer.Option(help="How much of the entity tables becomes zero: 0.7 is 70 %.")],
    turn: Annotated[bool, typer.Option("--turn", help="RESCAL: first turn its axes so that zeros cost least.")] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder (default: RUN-sparse-SHARE)")] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Set the smallest entries of the entity tables to zero."""
    from dualkg.analysis.sparsity import sparsify as make_sparse
    from dualkg.analysis.sparsity import storage_of
    from dualkg.training.run import RunFolder

    options.set_threads(threads)
    made = make_sparse(run, share=share, turn=turn, out=out, device=device)
    folder = RunFolder(made.folder or "")
    storage = storage_of(made.model, weights=folder.weights)
    if as_json:
        facts = {"run": str(made.folder), "sparsity": made.sparsity, "storage": storage.as_dict()}
        output.print_json({**facts, "reports": folder.saved_reports()})
        return
    output.print_metrics({f"{made.graph.name} {split}": report.metrics for split, report in made.reports.items()})
    output.out.print()
    print_storage(storage)
    output.err.print(f"\nKept in [bold]{escape(str(made.folder))}[/bold].", soft_wrap=True)


@app.command()
def sparsity(
    run: options.RunPath,
    shares: Annotated[str | None, typer.Option(help="Shares of zeros: 0,0.5,0.9 (default: 0 to 0.95)")] = None,
    turn: Annotated[float | None, typer.Option(help="RESCAL: turn its axes for this share of zeros.")] = None,
    split: options.Split = "test",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Rank a run with more and more of its entries set to zero."""
    from dualkg.analysis.sparsity import SHARES, rotated, sparsity_curve

    options.set_threads(threads)
    options.check_split(split)
    wanted = SHARES if shares is None else options.numbers_of("--shares", shares)
    loaded = options.load_on(run, device)
    model = loaded.model
    model = model if turn is None else rotated(model, share=turn)
    points = sparsity_curve(model, loaded.graph, shares=wanted, split=cast("Split", split))
    if as_json:
        output.print_json([point.as_dict() for point in points])
    else:
        print_curve(points)


@app.command()
def bound(
    run: options.RunPath,
    plain: Annotated[float, typer.Option(help="λ1, of ‖h‖² and ‖t‖².")] = 1.0,
    mapped: Annotated[float, typer.Option(help="λ2, of ‖hR‖² and ‖tRᵀ‖².")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Bound the nuclear norm of a run by DURA (Theorem 1)."""
    from dualkg.analysis.nuclear import bound_before_and_after
    from dualkg.training.run import load_run

    found = bound_before_and_after(load_run(run).model, plain=plain, mapped=mapped)
    if as_json:
        output.print_json({name: one.as_dict() for name, one in found.items()})
    else:
        print_bounds(found)


def print_storage(storage: Storage) -> None:
    """Numbers as the paper counts them and bytes, each with how much less than dense they are."""
    table = output.plain_table(f"{storage.share:.1%} zeros", "numbers", "less", "bytes", "less", "on disk")
    for name, sizes in (("entity tables", storage.entity_tables), ("whole model", storage.whole_model)):
        key = name.replace(" ", "_")
        for form, size in sizes.items():
            saved = ("", "") if form == "dense" else (f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
            kept = f"{storage.on_disk[key]:,}" if storage.on_disk and form == "CSR" else ""
            table.add_row(f"{name}, {form}", f"{size.numbers:,}", saved[0], f"{size.bytes:,}", saved[1], kept)
    output.out.print(table)


def print_curve(points: list[CurvePoint]) -> None:
    """How the model ranks at each share, and how much less CSR is than dense, as the paper counts and in bytes."""
    from dualkg.evaluation.report import COLUMNS

    table = output.plain_table("zeros", "threshold", *COLUMNS, "numbers less", "bytes less")
    for point in points:
        size = point.storage.entity_tables["CSR"]
        metrics = point.metrics.row()[: len(COLUMNS)]
        facts = (f"{point.share:.1%}", f"{point.threshold:.4g}")
        table.add_row(*facts, *metrics, f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
    output.out.print(table)


def print_bounds(found: dict[str, NuclearBound]) -> None:
    table = output.plain_table("", *found)
    table.add_row("DURA over all entities and relations", *(f"{one.dura:.6g}" for one in found.values()))
    table.add_row("bound on the nuclear 2-norm", *(f"{one.bound:.6g}" for one in found.values()))
    table.add_row("Σ‖h‖‖r‖‖t‖ of its components", *(f"{one.components:.6g}" for one in found.values()))
    output.out.print(table)
