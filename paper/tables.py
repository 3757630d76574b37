"""Tables as text, studies, whose tables are made from saved results, and the pages RESULTS.md and
README.md.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dualkg as kg
from dualkg.analysis.figures import Drawing
from dualkg.evaluation.metrics import columns as metric_columns
from dualkg.extras import optional_import
from dualkg.files import locked, read_json, write_text
from dualkg.training.api import choose_device, spread
from dualkg.training.run import environment
from paper import registry
from paper.records import Config, Record, is_uncommitted, load_records
from paper.registry import (
    FOLDER,
    GRAPHS,
    MAIN,
    METRICS,
    TABLES,
    TEXTS,
    ResultTable,
    Row,
    published,
    published_metrics,
)

README = FOLDER.parent / "README.md"
DATASETS = "figures/datasets.json"
BEGIN = "<!-- made from records: begin -->"
END = "<!-- made from records: end -->"
BOOTSTRAP_SAMPLES = 2000  # enough for an interval that is rounded to four digits
MISSING = "–"
Results = Any  # of a study: whatever JSON holds
MakeRows = Callable[[Results], Iterable[list[str]]]


@dataclass(frozen=True)
class Table:
    """Rows of text with a title and notes; `facts` are the same values unrounded, for JSON."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    facts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_left: int = 1  # columns that are aligned to the left

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": self.facts, "notes": self.notes}

    def as_markdown(self, *, level: int = 3) -> str:
        title = [f"{'#' * level} {self.title}\n"] if level else []
        head, *rows = (f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows))
        ruler = "|---" * self.num_left + "|--:" * (len(self.columns) - self.num_left) + "|"
        return "\n".join([*title, head, ruler, *rows, *(f"\n{note}" for note in self.notes)])


def over_seeds(values: list[float], *, digits: int = 4) -> str:
    """`0.4910 ± 0.0006`, or the mean alone for a single value."""
    mean, sd = spread(values)
    return f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if len(values) > 1 else "")


def grouped(
    results: Iterable[dict[str, Any]], *keys: str
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Results with the same values of some keys, such as those of all seeds of a row, in the order
    of the first.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    return groups


def duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 10
        else f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
    )


