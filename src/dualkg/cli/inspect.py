"""`inspect`: properties of a graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli

if TYPE_CHECKING:
    from dualkg.data.inspection import Inspection

NUM_ROWS = 15  # relations, and redundant relations, that a table lists
COUNTS = ("triples", "duplicates", "self_loops", "entities", "relations")
# The rows that compare valid and test with train.
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
    cli.check_figure(picture, option="picture")
    graph = kg.load_graph(
        data,
        columns=cli.parse_columns(columns),
        delimiter=delimiter,
        split=split,
        labels=labels,
        max_size=max_size,
    )
    inspection = graph.inspect()
    figures = _draw_inspection(inspection, picture) if picture else []
    yield cli.Result(
        {
            **inspection.as_dict(),
            "fingerprint": graph.fingerprint,
            "figures": [str(path) for path in figures],
        }
    )
    _print_splits(inspection)
    _print_degrees(inspection)
    _print_relations(inspection)
    _print_redundant(inspection)
    warnings = inspection.warnings()
    for remark in inspection.notes:
        if remark not in warnings:
            cli.note(remark)
    for warning in warnings:
        cli.note(warning, style="yellow")
    for path in figures:
        cli.note(f"Figure: {path}", style=None)


def _draw_inspection(inspection: Inspection, path: Path) -> list[Path]:
    from dualkg.analysis.figures import draw_inspection

    return list(draw_inspection(inspection).save(path))


def _print_splits(inspection: Inspection) -> None:
    """Counts of each split, and of the held-out triples that train gives away or lacks."""
    rows: list[Any] = []
    for name in COUNTS:
        counts = [split[name] for split in inspection.counts.values()]
        rows.append([name.replace("_", "-"), *counts])
    for name, title in HELD_OUT.items():
        numbers = {split: getattr(facts, name) for split, facts in inspection.held_out.items()}
        # A row that is indented is a part of the row above, and left out if there is none.
        if title.startswith(" ") and not any(numbers.values()):
            continue
        cells: list[Any] = list(numbers.values())
        if name not in ("unseen_entities", "unseen_relations"):
            cells = [
                _with_share(number, len(inspection.triples[split]))
                for split, number in numbers.items()
            ]
        rows.append([title, "", *cells])
    cli.print_table([inspection.graph, *inspection.counts], rows)


def _with_share(number: int, total: int) -> str:
    return f"{number:,} ({number / total:.1%})" if number else "0"


def _print_degrees(inspection: Inspection) -> None:
    degrees = inspection.degrees
    components = inspection.components
    hubs = []
    for hub in degrees.hubs:
        hubs.append(f"{_label(inspection.entities, hub['entity'])} ({hub['degree']:,})")
    lines = [
        "",
        f"Degrees in train: mean {degrees.mean:.1f}, median {degrees.median:g}, maximum "
        f"{degrees.max:,}.",
        f"Highest degrees: {', '.join(hubs)}.",
        f"Connected components of train: {components.number:,}; the largest has "
        f"{components.largest:,} entities ({components.share:.1%}).",
        "",
    ]
    cli.stdout.print(*lines, sep="\n", markup=False, soft_wrap=True)


def _print_relations(inspection: Inspection) -> None:
    """The relations by cardinality, and those with the most triples."""
    rows: list[Any] = [
        [cardinality, *numbers.values()]
        for cardinality, numbers in inspection.by_cardinality.items()
    ]
    cli.print_table(["cardinality", "relations", *inspection.counts], rows)
    rows = []
    by_size = sorted(inspection.by_relation.items(), key=lambda item: -item[1].train)
    for name, relation in by_size[:NUM_ROWS]:
        means = [
            f"{relation.tails_per_head:.1f}",
            f"{relation.heads_per_tail:.1f}",
            f"{relation.symmetry:.0%}",
        ]
        label = _label(inspection.relations, name)
        rows.append([label, relation.train, relation.test, relation.cardinality, *means])
    cli.stdout.print()
    cli.print_table(
        ["relation", "train", "test", "cardinality", "tails/head", "heads/tail", "symmetry"], rows
    )
    _note_more(len(inspection.relations), "relations")


def _print_redundant(inspection: Inspection) -> None:
    """Pairs of relations that repeat each other, and the held-out triples that they leak."""
    if not inspection.redundant:
        return
    rows = []
    for pair in inspection.redundant[:NUM_ROWS]:
        # A symmetric relation is a pair with itself.
        distinct = dict.fromkeys((pair.relation, pair.other))
        names = " / ".join(_label(inspection.relations, name) for name in distinct)
        rows.append([names, pair.kind, f"{min(pair.overlap):.0%}", *pair.leaked.values()])
    cli.stdout.print()
    titles = [f"leaked {split}" for split in inspection.held_out]
    cli.print_table(["redundant relations", "kind", "overlap", *titles], rows)
    _note_more(len(inspection.redundant), "redundant relations")


def _label(names: kg.Vocabulary, name: str) -> str:
    return str(names.label(names.id(name)))


def _note_more(number: int, kind: str) -> None:
    if number > NUM_ROWS:
        cli.note(f"{number - NUM_ROWS:,} more {kind}: --json lists all.")
