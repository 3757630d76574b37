import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dualkg as kg
from dualkg.cli import main
from paper import registry
from paper.__main__ import app
from paper.registry import ResultTable, Row
from tests.conftest import CommandResult

TINY = ResultTable(
    "tiny",
    "Tiny",
    "Two rows.",
    (Row("ComplEx", "complex"), Row("ComplEx-DURA", "complex-dura"), Row("RESCAL", "rescal")),
    (("ComplEx-DURA", "ComplEx"),),
)
BASE = {"model.dim": 4, "training.epochs": 2, "training.batch_size": 500}
DURA = {"regularizer.name": "DURA", "regularizer.weight": 0.05}


@pytest.fixture(autouse=True)
def _small_world(small_world) -> None:
    """What these tests train need not be good."""


@pytest.fixture(autouse=True)
def _committed(monkeypatch, tmp_path):
    """A copy of a commit. A developer's tree often has uncommitted changes, which are refused."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))
    monkeypatch.setenv("DUALKG_COMMIT", "0123456789ab")


@pytest.fixture
def write_recipes(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Replace all recipes by tiny ones on the bundled graph: name → changes."""

    def write(recipes: dict[str, dict[str, object]]) -> Path:
        folder = tmp_path / "recipes"
        (folder / "world").mkdir(parents=True)
        for name, changes in recipes.items():
            (folder / "world" / f"{name}.toml").write_text(
                kg.Recipe().with_changes(BASE | changes).as_toml()
            )
        monkeypatch.setattr(registry, "RECIPE_FOLDERS", (folder,))
        return folder

    return write


@pytest.fixture
def recipes(write_recipes) -> Path:
    """Recipes of two of the three rows of TINY."""
    return write_recipes({"complex": {}, "complex-dura": DURA})


@pytest.fixture
def run_paper(capsys, monkeypatch, tmp_path) -> Callable[..., CommandResult]:
    """Run `python -m paper` in this process and in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> CommandResult:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["python -m paper", *map(str, words)])
        try:
            main(app)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return CommandResult(code, out, err)

    return run
