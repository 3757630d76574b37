"""Shared by all tests: a cache folder for the session, few threads, commands, small graphs, the
benchmark graphs.
"""

import functools
import gc
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from typer.main import get_command

import dualkg as kg
from dualkg.cli.main import app, main

# Collecting thousands of tests leaves little garbage, and searching for it takes a seventh of the
# time.
gc.disable()

# Its assertions explain themselves as those of tests do.
pytest.register_assert_rewrite("tests.raising")

# No deadlines, since a busy machine is no failure. `make test-slow` uses the profile "thorough".
settings.register_profile("ordinary", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("ordinary")

LONGEST = re.compile(
    r"tests/(tuning|serve/browser|training/test_(distributed|killed_runs|memory)|workflows"
    r"|paper/test_|cli/test_[bm]|test_)"
)

# The process that only starts the workers of pytest-xdist imports this file, and needs no PyTorch.
WORLD = Path(kg.__file__).parent / "data" / "world"
DATA = Path(os.environ.get("DUALKG_DATA") or Path(__file__).parents[2] / "shared" / "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first: short ones at the end keep all workers of pytest-xdist
    busy.
    """
    items.sort(key=lambda item: LONGEST.match(item.nodeid) is None)


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections, and collect rarely: it took a twentieth of
    the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep the user's cache and archives out of the tests; each worker of pytest-xdist has a cache
    folder.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("DUALKG_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("DUALKG_DATA", raising=False)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory):
    """An empty folder of certificates: no test uses TLS, and where SSL_CERT_FILE is set, each
    client of httpx would read that file for 30 ms.
    """
    patch = pytest.MonkeyPatch()
    patch.delenv("SSL_CERT_FILE", raising=False)
    patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Two threads, or one for each worker of pytest-xdist and for each process that its tests
    start.
    """
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(1 if workers > 1 else min(2, os.cpu_count() or 1))
    patch = pytest.MonkeyPatch()
    if workers > 1:
        patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _short_measurements():
    """Measure the speed of an index with three queries, not for a second."""
    from dualkg.inference import index

    patch = pytest.MonkeyPatch()
    patch.setattr(index, "SECONDS", 0.0)
    yield
    patch.undo()


@pytest.fixture
def data_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of benchmark archives, named in DUALKG_DATA as users name it."""
    if not DATA.is_dir():
        pytest.skip(
            f"the benchmark archives are not here: name their folder in DUALKG_DATA ({DATA} is "
            "missing)"
        )
    monkeypatch.setenv("DUALKG_DATA", str(DATA))
    return DATA


@pytest.fixture(scope="session")
def folder_of_small_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled graph with a tenth of its entities: those with the most triples, and three more
    that the docs name.
    """
    folder = tmp_path_factory.mktemp("small")
    (folder / "world").mkdir()
    shutil.copy(WORLD.parent / "catalogue.json", folder)
    splits = {
        name: (WORLD / f"{name}.tsv").read_text("utf-8").splitlines()
        for name in ("train", "valid", "test")
    }
    ends = (
        line.split("\t")[place] for lines in splits.values() for line in lines for place in (0, 2)
    )
    kept = {entity for entity, _ in Counter(ends).most_common(200)}
    kept |= {"Paris", "Japan", "Japanese Yen"}
    for name, lines in splits.items():
        inside = [line for line in lines if {line.split("\t")[0], line.split("\t")[2]} <= kept]
        (folder / "world" / f"{name}.tsv").write_text("\n".join(inside) + "\n", "utf-8")
    return folder


@pytest.fixture
def small_world(folder_of_small_world, monkeypatch) -> None:
    """Replace the bundled graph by a small part of it, where what is trained does not matter."""
    from dualkg.data import loading

    monkeypatch.setattr(
        loading, "resources", SimpleNamespace(files=lambda package: folder_of_small_world)
    )


class CommandResult(NamedTuple):
    """The exit status of a command, and its output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@functools.cache  # typer makes it anew in every call, which takes longer than most commands
def commands() -> Any:
    return get_command(app)


@pytest.fixture
def run_cli(capsys, monkeypatch) -> Callable[..., CommandResult]:
    """Run a command in this process: `run_cli("train", "world")`."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: object) -> CommandResult:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["dualkg", *map(str, words)])
        try:
            main(commands())
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return CommandResult(code, out, err)

    return run


def graph_of(
    train, valid=(), test=(), *, num_entities: int | None = None, num_relations: int | None = None
) -> "kg.Graph":
    """A graph of ids, entities named e0, e1, … and relations r0, r1, …"""
    splits = [np.array(list(part), dtype=np.int32).reshape(-1, 3) for part in (train, valid, test)]
    joined = np.concatenate(splits)
    num_entities = num_entities or int(joined[:, [0, 2]].max(initial=0)) + 1
    num_relations = num_relations or int(joined[:, 1].max(initial=0)) + 1
    return kg.Graph(
        "made",
        kg.Vocabulary([f"e{i}" for i in range(num_entities)]),
        kg.Vocabulary([f"r{i}" for i in range(num_relations)], kind="relation"),
        *splits,
    )


@pytest.fixture
def small_graph() -> "kg.Graph":
    """A random graph of 30 entities and 4 relations."""
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 300) for n in (30, 4, 30)], axis=1), axis=0)
    random.shuffle(triples)
    return graph_of(triples[40:], triples[:20], triples[20:40], num_entities=30, num_relations=4)
