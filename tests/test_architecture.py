"""The architecture: package order, sizes, imports, declared dependencies, package data, public
names.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dualkg
from tests.processes import run_python, unload

SOURCE = Path(dualkg.__file__).parent
# A package may import only packages before it. The base modules are importable by all and import no
# package.
BASE = ["delimited", "errors", "registry", "settings", "files", "extras", "logs"]
PACKAGES = [
    "kernels",
    "data",
    "tables",
    "models",
    "regularizers",
    "losses",
    "evaluation",
    "training",
    "tuning",
    "analysis",
    "inference",
    "workflows",
    "serve",
    "cli",
]
# Distributions whose import name differs from their own.
IMPORT_NAMES = {
    "scikit-learn": "sklearn",
    "faiss-cpu": "faiss",
    "prometheus-client": "prometheus_client",
    "opentsne": "openTSNE",
    "mlflow-skinny": "mlflow",
}
# Declared and never imported by name: others load them, such as SQLAlchemy the driver psycopg.
NOT_IMPORTED = {"uvloop", "tensorboard", "alembic", "psycopg"}
# Triton is part of PyTorch's CUDA build, and is used only where it is installed.
NOT_DECLARED = {"triton"}


@cache
def trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def imported_modules(tree: ast.AST) -> set[str]:
    """The dotted names that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_packages(tree: ast.AST) -> set[str]:
    """The packages of dualkg that a module imports, wherever in it.

    The root package leads to all others, so importing it, or a public name from it, is the package
    "dualkg".
    """
    packages = set()
    for name in imported_modules(tree):
        root, _, rest = name.partition(".")
        if root != "dualkg" or rest == "__version__":
            continue
        package = rest.partition(".")[0]
        is_module = (SOURCE / package).is_dir() or (SOURCE / f"{package}.py").is_file()
        packages.add(package if package and is_module else "dualkg")
    return packages


def project() -> dict[str, Any]:
    return tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-bench.txt"])
def test_a_version_is_pinned_once(file):
    """Names differ in case and separators, and pip does not tell them apart."""
    lines = (SOURCE.parents[1] / file).read_text(encoding="utf-8").splitlines()
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0].casefold()) for line in lines]
    assert len(names) == len(set(names))


# A shortcut: `run.predictor()` imports the package of predictors when it is called.
SHORTCUT = ("training/run.py", "inference")


def test_packages_import_only_packages_to_their_left():
    order = BASE + PACKAGES
    wrong = []
    for path, tree in trees().items():
        package = path.relative_to(SOURCE).with_suffix("").parts[0]
        if package in ("__init__", "__main__"):
            continue
        assert package in order, f"{path} is in no package of the layout"
        allowed = {*BASE} if package in BASE else {*order[: order.index(package)], package}
        if package == "cli":
            allowed.add("dualkg")  # the commands use the public names
        for imported in imported_packages(tree) - allowed:
            if (path.relative_to(SOURCE).as_posix(), imported) != SHORTCUT:
                wrong.append(f"{path.relative_to(SOURCE)} imports {imported}")
    assert not wrong


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import dualkg", "dualkg"),
        ("def f():\n    import dualkg as kg", "dualkg"),
        ("def f():\n    from dualkg import Predictor", "dualkg"),
        ("if TYPE_CHECKING:\n    import dualkg.inference.api", "inference"),
        ("from dualkg import files", "files"),
        ("from dualkg.data.graph import Graph", "data"),
    ],
)
def test_imports_of_the_root_package_and_in_functions_are_seen(code, package):
    assert imported_packages(ast.parse(code)) == {package}


def test_modules_of_a_package_do_not_import_each_other_in_a_circle():
    """Type-checking imports count too: a circle of types is a circle of ideas."""
    modules = {
        ".".join(("dualkg", *path.relative_to(SOURCE).with_suffix("").parts)): tree
        for path, tree in trees().items()
    }
    modules = {name: tree for name, tree in modules.items() if not name.endswith("__init__")}
    prefixes = {  # `dualkg.data.graph.Graph` is imported from dualkg.data.graph
        name: {one.rpartition(".")[0] for one in imported_modules(tree)} | imported_modules(tree)
        for name, tree in modules.items()
    }
    imports = {name: (names & modules.keys()) - {name} for name, names in prefixes.items()}
    imports["dualkg.training.run"].discard("dualkg.inference.predictor")  # see SHORTCUT
    reachable = {name: set(others) for name, others in imports.items()}
    for _ in range(len(PACKAGES)):
        for others in reachable.values():
            others |= {far for near in others for far in imports[near]}
    in_circles = {name for name, others in reachable.items() if name in others}
    assert not in_circles


