"""The pages made from records: records/RESULTS.md, and the results table of README.md."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualkg.evaluation.report import COLUMNS
from dualkg.files import locked, read_json, write_text
from paper import tables
from paper.records import Record, is_uncommitted, load_records
from paper.registry import FOLDER, GRAPHS, MAIN, PUBLISHED_GRAPHS, TABLES, Row, published_metrics
from paper.studies import STUDIES

README = FOLDER.parent / "README.md"
DATASETS = "figures/datasets.json"
BEGIN, END = "<!-- made from records: begin -->", "<!-- made from records: end -->"
ABOUT = """\
Made from the records in this folder by `python -m paper results`; do not edit. Filtered ranking of the test split,
both directions, every test triple kept, ties at their mean rank. With several seeds: mean ± standard deviation.
Differences between two of our rows are means over the seeds of each query, with a bootstrap interval over the triples;
the interval covers the choice of triples, the standard deviation the choice of seeds. ≤ marks a training time measured
while other work ran on the same device, † a record with runs from a source tree with uncommitted changes."""

TIMES = (
    "One seed of each of the six trainings with DURA takes {training_seconds:.0f} s of training in total, plus "
    "{warm_up_seconds:.0f} s of compiling and capturing kernels (less where the same process compiled them before) and "
    "{ranking_seconds:.0f} s of ranking valid and test."
)


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
            parts += [tables.results_table(table, graph, records).as_markdown() for graph in graphs]
            if table is MAIN and (total := tables.training_time(MAIN, PUBLISHED_GRAPHS, records)):
                parts.append(TIMES.format(**total))
    parts += ["## Hyper-parameters", tables.hyperparameters_table().as_markdown(level=0)]
    if (root / DATASETS).exists():
        parts += ["## Data sets", tables.datasets_table(read_json(root / DATASETS)["results"]).as_markdown(level=0)]
    studies = [(study, path) for study in STUDIES.values() for path in study.saved(root)]
    parts += ["## Studies", *(study.page(path) for study, path in studies)] if studies else []
    parts += ["## All records", all_records(records).as_markdown(level=0)]
    return "\n\n".join(parts) + "\n"


def all_records(records: Mapping[str, Record]) -> tables.Table:
    columns = ("recipe", "graph", "model", "dim", "regularizer", "on", "seeds", *COLUMNS, "valid MRR", "training")
    rows = []
    for name, record in records.items():
        model, regularizer, runs = record.recipe.model, record.recipe.regularizer, record.runs
        weight = "" if regularizer.name == "none" else f" λ={regularizer.weight:g}"
        uncommitted = any(is_uncommitted(run["environment"]) for run in runs)
        about = [f"[{name}]({name}/recipe.toml)", record.graph, model.name, str(model.dim), regularizer.name + weight]
        about += [hardware(runs[0]["environment"]), f"{len(runs)}{' †' * uncommitted}"]
        metrics = [*map(record.values, COLUMNS.values()), [run["valid"]["mrr"] for run in runs]]
        rows.append([*about, *map(tables.over_seeds, metrics), tables.training_cell(record)])
    return tables.Table("All records", columns, rows, num_left=6)


def hardware(environment: Mapping[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    return f"{environment['threads']} thread{'s' * (environment['threads'] != 1)} of {environment['processor']}"


def readme_table(root: Path) -> str:
    """The main table in short: published and measured test MRR."""
    records = load_records(root)
    rows, shown = [], []
    for row in MAIN.rows:
        found = [records.get(row.record_name(graph)) for graph in PUBLISHED_GRAPHS]
        if not any(found):
            continue
        shown += filter(None, found)
        cells = [row.name]
        for graph, record in zip(PUBLISHED_GRAPHS, found, strict=True):
            cells.append(f"{published_metrics(row.name, graph)['mrr']:.3f}")
            cells.append(tables.over_seeds(record.values("mrr")) if record else "–")
        seeds = (str(len(record.runs)) if record else "0" for record in found)
        rows.append([*cells, " / ".join(seeds), " / ".join(map(tables.training_cell, found))])
    columns = ("", *(f"{graph}, {side}" for graph in PUBLISHED_GRAPHS for side in ("published", "ours")))
    machines = {hardware(run["environment"]) for record in shown for run in record.runs}
    notes = [f"Trained on {' and '.join(sorted(machines))}."] if machines else []
    if any(record.times_are_bounds for record in shown):
        notes.append("≤: other work ran on the same device.")
    return tables.Table("", (*columns, "seeds", "training"), rows, notes=notes).as_markdown(level=0)


def with_table(readme: str, table: str) -> str:
    """The README with the text between its two marks replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", readme, flags=re.DOTALL)
