"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from dualkg.evaluation.report import Metrics, Report
    from dualkg.inference.predictor import Prediction
    from dualkg.training.trainer import ProgressEvent


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def plain_table(*columns: str, left: int = 1) -> Table:
    """A table without walls; the first columns to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=number > 0)
    return table


def print_whole(table: Table) -> None:
    """A narrow terminal wraps long lines, and loses nothing; cells cut short would say nothing."""
    needed = Measurement.get(out, out.options.update(max_width=1000), table).maximum
    Console(highlight=False, width=max(out.width, needed)).print(table)


def known_graphs() -> list[dict[str, Any]]:
    """Everything that can be loaded by name, with where it would come from."""
    from dualkg.data.catalogue import catalogue
    from dualkg.data.loading import load_graph
    from dualkg.data.locations import BUNDLED, data_folder, names_in_data_folder

    world = load_graph(BUNDLED)
    here = {name.casefold(): name for name in names_in_data_folder()}
    rows = [
        {
            "name": BUNDLED,
            **world.counts,
            "licence": "CC BY 4.0",
            "from": "bundled",
            "about": "countries, cities, languages",
        }
    ]
    for entry in catalogue().values():
        origin = str(data_folder()) if entry.name.casefold() in here else "network"
        rows.append(
            {
                "name": entry.name,
                **entry.counts,
                "licence": entry.licence,
                "from": origin,
                "about": entry.about,
                "address": entry.address,
                "sha256": entry.sha256,
                "note": entry.note,
            }
        )
    known = {name.casefold() for name in catalogue()}
    for folded, name in here.items():
        if folded not in known:
            rows.append({"name": name, "from": str(data_folder()), "about": "not in the catalogue", "licence": ""})
    return rows


def print_datasets(rows: Sequence[dict[str, Any]]) -> None:
    table = plain_table("name", "entities", "relations", "train", "valid", "test", "from")
    table.columns[0].no_wrap, table.columns[-1].justify = True, "left"
    roomy = out.width >= 105
    if roomy:
        table.add_column("about", style="dim")
    for row in rows:
        counts = [f"{row[key]:,}" if key in row else "" for key in ("entities", "relations", "train", "valid", "test")]
        origin = row["from"] if row["from"] in ("bundled", "network") else "DUALKG_DATA"
        table.add_row(escape(row["name"]), *counts, origin, *([escape(row["about"])] if roomy else []))
    out.print(table)
    out.print("\n[dim]Licences, addresses and checksums: dualkg datasets --json[/dim]")


def print_report(report: Report, *, by: str | None = None) -> None:
    """The whole first, then its bounds where ties make them differ, then the view asked for."""
    rows = {f"{report.graph} {report.split}": report.metrics}
    if not math.isclose(report.optimistic.mrr, report.pessimistic.mrr):
        rows |= {"  ties at their best": report.optimistic, "  ties at their worst": report.pessimistic}
    if report.num_unseen_triples:
        rows[f"  without {report.num_unseen_triples:,} triples of unseen entities"] = report.without_unseen
    print_metrics(rows)
    if by:
        out.print()
        found = report.by(by)
        print_metrics(dict(sorted(found.items(), key=lambda item: -item[1].num_queries)), title=by)


def print_metrics(rows: dict[str, Metrics], *, title: str = "") -> None:
    from dualkg.evaluation.report import COLUMNS

    table = plain_table(title, *COLUMNS, "MR", "queries")
    for name, metrics in rows.items():
        table.add_row(escape(name), *metrics.row())
    out.print(table)


def print_spread(by_seed: dict[int, dict[str, float]], spread: dict[str, tuple[float, float]]) -> None:
    """One row a seed, then mean ± sd."""
    from dualkg.evaluation.report import COLUMNS

    table = plain_table("seed", *spread)
    for seed, metrics in by_seed.items():
        table.add_row(str(seed), *(f"{metrics[COLUMNS[name]]:.4f}" for name in spread))
    table.add_row("mean ± sd", *(f"{mean:.4f} ± {sd:.4f}" for mean, sd in spread.values()), style="bold")
    out.print(table)


def print_answers(question: str, answers: Sequence[Prediction], *, score: str = "score", known: bool = True) -> None:
    out.print(Text(question, style="bold"))
    believed = any(answer.probability is not None for answer in answers)
    table = plain_table("", score, *(["probability"] if believed else []), "", left=1)
    for answer in answers:
        shown = Text(answer.label)  # no markup: a name may hold anything
        if answer.label != answer.name:
            shown.append(f" {answer.name}", style="dim")
        mark = f"[green]known[/green] [dim]({answer.split})[/dim]" if known and answer.known else ""
        probability = "" if answer.probability is None else f"{answer.probability:.3f}"
        table.add_row(shown, f"{answer.score:.3f}", *([probability] if believed else []), mark)
    table.columns[-1].justify = "left"
    out.print(table)


@contextmanager
def watching(title: str, console: Console | None = None) -> Iterator[Callable[[ProgressEvent], None]]:
    """A progress bar of a training on stderr; nothing where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console or err,
        transient=True,
    )
    task = bar.add_task(escape(title), total=None, facts="")

    def on_progress(event: ProgressEvent) -> None:
        facts = f"epoch {event.epoch}/{event.epochs}  loss {event.loss:.3f}"
        if event.mrr is not None:
            facts += f"  best valid MRR {event.mrr:.4f}"
        done = (event.epoch - 1) * event.steps + event.step
        bar.update(task, total=event.epochs * event.steps, completed=done, facts=facts)

    with bar:
        yield on_progress
