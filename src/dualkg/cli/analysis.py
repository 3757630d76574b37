"""`sparsify`, `sparsity` and `nuclear-norm`: properties of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from dualkg.cli import common as cli

if TYPE_CHECKING:
    from dualkg.analysis.sparsity import Storage


@cli.command()
def sparsify(
    run: cli.RunPath,
    share: Annotated[float, Option(help="Share of the entity table to set to zero: 0.7 is 70 %.")],
    rotate: Annotated[bool, Option("--rotate", help="RESCAL only: first rotate the axes, to lose less.")] = False,
    out: Annotated[Path | None, Option(help="New folder (default: RUN-sparse-SHARE).")] = None,
    device: cli.Device = None,
) -> cli.Result:
    """Set the smallest entries of the entity table to zero and save the result as a run."""
    from dualkg.analysis.sparsity import sparsify as make_sparse
    from dualkg.analysis.sparsity import storage_of
    from dualkg.training.run import RunFolder

    made = make_sparse(run, share=share, rotate=rotate, out=out, device=device)
    folder = RunFolder(made.folder or "")
    storage = storage_of(made.model, weights=folder.weights)

    def show() -> None:
        cli.print_reports(made)
        cli.stdout.print()
        _print_storage(storage)
        cli.note_saved(made.folder)

    facts = {"run": str(made.folder), "sparsity": made.sparsity, "storage": storage.as_dict()}
    return cli.Result({**facts, "reports": folder.saved_reports()}, show)


def _print_storage(storage: Storage) -> None:
    """Stored numbers, as the paper counts them, and bytes, each with the share saved compared to dense."""
    rows = []
    for name, sizes in (("entity tables", storage.entity_tables), ("whole model", storage.whole_model)):
        for form, size in sizes.items():
            saved = ("", "") if form == "dense" else (f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
            on_disk = storage.on_disk[name.replace(" ", "_")] if storage.on_disk and form == "CSR" else None
            disk = "" if on_disk is None else f"{on_disk:,}"
            rows.append([f"{name}, {form}", f"{size.numbers:,}", saved[0], f"{size.bytes:,}", saved[1], disk])
    cli.print_table([f"{storage.share:.1%} zeros", "numbers", "saved", "bytes", "saved", "on disk"], rows)


@cli.command()
def sparsity(
    run: cli.RunPath,
    shares: Annotated[str | None, Option(help="Shares of zeros, separated by commas (default: 0 to 0.95).")] = None,
    rotate: Annotated[float | None, Option(help="RESCAL only: first rotate the axes for this share of zeros.")] = None,
    split: cli.SplitName = "test",
    device: cli.Device = None,
) -> cli.Result:
    """Evaluate a run with increasing shares of its entity table set to zero."""
    from dualkg.analysis.sparsity import SHARES, rotated, sparsity_curve
    from dualkg.evaluation.report import COLUMNS

    wanted = SHARES if shares is None else cli.parse_numbers("--shares", shares)
    loaded = cli.load_on_device(run, device)
    model = loaded.model if rotate is None else rotated(loaded.model, share=rotate)
    points = sparsity_curve(model, loaded.graph, shares=wanted, split=split)
    rows = []
    for point in points:
        size = point.storage.entity_tables["CSR"]
        saved = (f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
        rows.append([f"{point.share:.1%}", f"{point.threshold:.4g}", *point.metrics.row()[: len(COLUMNS)], *saved])
    columns = ["zeros", "threshold", *COLUMNS, "numbers saved", "bytes saved"]
    return cli.Result([point.as_dict() for point in points], lambda: cli.print_table(columns, rows))


@cli.command()
def nuclear_norm(
    run: cli.RunPath,
    plain: Annotated[float, Option(help="λ1, the weight of ‖h‖² and ‖t‖².")] = 1.0,
    mapped: Annotated[float, Option(help="λ2, the weight of ‖hR‖² and ‖tRᵀ‖².")] = 1.0,
) -> cli.Result:
    """Bound the nuclear 2-norm of a run by DURA (Theorem 1 of the paper)."""
    from dualkg.analysis.nuclear import bound_before_and_after
    from dualkg.training.run import load_run

    bounds = bound_before_and_after(load_run(run).model, plain=plain, mapped=mapped)
    titles = {
        "dura": "DURA over all entities and relations",
        "bound": "bound on the nuclear 2-norm",
        "components": "Σ‖h‖‖r‖‖t‖ of the components",
    }
    rows = [[title, *(f"{getattr(bound, key):.6g}" for bound in bounds.values())] for key, title in titles.items()]
    data = {name: bound.as_dict() for name, bound in bounds.items()}
    return cli.Result(data, lambda: cli.print_table(["", *bounds], rows))
