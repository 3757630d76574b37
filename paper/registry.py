"""The tables of the paper: their rows, the recipe of each row, and the published numbers."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dualkg as kg
from dualkg.errors import RequestError, UnknownName, close_matches

FOLDER = Path(__file__).parent
RECIPE_FOLDERS = (Path(kg.__file__).parent / "recipes", FOLDER / "recipes")
"""Recipes that ship with the package, and those that only the tables of the paper use."""
SPACES = FOLDER / "spaces"
GRAPHS = ("WN18RR", "FB15k-237", "YAGO3-10", "YAGO3-10-quarter", "world")
PUBLISHED_GRAPHS = GRAPHS[:2]
MODELS = ("CP", "RESCAL", "ComplEx")
REGULARIZERS = {"": "", "DURA": "-dura", "FRO": "-frobenius", "N3": "-n3", "Reg_p1": "-regp1"}
METRICS = {"MRR": "mrr", "H@1": "hits_at_1", "H@10": "hits_at_10"}
"""Column titles of the paper's tables, and the metrics they show."""
PUBLISHED_TABLES = (
    "main_results",
    "regularizers",
    "reg_p1",
    "published_elsewhere",
    "published_since",
)
"""Parts of published.json, in the order in which a row is looked up in them."""


@dataclass(frozen=True)
class Row:
    """A row of a table: its name in the paper and the file name of its recipe.

    The file name is the same on every graph. A row without a recipe only shows published numbers.
    """

    name: str
    recipe: str = ""

    def record_name(self, graph: str) -> str:
        """The path of its recipe and its record below `recipes` and `records`."""
        return f"{graph.lower()}/{self.recipe}"


@dataclass(frozen=True)
class ResultTable:
    """A table of test metrics: its rows, and the pairs of rows whose difference is tested.

    It is made for `GRAPHS`, and for `other_graphs`.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    pairs: tuple[tuple[str, str], ...]
    other_graphs: tuple[str, ...] = ()

    @property
    def dura_rows(self) -> list[Row]:
        """The rows of the paper's own models with DURA."""
        names = {f"{model}-DURA" for model in MODELS}
        return [row for row in self.rows if row.name in names]

    def row(self, name: str) -> Row:
        """Look up a row by its name, ignoring case."""
        rows = {row.name: row for row in self.rows}
        return rows[spelled(name, rows, kind=f"row of the table {self.name}")]


def spelled(name: str, names: Iterable[str], *, kind: str) -> str:
    """One of some names as it is written, ignoring case."""
    known = {known_name.casefold(): known_name for known_name in names}
    if name.casefold() not in known:
        spellings = list(known.values())
        raise UnknownName(kind, name, suggestions=close_matches(name, spellings), known=spellings)
    return known[name.casefold()]


def model_row(name: str) -> Row:
    """`ComplEx-DURA` → the row with the recipe `complex-dura`."""
    model, _, regularizer = name.partition("-")
    return Row(name, model.lower() + REGULARIZERS[regularizer])


def _table(
    name: str,
    title: str,
    about: str,
    rows: list[str | dict[str, str]],
    pairs: list[list[str]],
    other_graphs: Iterable[str] = (),
) -> ResultTable:
    table_rows = tuple(model_row(row) if isinstance(row, str) else Row(**row) for row in rows)
    table_pairs = tuple(map(tuple, pairs))
    return ResultTable(name, title, about, table_rows, table_pairs, tuple(other_graphs))


_TOML = tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8"))
TABLES = {name: _table(name, **table) for name, table in _TOML["results"].items()}
MAIN = TABLES["main"]
PATHS = TABLES["paths"]
PATH_NETWORK = PATHS.row("PathNetwork")
TEXTS: dict[str, dict[str, Any]] = _TOML["texts"]


def recipe_path(row: Row, graph: str) -> Path | None:
    """The recipe file of a row on a graph; None if there is none."""
    if not row.recipe:
        return None
    paths = [folder / f"{row.record_name(graph)}.toml" for folder in RECIPE_FOLDERS]
    return next((path for path in paths if path.exists()), None)


def recipe_of(row: Row, graph: str) -> kg.Recipe:
    path = recipe_path(row, graph)
    if path is None:
        raise RequestError(
            f"{row.name} has no recipe on {graph}: {row.record_name(graph)}.toml is missing."
        )
    return kg.load_recipe(path)


def rows_with_recipes(rows: Iterable[Row], graph: str) -> list[Row]:
    return [row for row in rows if recipe_path(row, graph)]


@cache
def published() -> dict[str, Any]:
    """The numbers of the paper, and of work published since."""
    return json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))


def published_metrics(row: str, graph: str) -> dict[str, float]:
    """The published metrics of a system on a graph, such as CP-DURA on WN18RR.

    Metrics that were not published are left out.
    """
    for table in PUBLISHED_TABLES:
        values = published()[table].get(row, {}).get(graph)
        if values:
            metrics = zip(METRICS.values(), values, strict=True)
            return {name: value for name, value in metrics if value is not None}
    return {}
