"""Micro-batching: pending queries are answered together by one call of the model."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch

from dualkg.inference.predictor import Prediction, Predictor, Query, QueryType
from dualkg.serve.errors import BusyError

MAX_BATCH_PREDICTIONS = 400  # a batch with more would make all other requests wait for it
MAX_GROUP = 25  # queries of one request that are one item of the queue
MIN_COST = {"triple": 2}  # predictions that the scores of a query take the time of
USUAL_MIN_COST = 10
MAX_RECENT = 5000  # queries whose predictions are kept, about 4 KB each
MAX_RECENT_K = 20  # predictions that a query whose predictions are kept may ask for

RecentQuery = tuple[Predictor, QueryType, Query]


@dataclass(frozen=True, eq=False)
class PendingQueries:
    """Queries of one kind, and the future of their predictions."""

    predictor: Predictor
    kind: QueryType
    queries: Sequence[Query]
    future: asyncio.Future[list[list[Prediction]]]

    @property
    def cost(self) -> int:
        """The predictions whose time the queries take."""
        least = MIN_COST.get(self.kind, USUAL_MIN_COST)
        return sum(max(least, query.k) for query in self.queries)


class MicroBatcher:
    """Answers pending queries of one run and kind by one call in a thread.

    Predictions of recent small queries are kept, since a served model does not change. With
    `max_predictions=1`, every query is answered alone, and again when it is repeated.
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
        self._pending: deque[PendingQueries] = deque()
        self._num_pending = 0  # queries, also those that are being answered
        self._arrived = asyncio.Event()
        self._recent: OrderedDict[RecentQuery, list[Prediction]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predictions")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # The event loop keeps a core: products that wait for it spin, and take half as long again
        # on two cores.
        num_threads = torch.get_num_threads()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, _limit_threads, max(1, num_threads - 1))
        torch.set_num_threads(num_threads)
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
        key = (predictor, kind, query)
        kept = self._recent.get(key)
        if kept is not None:
            self._recent.move_to_end(key)
            return kept.copy()
        [predictions] = await self.predict_all(predictor, kind, [query])
        if query.k <= MAX_RECENT_K and self._max_predictions > 1:
            self._recent[key] = predictions.copy()
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        return predictions

    async def predict_all(
        self, predictor: Predictor, kind: QueryType, queries: Sequence[Query]
    ) -> list[list[Prediction]]:
        """The predictions for several queries of a request, which are some items of the queue."""
        if self._num_pending >= self._max_pending:
            raise BusyError(
                f"{self._num_pending:,} queries are waiting already. Try again in a moment."
            )
        size = MAX_GROUP if self._max_predictions > 1 else 1
        groups = [queries[start : start + size] for start in range(0, len(queries), size)]
        loop = asyncio.get_running_loop()
        pending = [PendingQueries(predictor, kind, group, loop.create_future()) for group in groups]
        self._num_pending += len(queries)
        try:
            self._pending.extend(pending)
            self._arrived.set()
            answers = await asyncio.gather(*(item.future for item in pending))
        finally:
            self._num_pending -= len(queries)
        return [predictions for group in answers for predictions in group]

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for batch in self._next_batches():
                self._on_batch(sum(len(pending.queries) for pending in batch))
                results = await loop.run_in_executor(self._thread, predict_batch, batch)
                for pending, result in zip(batch, results, strict=True):
                    _deliver(pending, result)

    def _next_batches(self) -> list[list[PendingQueries]]:
        """The pending queries by run and kind; the excess stays for the next round."""
        batches: dict[tuple[Predictor, QueryType, bool], list[PendingQueries]] = {}
        cost = 0
        while cost < self._max_predictions and self._pending:
            pending = self._pending.popleft()
            if pending.future.done():  # its request was cancelled
                continue
            # Small queries are not answered together with a large one, and before it.
            is_large = 4 * pending.cost > self._max_predictions > 1
            batch = batches.setdefault((pending.predictor, pending.kind, is_large), [])
            batch.append(pending)
            cost += pending.cost
        if not self._pending:
            self._arrived.clear()
        return [batches[key] for key in sorted(batches, key=lambda key: key[2])]


def _limit_threads(number: int) -> None:
    """Limit the threads of the products that this thread computes.

    PyTorch fixes the limit of a thread when it is first read, so it is read here: otherwise the
    next call of `set_num_threads` in another thread would change it.
    """
    torch.set_num_threads(number)
    torch.get_num_threads()


def _deliver(pending: PendingQueries, result: list[list[Prediction]] | Exception) -> None:
    if pending.future.done():  # its request was cancelled
        return
    if isinstance(result, Exception):
        pending.future.set_exception(result)
    else:
        pending.future.set_result(result)


def predict_batch(batch: list[PendingQueries]) -> list[list[list[Prediction]] | Exception]:
    """The predictions for each item.

    If the batch fails, each item is answered alone, so that one cannot fail the others.
    """
    first = batch[0]
    queries = [query for pending in batch for query in pending.queries]
    try:
        predictions = iter(first.predictor.predict(first.kind, queries))
        return [list(islice(predictions, len(pending.queries))) for pending in batch]
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [predict_batch([pending])[0] for pending in batch]
