"""Two ways to score one set of embeddings: by inner products, and by the distances of the dual."""

from __future__ import annotations

from typing import Any

from dualkg.data.filters import KnownAnswers
from dualkg.evaluation.report import evaluate
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.distance import ModE, RotatE
from dualkg.models.dual import Dual
from paper.plan import Row, rows_with_recipes
from paper.setting import Setting
from paper.sheets import Sheet, over_seeds

ROWS = tuple(
    Row(name, stem)
    for name, stem in (
        ("CP", "cp"),
        ("CP-DURA", "cp-dura"),
        ("RESCAL", "rescal"),
        ("RESCAL-DURA", "rescal-dura"),
        ("ComplEx", "complex"),
        ("ComplEx-DURA", "complex-dura"),
        ("RotatE", "rotate"),
        ("ModE", "mode"),
    )
)
WAYS = ("as trained", "inner product", "distance, tail's side", "distance, head's side")


def ways_to_score(model: Model) -> dict[str, Model]:
    """The model as it was trained, and the other models that have its embeddings."""
    primal = model.primal() if isinstance(model, RotatE | ModE) else model
    assert isinstance(primal, BilinearModel), "rows are of models with a bilinear one behind them"
    duals = {f"distance, {side}'s side": Dual(primal, side) for side in ("tail", "head")}
    return {"as trained": model, "inner product": primal, **duals}


def duality(setting: Setting) -> list[Sheet]:
    """Each model trained as it is, and ranked by both kinds of score."""
    return [_sheet(setting, name) for name in setting.graphs]


def _sheet(setting: Setting, name: str) -> Sheet:
    graph = setting.graph(name)
    known = KnownAnswers.of(graph)
    rows: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for row in rows_with_recipes(ROWS, graph.name):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(setting.seeds):
            model = setting.trained(row, graph, seed).model
            for way, one in ways_to_score(model).items():
                found[way].append(evaluate(one, graph, split="test", known=known).mrr)
        rows.append([row.name, *(over_seeds(mrr) for mrr in found.values()), str(setting.seeds)])
        facts.append({"row": row.name, "graph": graph.name, "mrr": found})
    note = (
        "The same embeddings in a row. Inner product and distance differ by two norms, which DURA bounds; RotatE and "
        "ModE are trained by a distance, with another norm, and have ComplEx and DistMult behind them."
    )
    columns = ("test MRR, scored", *WAYS, "seeds")
    sheet = Sheet(f"Inner product and distance: {graph.name}", columns, rows, facts, [note])
    return setting.keep("duality", sheet, facts, graph=graph)
