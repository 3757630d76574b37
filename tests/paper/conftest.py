from __future__ import annotations

from pathlib import Path

import pytest

import dualkg as kg
from paper import plan
from paper.plan import Row, Table

TINY = Table(
    "tiny",
    "Tiny",
    "Two rows.",
    (Row("ComplEx", "complex"), Row("ComplEx-DURA", "complex-dura"), Row("RESCAL", "rescal")),
    (("ComplEx-DURA", "ComplEx"),),
)


@pytest.fixture
def recipes(tmp_path, monkeypatch) -> Path:
    """Recipes of two of the three rows of a tiny table on the bundled graph."""
    folder = tmp_path / "recipes"
    (folder / "world").mkdir(parents=True)
    base = {"model.dim": 4, "training.epochs": 2, "training.batch_size": 500}
    dura = {"regularizer.name": "DURA", "regularizer.weight": 0.05}
    for stem, changes in (("complex", base), ("complex-dura", base | dura)):
        (folder / "world" / f"{stem}.toml").write_text(kg.Recipe().with_changes(changes).as_toml())
    monkeypatch.setattr(plan, "RECIPE_FOLDERS", (folder,))
    return folder
