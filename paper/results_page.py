"""The pages made from records: records/RESULTS.md, and the results table of README.md."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualkg.evaluation.report import COLUMNS
from dualkg.files import locked, read_json, write_text
from paper.records import Record, is_uncommitted, load_records
from paper.registry import FOLDER, GRAPHS, MAIN, PUBLISHED_GRAPHS, TABLES, Row, published_metrics
from paper.studies import STUDIES
from paper.tables import (
    Table,
    datasets_table,
    hyperparameters_table,
    mean_and_sd,
    over_seeds,
    results_table,
    training_cell,
    training_time,
)

README = FOLDER.parent / "README.md"
DATASETS = "figures/datasets.json"
BEGIN, END = "<!-- made from records: begin -->", "<!-- made from records: end -->"
ABOUT = """\
Made from the records in this folder by `python -m paper results`; do not edit. Filtered ranking of the test split,
both directions, every test triple kept, ties at their mean rank. With several seeds: mean ± standard deviation.
Differences between two of our rows are means over the seeds of each query, with a bootstrap interval over the triples;
the interval covers the choice of triples, the standard deviation the choice of seeds. ≤ marks a training time measured
while other work ran on the same device, † a record with runs from a source tree with uncommitted changes."""


def write_pages(records: Path, readme: Path | None = None) -> None:
    """Write RESULTS.md, and the table of the README if one is given."""
    with locked(records / "RESULTS.md", wait=True):
        write_text(records / "RESULTS.md", results_page(records))
    if readme:
        with locked(readme, wait=True):
            write_text(readme, with_table(readme.read_text(encoding="utf-8"), readme_table(records)))


def results_page(root: Path) -> str:
    """RESULTS.md: the tables and studies as far as they are recorded, then all records."""
    records = load_records(root)
    parts = ["# Results", ABOUT]
    seen: set[Row] = set()
    for table in TABLES.values():
        new = set(table.rows) - seen  # a table whose only records are in tables above shows nothing new
        seen |= new
        graphs = [graph for graph in GRAPHS if any(row.record_name(graph) in records for row in new)]
        if graphs:
            parts += [f"## {table.title}", f"{table.about} `python -m paper {table.name}`"]
            parts += [results_table(table, graph, records).as_markdown() for graph in graphs]
            parts += _total_time(records) if table is MAIN else []
    parts += ["## Hyper-parameters", hyperparameters_table().as_markdown(level=0)]
    if (root / DATASETS).exists():
        parts += ["## Data sets", datasets_table(read_json(root / DATASETS)["results"]).as_markdown(level=0)]
    studies = [(study, path) for study in STUDIES.values() for path in study.saved(root)]
    parts += ["## Studies", *(study.page(path) for study, path in studies)] if studies else []
    parts += ["## All records", all_records(records).as_markdown(level=0)]
    return "\n\n".join(parts) + "\n"


def _total_time(records: Mapping[str, Record]) -> list[str]:
    total = training_time(MAIN, PUBLISHED_GRAPHS, records)
    if total is None:
        return []
    return [
        f"One seed of each of the six trainings with DURA takes {total['training_seconds']:.0f} s of training in "
        f"total, plus {total['warm_up_seconds']:.0f} s of compiling and capturing kernels (less where the same process "
        f"compiled them before) and {total['ranking_seconds']:.0f} s of ranking valid and test."
    ]


def all_records(records: Mapping[str, Record]) -> Table:
    columns = ("recipe", "graph", "model", "dim", "regularizer", "on", "seeds", *COLUMNS, "valid MRR", "training")
    rows = []
    for name, record in records.items():
        recipe, regularizer, count = record.recipe, record.recipe.regularizer, len(record.runs)
        rows.append(
            [
                f"[{name}]({name}/recipe.toml)",
                record.graph,
                recipe.model.name,
                str(recipe.model.dim),
                regularizer.name + ("" if regularizer.name == "none" else f" λ={regularizer.weight:g}"),
                hardware(record.runs[0]["environment"]),
                f"{count}{' †' * any(is_uncommitted(run['environment']) for run in record.runs)}",
                *(mean_and_sd(record.metric(key), count) for key in COLUMNS.values()),
                over_seeds([run["valid"]["mrr"] for run in record.runs]),
                training_cell(record),
            ]
        )
    return Table("All records", columns, rows, num_left=6)


def hardware(environment: Mapping[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    threads = environment["threads"]
    return f"{threads} {'thread' if threads == 1 else 'threads'} of {environment['processor']}"


def readme_table(root: Path) -> str:
    """The main table in short: published and measured test MRR."""
    records = load_records(root)
    rows: list[list[str]] = []
    shown: list[Record] = []
    for row in MAIN.rows:
        found = {graph: records.get(row.record_name(graph)) for graph in PUBLISHED_GRAPHS}
        if not any(found.values()):
            continue
        shown += [record for record in found.values() if record]
        cells = []
        for graph, record in found.items():
            cells.append(f"{published_metrics(row.name, graph)['mrr']:.3f}")
            cells.append(mean_and_sd(record.metric("mrr"), len(record.runs)) if record else "–")
        seeds = [str(len(record.runs)) if record else "0" for record in found.values()]
        rows.append([row.name, *cells, " / ".join(seeds), " / ".join(map(training_cell, found.values()))])
    columns = ("", *(f"{graph}, {side}" for graph in PUBLISHED_GRAPHS for side in ("published", "ours")))
    machines = {hardware(run["environment"]) for record in shown for run in record.runs}
    notes = [f"Trained on {' and '.join(sorted(machines))}."] if machines else []
    if any(record.times_are_bounds for record in shown):
        notes.append("≤: other work ran on the same device.")
    return Table("", (*columns, "seeds", "training"), rows, notes=notes).as_markdown(level=0)


def with_table(readme: str, table: str) -> str:
    """The README with the text between its two marks replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", readme, flags=re.DOTALL)
