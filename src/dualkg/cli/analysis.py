"""`inspect`: properties of a graph; `sparsify`, `sparsity` and `nuclear-norm`: of a trained
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import RequestError

NUM_ROWS = 15  # relations, and redundant relations, that a table lists
COUNTS = ("triples", "duplicates", "self_loops", "entities", "relations")
HELD_OUT = {
    "unseen_entities": "entities unseen in train",
    "unseen_relations": "relations unseen in train",
    "unseen_triples": "triples with unseen ones",
    "leaked": "triples leaked by train",
    "copies": "  by a copy",
    "duplicate": "  by a duplicate relation",
    "inverse": "  by an inverse relation",
    "symmetric": "  by a symmetric relation",
    "reverse": "triples with any reverse in train",
    "parallel": "triples with another relation in train",
}
"""The rows that compare valid and test with train."""


@cli.command(threads=False, trust_code=False)
def inspect(
    data: Annotated[
        str,
        Argument(
            metavar="DATA", help="Graph: a name, file, folder or archive.", show_default=False
        ),
    ],
    columns: cli.Columns = None,
    delimiter: cli.Delimiter = None,
    split: Annotated[str, Option(help="Split of a single file, in percent.")] = "80/10/10",
    labels: Annotated[
        str | None, Option(help="File with a readable label for each entity name.")
    ] = None,
    max_size: cli.MaxSize = None,
    picture: Annotated[
        Path | None, Option("--picture", "--figure", help="Draw a figure (PNG and SVG).")
    ] = None,
) -> cli.Output:
    """Show counts, degrees, cardinalities, components, unseen entities and leakage of a graph."""
    from dualkg.data.loading import load_graph

    wanted = cli.parse_columns(columns)
    options: dict[str, Any] = {
        "delimiter": delimiter,
        "split": split,
        "labels": labels,
        "max_size": max_size,
    }
    graph = load_graph(data, columns=wanted, **options)
    found = graph.inspect()
    figures = []
    if picture:
        if picture.suffix in (".jpg", ".jpeg", ".pdf", ".eps", ".gif", ".webp"):
            raise RequestError(
                f"The figure is saved as .png and .svg; '{picture}' ends with {picture.suffix}."
            )
        from dualkg.analysis.figures import draw_inspection

        figures = draw_inspection(found).save(picture)
    facts = {
        **found.as_dict(),
        "fingerprint": graph.fingerprint,
        "figures": [str(path) for path in figures],
    }
    yield cli.Result(facts)
    # Tables of splits, cardinalities, relations and redundant relations; names are printed as
    # labels.

    def label(names: Any, name: str) -> str:
        return str(names.label(names.id(name)))

    def share(number: int, split: str) -> str:
        return f"{number:,} ({number / len(found.triples[split]):.1%})" if number else "0"

    splits = list(found.counts)
    degrees = found.degrees
    components = found.components
    rows: list[Any] = [
        [name.replace("_", "-"), *(each[name] for each in found.counts.values())] for name in COUNTS
    ]
    for name, title in HELD_OUT.items():
        numbers = {split: getattr(facts, name) for split, facts in found.held_out.items()}
        if any(numbers.values()) or not title.startswith(" "):
            of_triples = name not in ("unseen_entities", "unseen_relations")
            rows.append(
                [title, "", *(share(n, split) if of_triples else n for split, n in numbers.items())]
            )
    cli.print_table([found.graph, *splits], rows)

    hubs = ", ".join(
        f"{label(found.entities, hub['entity'])} ({hub['degree']:,})" for hub in degrees.hubs
    )
    lines = [
        f"Degrees in train: mean {degrees.mean:.1f}, median {degrees.median:g}, maximum "
        f"{degrees.max:,}.",
        f"Highest degrees: {hubs}.",
        f"Connected components of train: {components.number:,}; the largest has "
        f"{components.largest:,} entities ({components.share:.1%}).",
    ]
    cli.stdout.print("", *lines, "", sep="\n", markup=False, soft_wrap=True)
    rows = [[kind, *numbers.values()] for kind, numbers in found.by_cardinality.items()]
    cli.print_table(["cardinality", "relations", *splits], rows)

    rows = []
    for name, row in sorted(found.by_relation.items(), key=lambda item: -item[1].train)[:NUM_ROWS]:
        means = (f"{row.tails_per_head:.1f}", f"{row.heads_per_tail:.1f}", f"{row.symmetry:.0%}")
        rows.append([label(found.relations, name), row.train, row.test, row.cardinality, *means])
    cli.stdout.print()
    cli.print_table(
        ["relation", "train", "test", "cardinality", "tails/head", "heads/tail", "symmetry"], rows
    )
    _note_more(len(found.relations), "relations")
    rows = []
    for pair in found.redundant[:NUM_ROWS]:
        names = " / ".join(
            label(found.relations, name) for name in dict.fromkeys((pair.relation, pair.other))
        )
        rows.append([names, pair.kind, f"{min(pair.overlap):.0%}", *pair.leaked.values()])
    if rows:
        cli.stdout.print()
        titles = (f"leaked {split}" for split in found.held_out)
        cli.print_table(["redundant relations", "kind", "overlap", *titles], rows)
        _note_more(len(found.redundant), "redundant relations")
    for sentence in found.notes:
        cli.note(str(sentence))
    for sentence in found.warnings():
        cli.note(sentence, style="yellow")
    for path in figures:
        cli.note(f"Figure: {path}", style=None)


def _note_more(number: int, kind: str) -> None:
    if number > NUM_ROWS:
        cli.note(f"{number - NUM_ROWS:,} more {kind}: --json lists all.")


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
    # The reports; then numbers, as the paper counts them, and bytes, with the share saved compared
    # to dense.
    cli.print_reports(made)
    cli.stdout.print()
    rows: list[Any] = []
    for name, sizes in (
        ("entity tables", storage.entity_tables),
        ("whole model", storage.whole_model),
    ):
        for form, size in sizes.items():
            saved = (
                ("", "")
                if form == "dense"
                else (f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
            )
            disk = (
                storage.on_disk[name.replace(" ", "_")] if storage.on_disk and form == "CSR" else ""
            )
            rows.append([f"{name}, {form}", size.numbers, saved[0], size.bytes, saved[1], disk])
    cli.print_table(
        [f"{storage.share:.1%} zeros", "numbers", "saved", "bytes", "saved", "on disk"], rows
    )
    cli.note_saved(made.folder)


@cli.command()
def sparsity(
    run: cli.RunPath,
    shares: Annotated[
        str | None, Option(help="Shares of zeros, separated by commas (default: 0 to 0.95).")
    ] = None,
    rotate: Annotated[
        float | None, Option(help="RESCAL only: first rotate the axes for this share of zeros.")
    ] = None,
    split: cli.SplitName = "test",
    device: cli.Device = None,
) -> cli.Output:
    """Evaluate a run with increasing shares of its entity table set to zero."""
    analysis = kg.analysis.sparsity
    metrics = kg.evaluation.metrics.columns()
    wanted = analysis.SHARES if shares is None else cli.parse_numbers("--shares", shares)
    loaded = cli.load_on_device(run, device)
    model = loaded.model if rotate is None else analysis.rotated(loaded.model, share=rotate)
    points = analysis.sparsity_curve(model, loaded.graph, shares=wanted, split=split)
    rows = []
    for point in points:
        size = point.storage.entity_tables["CSR"]
        saved = (f"{size.numbers_saved:.1%}", f"{size.bytes_saved:.1%}")
        rows.append(
            [
                f"{point.share:.1%}",
                f"{point.threshold:.4g}",
                *point.metrics.row()[: len(metrics)],
                *saved,
            ]
        )
    columns = ["zeros", "threshold", *metrics, "numbers saved", "bytes saved"]
    yield cli.Result([point.as_dict() for point in points])
    cli.print_table(columns, rows)


@cli.command()
def nuclear_norm(
    run: cli.RunPath,
    plain: Annotated[float, Option(help="λ1, the weight of ‖h‖² and ‖t‖².")] = 1.0,
    mapped: Annotated[float, Option(help="λ2, the weight of ‖hR‖² and ‖tRᵀ‖².")] = 1.0,
) -> cli.Output:
    """Bound the nuclear 2-norm of a run by DURA (Theorem 1 of the paper)."""
    bounds = kg.analysis.nuclear.bound_before_and_after(
        kg.load_run(run).model, plain=plain, mapped=mapped
    )
    titles = {
        "dura": "DURA over all entities and relations",
        "bound": "bound on the nuclear 2-norm",
        "components": "Σ‖h‖‖r‖‖t‖ of the components",
    }
    rows = [
        [title, *(f"{getattr(bound, key):.6g}" for bound in bounds.values())]
        for key, title in titles.items()
    ]
    data = {name: bound.as_dict() for name, bound in bounds.items()}
    yield cli.Result(data)
    cli.print_table(["", *bounds], rows)
