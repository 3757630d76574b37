"""The pages that are made from records: RESULTS.md, and the table in the README."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualkg.analysis.records import Record
from dualkg.evaluation.report import COLUMNS
from paper.plan import GRAPHS, MAIN, TABLES, Row
from paper.published import published_metrics
from paper.records import load_records
from paper.setting import PUBLISHED_GRAPHS
from paper.sheets import Sheet, mean_and_sd
from paper.tables import table_sheet, training_cell, training_time

BEGIN, END = "<!-- made from records: begin -->", "<!-- made from records: end -->"


def results_page(root: Path) -> str:
    """RESULTS.md: the paper's tables and figures as far as there are records of them, then every record."""
    records = load_records(root)
    parts = [
        "# Results",
        "Made from the records in this folder by `make records`; do not edit. Filtered ranking of the test split,\n"
        "both directions, every test triple kept, ties at their mean. Where there are several seeds: mean ± sd.\n"
        "Differences between two of our rows: mean over the seeds of each query, and a bootstrap over the triples.\n"
        "Its interval is about the triples; how far seeds differ is the sd beside it, where there are several.\n"
        "≤ stands before a time of training that was taken beside other work on the same device.",
    ]
    earlier: set[Row] = set()
    for table in TABLES.values():
        own = set(table.rows) - earlier  # a table that has no record but of rows before it would say nothing new
        known = [graph for graph in GRAPHS if any(row.record_name(graph) in records for row in own)]
        earlier |= own
        if known:
            parts += [f"## {table.title}", f"{table.about} `dualkg reproduce {table.name}`"]
            parts += [table_sheet(table, graph, records).as_markdown() for graph in known]
            parts += [_time(records)] if table is MAIN else []
    parts += figure_parts(root)
    parts += ["## Every record", all_records(records).as_markdown(level=0)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _time(records: Mapping[str, Record]) -> str:
    """The six trainings with DURA together, if there are six."""
    found = training_time(MAIN, PUBLISHED_GRAPHS, records)
    if found is None:
        return ""
    return (
        f"One seed of each of the six trainings with DURA, together: {found['training_seconds']:.0f} s of training. "
        f"Apart from it: {found['warm_up_seconds']:.0f} s of compiling and capturing kernels, fewer where the same "
        f"process had compiled them for the row before; {found['ranking_seconds']:.0f} s of ranking valid and test."
    )


def figure_parts(root: Path) -> list[str]:
    """What `dualkg reproduce` has drawn, counted or measured: the page that was written beside each."""
    pages = sorted((root / "figures").glob("*.md"))
    return ["## Figures and facts", *(page.read_text(encoding="utf-8").strip() for page in pages)] if pages else []


def all_records(records: Mapping[str, Record]) -> Sheet:
    columns = ("recipe", "graph", "model", "dim", "regularizer", "on", "seeds", *COLUMNS, "valid MRR", "training")
    rows = []
    for name, record in records.items():
        recipe, regularizer = record.recipe, record.recipe.regularizer
        kept_small = regularizer.name if regularizer.name == "none" else f"{regularizer.name} λ={regularizer.weight:g}"
        rows.append(
            [
                f"[{name}]({name}/recipe.toml)",
                record.graph,
                recipe.model.name,
                str(recipe.model.dim),
                kept_small,
                hardware(record.runs[0]["environment"]),
                str(len(record.runs)),
                *(mean_and_sd(record.metric(key), len(record.runs)) for key in COLUMNS.values()),
                mean_and_sd(record.metric("mrr", split="valid"), len(record.runs)),
                training_cell(record),
            ]
        )
    return Sheet("Every record", columns, rows, num_left=6)


def hardware(environment: Mapping[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    threads = environment["threads"]
    return f"{threads} {'thread' if threads == 1 else 'threads'} of {environment['processor']}"


def readme_table(root: Path) -> str:
    """The main table in short, for the README: test MRR, published and ours."""
    records = load_records(root)
    columns = ("", *(f"{graph}, {side}" for graph in PUBLISHED_GRAPHS for side in ("published", "ours")))
    columns += ("seeds", "training")
    rows: list[list[str]] = []
    shown: list[Record] = []
    for row in MAIN.rows:
        kept = {graph: records.get(row.record_name(graph)) for graph in PUBLISHED_GRAPHS}
        if not any(kept.values()):
            continue
        shown += [record for record in kept.values() if record]
        cells = []
        for graph, record in kept.items():
            cells.append(f"{published_metrics(row.name, graph)['mrr']:.3f}")
            cells.append(mean_and_sd(record.metric("mrr"), len(record.runs)) if record else "–")
        seeds = [str(len(record.runs)) if record else "0" for record in kept.values()]
        rows.append([row.name, *cells, " / ".join(seeds), " / ".join(map(training_cell, kept.values()))])
    machines = {hardware(run["environment"]) for record in shown for run in record.runs}
    notes = [f"Trained on {' and '.join(sorted(machines))}."] if machines else []
    if any(record.times_are_bounds for record in shown):
        notes.append("≤: beside other work on the same device.")
    return Sheet("", columns, rows, notes=notes).as_markdown(level=0)


def with_table(readme: str, table: str) -> str:
    """The README with what stands between its two marks made again."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", readme, flags=re.DOTALL)
