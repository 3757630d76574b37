"""Tables as text, studies with saved results, and the pages that are made from records."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dualkg as kg
from dualkg.analysis.figures import Drawing
from dualkg.evaluation.metrics import columns as metric_columns
from dualkg.extras import optional_import
from dualkg.files import locked, read_json, write_text
from dualkg.training.api import choose_device, spread
from dualkg.training.environment import environment
from paper import registry
from paper.records import Config, Record, is_uncommitted, load_records
from paper.registry import (
    GRAPHS,
    MAIN,
    METRICS,
    PUBLISHED_GRAPHS,
    TABLES,
    TEXTS,
    ResultTable,
    Row,
    published,
    published_metrics,
)

DATASETS = "figures/datasets.json"
BEGIN = "<!-- made from records: begin -->"
END = "<!-- made from records: end -->"
BOOTSTRAP_SAMPLES = 2000  # enough for an interval that is rounded to four digits
MISSING = "–"
HITS = ("H@1", "H@10")
Results = Any  # The results of a study are whatever JSON can hold.
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
    # Without the sum, a small negative mean would be -0.00.
    mean = round(mean, digits) + 0.0
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {sd:.{digits}f}"


def grouped(
    results: Iterable[dict[str, Any]], *keys: str
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Results with the same values of some keys, such as those of all seeds of a row.

    Groups are in the order of their first results.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        values = tuple(result[key] for key in keys)
        groups.setdefault(values, []).append(result)
    return groups


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def cell(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def training_cell(record: Record | None) -> str:
    """The training time of one run; an upper bound (≤) where all runs shared their device."""
    seconds = record.cost("training_seconds") if record else None
    if record is None or seconds is None:
        return MISSING
    return f"≤ {duration(seconds)}" if record.times_are_bounds else duration(seconds)


def results_table(
    table: ResultTable, graph: str, records: Mapping[str, Record], *, compared: bool = True
) -> Table:
    """Measured and published metrics of each row on one graph, and the costs.

    With `compared`, a note has the differences of the table's pairs of rows.
    """
    with_published = any(published_metrics(row.name, graph) for row in table.rows)
    columns = ["", "MRR"]
    if with_published:
        columns += ["published", "difference"]
        columns += [f"{title} (published)" for title in HITS]
    else:
        columns += HITS
    columns += ["seeds", "training", "peak MiB"]

    rows = []
    facts = []
    for row in table.rows:
        record = records.get(row.record_name(graph))
        reported = published_metrics(row.name, graph)
        if record or reported:
            facts.append(_result_facts(row, graph, record, reported))
            rows.append(_result_cells(row, record, reported, with_published=with_published))
    return Table(
        f"{table.title}: {graph}",
        tuple(columns),
        rows,
        facts,
        notes=_comparisons(table, graph, records) if compared else [],
    )


def _result_facts(
    row: Row, graph: str, record: Record | None, reported: Mapping[str, float]
) -> dict[str, Any]:
    """The values of one row, unrounded."""
    facts: dict[str, Any] = {
        "row": row.name,
        "graph": graph,
        "published": reported,
        "measured": None,
    }
    if record is None:
        return facts
    measured = {}
    for metric in METRICS.values():
        mean, sd = spread(record.values(metric))
        measured[metric] = {"mean": mean, "sd": sd}
    facts["measured"] = measured
    facts["difference"] = measured["mrr"]["mean"] - reported["mrr"] if reported else None
    facts["seeds"] = record.seeds
    for cost in ("training_seconds", "warm_up_seconds", "ranking_seconds", "peak_mib"):
        facts[cost] = record.cost(cost)
    return facts


def _result_cells(
    row: Row, record: Record | None, reported: Mapping[str, float], *, with_published: bool
) -> list[str]:
    """The cells of one row."""
    means = {}
    if record:
        means = {metric: spread(record.values(metric))[0] for metric in METRICS.values()}
    cells = [row.name, over_seeds(record.values("mrr")) if record else MISSING]
    if with_published:
        difference = means["mrr"] - reported["mrr"] if record and reported else None
        cells += [cell(reported.get("mrr"), ".3f"), cell(difference, "+.4f")]
    for title in HITS:
        metric = METRICS[title]
        text = cell(means.get(metric), ".4f")
        if metric in reported:
            text += f" ({reported[metric]:.3f})"
        cells.append(text)
    cells.append(str(len(record.runs)) if record else "0")
    cells.append(training_cell(record))
    cells.append(cell(record.cost("peak_mib") if record else None, ",.0f"))
    return cells


def _comparisons(table: ResultTable, graph: str, records: Mapping[str, Record]) -> list[str]:
    """A paired bootstrap for each pair of rows that the table compares."""
    by_row = {row.name: records.get(row.record_name(graph)) for row in table.rows}
    sentences = []
    for name_a, name_b in table.pairs:
        a = by_row.get(name_a)
        b = by_row.get(name_b)
        if a and b:
            comparison = kg.compare_ranks(a.ranks, b.ranks, samples=BOOTSTRAP_SAMPLES, seed=0)
            sentences.append(f"{name_a} against {name_b}: {comparison.sentence(name_a, name_b)}")
    return [" ".join(sentences)] if sentences else []


def datasets_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Statistics of the data sets, counted where the data are available, and the published ones."""
    kinds = ("entities", "relations", "train", "valid", "test")
    rows = []
    facts = []
    for graph in GRAPHS:
        reported = published()["datasets"].get(graph)
        counted = counts.get(graph)
        shown = counted or reported
        if shown is None:
            continue
        if reported is None:
            as_published = "not in the paper"
        elif not counted:
            as_published = "not available"
        else:
            different = [kind for kind in kinds if counted[kind] != reported[kind]]
            differences = [f"{kind} {reported[kind]:,} published" for kind in different]
            as_published = ", ".join(differences) or "yes"
        rows.append([graph, *(f"{shown[kind]:,}" for kind in kinds), as_published])
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
        for graph in GRAPHS[:3]:
            if not registry.recipe_path(row, graph):
                continue
            recipe = registry.recipe_of(row, graph)
            theirs = reported[model][graph]
            ours = [
                recipe.model.dim,
                recipe.training.batch_size,
                recipe.regularizer.weight,
                recipe.regularizer.plain,
                recipe.regularizer.mapped,
            ]
            cells = [row.name, graph]
            for their_value, our_value in zip(theirs, ours, strict=True):
                is_same = their_value == our_value
                cells.append(f"{their_value:g}" if is_same else f"{their_value:g} → {our_value:g}")
            cells.append(f"{recipe.loss.frequency_weight:g}")
            cells.append(str(recipe.training.epochs))
            rows.append(cells)
            facts.append({"model": model, "graph": graph, "published": theirs, "ours": ours})
    text = TEXTS["hyperparameters"]
    return Table(text["title"], tuple(text["columns"]), rows, facts, [text["note"]], num_left=2)


