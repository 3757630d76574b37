"""`python -m paper sparsify`: a run with zeros in its entity table."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

import dualkg as kg
from dualkg.cli import common as cli


@cli.command()
def sparsify(
    run: cli.RunPath,
    share: Annotated[float, Option(help="Share of the entity table to set to zero: 0.7 is 70 %.")],
    rotate: Annotated[
        bool, Option("--rotate", help="RESCAL only: first rotate the axes, to lose less.")
    ] = False,
    out: Annotated[Path | None, Option(help="New folder (default: RUN-sparse-SHARE).")] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Set the smallest entries of the entity table to zero and save the result as a run."""
    made = kg.analysis.sparsity.sparsify(run, share=share, rotate=rotate, out=out, device=device)
    folder = kg.training.RunFolder(made.folder or "")
    storage = kg.analysis.sparsity.storage_of(made.model, weights=folder.weights)
    facts = {"run": str(made.folder), "sparsity": made.sparsity, "storage": storage.as_dict()}
    yield cli.Result({**facts, "reports": folder.saved_reports()})
    cli.print_reports(made)
    cli.stdout.print()
    _print_storage(storage)
    cli.note_saved(made.folder)


def _print_storage(storage: kg.analysis.sparsity.Storage) -> None:
    """Numbers, as the paper counts them, and bytes, with the share saved compared to dense."""
    rows: list[Any] = []
    tables = {"entity tables": storage.entity_tables, "whole model": storage.whole_model}
    for name, sizes in tables.items():
        for layout, size in sizes.items():
            numbers_saved = ""
            bytes_saved = ""
            if layout != "dense":
                numbers_saved = f"{size.numbers_saved:.1%}"
                bytes_saved = f"{size.bytes_saved:.1%}"
            on_disk: Any = ""
            if storage.on_disk and layout == "CSR":
                on_disk = storage.on_disk[name.replace(" ", "_")]
            rows.append(
                [f"{name}, {layout}", size.numbers, numbers_saved, size.bytes, bytes_saved, on_disk]
            )
    columns = [f"{storage.share:.1%} zeros", "numbers", "saved", "bytes", "saved", "on disk"]
    cli.print_table(columns, rows)
