"""Micro-batching: pending queries are answered together, by one call of the model, in turns."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch

from dualkg.inference.predictor import Prediction, Predictor, Query, QueryType
from dualkg.serve.errors import QueueFull
from dualkg.serve.fairness import FairQueue

MAX_BATCH_PREDICTIONS = 400  # a batch with more would make all other requests wait for it
MAX_GROUP = 25  # queries of one request that are one item of the queue
MIN_COST = {"triple": 2}  # predictions that the scores of a query take the time of
USUAL_MIN_COST = 10
MAX_RECENT = 5000  # queries whose predictions are kept, about 4 KB each
MAX_RECENT_K = 20  # predictions that a query whose predictions are kept may ask for
FULL_QUEUES = 8  # clients that may have as many pending queries as one may

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

    Clients take turns, by the cost of their queries, so that no client waits for all queries of
    another. Predictions of recent small queries are kept, since a served model does not change.
    With `max_predictions=1`, every query is answered alone, and again when it is repeated.
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
        self._pending: FairQueue[PendingQueries] = FairQueue()
        self._num_pending: Counter[str] = Counter()  # queries by client
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
        self, predictor: Predictor, kind: QueryType, query: Query, *, client: str = ""
    ) -> list[Prediction]:
        """The predictions for one query; a wrong query raises a DualkgError."""
        key = (predictor, kind, query)
        kept = self._recent.get(key)
        if kept is not None:
            self._recent.move_to_end(key)
            return kept.copy()
        [predictions] = await self.predict_all(predictor, kind, [query], client=client)
        if query.k <= MAX_RECENT_K and self._max_predictions > 1:
            self._recent[key] = predictions.copy()
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        return predictions

    async def predict_all(
        self, predictor: Predictor, kind: QueryType, queries: Sequence[Query], *, client: str = ""
    ) -> list[list[Prediction]]:
        """The predictions for several queries of a request, which are some items of the queue."""
        self._check_room(client)
        size = MAX_GROUP if self._max_predictions > 1 else 1
        groups = [queries[start : start + size] for start in range(0, len(queries), size)]
        loop = asyncio.get_running_loop()
        futures = []
        self._num_pending[client] += len(queries)
        try:
            for group in groups:
                pending = PendingQueries(predictor, kind, group, loop.create_future())
                self._pending.put(client, pending, cost=pending.cost)
                futures.append(pending.future)
            self._arrived.set()
            answers = await asyncio.gather(*futures)
        finally:
            self._num_pending[client] -= len(queries)
            if not self._num_pending[client]:
                del self._num_pending[client]
        return [predictions for group in answers for predictions in group]

    def _check_room(self, client: str) -> None:
        """Refuse a query if its client has enough, or all have and it has more than others."""
        num_own = self._num_pending[client]
        num_all = self._num_pending.total()
        is_full = num_all >= FULL_QUEUES * self._max_pending
        if num_own >= self._max_pending or (is_full and num_own * len(self._num_pending) > num_all):
            raise QueueFull(num_own)

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
        """The pending queries by run and kind, in turns of their clients.

        The excess stays for the next round.
        """
        batches: dict[tuple[Predictor, QueryType, bool], list[PendingQueries]] = {}
        cost = 0
        while cost < self._max_predictions and (pending := self._pending.take()):
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
    """Let the products of this thread alone use so many threads.

    A thread takes its number over from the last call when it is first asked for, here at once: else
    it would be that of the next call in another thread.
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
