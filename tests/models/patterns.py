"""Tiny graphs of one pattern each, and the patterns that each model finds.

A graph withholds triples that follow from its pattern alone. `CAPABILITIES` says which model finds
them, as the table in docs/models.md does. Reciprocal relations are left out: a second relation
would say what the model cannot.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import dualkg as kg
from dualkg.regularizers import Regularizer
from tests.conftest import graph_of
from tests.families import EMBEDDINGS

Triple = tuple[int, int, int]
FOUND = 0.8  # the least MRR of the withheld triples that counts as found
MISSED = 0.65  # the most that a model may have of which the table says that it does not find them


@dataclass(frozen=True)
class Pattern:
    """What is trained on, and what follows from it."""

    train: list[Triple]
    withheld: list[Triple]

    @property
    def graph(self) -> kg.Graph:
        return graph_of(self.train, self.withheld, self.withheld)


def pattern(known: Iterable[Triple], follows: Iterable[tuple[Triple, bool]]) -> Pattern:
    """Triples that are known, and those that follow from them: the marked are withheld, the others
    are examples.
    """
    follows = list(follows)
    examples = [triple for triple, withheld in follows if not withheld]
    return Pattern([*known, *examples], [triple for triple, withheld in follows if withheld])


def symmetry(num_pairs: int = 16) -> Pattern:
    """r(a, b) ⇒ r(b, a): entities in pairs, of a quarter of which one direction is withheld."""
    pairs = [(2 * i, 2 * i + 1) for i in range(num_pairs)]
    return pattern(
        ((a, 0, b) for a, b in pairs),
        (((b, 0, a), i % 4 == 0) for i, (a, b) in enumerate(pairs)),
    )


def chains(num_chains: int = 10) -> list[tuple[int, int, bool]]:
    """Steps along chains of four entities, and whether what follows from a step is withheld: the
    inner one, of half.
    """
    return [
        (4 * chain + i, 4 * chain + i + 1, i == 1 and chain % 2 == 1)
        for chain in range(num_chains)
        for i in range(3)
    ]


def antisymmetry() -> Pattern:
    """r(a, b) ⇒ not r(b, a): steps along chains, which a second relation takes again, and never
    backwards.
    """
    return pattern(
        ((a, 0, b) for a, b, _ in chains()), (((a, 1, b), withheld) for a, b, withheld in chains())
    )


def inversion() -> Pattern:
    """r(a, b) ⇔ r′(b, a): steps along chains, which a second relation takes back."""
    return pattern(
        ((a, 0, b) for a, b, _ in chains()), (((b, 1, a), withheld) for a, b, withheld in chains())
    )


def composition(size: int = 16) -> Pattern:
    """r(a, b) and r′(b, c) ⇒ r″(a, c): three layers of entities, every relation one-to-one."""
    ways = [(i, size + i, 2 * size + i) for i in range(size)]
    return pattern(
        [triple for a, b, c in ways for triple in ((a, 0, b), (b, 1, c))],
        (((a, 2, c), i % 4 == 0) for i, (a, _, c) in enumerate(ways)),
    )


def one_to_many(num_heads: int = 6, num_tails: int = 4) -> Pattern:
    """Heads have four tails each, which have four marks; each of the two relations holds again
    under a second name.

    Were the tails of a head all one point, the marks could not be distinguished.
    """
    cells = [
        (i, j, num_heads + i * num_tails + j) for i in range(num_heads) for j in range(num_tails)
    ]
    first_mark = num_heads + len(cells)
    owned = [((i, 0, tail), (i, 1, tail), (i + j) % 4 == 0) for i, j, tail in cells]
    marked = [
        ((tail, 2, first_mark + j), (tail, 3, first_mark + j), (i + j) % 4 == 2)
        for i, j, tail in cells
    ]
    return pattern(
        (known for known, _, _ in owned + marked),
        ((again, withheld) for _, again, withheld in owned + marked),
    )


PATTERNS: dict[str, Pattern] = {
    "symmetry": symmetry(),
    "antisymmetry": antisymmetry(),
    "inversion": inversion(),
    "composition": composition(),
    "one-to-many": one_to_many(),
}

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
YES = "yes"  # training finds the withheld triples
NO = "no"  # the algebra forbids it, or what is trained leads nowhere
IN_PRINCIPLE = "in principle"  # there are numbers that say it, and training does not find them


def table(first: str) -> dict[str, dict[str, str]]:
    """A table of docs/models.md by the start of its header: for each model, the cells by column."""
    text = PAGE.read_text(encoding="utf-8")
    match = re.search(rf"^(\| {re.escape(first)} .*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.M)
    assert match, f"docs/models.md has no table that begins with {first}"
    _, *columns = _cells(match[1])
    rows = {}
    for line in match[2].splitlines():
        name, *cells = _cells(line)
        rows[re.sub(r"\W", "", name)] = dict(zip(columns, cells, strict=True))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# What the page says, which the tests hold against trained models.
CAPABILITIES: dict[str, dict[str, str]] = table("model | symmetry")


@dataclass(frozen=True)
class Setting:
    """How a model is trained on every pattern: `weight` is DURA's where a model has two maps, else
    Frobenius'.
    """

    dim: int = 8
    init_scale: float = 0.1
    weight: float = 0.05
    learning_rate: float = 0.1
    epochs: int = 50


USUAL = Setting()
SETTINGS: dict[str, Setting] = {
    "CP": Setting(dim=16),
    "DistMult": Setting(dim=16),
    "QuatE": Setting(learning_rate=0.05),
    "TransE": Setting(learning_rate=0.3),
    "ModE": Setting(learning_rate=0.3, weight=0.02, epochs=100),
    "SE": Setting(learning_rate=0.3, weight=0.1, epochs=100),
    "MuRP": Setting(dim=12, init_scale=0.01, epochs=100),
}


class StopWhenFound(kg.Callback):
    """Ends a training once the validation split is found, which saves most of the epochs."""

    def __init__(self, found: Callable[[kg.Report], bool]) -> None:
        self.found = found

    def on_validation(self, epoch: int, report: kg.Report) -> None:
        if self.found(report):
            raise kg.StopTraining


def trained(name: str, graph: kg.Graph, *, reciprocal: bool = False, seed: int = 0) -> kg.Run:
    """A model trained on the graph of a pattern, its report on the withheld triples."""
    setting = SETTINGS.get(name, USUAL)
    model = EMBEDDINGS[name](
        graph.shape,
        dim=setting.dim,
        reciprocal=reciprocal,
        init_scale=setting.init_scale,
        seed=seed,
    )
    return kg.train(
        model,
        graph,
        regularizer=_regularizer(model, setting.weight),
        optimizer=kg.Optimizer(learning_rate=setting.learning_rate),
        validation=kg.Validation(every=10, keep="last"),
        callbacks=[StopWhenFound(lambda report: report.mrr > 0.97)],
        epochs=setting.epochs,
        batch_size=500,
        device="cpu",
    )


def _regularizer(model: kg.EmbeddingModel, weight: float) -> Regularizer:
    if model.has_adjoint:
        return kg.DURA(weight)
    return kg.Frobenius(weight) if model.euclidean else kg.NoRegularizer()


def all_above_their_reverse(model: kg.Model, triples: list[Triple]) -> bool:
    """Whether each r(a, b) scores above r(b, a)."""
    heads, relations, tails = torch.tensor(triples).T
    return bool((model.score(heads, relations, tails) > model.score(tails, relations, heads)).all())
