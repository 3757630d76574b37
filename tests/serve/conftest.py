"""Two runs of a graph whose names look like markup, paths or commands, and servers for them."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

import dualkg as kg
from dualkg.inference.api import calibrate
from dualkg.inference.predictor import Predictor, Query, QueryType
from dualkg.serve.app import application
from dualkg.serve.served import ServedRuns
from dualkg.serve.server import address_of, bind, server_for
from dualkg.serve.service import Limits
from tests.processes import LIMIT, until

HOSTILE = [
    "<script>alert('x')</script>",
    "\"quoted\" & 'so'",
    "../../etc/passwd",
    "$(touch /tmp/owned); `id`",
    "two\nlines\r\nHTTP/1.1 200 OK",
    "/m/0abc/d",
    "notes.json",
    "שלום עולם",
    "\u202ereversed\x1b[31m",
    "long " * 200,
    "100%2F?&=#",
    " ",
]


def hostile_graph() -> kg.Graph:
    """40 entities and 3 relations."""
    random = np.random.default_rng(0)
    columns = [random.integers(0, number, 400) for number in (40, 3, 40)]
    triples = np.unique(np.stack(columns, axis=1), axis=0).astype(np.int32)
    random.shuffle(triples)
    names = [*HOSTILE, *(f"thing {i}" for i in range(len(HOSTILE), 40))]
    return kg.Graph(
        "made",
        kg.Vocabulary(names, {"thing 20": "Twenty", "thing 21": "Twenty-one"}),
        kg.Vocabulary(["likes", "is a", "<b>bold</b>"], kind="relation"),
        train=triples[:-100],
        valid=triples[-100:-50],
        test=triples[-50:],
        fingerprint="made",
    )


@pytest.fixture(scope="session")
def untouched_folders(tmp_path_factory) -> list[Path]:
    """The folders of `calibrated`, and of `plain`, which has no probabilities.

    Tests copy them, since servers write into run folders.
    """
    folder = tmp_path_factory.mktemp("serve")
    graph = hostile_graph()
    for name, seed in (("calibrated", 0), ("plain", 1)):
        model = kg.ComplEx(graph.shape, dim=4)
        run = kg.train(model, graph, regularizer=kg.DURA(0.01), batch_size=64, epochs=3, seed=seed)
        run.save(folder / name)
    calibrate(folder / "calibrated")
    return [folder / "calibrated", folder / "plain"]


@pytest.fixture(scope="session")
def run_folders(untouched_folders, tmp_path_factory) -> list[Path]:
    """Copies of the two folders that all tests share."""
    copies = tmp_path_factory.mktemp("served")
    return [shutil.copytree(folder, copies / folder.name) for folder in untouched_folders]


@pytest.fixture(scope="session")
def served(run_folders) -> ServedRuns:
    return ServedRuns.load(run_folders, device="cpu")


@contextmanager
def serving(app) -> Iterator[str]:
    """The address of an application that runs in a thread."""
    with running(app) as (address, _):
        yield address


@contextmanager
def running(app) -> Iterator[tuple[str, uvicorn.Server]]:
    """The address and the server of an application that runs in a thread."""
    listening = bind("127.0.0.1", 0)
    server = server_for(app, limits=replace(app.state.service.limits, shutdown_seconds=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        yield address_of(listening), server
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        listening.close()


@pytest.fixture
def client_of(served) -> Iterator[Callable[..., httpx.Client]]:
    """Start a server with some options: `client_of(token="secret")`."""
    with ExitStack() as stack:

        def start(
            limits: Limits | None = None, *, runs: ServedRuns = served, **options
        ) -> httpx.Client:
            address = stack.enter_context(serving(application(runs, limits=limits, **options)))
            return stack.enter_context(httpx.Client(base_url=address, timeout=LIMIT))

        yield start


@pytest.fixture(scope="session")
def address(served) -> Iterator[str]:
    with serving(application(served)) as address:
        yield address


@pytest.fixture(scope="session")
def client(address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=LIMIT) as client:
        yield client


class StandIn:
    """A predictor that does something before it answers a batch of queries."""

    def __init__(self, predictor: Predictor, *, before: Callable[[], object]) -> None:
        self._predictor = predictor
        self._before = before

    def __getattr__(self, name: str) -> object:
        return getattr(self._predictor, name)

    def predict(self, kind: QueryType, queries: list[Query]) -> object:
        self._before()
        return self._predictor.predict(kind, queries)


def with_predictors(served: ServedRuns, *, before: Callable[[], object]) -> ServedRuns:
    """The runs with predictors that do something first."""
    return ServedRuns(
        [replace(run, predictor=StandIn(run.predictor, before=before)) for run in served]
    )


class Blocked:
    """A context within which no query of `runs` is answered."""

    def __init__(self, served: ServedRuns) -> None:
        self._finish = threading.Event()
        self.runs = with_predictors(served, before=lambda: self._finish.wait(LIMIT))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._finish.set()


@pytest.fixture
def blocked(served) -> Blocked:
    return Blocked(served)


def fail() -> None:
    raise ZeroDivisionError("secret with a\nline end")


@pytest.fixture
def failing(served) -> ServedRuns:
    """Runs whose predictors raise an unexpected exception."""
    return with_predictors(served, before=fail)
