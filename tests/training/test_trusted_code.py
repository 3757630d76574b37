"""Classes that files name are imported only with trust: somebody else's run folder, recipe or
search space.
"""

import shutil
import sys
from pathlib import Path

import pytest

import dualkg as kg
from dualkg.errors import RequestError
from dualkg.files import write_json
from dualkg.training.run_folder import RunFolder

# Importing it leaves a file, as the code of an attacker would.
FOREIGN = """
from pathlib import Path
import torch
import dualkg as kg
Path("imported").touch()
class Model(kg.ComplEx): pass
class Penalty(kg.N3): pass
class Loss(kg.OneVsAll): pass
class Step(kg.Optimizer):
    def build(self, parameters):
        return torch.optim.SGD(parameters, lr=self.learning_rate)
"""
CLASSES = {
    "model": "foreign:Model",
    "regularizer": "foreign:Penalty",
    "loss": "foreign:Loss",
    "optimizer": "foreign:Step",
}
REFUSED = r"recipe\.toml names the class foreign:\w+, which is not part of dualkg, .* use {}\."


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished run on `world`, and one that is not finished."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {
        "training.epochs": 1,
        "model.dim": 2,
        "regularizer.name": "N3",
        "regularizer.weight": 0.1,
    }
    kg.train_recipe(kg.Recipe().with_changes(changes), out=folder / "run")
    shutil.copytree(folder / "run", folder / "unfinished")
    unfinished = RunFolder(folder / "unfinished")
    unfinished.report.unlink()
    unfinished.weights.rename(unfinished.checkpoint)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with foreign code beside the runs, whose recipes do not name it yet."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "foreign.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign", raising=False)
    return tmp_path


def name_class(folder: str, table: str = "model") -> Path:
    """Name a foreign class in the recipe of a run, and forget its checksums, as somebody else
    could.
    """
    path = Path(folder) / "recipe.toml"
    tables = kg.load_recipe(path).model_dump()
    path.write_text(
        path.read_text().replace(f'name = "{tables[table]["name"]}"', f'name = "{CLASSES[table]}"')
    )
    run = RunFolder(folder)
    if run.report.exists():
        write_json(run.report, run.saved_reports())
    return path


@pytest.mark.parametrize("table", CLASSES)
def test_a_run_of_somebody_else_imports_nothing(here: Path, table: str) -> None:
    recipe = name_class("run", table)
    shutil.copytree("run", "seeds/seed-0")
    loads = [
        lambda: kg.load_run("run"),
        lambda: kg.load_recipe(recipe),
        lambda: kg.load_run("seeds"),
        lambda: kg.Ensemble(["run"]),
        lambda: kg.calibrate("run"),
        lambda: kg.complete("run"),
    ]
    for load in loads:
        with pytest.raises(RequestError, match=REFUSED.format("`trust_code=True`")):
            load()
    name_class("unfinished", table)
    with pytest.raises(RequestError, match=REFUSED.format("`trust_code=True`")):
        kg.resume("unfinished")
    assert not Path("imported").exists()
    run = kg.load_run("run", trust_code=True)
    assert CLASSES[table] in run.recipe.as_toml()
    run.recipe.regularizer.build()
    assert Path("imported").exists()
    kg.load_run("run")  # the program has imported the module by now


TRIPLE = ["--head", "Kenya", "--relation", "borders", "--tail", "Uganda"]
COMMANDS = [
    ["predict", "run", *TRIPLE[:4]],
    ["predict", "run", "--similar", "Kenya"],
    ["explain", "run", *TRIPLE],
    ["evaluate", "run"],
    ["compare", "run", "unfinished"],
    ["calibrate", "run"],
    ["complete", "run"],
    ["extend", "run", "new.tsv", "--out", "out"],
    ["ensemble", "run", "run", "--out", "out"],
    ["index", "run"],
    ["export", "run", "--out", "out"],
    ["serve", "run", "--get", "/health"],
    ["resume", "unfinished"],
    ["train", "run/recipe.toml"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_every_command_needs_the_word(here: Path, run_cli, command: list[str]) -> None:
    for folder in ("run", "unfinished"):
        name_class(folder)
    result = run_cli(*command)
    assert result.code == 2, result.err
    assert "foreign:Model, which is not part of dualkg" in result.err
    assert "use --trust-code" in result.err
    assert not Path("imported").exists()


def test_with_the_word_a_command_imports(here: Path, run_cli) -> None:
    name_class("run")
    assert run_cli("evaluate", "run", "--trust-code", "--json").json["metrics"]
    assert Path("imported").exists()


def test_a_search_space_and_a_tuning_file_need_the_word(here: Path, run_cli) -> None:
    for line in (
        '"model.name" = ["ComplEx", "foreign:Model"]',
        '[space.loss]\nname = ["foreign:Loss"]',
    ):
        Path("space.toml").write_text(f"[space]\n{line}\n")
        assert "space.toml names the class foreign:" in run_cli("tune", "space.toml").err
    unfinished = RunFolder("unfinished")
    unfinished.checkpoint.unlink()
    unfinished.tuning.write_text('{"trials": [], "start": {"model": {"name": "foreign:Model"}}}')
    assert "tuning.json names the class foreign:Model" in run_cli("resume", "unfinished").err
    assert not Path("imported").exists()


def test_a_class_that_is_typed_needs_no_word(here: Path, run_cli) -> None:
    words = [
        "--model",
        "foreign:Model",
        "--dim",
        "2",
        "--epochs",
        "1",
        "--no-tune",
        "--seeds",
        "2",
        "--out",
        "own",
    ]
    assert run_cli("train", "world", *words).code == 0
    sys.modules.pop("foreign")
    assert run_cli("train", "world", *words).code == 0  # finished seeds are not repeated
