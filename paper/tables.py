"""Tables as text: measured against published results, data sets, hyper-parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualkg.evaluation.comparison import compare_ranks
from dualkg.training.api import spread
from paper.records import Record
from paper.registry import GRAPHS, MAIN, METRICS, ResultTable, published, published_metrics, recipe_of, recipe_path

BOOTSTRAP_SAMPLES = 2000  # enough for an interval that is rounded to four digits
MISSING = "–"


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


def grouped(results: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Results with the same values of some keys, such as those of all seeds of a row, in the order of the first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    return groups


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def training_cell(record: Record | None) -> str:
    """The training time of one run; an upper bound (≤) where all runs shared their device."""
    seconds = record.cost("training_seconds") if record else None
    if record is None or seconds is None:
        return MISSING
    return ("≤ " if record.times_are_bounds else "") + duration(seconds)


def results_table(table: ResultTable, graph: str, records: Mapping[str, Record]) -> Table:
    """A table on one graph: measured and published metrics of each row, their difference in MRR, and the costs."""
    with_published = any(published_metrics(row.name, graph) for row in table.rows)
    hits = list(METRICS)[1:]
    columns = ["", "MRR", *(["published", "difference"] if with_published else [])]
    columns += [f"{name} (published)" if with_published else name for name in hits] + ["seeds", "training", "peak MiB"]
    rows, facts = [], []
    for row in table.rows:
        record, reported = records.get(row.record_name(graph)), published_metrics(row.name, graph)
        if record is None and not reported:
            continue
        fact: dict[str, Any] = {"row": row.name, "graph": graph, "published": reported, "measured": None}
        cells = dict.fromkeys(("MRR", "published", "difference", *hits, "training", "peak MiB"), MISSING)
        cells |= {"seeds": str(len(record.runs)) if record else "0", "training": training_cell(record)}
        if record:
            measured = {key: dict(zip(("mean", "sd"), record.metric(key), strict=True)) for key in METRICS.values()}
            difference = measured["mrr"]["mean"] - reported["mrr"] if reported else None
            costs = ("training_seconds", "warm_up_seconds", "ranking_seconds", "peak_mib")
            fact |= {"measured": measured, "difference": difference, "seeds": record.seeds}
            fact |= {name: record.cost(name) for name in costs}
            cells |= {name: f"{measured[METRICS[name]]['mean']:.4f}" for name in hits}
            cells["MRR"] = over_seeds(record.values("mrr"))
            if fact["peak_mib"] is not None:
                cells["peak MiB"] = f"{fact['peak_mib']:,.0f}"
            if difference is not None:
                cells["difference"] = f"{difference:+.4f}"
        if reported:
            cells["published"] = f"{reported['mrr']:.3f}"
            shown = [name for name in hits if METRICS[name] in reported]
            cells |= {name: f"{cells[name]} ({reported[METRICS[name]]:.3f})" for name in shown}
        facts.append(fact)
        rows.append([row.name, *(cells[column.removesuffix(" (published)")] for column in columns[1:])])
    return Table(f"{table.title}: {graph}", tuple(columns), rows, facts, notes=_comparisons(table, graph, records))


def _comparisons(table: ResultTable, graph: str, records: Mapping[str, Record]) -> list[str]:
    """A paired bootstrap for each pair of rows that the table compares."""
    found = {row.name: records.get(row.record_name(graph)) for row in table.rows}
    sentences = []
    for name_a, name_b in table.pairs:
        a, b = found.get(name_a), found.get(name_b)
        if a and b:
            comparison = compare_ranks(a.ranks, b.ranks, samples=BOOTSTRAP_SAMPLES, seed=0)
            sentences.append(f"{name_a} against {name_b}: {comparison.sentence(name_a, name_b)}")
    return [" ".join(sentences)] if sentences else []


def datasets_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Statistics of the data sets: counted where the data are available, against the published ones."""
    kinds = ("entities", "relations", "train", "valid", "test")
    rows, facts = [], []
    for graph in GRAPHS:
        reported, counted = published()["datasets"].get(graph), counts.get(graph)
        if counted is None and reported is None:
            continue
        same = "not in the paper" if reported is None else "not available"
        if counted and reported:
            different = [kind for kind in kinds if counted[kind] != reported[kind]]
            same = ", ".join(f"{kind} {reported[kind]:,} published" for kind in different) or "yes"
        shown = counted or reported
        rows.append([graph, *(f"{shown[kind]:,}" for kind in kinds), same])
        facts.append({"graph": graph, "published": reported, "counted": dict(counted) if counted else None})
    return Table("Data sets", ("graph", *kinds, "as published"), rows, facts)


def hyperparameters_table() -> Table:
    """The published hyper-parameters, and those of the recipes."""
    reported = published()["hyperparameters"]
    rows, facts = [], []
    for row in MAIN.dura_rows:
        model = row.name.removesuffix("-DURA")
        for graph in (graph for graph in GRAPHS[:3] if recipe_path(row, graph)):
            recipe = recipe_of(row, graph)
            weights = recipe.regularizer
            ours = [recipe.model.dim, recipe.training.batch_size, weights.weight, weights.plain, weights.mapped]
            pairs = zip(reported[model][graph], ours, strict=True)
            cells = [f"{theirs:g}" if theirs == own else f"{theirs:g} → {own:g}" for theirs, own in pairs]
            rows.append([row.name, graph, *cells, f"{recipe.loss.frequency_weight:g}", str(recipe.training.epochs)])
            facts.append({"model": model, "graph": graph, "published": reported[model][graph], "ours": ours})
    note = "published → ours where the two differ; docs/reproduce.md says why."
    columns = ("", "graph", "k", "batch", "λ", "λ1", "λ2", "w0", "epochs")
    return Table("Hyper-parameters", columns, rows, facts, [note], num_left=2)


def training_time(table: ResultTable, graphs: Iterable[str], records: Mapping[str, Record]) -> dict[str, float] | None:
    """Seconds of one seed of every DURA row, summed; None if a row is missing or all its runs shared their device."""
    found = [records.get(row.record_name(graph)) for graph in graphs for row in table.dura_rows]
    if not all(record and not record.times_are_bounds for record in found):
        return None
    kinds = ("training_seconds", "warm_up_seconds", "ranking_seconds")
    costs = {kind: [record.cost(kind) for record in found] for kind in kinds}
    return None if any(None in values for values in costs.values()) else {kind: sum(costs[kind]) for kind in kinds}
