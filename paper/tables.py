"""The paper's tables, published against measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualkg.analysis.records import Record
from dualkg.evaluation.comparison import compare_ranks
from paper.plan import GRAPHS, MAIN, MODELS, Table, recipe_of
from paper.published import COLUMNS, published, published_metrics
from paper.sheets import Sheet, duration, mean_and_sd

SAMPLES = 2000  # of a bootstrap: enough for an interval that a page rounds to four digits
NOTHING = "–"


def table_sheet(table: Table, graph: str, records: Mapping[str, Record]) -> Sheet:
    """One table on one graph: of each row our figures, what was published, and the difference in MRR."""
    with_published = any(published_metrics(row.name, graph) for row in table.rows)
    columns = ["", "MRR", *(["published", "difference"] if with_published else [])]
    columns += [f"{name} (published)" if with_published else name for name in list(COLUMNS)[1:]]
    columns += ["seeds", "training", "peak MiB"]
    rows, facts = [], []
    for row in table.rows:
        record, printed = records.get(row.record_name(graph)), published_metrics(row.name, graph)
        if record is None and not printed:
            continue
        facts.append({"row": row.name, "graph": graph, "published": printed, **_ours(record, printed)})
        rows.append([row.name, *_metric_cells(record, printed, with_published=with_published), *_cost_cells(record)])
    return Sheet(f"{table.title}: {graph}", tuple(columns), rows, facts, notes=_notes(table, graph, records))


def _ours(record: Record | None, printed: Mapping[str, float]) -> dict[str, Any]:
    if record is None:
        return {"ours": None}
    ours = {key: dict(zip(("mean", "sd"), record.metric(key), strict=True)) for key in COLUMNS.values()}
    difference = ours["mrr"]["mean"] - printed["mrr"] if printed else None
    costs = {name: record.cost(name) for name in ("training_seconds", "warm_up_seconds", "ranking_seconds", "peak_mib")}
    return {"ours": ours, "difference": difference, "seeds": record.seeds, **costs}


def _metric_cells(record: Record | None, printed: Mapping[str, float], *, with_published: bool) -> list[str]:
    """MRR ± sd, what was published, the difference; then the hits, each with the published one behind it."""
    cells = [mean_and_sd(record.metric("mrr"), len(record.runs)) if record else NOTHING]
    if with_published:
        cells.append(f"{printed['mrr']:.3f}" if printed else NOTHING)
        cells.append(f"{record.metric('mrr')[0] - printed['mrr']:+.4f}" if record and printed else NOTHING)
    for key in list(COLUMNS.values())[1:]:
        ours = f"{record.metric(key)[0]:.4f}" if record else NOTHING
        theirs = f" ({printed[key]:.3f})" if key in printed else ""
        cells.append(ours + theirs)
    return cells


def _cost_cells(record: Record | None) -> list[str]:
    if record is None:
        return ["0", NOTHING, NOTHING]
    peak = record.cost("peak_mib")
    shown = NOTHING if peak is None else f"{peak:,.0f}"
    return [str(len(record.runs)), training_cell(record), shown]


def training_cell(record: Record | None) -> str:
    """How long one training took; no more than, where other work shared the device."""
    bound = "≤ " if record and record.times_are_bounds else ""
    return bound + duration(record.cost("training_seconds") if record else None)


def _notes(table: Table, graph: str, records: Mapping[str, Record]) -> list[str]:
    """What lies between the rows that a table compares, and whether it is more than noise."""
    by_name = {row.name: records.get(row.record_name(graph)) for row in table.rows}
    sentences = []
    for better, worse in table.pairs:
        ours = [by_name.get(name) for name in (better, worse)]
        ranks = [record.ranks() for record in ours if record is not None]
        if len(ranks) == 2 and ranks[0] is not None and ranks[1] is not None:
            found = compare_ranks(ranks[0], ranks[1], samples=SAMPLES, seed=0)
            sentences.append(f"{better} against {worse}: {found.sentence(better, worse)}")
    return [" ".join(sentences)] if sentences else []


def datasets_sheet(counts: Mapping[str, Mapping[str, int]]) -> Sheet:
    """The table of data sets: what was counted, where it is here, against what is printed."""
    kinds = ("entities", "relations", "train", "valid", "test")
    rows, facts = [], []
    for graph in GRAPHS:
        printed, counted = published()["datasets"].get(graph), counts.get(graph)
        if counted is None and printed is None:
            continue
        same = "no such row" if printed is None else "not here" if counted is None else "yes"
        if counted and printed and any(counted[kind] != printed[kind] for kind in kinds):
            same = ", ".join(f"{kind} {printed[kind]:,} printed" for kind in kinds if counted[kind] != printed[kind])
        shown = counted or printed
        rows.append([graph, *(f"{shown[kind]:,}" for kind in kinds), same])
        facts.append({"graph": graph, "published": printed, "counted": dict(counted) if counted else None})
    return Sheet("Data sets", ("graph", *kinds, "as printed"), rows, facts)


def hyperparameters_sheet() -> Sheet:
    """The table of hyper-parameters: those printed, and those of our recipes."""
    printed = published()["hyperparameters"]
    names = ("k", "batch", "λ", "λ1", "λ2")
    rows, facts = [], []
    for model in MODELS:
        for graph in GRAPHS[:3]:
            recipe = recipe_of(next(row for row in MAIN.with_dura if row.name == f"{model}-DURA"), graph)
            kept = recipe.regularizer
            ours = [recipe.model.dim, recipe.training.batch_size, kept.weight, kept.plain, kept.mapped]
            pairs = zip(printed[model][graph], ours, strict=True)
            cells = [f"{theirs:g}" if theirs == own else f"{theirs:g} → {own:g}" for theirs, own in pairs]
            weight = recipe.loss.frequency_weight
            rows.append([f"{model}-DURA", graph, *cells, f"{weight:g}", str(recipe.training.epochs)])
            facts.append({"model": model, "graph": graph, "published": printed[model][graph], "ours": ours})
    note = "Where two stand in a cell, the first is printed and the second is ours: docs/reproduce.md says why."
    return Sheet("Hyper-parameters", ("", "graph", *names, "w0", "epochs"), rows, facts, [note], num_left=2)


def training_time(table: Table, graphs: tuple[str, ...], records: Mapping[str, Record]) -> dict[str, float] | None:
    """One seed of every DURA row, together: seconds of training, and of what is not.

    None where a row is missing, or was trained beside other work alone.
    """
    names = [row.record_name(graph) for graph in graphs for row in table.with_dura]
    found = [records[name] for name in names if name in records]
    kinds = ("training_seconds", "warm_up_seconds", "ranking_seconds")
    costs = {kind: [record.cost(kind) for record in found] for kind in kinds}
    bounds = any(record.times_are_bounds for record in found)
    if bounds or len(found) < len(names) or any(cost is None for one in costs.values() for cost in one):
        return None
    return {kind: sum(cost for cost in one if cost is not None) for kind, one in costs.items()}
