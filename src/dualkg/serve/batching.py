"""Micro-batching: pending queries are answered together, by one call of the model."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dualkg.inference.predictor import Prediction, Predictor, Query, QueryType
from dualkg.serve.errors import QueueFull

MAX_BATCH_PREDICTIONS = 4000  # a batch with more would make all other requests wait for it


@dataclass(frozen=True, eq=False)
class PendingQuery:
    """A query and the future of its predictions."""

    predictor: Predictor
    kind: QueryType
    query: Query
    future: asyncio.Future[list[Prediction]]


class MicroBatcher:
    """Answers pending queries of one run and kind by one call in a thread.

    With `max_predictions=1`, every query is answered alone.
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
            raise QueueFull(len(self._pending))

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
                    _deliver(pending, result)

    def _next_batches(self) -> list[list[PendingQuery]]:
        """The pending queries by run and kind, in the order of arrival.

        The excess stays for the next round.
        """
        batches: dict[tuple[Predictor, QueryType], list[PendingQuery]] = {}
        num_predictions = 0
        while self._pending and num_predictions < self._max_predictions:
            pending = self._pending.popleft()
            if pending.future.done():  # its request was cancelled
                continue
            batch = batches.setdefault((pending.predictor, pending.kind), [])
            batch.append(pending)
            num_predictions += pending.query.k
        if not self._pending:
            self._arrived.clear()
        return list(batches.values())


def _deliver(pending: PendingQuery, result: list[Prediction] | Exception) -> None:
    if pending.future.done():  # its request was cancelled
        return
    if isinstance(result, Exception):
        pending.future.set_exception(result)
    else:
        pending.future.set_result(result)


def predict_batch(batch: list[PendingQuery]) -> list[list[Prediction] | Exception]:
    """The predictions for each query.

    If the batch fails, each query is answered alone, so that one cannot fail the others.
    """
    first = batch[0]
    queries = [pending.query for pending in batch]
    try:
        return list(first.predictor.predict(first.kind, queries))
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [predict_batch([pending])[0] for pending in batch]
