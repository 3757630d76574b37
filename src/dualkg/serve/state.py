"""The files of decisions of the runs that are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar

from fastapi import Request

from dualkg.analysis.projection import Vectors, entity_map
from dualkg.data.graph import relations_with_self_loops
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.inference.calibration_store import load_calibration
from dualkg.inference.decisions import DecisionStore
from dualkg.inference.names import NameSearch
from dualkg.inference.predictor import Predictor, Query, QueryType
from dualkg.serve.batching import Asker
from dualkg.serve.limits import Limits
from dualkg.serve.metrics import Counts, Journal
from dualkg.serve.schemas import Answer
from dualkg.training.api import choose_device
from dualkg.training.run import Run, RunFolder, load_run


class UnknownError(RequestError):
    """A name that nothing has; `near` are names that may have been meant."""

    def __init__(self, sentence: str, near: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.near = list(near)


@dataclass(frozen=True, eq=False)
class ServedRun:
    """A run with all that answering takes."""

    name: str
    run: Run
    predictor: Predictor
    checks: dict[str, Any] = field(default_factory=dict)  # how its probabilities held on test

    @classmethod
    def of(cls, run: Run, *, name: str, device: str | None = None) -> ServedRun:
        """With probabilities and prediction sets where the run has been calibrated."""
        run.model = run.model.to(choose_device(device))
        if not run.folder or not RunFolder(run.folder).calibration.exists():
            return cls(name, run, Predictor(run.model, run.graph, recipe=run.recipe, cache=True))
        calibration_data = load_calibration(run.folder, run.graph)
        predictor = Predictor(
            run.model,
            run.graph,
            recipe=run.recipe,
            calibration=calibration_data.calibration,
            prediction_sets=calibration_data.prediction_sets,
            cache=True,
        )
        return cls(name, run, predictor, calibration_data.checks)

    @property
    def entities(self) -> Vocabulary:
        return self.run.graph.entities

    @property
    def relations(self) -> Vocabulary:
        return self.run.graph.relations

    @cached_property
    def finder(self) -> NameSearch:
        return NameSearch(self.entities)

    @cached_property
    def looping(self) -> frozenset[int]:
        """The relations by which an entity may be its own answer."""
        return relations_with_self_loops(self.run.graph)

    def id_of(self, vocabulary: Vocabulary, name: str | int) -> int:
        """The id of a name; where there is none, the command line's sentence and the nearest names."""
        try:
            return vocabulary.id(name)
        except RequestError as error:
            near = self.finder.search(name, limit=5) if vocabulary is self.entities and isinstance(name, str) else []
            raise UnknownError(str(error), [self.entities[match.id] for match in near]) from None

    def warm(self) -> None:
        """Make what the first requests would wait for."""
        _ = self.finder, self.looping
        self.predictor.warm_up()
        self.entities.id(0)
        _ = "" in self.entities, "" in self.relations


class ServedRuns:
    """Runs by name; the first is the one that is asked where none is named."""

    def __init__(self, runs: Sequence[ServedRun]) -> None:
        if not runs:
            raise RequestError("Name at least one run to serve.")
        names = [run.name for run in runs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RequestError(f"Two of the runs are called '{twice}'. Serve runs from folders with different names.")
        self._runs = {run.name: run for run in runs}

    @classmethod
    def load(cls, paths: Sequence[Path], *, device: str | None = None) -> ServedRuns:
        """Runs from their folders, each called as its folder is."""
        return cls([ServedRun.of(load_run(path), name=path.resolve().name, device=device) for path in paths])

    @property
    def names(self) -> list[str]:
        return list(self._runs)

    def __iter__(self) -> Any:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, name: str | None) -> ServedRun:
        if name is None:
            return next(iter(self._runs.values()))
        if name not in self._runs:
            served = ", ".join(f"'{known}'" for known in self._runs)
            raise UnknownError(f"No run that is served is named '{name}'. There are: {served}.", self.names)
        return self._runs[name]


class DecisionFiles:
    """Of each run the file beside it. One thread at a time reads or writes: `lock`."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._files: dict[str, DecisionStore] = {}

    def of(self, run: ServedRun) -> DecisionStore:
        if run.run.folder is None:
            raise RequestError(f"The run {run.name} is in no folder, so decisions cannot be kept. Save it first.")
        return self._files.setdefault(run.name, DecisionStore(RunFolder(run.run.folder).decisions))


class Maps:
    """The map of each run: read from its folder, or made and kept there, one run after the other.

    A large one takes a minute or two. Its thread is a daemon, so that a server which is stopped does not wait for it.
    """

    def __init__(self) -> None:
        self._one_at_a_time = Lock()
        self._maps: dict[str, Future[Vectors]] = {}

    def of(self, run: ServedRun) -> Future[Vectors]:
        """The same future for the same run; one that failed is tried again."""
        made = self._maps.get(run.name)
        if made is None or (made.done() and made.exception() is not None):
            made = self._maps[run.name] = Future()
            made.set_running_or_notify_cancel()
            Thread(target=self._make, args=(run, made), name=f"map of {run.name}", daemon=True).start()
        return made

    def _make(self, run: ServedRun, made: Future[Vectors]) -> None:
        try:
            with self._one_at_a_time:
                places = entity_map(run.run)
        except Exception as error:
            made.set_exception(error)
        else:
            made.set_result(places)


Result = TypeVar("Result")


def _slow_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="slow")


@dataclass(frozen=True, eq=False)
class Service:
    """The runs, who answers questions about them, and the threads for what takes longer than a product."""

    runs: ServedRuns
    asker: Asker
    limits: Limits
    counts: Counts
    journal: Journal
    maps: Maps = field(default_factory=Maps)
    slow: ThreadPoolExecutor = field(default_factory=_slow_threads)
    completing: Lock = field(default_factory=Lock)  # one list of new triples at a time
    decisions: DecisionFiles = field(default_factory=DecisionFiles)
    read_only: bool = False  # whether decisions are refused

    async def entity(self, run: ServedRun, name: str | int) -> int:
        return await self._id(run, name, entity=True)

    async def relation(self, run: ServedRun, name: str | int) -> int:
        return await self._id(run, name, entity=False)

    async def _id(self, run: ServedRun, name: str | int, *, entity: bool) -> int:
        """At once for what is known; names alike are looked for in a thread, since that takes a while."""
        vocabulary = run.entities if entity else run.relations
        if isinstance(name, int) or name in vocabulary:
            return run.id_of(vocabulary, name)
        return await self.slowly(run.id_of, vocabulary, name)

    async def slowly(self, work: Callable[..., Result], *nouns: object) -> Result:
        """Work in a thread. When a request is given up, work that has begun goes on to its end, and is thrown away."""
        return await asyncio.get_running_loop().run_in_executor(self.slow, work, *nouns)

    async def answers(self, run: ServedRun, kind: QueryType, question: Query) -> list[Answer]:
        return [Answer.of(answer) for answer in await self.asker.ask(run, kind, question)]

    async def start(self) -> None:
        await self.asker.start()
        for run in self.runs:
            await self.slowly(run.warm)

    async def stop(self) -> None:
        await self.asker.stop()
        self.slow.shutdown(wait=False, cancel_futures=True)


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
