"""What is reproduced: the rows of each of the paper's tables, and the recipe that each of them is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import dualkg
from dualkg.errors import RequestError, did_you_mean
from dualkg.training.recipe import Recipe, load_recipe

GRAPHS = ("WN18RR", "FB15k-237", "YAGO3-10", "YAGO3-10-quarter", "world")


@dataclass(frozen=True)
class Row:
    """A row of a table: its name as the paper has it, and the file name of its recipe on every graph.

    A row without one is there for what was published.
    """

    name: str
    stem: str = ""

    def record_name(self, graph: str) -> str:
        """Where recipe and record of this row lie, below `recipes` and `records`."""
        return f"{graph.lower()}/{self.stem}"


@dataclass(frozen=True)
class Table:
    """A table of the paper: its rows, and the pairs of rows whose difference is its point."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    pairs: tuple[tuple[str, str], ...]

    @property
    def with_dura(self) -> list[Row]:
        """Those of the paper's own models."""
        return [row for row in self.rows if row.name in {f"{model}-DURA" for model in MODELS}]

    def row(self, name: str) -> Row:
        """The row of a name, case aside."""
        found = next((row for row in self.rows if row.name.casefold() == name.casefold()), None)
        if found is None:
            names = [row.name for row in self.rows]
            near = did_you_mean(name, names) or f" Its rows are {', '.join(names)}."
            raise RequestError(f"The table {self.name} has no row '{name}'.{near}")
        return found


MODELS = ("CP", "RESCAL", "ComplEx")
OTHERS = ("RotatE", "MuRP", "HAKE", "TuckER")  # that the paper compares with
_STEMS = {"": "", "DURA": "-dura", "FRO": "-frobenius", "N3": "-n3", "Reg_p1": "-regp1"}


def _row(name: str) -> Row:
    model, _, regularizer = name.partition("-")
    return Row(name, f"{model.lower()}{_STEMS[regularizer]}")


def _table(name: str, title: str, about: str, rows: tuple[str, ...], pairs: tuple[tuple[str, str], ...]) -> Table:
    return Table(name, title, about, tuple(_row(row) for row in rows), pairs)


MAIN = _table(
    "main",
    "Main results",
    "The models that the paper compares with; then each of its own without a regularizer and with DURA (its second "
    "table).",
    (*OTHERS, *MODELS, *(f"{model}-DURA" for model in MODELS)),
    tuple((f"{model}-DURA", model) for model in MODELS),
)
REGULARIZERS = _table(
    "regularizers",
    "DURA against other regularizers",
    "Frobenius, N3 and DURA; N3 is not defined for RESCAL.",
    ("CP-FRO", "CP-N3", "CP-DURA", "ComplEx-FRO", "ComplEx-N3", "ComplEx-DURA", "RESCAL-FRO", "RESCAL-DURA"),
    (("CP-DURA", "CP-N3"), ("ComplEx-DURA", "ComplEx-N3"), ("RESCAL-DURA", "RESCAL-FRO")),
)
P1 = _table(
    "p1",
    "p = 1",
    "Reg_p1, the regularizer of Appendix B that the L1 distance leaves, against DURA.",
    ("RESCAL-Reg_p1", "RESCAL-DURA", "ComplEx-Reg_p1", "ComplEx-DURA"),
    (("RESCAL-DURA", "RESCAL-Reg_p1"), ("ComplEx-DURA", "ComplEx-Reg_p1")),
)
ABLATIONS = Table(
    "ablations",
    "Ablations",
    "What the paper says in words: both duals against one (basic DURA), and a mean over the training triples against a "
    "mean over all entities and relations (unweighted). ComplEx at dim 500.",
    (
        Row("DURA", "complex-dura-dim-500"),
        Row("basic DURA", "complex-basic-dura-dim-500"),
        Row("unweighted DURA", "complex-unweighted-dura-dim-500"),
    ),
    (("DURA", "basic DURA"), ("DURA", "unweighted DURA")),
)
BEYOND = Table(
    "beyond",
    "Beyond the paper",
    "What more than the paper's choices gives one model: relation prediction as a second loss on FB15k-237, answers of "
    "a question as targets together on WN18RR. Beside them what others published since, of embedding models trained "
    "on triples alone.",
    (
        Row("ComplEx-N3 + relation prediction (Chen et al. 2021)"),
        Row("MetaSD (2022)"),
        Row("ComplEx-ER (2022)"),
        Row("RESCAL-ER (2022)"),
        Row("TuckER-IVR (2024)"),
        _row("ComplEx-DURA"),
        Row("ComplEx-DURA, relation prediction", "complex-dura-relation-prediction"),
        _row("RESCAL-DURA"),
        Row("RESCAL-DURA, by question", "rescal-dura-grouped"),
    ),
    (("ComplEx-DURA, relation prediction", "ComplEx-DURA"), ("RESCAL-DURA, by question", "RESCAL-DURA")),
)
CAST = _table(
    "cast",
    "The rest of the cast",
    "The distance models that the paper argues with, and DURA for models that are not its own.",
    ("TransE", "TransE-DURA", "SE", "ModE", "RotatE", "RotatE-DURA", "TuckER", "TuckER-DURA"),
    tuple((f"{model}-DURA", model) for model in ("TransE", "RotatE", "TuckER")),
)
TABLES = {table.name: table for table in (MAIN, REGULARIZERS, P1, ABLATIONS, BEYOND, CAST)}


RECIPE_FOLDERS = (Path(dualkg.__file__).parent / "recipes", Path(__file__).parent / "recipes")
"""Recipes that ship with the package, and those of the tables of the paper alone."""


def recipe_path(row: Row, graph: str) -> Path | None:
    """The recipe file of a row on a graph; None where there is none."""
    paths = [folder / f"{row.record_name(graph)}.toml" for folder in RECIPE_FOLDERS]
    return next((path for path in paths if row.stem and path.exists()), None)


def spaces_folder() -> Path:
    """Where the search spaces of the paper are."""
    return Path(__file__).parent / "spaces"


def recipe_of(row: Row, graph: str) -> Recipe:
    """The recipe of a row on a graph."""
    path = recipe_path(row, graph)
    if path is None:
        raise RequestError(f"There is no recipe of {row.name} on {graph}: {row.record_name(graph)}.toml is missing.")
    return load_recipe(path)


def rows_with_recipes(rows: Iterable[Row], graph: str) -> list[Row]:
    """Those rows that have a recipe on a graph."""
    return [row for row in rows if recipe_path(row, graph)]


def graph_named(name: str) -> str:
    """The name of a graph that is reproduced on, as it is written, case aside."""
    found = next((graph for graph in GRAPHS if graph.casefold() == name.casefold()), None)
    if found is None:
        near = did_you_mean(name, GRAPHS) or f" There are {', '.join(GRAPHS)}."
        raise RequestError(f"'{name}' is no graph of these tables.{near}")
    return found
