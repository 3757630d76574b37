"""The served runs and everything that requests share: micro-batching of queries, metrics,
threads.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Annotated, Self, TypeVar

import fastapi
from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualkg.analysis.projection import Vectors, entity_map
from dualkg.data.graph import Graph
from dualkg.errors import DualkgError, RequestError
from dualkg.inference.decisions import DecisionStore
from dualkg.inference.inductive import with_adjoint
from dualkg.inference.name_search import NameSearch
from dualkg.inference.predictor import Known, Prediction, Predictor, Query, QueryType
from dualkg.serve.limits import MAX_NAME_LENGTH, Limits
from dualkg.serve.schemas import PARTS, Item, Part, vocabulary_of
from dualkg.training.api import choose_device
from dualkg.training.ensemble import load_run
from dualkg.training.run import Run, RunFolder

Result = TypeVar("Result")
MAX_BATCH_PREDICTIONS = 4000  # a batch with more would make all other requests wait for it
BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)  # seconds


class UnknownNameError(RequestError):
    """A name that does not exist, and similar ones; `part` is the part of a triple that it was
    given for.
    """

    def __init__(
        self, message: str, suggestions: Sequence[str] = (), part: Part | None = None
    ) -> None:
        super().__init__(message)
        self.suggestions = list(suggestions)
        self.part = part


@dataclass(frozen=True, eq=False)
class ServedRun:
    """A run with its predictor and name index."""

    name: str
    run: Run
    predictor: Predictor

    @classmethod
    def of(cls, run: Run, *, name: str, device: str | None = None) -> Self:
        """A run with its probabilities and prediction sets, if it has been calibrated."""
        run.model = run.model.to(choose_device(device))
        return cls(name, run, Predictor.of(run, cache=True))

    @property
    def graph(self) -> Graph:
        return self.run.graph

    @cached_property
    def name_search(self) -> NameSearch:
        return NameSearch(self.graph.entities)

    @cached_property
    def has_explanations(self) -> bool:
        """Whether predictions can be explained: not those of an ensemble or of a model without an
        adjoint.
        """
        try:
            with_adjoint(self.run.model)
        except RequestError:
            return False
        return True

    @cached_property
    def relations(self) -> list[Item]:
        return [Item.of(self.graph.relations, id) for id in range(len(self.graph.relations))]

    def warm_up(self) -> None:
        """Compute everything that is cached, so that the first requests do not wait for it."""
        _ = self.name_search
        self.predictor.warm_up()
        self.graph.entities.id(0)
        _ = "" in self.graph.entities, "" in self.graph.relations


class ServedRuns:
    """Runs by name; the first is the default."""

    def __init__(self, runs: Sequence[ServedRun]) -> None:
        if not runs:
            raise RequestError("Name at least one run to serve.")
        self.names = [run.name for run in runs]
        self._runs = dict(zip(self.names, runs, strict=True))
        for name in self.names:
            if self.names.count(name) > 1:
                raise RequestError(
                    f"Two of the runs are named '{name}'. Serve runs from folders with different "
                    "names."
                )

    @classmethod
    def load(cls, paths: Sequence[Path], *, device: str | None = None) -> Self:
        """Runs from their folders, each named as its folder."""
        return cls(
            [
                ServedRun.of(load_run(path), name=path.resolve().name, device=device)
                for path in paths
            ]
        )

    def __iter__(self) -> Iterator[ServedRun]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, name: str | None) -> ServedRun:
        name = self.names[0] if name is None else name
        if name not in self._runs:
            served = ", ".join(f"'{known}'" for known in self._runs)
            raise UnknownNameError(
                f"No served run is named '{name}'. Available: {served}.", self.names
            )
        return self._runs[name]


class ServerMetrics:
    """Requests and latency by route, never by address, so that the number of labels is bounded; and
    micro-batches.
    """

    def __init__(self, num_entities: dict[str, int]) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "dualkg_requests", "Requests by route and status.", ["route", "status"], registry=own
        )
        self._seconds = Histogram(
            "dualkg_request_seconds", "Latency by route.", ["route"], registry=own, buckets=BUCKETS
        )
        self.in_progress = Gauge(
            "dualkg_requests_in_progress", "Requests not yet answered.", registry=own
        )
        self._batches = Counter("dualkg_batches", "Micro-batches of queries.", registry=own)
        self._queries = Counter(
            "dualkg_queries", "Queries answered in micro-batches.", registry=own
        )
        self._largest = Gauge(
            "dualkg_largest_batch", "Queries of the largest micro-batch.", registry=own
        )
        self._largest_so_far = 0
        Gauge(
            "dualkg_start_time_seconds", "Start of the server.", registry=own
        ).set_to_current_time()
        entities = Gauge("dualkg_entities", "Entities of each run.", ["run"], registry=own)
        for run, number in num_entities.items():
            entities.labels(run).set(number)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, size: int) -> None:
        self._batches.inc()
        self._queries.inc(size)
        self._largest_so_far = max(self._largest_so_far, size)
        self._largest.set(self._largest_so_far)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class BusyError(DualkgError):
    """The server has more to do than it accepts; the same request may succeed later."""


@dataclass(frozen=True, eq=False)
class PendingQuery:
    """A query and the future of its predictions."""

    predictor: Predictor
    kind: QueryType
    query: Query
    future: asyncio.Future[list[Prediction]]


class MicroBatcher:
    """Answers pending queries of one run and kind by one call in a thread; with
    `max_predictions=1`, one by one.
    """

    def __init__(
        self,
        *,
        max_pending: int,
        on_batch: Callable[[int], None],
        max_predictions: int = MAX_BATCH_PREDICTIONS,
    ) -> None:
        self._max_pending = max_pending
        self._on_batch = on_batch
        self._max_predictions = max_predictions
        self._pending: deque[PendingQuery] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predictions")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def predict(
        self, predictor: Predictor, kind: QueryType, query: Query
    ) -> list[Prediction]:
        """The predictions for one query; a wrong query raises a DualkgError."""
        if len(self._pending) >= self._max_pending:
            raise BusyError(
                f"{len(self._pending):,} queries are waiting already. Try again in a moment."
            )
        future: asyncio.Future[list[Prediction]] = asyncio.get_running_loop().create_future()
        self._pending.append(PendingQuery(predictor, kind, query, future))
        self._arrived.set()
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for batch in self._next_batches():
                self._on_batch(len(batch))
                results = await loop.run_in_executor(self._thread, predict_batch, batch)
                for pending, result in zip(batch, results, strict=True):
                    if pending.future.done():  # its request was cancelled
                        continue
                    if isinstance(result, Exception):
                        pending.future.set_exception(result)
                    else:
                        pending.future.set_result(result)

    def _next_batches(self) -> list[list[PendingQuery]]:
        """The pending queries by run and kind, in the order of arrival; the excess stays for the
        next round.
        """
        batches: dict[tuple[Predictor, QueryType], list[PendingQuery]] = {}
        num_predictions = 0
        while self._pending and num_predictions < self._max_predictions:
            pending = self._pending.popleft()
            if not pending.future.done():
                batches.setdefault((pending.predictor, pending.kind), []).append(pending)
                num_predictions += pending.query.k
        if not self._pending:
            self._arrived.clear()
        return list(batches.values())


def predict_batch(batch: list[PendingQuery]) -> list[list[Prediction] | Exception]:
    """The predictions for each query; if the batch fails, each query alone, so that one cannot fail
    the others.
    """
    first = batch[0]
    try:
        return list(first.predictor.predict(first.kind, [pending.query for pending in batch]))
    except Exception as error:
        return [error] if len(batch) == 1 else [predict_batch([pending])[0] for pending in batch]


class Service:
    """The runs, the batcher that answers queries, and threads for longer work."""

    def __init__(
        self,
        runs: ServedRuns,
        *,
        limits: Limits,
        log: bool,
        read_only: bool,
        micro_batching: bool = True,
    ) -> None:
        self.runs = runs
        self.limits = limits
        self.access_log = log
        self.read_only = read_only
        self.metrics = ServerMetrics({run.name: len(run.graph.entities) for run in runs})
        most = MAX_BATCH_PREDICTIONS if micro_batching else 1
        self.batcher = MicroBatcher(
            max_pending=limits.queued_queries, on_batch=self.metrics.batch, max_predictions=most
        )
        self._mapping = Lock()  # one map at a time
        self._maps: dict[str, Future[Vectors]] = {}
        self.completing = (
            Lock()
        )  # one completion at a time, and in one thread: each would keep its own free memory
        self.completions = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._deciding = Lock()  # one thread reads or writes decisions at a time
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="slow")

    def decisions(self, run: ServedRun, work: Callable[[DecisionStore], Result]) -> Result:
        """The result of reading or changing the decisions on a run."""
        if run.run.folder is None:
            raise RequestError(
                f"The run {run.name} has no folder to store decisions in. Save it first."
            )
        with self._deciding:
            return work(DecisionStore(RunFolder(run.run.folder).decisions))

    def entity_map(self, run: ServedRun) -> Future[Vectors]:
        """The map of a run: read, or computed by a daemon thread, which takes minutes; after a
        failure, again.
        """
        future = self._maps.get(run.name)
        if future is None or (future.done() and future.exception() is not None):
            future = self._maps[run.name] = Future()
            # So that a request that is cancelled does not cancel it.
            future.set_running_or_notify_cancel()
            Thread(target=self._compute_map, args=(run, future), daemon=True).start()
        return future

    def _compute_map(self, run: ServedRun, future: Future[Vectors]) -> None:
        try:
            with self._mapping:
                future.set_result(entity_map(run.run))
        except Exception as error:
            future.set_exception(error)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Work in a thread. Work that has begun runs to its end even if its request is
        cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def start(self) -> None:
        await self.batcher.start()
        for run in self.runs:
            await self.in_thread(run.warm_up)

    async def stop(self) -> None:
        await self.batcher.stop()
        for threads in (self._threads, self.completions):
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class RequestContext:
    """A request, the service, and the run that the request is about."""

    request: Request
    service: Service
    run: ServedRun

    @property
    def is_default_run(self) -> bool:
        return self.run.name == self.service.runs.names[0]

    async def ids(self, **names: str | int) -> dict[Part, int]:
        """The ids of some parts of a triple, in their order."""
        return {part: await self.id(names[part], part) for part in PARTS if part in names}

    async def id(self, name: str | int, part: Part = "head") -> int:
        """The id of a name; for an unknown one, an error with similar names, which are searched in
        a thread.
        """
        vocabulary = vocabulary_of(self.run.graph, part)

        def find() -> int:
            try:
                return vocabulary.id(name)
            except RequestError as error:
                is_entity = part != "relation" and isinstance(name, str)
                similar = self.run.name_search.search(str(name), limit=5) if is_entity else []
                raise UnknownNameError(
                    str(error), [vocabulary[match.id] for match in similar], part
                ) from None

        return find() if isinstance(name, int) or name in vocabulary else await self.in_thread(find)

    async def predict(
        self, kind: QueryType, *ids: int, k: int, known: Known = "mark"
    ) -> list[Prediction]:
        return await self.service.batcher.predict(self.run.predictor, kind, Query(ids, k, known))

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await self.service.in_thread(work)


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def request_context(
    request: Request,
    run: Annotated[
        str | None,
        fastapi.Query(max_length=MAX_NAME_LENGTH, description="A run; by default the first one."),
    ] = None,
) -> RequestContext:
    service = await service_of(request)
    return RequestContext(request, service, service.runs.get(run))


Context = Annotated[
    RequestContext, Depends(request_context)
]  # one dependency: each takes a tenth of a millisecond
