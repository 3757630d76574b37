"""What requests share: limits, metrics, the batcher, threads and decisions; and their context."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar

import fastapi
from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualkg.errors import DualkgError, RequestError, UnknownName
from dualkg.inference.decisions import Decided, DecisionStore, Verdict
from dualkg.inference.predictor import Known, Prediction, Query, QueryType
from dualkg.serve.background import Maps, Searches
from dualkg.serve.batching import MAX_BATCH_PREDICTIONS, MicroBatcher
from dualkg.serve.errors import BusyError, FolderGone, NotFound
from dualkg.serve.schemas import MAX_FILE, MAX_NAME_LENGTH, PARTS, Item, Part, vocabulary_of
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.serve.trainings import Trainings
from dualkg.training.ensemble import load_run
from dualkg.training.run_folder import RunFolder

Result = TypeVar("Result")
NUM_SUGGESTIONS = 5  # similar names
NUM_THREADS = 3  # for work that takes longer than a lookup
# Upper bounds of the latencies that are counted together, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Limits:
    """Limits that a server is started with."""

    # Seconds for a request, and for one that streams its response.
    seconds: float = 30.0
    stream_seconds: float = 600.0
    # Address and headers of a request; four names of any characters take 96,000 bytes.
    header_bytes: int = 2**17
    # The body of a request, and the bodies of all requests that are being received.
    body_bytes: int = 2**20
    all_body_bytes: int = 2**26
    # The body of a request with a file to train on.
    file_bytes: int = MAX_FILE
    # Seconds between two requests of a connection.
    idle_seconds: int = 5
    # Connections: most systems allow a process 1,024 open files.
    connections: int = 800
    # Requests that are being answered.
    requests: int = 500
    # Queries that wait for the model.
    queued_queries: int = 1000
    # The part of `seconds` that a request waits for a map of all entities.
    map_share: float = 0.8
    # Seconds for requests in progress when the server stops.
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        for seconds in (self.seconds, self.stream_seconds):
            if not seconds > 0:
                raise RequestError(f"A time limit must be above 0 seconds; got {seconds:g}.")


class ServerMetrics:
    """Requests, their latency, and micro-batches, in Prometheus' text format.

    Requests are counted by route, never by address, so that the number of labels is bounded.
    """

    def __init__(self, num_entities: Mapping[str, int]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.in_progress = Gauge(
            "dualkg_requests_in_progress", "Requests not yet answered.", registry=registry
        )
        self._requests = Counter(
            "dualkg_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dualkg_request_seconds",
            "Latency by route.",
            ["route"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._batches = Counter("dualkg_batches", "Micro-batches of queries.", registry=registry)
        self._queries = Counter(
            "dualkg_queries", "Queries answered in micro-batches.", registry=registry
        )
        self._largest_batch = Gauge(
            "dualkg_largest_batch", "Queries of the largest micro-batch.", registry=registry
        )
        self._largest_so_far = 0

        start_time = Gauge("dualkg_start_time_seconds", "Start of the server.", registry=registry)
        start_time.set_to_current_time()
        self._entities = Gauge(
            "dualkg_entities", "Entities of each run.", ["run"], registry=registry
        )
        for run, number in num_entities.items():
            self.add_run(run, number)

    def add_run(self, run: str, num_entities: int) -> None:
        self._entities.labels(run).set(num_entities)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, size: int) -> None:
        self._batches.inc()
        self._queries.inc(size)
        self._largest_so_far = max(self._largest_so_far, size)
        self._largest_batch.set(self._largest_so_far)

    def text(self) -> bytes:
        return generate_latest(self._registry)


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
        needs_token: bool = False,
        training_folder: Path | None = None,
        device: str | None = None,
    ) -> None:
        self.runs = runs
        self.limits = limits
        self.access_log = log
        self.read_only = read_only
        self.needs_token = needs_token
        self._device = device
        self.trainings = Trainings(training_folder, on_finish=self.add)
        for folder in runs.in_training:
            self.trainings.watch(folder)
        self.metrics = ServerMetrics({run.name: len(run.graph.entities) for run in runs})
        self.batcher = MicroBatcher(
            max_pending=limits.queued_queries,
            on_batch=self.metrics.batch,
            max_predictions=MAX_BATCH_PREDICTIONS if micro_batching else 1,
        )
        # One completion runs at a time, and always in the same thread: every thread would keep
        # free memory of its own.
        self.completions = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self.searches = Searches(self.completions)
        self.maps = Maps()
        self.is_stopping = False
        self._deciding = Lock()  # held while decisions are read or written
        self._decided: dict[str, tuple[Any, Decided | None]] = {}  # by run, with the file's state
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="slow")

    def add(self, folder: Path) -> None:
        """Serve the run of a training that has ended."""
        run = ServedRun.of(load_run(folder), name=folder.name, device=self._device)
        run.warm_up()
        self.runs.add(run)
        self.metrics.add_run(run.name, len(run.graph.entities))

    def decisions(self, run: ServedRun, work: Callable[[DecisionStore], Result]) -> Result:
        """The result of reading or changing the decisions on a run, whose folder must be there."""
        folder = run.run.folder
        if folder is None:
            raise RequestError(
                f"The run {run.name} has no folder to store decisions in. Save it first."
            )

        def check() -> None:
            if not run.run.is_current:
                raise FolderGone(
                    f"The folder of the run {run.name} was moved, removed or replaced after the "
                    "server had loaded it, so decisions are neither read nor saved. Put it back, "
                    "or restart the server."
                )

        with self._deciding:
            return work(DecisionStore(RunFolder(folder).decisions, check=check))

    def decided(self, run: ServedRun) -> Decided:
        """The decisions on a run for lookups, read again when their file has changed.

        A file that cannot be read has none here: a request for the decisions is told why.
        """
        path = run.decisions_file
        try:
            stat = path.stat() if path is not None else None
        except OSError:
            stat = None
        state = (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else None
        saved_state, decided = self._decided.get(run.name, ((), None))
        if decided is None or saved_state != state:
            try:
                decisions = DecisionStore(path).load() if stat and path else {}
            except DualkgError:
                decisions = {}
            decided = Decided.of(decisions, run.graph)
            self._decided[run.name] = (state, decided)
        return decided

    def verdicts(
        self, run: ServedRun, given: Mapping[Part, int], predictions: Sequence[Prediction]
    ) -> list[Verdict | None]:
        """The verdicts on the predictions for a query, given by the ids of two of its parts."""
        decided = self.decided(run)
        if not decided:
            return [None] * len(predictions)
        names = {part: vocabulary_of(run.graph, part)[id] for part, id in given.items()}
        [missing] = (part for part in PARTS if part not in names)
        return [
            decided.verdict(**{**names, missing: prediction.name}) for prediction in predictions
        ]

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do some work in a thread.

        Work that has begun runs to its end even if its request is cancelled.
        """
        if self.is_stopping:
            raise BusyError("The server is stopping.")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def start(self) -> None:
        await self.batcher.start()
        for run in self.runs:
            await self.in_thread(run.warm_up)

    async def stop(self) -> None:
        """End all work; what still waits for a thread is cancelled."""
        self.is_stopping = True
        await self.trainings.close()
        await self.batcher.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.completions.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class RequestContext:
    """A request, the service, and the run that the request is about.

    Before the first run is finished there is none, and pages that need one are refused.
    """

    request: Request
    service: Service
    named_run: ServedRun | None

    @property
    def has_run(self) -> bool:
        return self.named_run is not None

    @property
    def run(self) -> ServedRun:
        return self.named_run or self.service.runs.default

    @property
    def is_default_run(self) -> bool:
        return not self.has_run or self.run.name == self.service.runs.names[0]

    @property
    def network(self) -> ServedRun | None:
        """The path network that explains predictions of the run, if one is served."""
        return self.service.runs.network_for(self.run)

    @property
    def decided(self) -> Decided:
        return self.service.decided(self.run)

    @property
    def can_decide(self) -> bool:
        """Whether the server accepts decisions on the run."""
        return not self.service.read_only and self.run.run.folder is not None

    @property
    def has_explanations(self) -> bool:
        """Whether predictions of the run can be explained."""
        return self.run.has_explanations or self.network is not None

    async def ids(self, **names: str | int) -> dict[Part, int]:
        """The ids of some parts of a triple, in their order."""
        return {part: await self.id(names[part], part) for part in PARTS if part in names}

    async def id(self, name: str | int, part: Part = "head") -> int:
        """The id of a name; for an unknown one, an error with similar names."""
        vocabulary = vocabulary_of(self.run.graph, part)
        if isinstance(name, int) or name in vocabulary:
            return self._find(name, part)
        # A search for similar names takes long.
        return await self.in_thread(lambda: self._find(name, part))

    def _find(self, name: str | int, part: Part) -> int:
        vocabulary = vocabulary_of(self.run.graph, part)
        try:
            return vocabulary.id(name)
        except RequestError as error:
            similar = self._similar(name, part, error) if isinstance(name, str) else []
            suggestions = [vocabulary[id] for id in similar]
            raise NotFound(str(error), suggestions=suggestions, part=part) from None

    def _similar(self, name: str, part: Part, error: RequestError) -> list[int]:
        """The ids of the names that an error suggests, or of those that a search finds."""
        run = self.run
        vocabulary = vocabulary_of(run.graph, part)
        if isinstance(error, UnknownName):
            return [id for text in error.suggestions for id in vocabulary.ids_ignoring_case(text)]
        search = run.relation_search if part == "relation" else run.name_search
        return [match.id for match in search.search(name, limit=NUM_SUGGESTIONS)]

    async def relation(self, name: str) -> Item | None:
        """The relation of a name; none without a name."""
        if not name:
            return None
        return self.run.relations[await self.id(name, "relation")]

    async def predict(
        self, kind: QueryType, *ids: int, k: int, known: Known = "mark"
    ) -> list[Prediction]:
        query = Query(ids, k, known)
        return await self.service.batcher.predict(self.run.predictor, kind, query)

    async def score(self, triples: Sequence[tuple[int, ...]]) -> list[Prediction]:
        """What the model says about triples by id, in their order."""
        queries = [Query(ids, 1) for ids in triples]
        answers = await self.service.batcher.predict_all(self.run.predictor, "triple", queries)
        return [prediction for [prediction] in answers]

    async def ids_of(
        self, triples: Sequence[tuple[str | int, str | int, str | int]]
    ) -> list[tuple[int, ...]]:
        """The ids of triples by name; only the first unknown name is searched for."""

        def find() -> list[tuple[int, ...]]:
            return [
                tuple(self._find(name, part) for name, part in zip(triple, PARTS, strict=True))
                for triple in triples
            ]

        return await self.in_thread(find)

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
    return context_of(request, service, run)


def context_of(request: Request, service: Service, run: str | None) -> RequestContext:
    """The context of a request on a run, or on the default."""
    is_waiting = run is None and not service.runs.names
    return RequestContext(request, service, None if is_waiting else service.runs.get(run))


# One dependency for all that routes need, since each takes a tenth of a millisecond.
Context = Annotated[RequestContext, Depends(request_context)]
