"""The house plan, held against the imports."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dualkg

SOURCE = Path(dualkg.__file__).parent
# A room may import only rooms before it. The foundation knows no room.
FOUNDATION = ["errors", "files"]
ROOMS = [
    "kernels",
    "data",
    "models",
    "regularizers",
    "losses",
    "evaluation",
    "training",
    "search",
    "analysis",
    "answers",
    "reproduce",
    "serve",
    "cli",
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("dualkg.")}


def test_rooms_import_only_rooms_to_their_left():
    order = FOUNDATION + ROOMS
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in order, f"{path} is in no room of the plan"
        allowed = [room, *(FOUNDATION if room in FOUNDATION else order[: order.index(room)])]
        wrong += [f"{path.relative_to(SOURCE)} imports {other}" for other in imported_rooms(path) - set(allowed)]
    assert not wrong


def test_the_command_line_does_no_arithmetic():
    wrong = [
        path
        for path in (SOURCE / "cli").glob("*.py")
        if {"torch", "numpy"}
        & {node.names[0].name for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)}
    ]
    assert not wrong


def test_files_stay_small():
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 320
    }
    assert not long


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh process has after some lines."""
    shown = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout.split())


def test_importing_is_light():
    """Nothing heavy but torch, and no extra; and nothing at all before a name is asked for."""
    assert not {"torch", "numpy", "pyarrow", "pydantic"} & loaded_by("import dualkg")
    loaded = loaded_by("import dualkg; dualkg.train")
    assert "torch" in loaded
    heavy = {
        "numba",
        "optuna",
        "triton",
        "pyarrow.compute",
        "pyarrow.dataset",
        "pyoxigraph",
        "pooch",
        "requests",
        "sklearn",
        "scipy",
        "matplotlib",
        "faiss",
        "fastapi",
        "uvicorn",
        "rich",
        "typer",
    }
    assert not heavy & loaded


def test_help_is_given_without_torch():
    assert not {"torch", "pyarrow", "pydantic"} & loaded_by("import dualkg.cli")


def test_public_names_are_those_of_the_rooms_that_type_checkers_see():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("dualkg")]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert set(seen) == set(dualkg.__all__) <= set(dir(dualkg))
    for name, room in seen.items():
        assert getattr(dualkg, name) is getattr(importlib.import_module(room), name)
        assert getattr(dualkg, room.split(".")[1]) is importlib.import_module(room)
    with pytest.raises(AttributeError, match="module 'dualkg' has no attribute 'ComplEks'"):
        _ = dualkg.ComplEks


def test_the_public_surface():
    assert sorted(dualkg.__all__, key=str.lower) == [
        "Answer",
        "BasicDURA",
        "BilinearModel",
        "compare_ranks",
        "Comparison",
        "ComplEx",
        "CP",
        "DataError",
        "DistanceModel",
        "DistMult",
        "DivergedError",
        "Dual",
        "DualkgError",
        "DURA",
        "EmbeddingModel",
        "evaluate",
        "evaluate_relations",
        "Frobenius",
        "from_arrays",
        "list_recipes",
        "Graph",
        "GraphShape",
        "HAKE",
        "KnownAnswers",
        "load_graph",
        "load_recipe",
        "load_run",
        "Loss",
        "Metrics",
        "ModE",
        "Model",
        "MuRP",
        "N3",
        "NoRegularizer",
        "Optimizer",
        "Predictor",
        "QuatE",
        "rank",
        "Ranks",
        "Recipe",
        "RegP1",
        "Regularizer",
        "Report",
        "RequestError",
        "RESCAL",
        "resume",
        "RotatE",
        "Run",
        "SE",
        "SimplE",
        "train",
        "train_recipe",
        "TransE",
        "TuckER",
        "UnweightedDURA",
        "Validation",
        "Vocabulary",
    ]
    assert all(hasattr(dualkg, name) for name in dualkg.__all__)


def test_what_is_no_code_is_packed_too():
    """An installed copy reads the same files as a clone."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["dualkg"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    needed = {
        path
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert needed <= packed


def test_recipes_are_package_data_and_nothing_is_installed_outside_the_package():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = project["tool"]["setuptools"]
    assert "recipes/*/*.toml" in setuptools["package-data"]["dualkg"]
    assert "data-files" not in setuptools
    assert (SOURCE / "recipes" / "umls" / "complex-dura.toml").exists()
