"""Everything that can be reproduced, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dualkg.data.loading import load_graph
from dualkg.errors import DataError
from dualkg.training.api import choose_device
from paper import answers, figures
from paper.cost import cost_sheet, measure_cost
from paper.duality import duality
from paper.plan import GRAPHS, MAIN, TABLES, Table, recipe_of
from paper.records import load_records
from paper.setting import Setting
from paper.sheets import Sheet
from paper.start import reproduce
from paper.tables import datasets_sheet, hyperparameters_sheet, table_sheet


def _table(table: Table, setting: Setting) -> list[Sheet]:
    for graph in setting.graphs:
        reproduce(
            table,
            graph,
            seeds=setting.seeds,
            records=setting.records,
            runs=setting.runs,
            only=setting.rows,
            device=setting.device,
            beside_others=setting.beside_others,
            tell=setting.tell,
            on_progress=setting.on_progress,
        )
    records = load_records(setting.records)
    return [table_sheet(table, graph, records) for graph in setting.graphs]


def _datasets(setting: Setting) -> list[Sheet]:
    counts = {}
    for graph in GRAPHS:
        try:
            counts[graph] = load_graph(graph).counts
        except DataError as error:
            setting.tell(f"{graph} is not here: {error}")
    sheet = datasets_sheet(counts)
    return [setting.keep("datasets", sheet, sheet.facts)]


def _hyperparameters(setting: Setting) -> list[Sheet]:
    sheet = hyperparameters_sheet()
    return [setting.keep("hyperparameters", sheet, sheet.facts)]


def _cost(setting: Setting) -> list[Sheet]:
    """A step of the main table's models with three regularizers."""
    sheets = []
    for name in setting.graphs:
        graph, found = load_graph(name), []
        for row in MAIN.with_dura:
            setting.tell(f"{row.name} on {name}: steps with three regularizers.")
            found.append(measure_cost(recipe_of(row, name), graph, device=choose_device(setting.device)))
        sheets.append(setting.keep("cost", cost_sheet(found), found, graph=graph))
    return sheets


REPRODUCTIONS: dict[str, Callable[[Setting], list[Sheet]]] = {
    **{name: partial(_table, table) for name, table in TABLES.items()},
    "datasets": _datasets,
    "hyperparameters": _hyperparameters,
    "cost": _cost,
    "duality": duality,
    "lambdas": figures.lambdas,
    "tsne": figures.tsne,
    "figure1": figures.plane,
    "sparsity": figures.sparsity,
    "completion": answers.completion,
    "calibration": answers.calibration,
    "forms": answers.forms,
    "inductive_entities": answers.inductive_entities,
    "reasons": answers.reasons,
}