def test_the_command_line_leaves_arrays_to_the_packages():
    """It imports no array library, but `set_threads`, which is not about arrays."""
    wrong = []
    for path, tree in trees().items():
        arrays = {"torch", "numpy"} & {name.split(".")[0] for name in imported_modules(tree)}
        if path.parent == SOURCE / "cli" and path.name != "common.py" and arrays:
            wrong.append(path.name)
    assert not wrong
    common = trees()[SOURCE / "cli" / "common.py"]
    users = [
        node.name
        for node in ast.walk(common)
        if isinstance(node, ast.FunctionDef) and "torch" in imported_modules(node)
    ]
    assert users == ["set_threads"]


def test_a_name_means_one_class():
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_init_files_only_re_export():
    """A docstring, imports and `__all__`; beside them may be tables of what a package offers, and a
    `__getattr__` that imports a name on first use.
    """
    allowed = (
        ast.Expr,
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AugAssign,
        ast.AnnAssign,
        ast.With,
    )
    wrong = [
        f"{path.relative_to(SOURCE)}, line {node.lineno}"
        for path, tree in trees().items()
        if path.name == "__init__.py" and path.parent != SOURCE
        for node in tree.body
        if not isinstance(node, allowed) and not _is_for_first_use(node)
    ]
    assert not wrong


def _is_for_first_use(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef) and node.name == "__getattr__"


def test_third_party_imports_are_declared_and_declared_packages_are_imported():
    declared_by_extra = project()["project"]["optional-dependencies"]
    lists = [project()["project"]["dependencies"]]
    lists += [
        names for extra, names in declared_by_extra.items() if extra not in ("dev", "docs", "world")
    ]
    distributions = {re.split(r"[<>=;\[ ]", line)[0].lower() for names in lists for line in names}
    declared = {IMPORT_NAMES.get(name, name) for name in distributions}
    paper = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (SOURCE.parents[1] / "paper").glob("*.py")
    ]
    imported = {
        name.split(".")[0]
        for tree in [*trees().values(), *paper]
        for name in imported_modules(tree)
    }
    third_party = imported - set(sys.stdlib_module_names) - {"dualkg", "paper", "__future__"}
    assert third_party - declared == NOT_DECLARED & third_party
    paper = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (SOURCE.parents[1] / "paper").rglob("*.py")
    ]
    used = third_party | {name.split(".")[0] for tree in paper for name in imported_modules(tree)}
    assert declared - used == NOT_IMPORTED & declared


# What one must load to use one thing is bounded: modules that a module imports at module level.
CLOSURES = {"dualkg.models.diagonal": 25, "dualkg.inference.predictor": 75, "dualkg.serve.app": 140}


def module_level_imports(tree: ast.Module) -> set[str]:
    """The dotted names that are imported when a module is, but for those of type checkers."""
    names = set()
    statements: list[ast.stmt] = list(tree.body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.If):
            is_typing = "TYPE_CHECKING" in ast.unparse(node.test)
            statements += node.orelse if is_typing else node.body + node.orelse
        elif isinstance(node, ast.Try):
            statements += node.body
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("module", "limit"), CLOSURES.items())
def test_what_one_must_load_is_bounded(module, limit):
    by_name = {}
    for path, tree in trees().items():
        parts = ("dualkg", *path.relative_to(SOURCE).with_suffix("").parts)
        by_name[".".join(part for part in parts if part != "__init__")] = tree
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        ancestors = [name[: match.start()] for match in re.finditer(r"\.", name)]
        for needed in {*ancestors, name} & by_name.keys() - loaded:
            loaded.add(needed)
            waiting += module_level_imports(by_name[needed])
    assert len(loaded) <= limit


def test_every_file_is_in_a_row_of_the_mechanisms():
    """And the lines of a row are not out of date."""
    page = SOURCE.parents[1] / "docs" / "mechanisms.md"
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| ([\d,]+) \|", page.read_text("utf-8"), re.M)
    named = set()
    stale = []
    for mechanism, where, lines in rows:
        files = {path for pattern in re.findall("`(.+?)`", where) for path in matches(pattern)}
        named |= files
        counted = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        if abs(counted - int(lines.replace(",", ""))) > 0.15 * counted:
            stale.append((mechanism, lines, counted))
    assert not stale
    files = {path for path in trees() if path.name not in ("__init__.py", "__main__.py")}
    assert files - named == set()


