"""Work that takes minutes and that requests share: searches for new facts, and maps of entities.

Requests for the same search follow one search, and its result is kept.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from dualkg.inference.completion import Completion
from dualkg.logs import TimeLeft
from dualkg.serve.errors import BusyError
from dualkg.serve.served import Positions, ServedRun

MAP_PATIENCE = 60.0  # seconds after which a map that nobody asks for is no longer computed
MAX_KEPT = 100  # results
MAX_KEPT_TRIPLES = 300_000  # of all results
MIN_SHARE = 0.01  # of a search that is done before its time left is told
PROGRESS_INTERVAL = 0.25  # seconds
COMPLETION_RUNNING = "Another completion is running. Try again when it has finished."
Key = tuple[Any, ...]
Options = dict[str, Any]


class SearchProgress(NamedTuple):
    """Queries that are done, and all of them."""

    done: int
    total: int
    seconds_left: float | None = None


class SoFar(NamedTuple):
    """The best triples so far."""

    best: Completion


Report = SearchProgress | SoFar | Completion | Exception


class Kept(NamedTuple):
    """A result, how many triples were asked for, and how many queries the search had."""

    top: int
    num_queries: int
    result: Completion


class _Abandoned(Exception):
    """Nobody follows a search any more."""


class Search:
    """A search that runs in a thread, and the requests that follow the search."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.num_queries = 0
        self.is_abandoned = Event()
        self._loop = asyncio.get_running_loop()
        self._followers: list[asyncio.Queue[Report]] = []
        self._progress: SearchProgress | None = None
        self._so_far: SoFar | None = None
        self._time_left = TimeLeft()
        self._last_report = 0.0

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def follow(self) -> asyncio.Queue[Report]:
        """What is reported from now on, and first what was reported last."""
        reports = asyncio.Queue[Report]()
        for report in (self._progress, self._so_far):
            if report is not None:
                reports.put_nowait(report)
        self._followers.append(reports)
        return reports

    def leave(self, reports: asyncio.Queue[Report]) -> None:
        self._followers.remove(reports)

    def on_progress(self, done: int, total: int) -> None:
        """Called in the thread of the search, which ends soon after nobody follows it."""
        if self.is_abandoned.is_set():
            raise _Abandoned
        self.num_queries = total
        now = time.monotonic()
        if now >= self._last_report + PROGRESS_INTERVAL or 0 < done == total:
            self._last_report = now
            seconds_left = self._time_left(done, total) if total else None
            if done < MIN_SHARE * total:  # the first blocks are slower than the others
                seconds_left = None
            self.report(SearchProgress(done, total, seconds_left))

    def on_best(self, best: Completion) -> None:
        self.report(SoFar(best))

    def report(self, report: Report) -> None:
        with suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self._tell, report)

    def _tell(self, report: Report) -> None:
        if isinstance(report, SearchProgress):
            self._progress = report
        elif isinstance(report, SoFar):
            self._so_far = report
        for reports in self._followers:
            reports.put_nowait(report)