def training_time(
    table: ResultTable, graphs: Iterable[str], records: Mapping[str, Record]
) -> dict[str, float] | None:
    """Seconds of one seed of every DURA row, summed.

    None if a row is missing, or if all runs of a row shared their device.
    """
    totals = {"training_seconds": 0.0, "warm_up_seconds": 0.0, "ranking_seconds": 0.0}
    for graph in graphs:
        for row in table.dura_rows:
            record = records.get(row.record_name(graph))
            if record is None or record.times_are_bounds:
                return None
            for kind in totals:
                seconds = record.cost(kind)
                if seconds is None:
                    return None
                totals[kind] += seconds
    return totals


@dataclass(frozen=True)
class Study:
    """A study: a function that measures, and functions that make its tables and its figure.

    The docstring of `measure` is the help of its command. It returns or yields results; with them
    the figure, where this shows data that the results do not contain, such as positions in the
    plane. The texts of a table are in tables.toml, with fields for the graph, the results and
    `fields` of these; where it has no columns there, they are the first of its rows. `further` has
    the rows of other tables by the names of their texts.

    With `merges`, results of several calls are kept together. A result has a `row`, a `seed` and
    `recipes`, which identify what was trained; it takes the place of that with its row and seed,
    and of those of its row with other recipes. Each is saved as soon as it is measured.
    """

    name: str
    measure: Callable[[Config, kg.Graph], Results | Iterator[Results] | tuple[Results, Drawing]]
    rows: MakeRows
    draw: Callable[[Results, str], Drawing] | None = None
    graphs: tuple[str, ...] = GRAPHS[:2]
    other_graphs: tuple[str, ...] = ()  # that are measured only where they are named
    several_seeds: bool = False
    by_device: bool = False  # whether results on a CPU are saved beside those on a GPU
    merges: bool = False
    further: Mapping[str, MakeRows] = field(default_factory=dict)
    fields: Callable[[Results], dict[str, Any]] = lambda results: {}

    def run(self, config: Config) -> list[Table]:
        """Measure it on the graphs of the configuration, and save results and figure."""
        # A missing library is reported before the long computation.
        with optional_import("matplotlib", purpose="A figure"):
            import matplotlib.figure  # noqa: F401
        with optional_import("scikit-learn", purpose="A figure"):
            import sklearn.manifold  # noqa: F401
        names = config.graphs(self.graphs, self.other_graphs)
        by_graph = config.on_each_graph(names, lambda name: self._run_on(config, name))
        return [table for tables in by_graph for table in tables]

    def _run_on(self, config: Config, name: str) -> list[Table]:
        graph = kg.load_graph(name)
        device = choose_device(config.device)
        on_cpu = self.by_device and device.type == "cpu"
        path = self.path(config.records, graph.name, suffix="-cpu" if on_cpu else "")
        made_with = environment(device, fingerprint=graph.fingerprint)
        earlier = self._earlier_results(path, graph)
        measured = self.measure(replace(config, earlier=tuple(earlier)), graph)
        results, drawing = measured if isinstance(measured, tuple) else (measured, None)
        saved = {"graph": graph.name, "environment": made_with, "results": earlier}
        if self.merges:
            for result in results:
                saved["results"] = merged(saved["results"], result)
                self.save(path, saved)
        else:
            saved["results"] = list(results) if isinstance(results, Iterator) else results
            self.save(path, saved, drawing)
        return self.tables(saved["results"], graph.name)

    def _earlier_results(self, path: Path, graph: kg.Graph) -> list[dict[str, Any]]:
        """The saved results on the same data, if those of several calls are kept together."""
        if not self.merges or not path.exists():
            return []
        saved = read_json(path)
        return saved["results"] if saved["environment"]["data"] == graph.fingerprint else []

    def tables(self, results: Results, graph: str) -> list[Table]:
        tables = []
        for name, make_rows in {self.name: self.rows, **self.further}.items():
            text = TEXTS[name]
            rows = list(make_rows(results))
            fields = {"graph": graph, "results": results, **self.fields(results)}
            note = text.get("note", "").format(**fields)
            table = Table(
                title=text.get("title", "").format(**fields),
                columns=tuple(text["columns"] if "columns" in text else rows.pop(0)),
                rows=rows,
                facts=results if isinstance(results, list) else [results],
                notes=[paragraph for paragraph in note.split("\n\n") if paragraph],
                num_left=text.get("num_left", 1),
            )
            tables.append(table)
        return tables

    def path(self, records: Path, graph: str, *, suffix: str = "") -> Path:
        return records / "figures" / f"{self.name}-{graph.lower()}{suffix}.json"

    def saved(self, records: Path) -> list[Path]:
        """The files of saved results, by graph."""
        paths = []
        for graph in dict.fromkeys((*GRAPHS, *self.graphs, *self.other_graphs)):
            for suffix in ("", "-cpu") if self.by_device else ("",):
                paths.append(self.path(records, graph, suffix=suffix))
        return [path for path in paths if path.exists()]

    def save(self, path: Path, saved: Mapping[str, Any], drawing: Drawing | None = None) -> None:
        """Write graph, environment and results as JSON, and the figure beside it."""
        if self.draw:
            drawing = self.draw(saved["results"], saved["graph"])
        if drawing:
            drawing.save(path.with_suffix(""))
        content = {"graph": saved["graph"], "environment": saved["environment"]}
        if drawing:
            content["caption"] = drawing.caption
        content["results"] = saved["results"]
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        write_text(path, f"{text}\n")

    def needs_runs(self, path: Path) -> bool:
        """Whether a figure is of more than its saved results, such as of embeddings."""
        return self.draw is None and "caption" in read_json(path)

    def redraw(self, path: Path) -> None:
        """Draw the figure of saved results again, unless it needs runs."""
        if self.draw:
            self.save(path, read_json(path))

    def page(self, path: Path) -> str:
        """Tables, figure and caption of saved results as Markdown."""
        saved = read_json(path)
        first, *others = self.tables(saved["results"], saved["graph"])
        parts = [first.as_markdown()]
        if "caption" in saved:
            parts += [f"![{first.title}](figures/{path.stem}.png)", saved["caption"]]
        parts += [table.as_markdown() for table in others]
        return "\n\n".join(parts)


