"""Tables as text: measured against published results, data sets, hyper-parameters."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
        title = [f"{'#' * level} {self.title}", ""] if level else []
        ruler = ["---" if number < self.num_left else "--:" for number in range(len(self.columns))]
        lines = [_line(self.columns), f"|{'|'.join(ruler)}|", *map(_line, self.rows)]
        notes = [part for note in self.notes for part in ("", note)]
        return "\n".join([*title, *lines, *notes])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean_and_sd(value: tuple[float, float], num_values: int, *, digits: int = 4) -> str:
    """`0.4910 ± 0.0006`, or the mean alone for a single value."""
    mean, sd = value
    return f"{mean:.{digits}f}" if num_values == 1 else f"{mean:.{digits}f} ± {sd:.{digits}f}"


def over_seeds(values: list[float], *, digits: int = 4) -> str:
    return mean_and_sd(spread(values), len(values), digits=digits)


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
        cells = {"MRR": MISSING, "published": MISSING, "difference": MISSING, "seeds": "0", "training": MISSING}
        cells |= {"peak MiB": MISSING} | dict.fromkeys(hits, MISSING)
        if record:
            measured = {key: dict(zip(("mean", "sd"), record.metric(key), strict=True)) for key in METRICS.values()}
            difference = measured["mrr"]["mean"] - reported["mrr"] if reported else None
            costs = ("training_seconds", "warm_up_seconds", "ranking_seconds", "peak_mib")
            fact |= {"measured": measured, "difference": difference, "seeds": record.seeds}
            fact |= {name: record.cost(name) for name in costs}
            cells |= {name: f"{measured[METRICS[name]]['mean']:.4f}" for name in hits}
            cells |= {"MRR": mean_and_sd(record.metric("mrr"), len(record.runs)), "seeds": str(len(record.runs))}
            cells["training"] = training_cell(record)
            cells["peak MiB"] = MISSING if fact["peak_mib"] is None else f"{fact['peak_mib']:,.0f}"
            cells["difference"] = MISSING if difference is None else f"{difference:+.4f}"
        if reported:
            cells["published"] = f"{reported['mrr']:.3f}"
            cells |= {
                name: f"{cells[name]} ({reported[METRICS[name]]:.3f})" for name in hits if METRICS[name] in reported
            }
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
        for graph in GRAPHS[:3]:
            if recipe_path(row, graph) is None:
                continue
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


def training_time(
    table: ResultTable, graphs: tuple[str, ...], records: Mapping[str, Record]
) -> dict[str, float] | None:
    """Seconds of training, warm-up and ranking of one seed of every DURA row, summed.

    None if a row is missing or all its runs shared their device.
    """
    found = [records.get(row.record_name(graph)) for graph in graphs for row in table.dura_rows]
    total = dict.fromkeys(("training_seconds", "warm_up_seconds", "ranking_seconds"), 0.0)
    for record, kind in itertools.product(found, total):
        cost = None if record is None or record.times_are_bounds else record.cost(kind)
        if cost is None:
            return None
        total[kind] += cost
    return total