class Searches:
    """The search that runs, and the results of the last ones.

    One runs at a time, in a thread of `executor`; `running` is locked meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self.running = Lock()
        self._executor = executor
        self._current: tuple[Key, Search] | None = None
        self._keeping = Lock()
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def check(self, run: str, options: Options) -> None:
        """Refuse what would have to wait for another search."""
        key, top = _key(run, options)
        has_answer = self._find(key, top) or self._joined(key, top)
        if not has_answer and self.running.locked():
            raise BusyError(COMPLETION_RUNNING)

    async def reports(
        self, run: str, options: Options, complete: Callable[..., Completion]
    ) -> AsyncGenerator[SearchProgress | SoFar | Completion, None]:
        """Reports of a search; the last report is the result.

        `complete` gets the options and the functions that report. A search that nobody follows any
        more ends at its next block of queries.
        """
        key, top = _key(run, options)
        kept = self._find(key, top)
        if kept is not None:
            yield SearchProgress(kept.num_queries, kept.num_queries)
            yield kept.result.first(top)
            return
        search = self._joined(key, top) or self._start(key, options, complete)
        reports = search.follow()
        try:
            while True:
                report = await reports.get()
                if isinstance(report, Exception):
                    raise report
                if isinstance(report, Completion):
                    yield report.first(top)
                    return
                yield SoFar(report.best.first(top)) if isinstance(report, SoFar) else report
        finally:
            search.leave(reports)
            if not search.has_followers:
                search.is_abandoned.set()

    def _find(self, key: Key, top: int) -> Kept | None:
        """A result that is kept, which may have more triples."""
        with self._keeping:
            kept = self._kept.get(key)
            if kept is None or kept.top < top:
                return None
            self._kept.move_to_end(key)
            return kept

    def _joined(self, key: Key, top: int) -> Search | None:
        current = self._current  # The thread of the search sets it to None at its end.
        if current is None:
            return None
        current_key, search = current
        is_same = current_key == key and search.top >= top
        return search if is_same and not search.is_abandoned.is_set() else None

    def _start(self, key: Key, options: Options, complete: Callable[..., Completion]) -> Search:
        if not self.running.acquire(blocking=False):
            raise BusyError(COMPLETION_RUNNING)
        search = Search(options["top"])
        self._current = (key, search)

        def work() -> None:
            report: Report = _Abandoned()
            try:
                report = complete(on_progress=search.on_progress, on_best=search.on_best, **options)
                self._keep(key, Kept(search.top, search.num_queries, report))
            except _Abandoned:
                pass
            except Exception as error:  # the followers raise it
                report = error
            finally:
                self._current = None
                self.running.release()
                search.report(report)

        self._executor.submit(work)
        return search

    def _keep(self, key: Key, kept: Kept) -> None:
        with self._keeping:
            self._kept.pop(key, None)
            self._kept[key] = kept
            num_triples = sum(len(kept.result) for kept in self._kept.values())
            while len(self._kept) > MAX_KEPT or num_triples > MAX_KEPT_TRIPLES:
                _, dropped = self._kept.popitem(last=False)
                num_triples -= len(dropped.result)


def _key(run: str, options: Options) -> tuple[Key, int]:
    """The key of a search, and the number of triples; a kept list may have more triples."""
    others = {name: value for name, value in options.items() if name != "top"}
    values = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(others.items())
        if value not in (None, 0.0)
    )
    return (run, values), options["top"]


class MapWork:
    """A map that is read or computed, and how much of it is done."""

    def __init__(self) -> None:
        self.future: Future[Positions] = Future()
        # A request that is cancelled cannot cancel a future that is running.
        self.future.set_running_or_notify_cancel()
        self.positions: Positions | None = None  # so far
        self.done = 0.0
        self.seconds_left: float | None = None
        self.asked_at = time.monotonic()
        self._time_left = TimeLeft()

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None

    def report_positions(self, positions: Positions) -> None:
        self.positions = positions

    def report(self, share: float) -> None:
        """Note that a share of the map is done; a map that nobody asks for is given up."""
        if time.monotonic() > self.asked_at + MAP_PATIENCE:
            raise BusyError("The map is no longer computed, since nobody has asked for it.")
        self.seconds_left = self._time_left(share, 1.0)
        self.done = share


class Maps:
    """The maps of the served runs; one map is computed at a time."""

    def __init__(self) -> None:
        self._computing = Lock()
        self._by_run: dict[str, MapWork] = {}

    def of(self, run: ServedRun) -> MapWork:
        """The map of a run: read, or computed by a daemon thread, which takes minutes.

        After a failure, the next request computes it again.
        """
        work = self._by_run.get(run.name)
        if work is None or work.has_failed:
            work = MapWork()
            self._by_run[run.name] = work
            Thread(target=self._compute, args=(run, work), daemon=True).start()
        work.asked_at = time.monotonic()
        return work

    def _compute(self, run: ServedRun, work: MapWork) -> None:
        try:
            if self._computing.locked():  # the first picture need not wait for another map
                from dualkg.analysis.projection import first_positions

                work.report_positions(first_positions(run.run.model))
            with self._computing:
                positions = run.compute_map(
                    run.run, on_progress=work.report, on_positions=work.report_positions
                )
                work.future.set_result(positions)
        except Exception as error:
            work.future.set_exception(error)