def matches(pattern: str) -> list[Path]:
    """The files of `a/{b,c}.py` or `a/*.py`."""
    braces = re.search(r"\{(.*)\}", pattern)
    names = braces[1].split(",") if braces else [""]
    patterns = [pattern.replace(braces[0], name) if braces else pattern for name in names]
    found = [list(SOURCE.glob(each)) for each in patterns]
    assert all(found), pattern
    return [path for paths in found for path in paths]


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh process has imported after running `code`."""
    printed = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", printed], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_importing_is_light():
    """`import dualkg` loads nothing heavy, and the first name that is used loads torch and no
    extra.
    """
    assert not {"torch", "numpy", "pyarrow", "pydantic"} & loaded_by("import dualkg")
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
        "jinja2",
        "rapidfuzz",
        "tensorboard",
        "mlflow",
        "wandb",
        "rich",
        "typer",
    }
    code = "import dualkg, sys; dualkg.train; print(*sys.modules)"
    loaded = set(run_python(unload(heavy) + code).out.split())
    assert "torch" in loaded
    assert not heavy & loaded


def test_help_is_printed_without_torch():
    assert not {"torch", "pyarrow", "pydantic"} & loaded_by("import dualkg.cli")


# Packages whose exported names are all public: every model, loss and regularizer is.
EXPORTING = ("models", "losses", "regularizers")


def test_public_names_are_those_that_type_checkers_see():
    tree = trees()[SOURCE / "__init__.py"]
    modules = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("dualkg"):
            continue
        for alias in node.names:
            names = [alias.name]
            if alias.name == "*":
                names = importlib.import_module(node.module).__all__
            modules.update(dict.fromkeys(names, node.module))
    assert set(modules) == set(dualkg.__all__) <= set(dir(dualkg))
    for name, module in modules.items():
        package = module.split(".")[1]
        assert getattr(dualkg, name) is getattr(importlib.import_module(module), name)
        assert getattr(dualkg, package) is importlib.import_module(f"dualkg.{package}")
    with pytest.raises(AttributeError, match="module 'dualkg' has no attribute 'ComplEks'"):
        _ = dualkg.ComplEks
    with pytest.raises(AttributeError):
        _ = dualkg._private


def test_every_model_loss_and_regularizer_is_public():
    for registry in (dualkg.MODELS, dualkg.LOSSES, dualkg.REGULARIZERS):
        for item in registry.values():
            assert getattr(dualkg, item.__name__) is item


def test_the_public_surface():
    exported = set()
    for package in EXPORTING:
        exported |= set(importlib.import_module(f"dualkg.{package}").__all__)
    assert sorted(set(dualkg.__all__) - exported, key=str.lower) == [
        "calibrate",
        "Callback",
        "compare_ranks",
        "Comparison",
        "complete",
        "DataError",
        "DivergedError",
        "DualkgError",
        "Ensemble",
        "evaluate",
        "evaluate_relations",
        "fit",
        "from_arrays",
        "from_libkge",
        "from_pykeen",
        "Graph",
        "GraphShape",
        "KnownAnswers",
        "list_recipes",
        "load_graph",
        "load_recipe",
        "load_run",
        "Metrics",
        "MLflow",
        "Optimizer",
        "predict_file",
        "Prediction",
        "Predictor",
        "rank",
        "Ranks",
        "Recipe",
        "Report",
        "RequestError",
        "resume",
        "Run",
        "search",
        "StopTraining",
        "TensorBoard",
        "train",
        "train_recipe",
        "TrainedRun",
        "Validation",
        "Vocabulary",
        "WandB",
    ]
    assert all(hasattr(dualkg, name) for name in dualkg.__all__)


def test_data_files_are_package_data():
    """An installed copy reads the same files as a clone: catalogue, `world`, recipes, templates,
    static files.
    """
    assert "data-files" not in project()["tool"]["setuptools"]
    patterns = project()["tool"]["setuptools"]["package-data"]["dualkg"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    assert all(any(SOURCE.glob(pattern)) for pattern in patterns)
    needed = {
        path
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert needed <= packed
    assert {"recipes/umls/complex-dura.toml", "serve/static/style.css", "data/catalogue.json"} <= {
        path.relative_to(SOURCE).as_posix() for path in packed
    }
