"""Tables of the README and of docs/, made from the records and the benchmarks."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from dualkg.files import read_json
from paper.records import load_records
from paper.registry import FOLDER, GRAPHS, MAIN, PATHS, PUBLISHED_GRAPHS, published_metrics
from paper.studies import STUDIES
from paper.tables import MISSING, Table, hardware, over_seeds, results_table, training_cell

ROOT = FOLDER.parent
BENCHMARKS = ROOT / "benchmarks"
PEERS = BENCHMARKS / "published.json"
GPU = "NVIDIA H200"
WIDTH = 120  # columns of prose in the pages
# A default, and the key of its results in a record of the study `defaults`.
DEFAULTS = {"recipe": "recipe", "--no-tune": "fixed", "tuned default": "tuned"}


def main_table(root: Path) -> str:
    """The main table in short: published and measured test MRR."""
    records = load_records(root)
    rows = []
    shown = []
    for row in MAIN.rows:
        row_records = [records.get(row.record_name(graph)) for graph in PUBLISHED_GRAPHS]
        if not any(row_records):
            continue
        cells = [row.name]
        seeds = []
        for graph, record in zip(PUBLISHED_GRAPHS, row_records, strict=True):
            cells.append(f"{published_metrics(row.name, graph)['mrr']:.3f}")
            cells.append(over_seeds(record.values("mrr")) if record else MISSING)
            seeds.append(str(len(record.runs)) if record else "0")
            if record:
                shown.append(record)
        cells.append(" / ".join(seeds))
        cells.append(" / ".join(training_cell(record) for record in row_records))
        rows.append(cells)

    columns = [""]
    for graph in PUBLISHED_GRAPHS:
        columns += [f"{graph}, published", f"{graph}, ours"]
    columns += ["seeds", "training"]
    machines = {hardware(run["environment"]) for record in shown for run in record.runs}
    notes = [f"Trained on {' and '.join(sorted(machines))}."] if machines else []
    if any(record.times_are_bounds for record in shown):
        notes.append("≤: other work ran on the same device.")
    return Table("", tuple(columns), rows, notes=notes).as_markdown(level=0)


def paths_tables(root: Path) -> str:
    """The tables of path networks, without the comparisons of RESULTS.md."""
    records = load_records(root)
    tables = [
        results_table(PATHS, graph, records, compared=False).as_markdown()
        for graph in PUBLISHED_GRAPHS
    ]
    tables.append(study_tables(root, "path-ensemble"))
    tables.append(other_graphs_table(root))
    tables.append(both_directions_table(root))
    return "\n\n".join(tables)


def other_graphs_table(root: Path) -> str:
    """Test MRR of path networks and of tuned embeddings on the other graphs of the table."""
    records = load_records(root)
    network = PATHS.row("PathNetwork")
    rows = []
    for graph in ("YAGO3-10-quarter", "world", *PATHS.other_graphs):
        record = records.get(network.record_name(graph))
        saved = root / "figures" / f"defaults-{graph.lower()}.json"
        if not record or not saved.exists():
            continue
        tuned = [seed["tuned"]["test"] for seed in read_json(saved)["results"]["seeds"]]
        seeds = f"{len(record.runs)} / {len(tuned)}"
        cells = [over_seeds(record.values("mrr")), training_cell(record), over_seeds(tuned)]
        rows.append([graph, *cells, seeds])
    columns = ("", "PathNetwork", "training", "embeddings, tuned by default", "seeds")
    return Table("Other graphs, test MRR", columns, rows).as_markdown()


def both_directions_table(root: Path) -> str:
    """What the other direction adds to path networks, a line for each graph."""
    rows = []
    for path in STUDIES["path-duality"].saved(root):
        saved = read_json(path)
        runs = saved["results"]
        num_better = sum((run["test"]["gain"]["low"] or 0.0) > 0 for run in runs)
        cells = [saved["graph"], over_seeds([run["weight"] for run in runs], digits=2)]
        for split in ("valid", "test"):
            for key in ("alone", "both"):
                cells.append(over_seeds([run[split][key]["mrr"] for run in runs]))
        rows.append([*cells, f"{num_better} of {len(runs)}"])
    columns = ("", "weight", "valid MRR, alone", "both", "test MRR, alone", "both", "better")
    note = "Better: seeds whose gain on test has a 95 % interval above zero."
    return Table("Both directions, MRR", columns, rows, notes=[note]).as_markdown()


def study_tables(root: Path, name: str) -> str:
    """The tables of a study, of all graphs on which it is recorded."""
    study = STUDIES[name]
    tables = []
    for path in study.saved(root):
        saved = read_json(path)
        for table in study.tables(saved["results"], saved["graph"]):
            notes = [textwrap.fill(note, WIDTH) for note in table.notes]
            tables.append(replace(table, notes=notes))
    return "\n\n".join(table.as_markdown() for table in tables)


@dataclass(frozen=True)
class Speed:
    """The seconds of a job in another program and in dualkg."""

    name: str
    peer: str
    theirs: float
    ours: float


def readme_table(root: Path) -> str:
    """Accuracy and speed beside others: what the README shows first."""
    rows = [accuracy_row(root, *choice) for choice in ACCURACY]
    for job in measured_speeds():
        ours = f"{job.ours:.3g} s, {job.theirs / job.ours:.1f}×"
        rows.append([job.name, f"{job.theirs:.3g} s ({job.peer})", ours])
    return Table("", ("", "others", "dualkg"), rows).as_markdown(level=0)


def measured_speeds() -> list[Speed]:
    """Jobs that were measured beside another program, by `make bench`."""
    training = read_benchmark("training")
    ranking = read_benchmark("ranking")
    job = "FB15k-237 ComplEx dim 2000 batch 1000"
    on_gpu = training[GPU][job]["measured"]
    machine = "2 cores of Intel(R) Xeon(R) Processor @ 2.50GHz"
    on_cpu = training[machine]["FB15k-237 ComplEx dim 100 batch 1000"]["measured"]
    ranked = ranking[machine]["FB15k-237 test ComplEx dim 100"]["measured"]
    ranked_by_pykeen = ranked["PyKEEN, batch as it chooses"]
    return [
        Speed(
            "an epoch of FB15k-237, ComplEx dim 2000, one H200",
            "DURA's authors",
            read_json(PEERS)["training"][job]["seconds"],
            on_gpu["dualkg bf16"]["seconds_per_epoch"],
        ),
        Speed(
            "an epoch of FB15k-237, ComplEx dim 100, two CPU cores, grouped by query",
            f"PyKEEN {on_cpu['PyKEEN']['version']}",
            on_cpu["PyKEEN"]["seconds_per_epoch"],
            on_cpu["dualkg float32, grouped by query"]["seconds_per_epoch"],
        ),
        Speed(
            "filtered ranking of FB15k-237's test split, two CPU cores",
            f"PyKEEN {ranked_by_pykeen['version']}",
            ranked_by_pykeen["seconds"],
            ranked["dualkg"]["seconds"] + ranked["dualkg"]["filter_seconds"],
        ),
    ]


# What accuracy is shown: a model, its row among the published results and among ours, a graph.
ACCURACY = [
    (label, theirs, ours, graph)
    for label, theirs, ours in (
        ("path network", "NBFNet (2021)", "PathNetwork"),
        ("ComplEx with DURA", "ComplEx-DURA", "ComplEx-DURA"),
    )
    for graph in PUBLISHED_GRAPHS
]


# Whose published results those are.
AUTHORS = {"NBFNet (2021)": "NBFNet, 2021", "ComplEx-DURA": "authors of DURA"}


def accuracy_row(root: Path, label: str, theirs: str, ours: str, graph: str) -> list[str]:
    """Published and measured test MRR, and what a measured one cost."""
    row = next(row for row in PATHS.rows if row.name == ours)
    record = load_records(root).get(row.record_name(graph))
    others = f"{published_metrics(theirs, graph)['mrr']:.3f} ({AUTHORS[theirs]}, published)"
    measured = MISSING
    if record:
        count = len(record.runs)
        seeds = "1 seed," if count == 1 else f"{count} seeds, each"
        measured = f"{over_seeds(record.values('mrr'))} ({seeds} {training_cell(record)})"
    return [f"test MRR of {graph}, {label}", others, measured]


def read_benchmark(name: str) -> Any:
    return read_json(BENCHMARKS / "results" / f"{name}.json")


def defaults_table(root: Path) -> str:
    """Test MRR and minutes of each default, by graph and device: means over seeds."""
    columns = ["graph", "device", "seeds"]
    for name in DEFAULTS:
        columns += [f"{name}: MRR", "minutes"]
    saved = [read_json(path) for path in (root / "figures").glob("defaults-*.json")]
    rows = [defaults_row(study) for study in sorted(saved, key=order_of)]
    return Table("", tuple(columns), rows, num_left=2).as_markdown(level=0)


def order_of(study: Mapping[str, Any]) -> tuple[bool, int, str]:
    """CPUs first, then graphs in the order of the paper's."""
    graph = study["graph"]
    position = GRAPHS.index(graph) if graph in GRAPHS else len(GRAPHS)
    return (not computed_on_a_cpu(study), position, graph)


def computed_on_a_cpu(study: Mapping[str, Any]) -> bool:
    return study["environment"]["device"] == "cpu"


def defaults_row(study: Mapping[str, Any]) -> list[str]:
    seeds = study["results"]["seeds"]
    device = "CPU, 2 threads" if computed_on_a_cpu(study) else study["environment"]["device"]
    cells = [study["graph"], device, str(len(seeds))]
    for key in DEFAULTS.values():
        results = [seed[key] for seed in seeds if key in seed]
        if not results:
            cells += [MISSING, MISSING]
            continue
        seconds = [result["seconds"] + result.get("tuning_seconds", 0) for result in results]
        cells += [f"{mean(result['test'] for result in results):.4f}", f"{mean(seconds) / 60:.1f}"]
    return cells


PAGES: dict[Path, Callable[[Path], str]] = {
    ROOT / "README.md": readme_table,
    ROOT / "docs" / "reproduce.md": main_table,
    ROOT / "docs" / "paths.md": paths_tables,
    ROOT / "docs" / "defaults.md": defaults_table,
    ROOT / "docs" / "inductive.md": lambda root: study_tables(root, "inductive-models"),
    ROOT / "docs" / "explanation.md": lambda root: study_tables(root, "deletion"),
}