def merged(results: list[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of a study with another one, by seed."""
    kept = []
    for earlier in results:
        is_replaced = earlier["row"] == result["row"] and (
            earlier["seed"] == result["seed"] or earlier["recipes"] != result["recipes"]
        )
        if not is_replaced:
            kept.append(earlier)
    return sorted([*kept, result], key=lambda one: one["seed"])


# -- pages -------------------------------------------------------------------


def write_pages(
    records: Path,
    studies: Iterable[Study],
    pages: Mapping[Path, Callable[[Path], str]] | None = None,
) -> None:
    """Write RESULTS.md, and the tables of other pages by the functions that make them."""
    with locked(records / "RESULTS.md", wait=True):
        write_text(records / "RESULTS.md", results_page(records, studies))
    for page, make_table in (pages or {}).items():
        with locked(page, wait=True):
            text = page.read_text(encoding="utf-8")
            write_text(page, with_table(text, make_table(records)))


def results_page(root: Path, studies: Iterable[Study]) -> str:
    """RESULTS.md: the tables and studies as far as they are recorded, then all records."""
    records = load_records(root)
    parts = ["# Results", TEXTS["page"]["about"]]
    seen: set[Row] = set()
    for table in TABLES.values():
        # A table whose only records are in tables above shows nothing new.
        new_rows = set(table.rows) - seen
        seen |= new_rows
        graphs = []
        for graph in (*GRAPHS, *table.other_graphs):
            if any(row.record_name(graph) in records for row in new_rows):
                graphs.append(graph)
        if not graphs:
            continue
        parts += [f"## {table.title}", f"{table.about} `python -m paper {table.name}`"]
        parts += [results_table(table, graph, records).as_markdown() for graph in graphs]
        times = training_time(MAIN, PUBLISHED_GRAPHS, records) if table is MAIN else None
        if times:
            parts.append(TEXTS["page"]["times"].format(**times))

    parts += ["## Hyper-parameters", hyperparameters_table().as_markdown(level=0)]
    if (root / DATASETS).exists():
        counts = read_json(root / DATASETS)["results"]
        parts += ["## Data sets", datasets_table(counts).as_markdown(level=0)]
    study_pages = [study.page(path) for study in studies for path in study.saved(root)]
    if study_pages:
        parts += ["## Studies", *study_pages]
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
        regularization = regularizer.name
        if regularizer.name != "none":
            regularization += f" λ={regularizer.weight:g}"
        seeds = str(len(record.runs))
        if any(is_uncommitted(run["environment"]) for run in record.runs):
            seeds += " †"
        cells = [
            f"[{name}]({name}/recipe.toml)",
            record.graph,
            model.name,
            str(model.dim),
            regularization,
            hardware(record.runs[0]["environment"]),
            seeds,
        ]
        cells += [over_seeds(record.values(metric)) for metric in metric_columns().values()]
        cells.append(over_seeds([run["valid"]["mrr"] for run in record.runs]))
        cells.append(training_cell(record))
        rows.append(cells)
    return Table("All records", columns, rows, num_left=6)


def hardware(environment: Mapping[str, Any]) -> str:
    if environment["device"] != "cpu":
        return str(environment["device"])
    threads = environment["threads"]
    noun = "thread" if threads == 1 else "threads"
    return f"{threads} {noun} of {environment['processor']}"


def with_table(page: str, table: str) -> str:
    """A page with the text between its two marks replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL)
