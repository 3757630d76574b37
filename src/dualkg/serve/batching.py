"""Micro-batching: queries of concurrent requests are answered by one call of the model."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dualkg.errors import DualkgError
from dualkg.inference.predictor import Prediction, Predictor, Query, QueryType

MAX_BATCH_PREDICTIONS = 4000  # a batch with more would make all other requests wait for it


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
    """Answers pending queries of one run and kind by one call in a thread; with `max_predictions=1`, one by one."""

    def __init__(
        self, *, max_pending: int, on_batch: Callable[[int], None], max_predictions: int = MAX_BATCH_PREDICTIONS
    ) -> None:
        self._max_pending, self._on_batch, self._max_predictions = max_pending, on_batch, max_predictions
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

    async def predict(self, predictor: Predictor, kind: QueryType, query: Query) -> list[Prediction]:
        """The predictions for one query; a wrong query raises a DualkgError."""
        if len(self._pending) >= self._max_pending:
            raise BusyError(f"{len(self._pending):,} queries are waiting already. Try again in a moment.")
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
        """The pending queries by run and kind, in the order of arrival; the excess stays for the next round."""
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
    """The predictions for each query; if the batch fails, each query alone, so that one cannot fail the others."""
    first = batch[0]
    try:
        return list(first.predictor.predict(first.kind, [pending.query for pending in batch]))
    except Exception as error:
        return [error] if len(batch) == 1 else [predict_batch([pending])[0] for pending in batch]