def cell(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def training_cell(record: Record | None) -> str:
    """The training time of one run; an upper bound (≤) where all runs shared their device."""
    seconds = record.cost("training_seconds") if record else None
    return MISSING if seconds is None else "≤ " * record.times_are_bounds + duration(seconds)


def results_table(table: ResultTable, graph: str, records: Mapping[str, Record]) -> Table:
    """A table on one graph: measured and published metrics of each row, their difference in MRR,
    and the costs.
    """
    with_published = any(published_metrics(row.name, graph) for row in table.rows)
    hits = list(METRICS)[1:]
    columns = ["", "MRR", *(["published", "difference"] if with_published else [])]
    columns += [f"{name} (published)" if with_published else name for name in hits] + [
        "seeds",
        "training",
        "peak MiB",
    ]
    rows = []
    facts = []
    for row in table.rows:
        record = records.get(row.record_name(graph))
        reported = published_metrics(row.name, graph)
        if record is None and not reported:
            continue
        fact: dict[str, Any] = {
            "row": row.name,
            "graph": graph,
            "published": reported,
            "measured": None,
        }
        if record:
            spreads = {key: spread(record.values(key)) for key in METRICS.values()}
            fact["measured"] = {
                key: {"mean": mean, "sd": sd} for key, (mean, sd) in spreads.items()
            }
            fact["difference"] = spreads["mrr"][0] - reported["mrr"] if reported else None
            costs = ("training_seconds", "warm_up_seconds", "ranking_seconds", "peak_mib")
            fact |= {"seeds": record.seeds, **{name: record.cost(name) for name in costs}}
        cells = [row.name, over_seeds(record.values("mrr")) if record else MISSING]
        if with_published:
            cells += [cell(reported.get("mrr"), ".3f"), cell(fact.get("difference"), "+.4f")]
        for key in (METRICS[name] for name in hits):
            mean = cell(fact["measured"] and fact["measured"][key]["mean"], ".4f")
            cells.append(f"{mean} ({reported[key]:.3f})" if key in reported else mean)
        cells += [
            str(len(record.runs)) if record else "0",
            training_cell(record),
            cell(fact.get("peak_mib"), ",.0f"),
        ]
        facts.append(fact)
        rows.append(cells)
    return Table(
        f"{table.title}: {graph}",
        tuple(columns),
        rows,
        facts,
        notes=_comparisons(table, graph, records),
    )


def _comparisons(table: ResultTable, graph: str, records: Mapping[str, Record]) -> list[str]:
    """A paired bootstrap for each pair of rows that the table compares."""
    found = {row.name: records.get(row.record_name(graph)) for row in table.rows}
    sentences = []
    for name_a, name_b in table.pairs:
        a = found.get(name_a)
        b = found.get(name_b)
        if a and b:
            comparison = kg.compare_ranks(a.ranks, b.ranks, samples=BOOTSTRAP_SAMPLES, seed=0)
            sentences.append(f"{name_a} against {name_b}: {comparison.sentence(name_a, name_b)}")
    return [" ".join(sentences)] if sentences else []


def datasets_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Statistics of the data sets: counted where the data are available, against the published
    ones.
    """
    kinds = ("entities", "relations", "train", "valid", "test")
    rows = []
    facts = []
    for graph in GRAPHS:
        reported = published()["datasets"].get(graph)
        counted = counts.get(graph)
        if counted is None and reported is None:
            continue
        shown = counted or reported
        same = "not in the paper" if reported is None else "not available"
        if counted and reported:
            different = [kind for kind in kinds if counted[kind] != reported[kind]]
            same = ", ".join(f"{kind} {reported[kind]:,} published" for kind in different) or "yes"
        rows.append([graph, *(f"{shown[kind]:,}" for kind in kinds), same])
        facts.append(
            {"graph": graph, "published": reported, "counted": dict(counted) if counted else None}
        )
    return Table("Data sets", ("graph", *kinds, "as published"), rows, facts)


def hyperparameters_table() -> Table:
    """The published hyper-parameters, and those of the recipes."""
    reported = published()["hyperparameters"]
    rows = []
    facts = []
    for row in MAIN.dura_rows:
        model = row.name.removesuffix("-DURA")
        for graph in (graph for graph in GRAPHS[:3] if registry.recipe_path(row, graph)):
            recipe = registry.recipe_of(row, graph)
            weights = recipe.regularizer
            ours = [
                recipe.model.dim,
                recipe.training.batch_size,
                weights.weight,
                weights.plain,
                weights.mapped,
            ]
            pairs = zip(reported[model][graph], ours, strict=True)
            cells = [
                f"{theirs:g}" if theirs == own else f"{theirs:g} → {own:g}" for theirs, own in pairs
            ]
            rows.append(
                [
                    row.name,
                    graph,
                    *cells,
                    f"{recipe.loss.frequency_weight:g}",
                    str(recipe.training.epochs),
                ]
            )
            facts.append(
                {"model": model, "graph": graph, "published": reported[model][graph], "ours": ours}
            )
    text = TEXTS["hyperparameters"]
    return Table(text["title"], tuple(text["columns"]), rows, facts, [text["note"]], num_left=2)


def training_time(
    table: ResultTable, graphs: Iterable[str], records: Mapping[str, Record]
) -> dict[str, float] | None:
    """Seconds of one seed of every DURA row, summed; None if a row is missing or all its runs
    shared their device.
    """
    found = [records.get(row.record_name(graph)) for graph in graphs for row in table.dura_rows]
    if not all(record and not record.times_are_bounds for record in found):
        return None
    kinds = ("training_seconds", "warm_up_seconds", "ranking_seconds")
    costs = {kind: [record.cost(kind) for record in found] for kind in kinds}
    return (
        None
        if any(None in values for values in costs.values())
        else {kind: sum(costs[kind]) for kind in kinds}
    )


@dataclass(frozen=True)
class Study:
    """A study: a function that measures it on a graph, and functions that make its tables and its
    figure.

    The docstring of `measure` is the help of its command. It returns or yields results; with them
    the figure, where this shows data that the results do not contain, such as positions in the
    plane. The texts of a table are in tables.toml, with fields for the graph, the results and
    `fields` of these; where it has no columns there, they are the first of its rows. `further` has
    the rows of other tables by the names of their texts.
    """

    name: str
    measure: Callable[[Config, kg.Graph], Results | Iterator[Results] | tuple[Results, Drawing]]
    rows: MakeRows
    draw: Callable[[Results, str], Drawing] | None = None
    graphs: tuple[str, ...] = GRAPHS[:2]
    several_seeds: bool = False
    further: Mapping[str, MakeRows] = field(default_factory=dict)
    fields: Callable[[Results], dict[str, Any]] = lambda results: {}

    def run(self, config: Config) -> list[Table]:
        """Measure it on the graphs of the configuration, and save results and figure."""
        with optional_import("matplotlib", purpose="A figure"):  # before a long computation
            import matplotlib.figure  # noqa: F401
        with optional_import("scikit-learn", purpose="A figure"):
            import sklearn.manifold  # noqa: F401
        tables = []
        for name in config.graphs(self.graphs):
            graph = kg.load_graph(name)
            measured = self.measure(config, graph)
            results, drawing = measured if isinstance(measured, tuple) else (measured, None)
            results = list(results) if isinstance(results, Iterator) else results
            made = environment(choose_device(config.device), fingerprint=graph.fingerprint)
            self.save(self.path(config.records, graph.name), graph.name, made, results, drawing)
            tables += self.tables(results, graph.name)
        return tables

    def tables(self, results: Results, graph: str) -> list[Table]:
        tables = []
        for name, make_rows in {self.name: self.rows, **self.further}.items():
            text = TEXTS[name]
            rows = list(make_rows(results))
            values = {"graph": graph, "results": results, **self.fields(results)}
            title, note = (text.get(kind, "").format(**values) for kind in ("title", "note"))
            columns = tuple(text["columns"] if "columns" in text else rows.pop(0))
            notes = [paragraph for paragraph in note.split("\n\n") if paragraph]
            facts = results if isinstance(results, list) else [results]
            tables.append(Table(title, columns, rows, facts, notes, text.get("num_left", 1)))
        return tables

    def path(self, records: Path, graph: str) -> Path:
        return records / "figures" / f"{self.name}-{graph.lower()}.json"

    def saved(self, records: Path) -> list[Path]:
        """The files of saved results, by graph."""
        paths = [self.path(records, graph) for graph in dict.fromkeys((*GRAPHS, *self.graphs))]
        return [path for path in paths if path.exists()]

    def save(
        self,
        path: Path,
        graph: str,
        made: dict[str, Any],
        results: Results,
        drawing: Drawing | None,
    ) -> None:
        drawing = self.draw(results, graph) if self.draw else drawing
        if drawing:
            drawing.save(path.with_suffix(""))
        caption = {"caption": drawing.caption} if drawing else {}
        saved = {"graph": graph, "environment": made, **caption, "results": results}
        write_text(path, json.dumps(saved, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def redraw(self, path: Path) -> None:
        """Draw the figure of saved results again."""
        if self.draw:
            saved = read_json(path)
            self.save(path, saved["graph"], saved["environment"], saved["results"], None)

    def page(self, path: Path) -> str:
        """Tables, figure and caption of saved results as Markdown."""
        saved = read_json(path)
        first, *others = self.tables(saved["results"], saved["graph"])
        figure = (
            [f"![{first.title}](figures/{path.stem}.png)", saved["caption"]]
            if "caption" in saved
            else []
        )
        return "\n\n".join(
            [first.as_markdown(), *figure, *(table.as_markdown() for table in others)]
        )


# -- pages -------------------------------------------------------------------


def write_pages(records: Path, studies: Iterable[Study], readme: Path | None = None) -> None:
    """Write RESULTS.md, and the table of the README if one is given."""
    with locked(records / "RESULTS.md", wait=True):
        write_text(records / "RESULTS.md", results_page(records, studies))
    if readme:
        with locked(readme, wait=True):
            write_text(
                readme, with_table(readme.read_text(encoding="utf-8"), readme_table(records))
            )


def results_page(root: Path, studies: Iterable[Study]) -> str:
    """RESULTS.md: the tables and studies as far as they are recorded, then all records."""
    records = load_records(root)
    parts = ["# Results", TEXTS["page"]["about"]]
    seen: set[Row] = set()
    for table in TABLES.values():
        new = (
            set(table.rows) - seen
        )  # a table whose only records are in tables above shows nothing new
        seen |= new
        graphs = [
            graph for graph in GRAPHS if any(row.record_name(graph) in records for row in new)
        ]
        if graphs:
            parts += [f"## {table.title}", f"{table.about} `python -m paper {table.name}`"]
            parts += [results_table(table, graph, records).as_markdown() for graph in graphs]
            if table is MAIN and (total := training_time(MAIN, GRAPHS[:2], records)):
                parts.append(TEXTS["page"]["times"].format(**total))
    parts += ["## Hyper-parameters", hyperparameters_table().as_markdown(level=0)]
    if (root / DATASETS).exists():
        parts += [
            "## Data sets",
            datasets_table(read_json(root / DATASETS)["results"]).as_markdown(level=0),
        ]
    shown = [study.page(path) for study in studies for path in study.saved(root)]
    parts += ["## Studies", *shown] if shown else []
    parts += ["## All records", all_records(records).as_markdown(level=0)]
    return "\n\n".join(parts) + "\n"


def all_records(records: Mapping[str, Record]) -> Table:
    columns = (
        "recipe",
        "graph",
        "model",
        "dim",
        "regularizer",
        "on",
        "seeds",
        *metric_columns(),
        "valid MRR",
        "training",
    )
    rows = []
    for name, record in records.items():
        model = record.recipe.model
        regularizer = record.recipe.regularizer
        runs = record.runs
        weight = "" if regularizer.name == "none" else f" λ={regularizer.weight:g}"
        uncommitted = any(is_uncommitted(run["environment"]) for run in runs)
        about = [
            f"[{name}]({name}/recipe.toml)",
            record.graph,
            model.name,
            str(model.dim),
            regularizer.name + weight,
        ]
        about += [hardware(runs[0]["environment"]), f"{len(runs)}{' †' * uncommitted}"]
        metrics = [
            *map(record.values, metric_columns().values()),
            [run["valid"]["mrr"] for run in runs],
        ]
        rows.append([*about, *map(over_seeds, metrics), training_cell(record)])
    return Table("All records", columns, rows, num_left=6)


def hardware(environment: Mapping[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    return f"{environment['threads']} thread{'s' * (environment['threads'] != 1)} of {environment['processor']}"


def readme_table(root: Path) -> str:
    """The main table in short: published and measured test MRR."""
    records = load_records(root)
    rows = []
    shown = []
    for row in MAIN.rows:
        found = [records.get(row.record_name(graph)) for graph in GRAPHS[:2]]
        if any(found):
            shown += filter(None, found)
            cells = [row.name]
            for graph, record in zip(GRAPHS[:2], found, strict=True):
                cells.append(f"{published_metrics(row.name, graph)['mrr']:.3f}")
                cells.append(over_seeds(record.values("mrr")) if record else MISSING)
            seeds = (str(len(record.runs)) if record else "0" for record in found)
            rows.append([*cells, " / ".join(seeds), " / ".join(map(training_cell, found))])
    columns = ("", *(f"{graph}, {side}" for graph in GRAPHS[:2] for side in ("published", "ours")))
    machines = {hardware(run["environment"]) for record in shown for run in record.runs}
    notes = [f"Trained on {' and '.join(sorted(machines))}."] if machines else []
    if any(record.times_are_bounds for record in shown):
        notes.append("≤: other work ran on the same device.")
    return Table("", (*columns, "seeds", "training"), rows, notes=notes).as_markdown(level=0)


def with_table(readme: str, table: str) -> str:
    """The README with the text between its two marks replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", readme, flags=re.DOTALL)
