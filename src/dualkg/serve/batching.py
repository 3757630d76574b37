"""What a route asks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualkg.errors import DualkgError
from dualkg.inference.predictor import Prediction, Query, QueryType
from dualkg.serve.metrics import Counts

if TYPE_CHECKING:
    from dualkg.serve.state import ServedRun


class BusyError(DualkgError):
    """There is more to do than the server takes on; the same request may do well later."""


class Asker(ABC):
    """Answers questions of many requests."""

    @abstractmethod
    async def ask(self, run: ServedRun, kind: QueryType, question: Query) -> list[Prediction]:
        """The answers to one question, or the sentence that refuses it as a DualkgError."""

    @abstractmethod
    async def start(self) -> None:
        """Before the first question."""

    @abstractmethod
    async def stop(self) -> None:
        """After the last."""


class OneByOne(Asker):
    """What `Together` is measured against, and tested against."""

    async def ask(self, run: ServedRun, kind: QueryType, question: Query) -> list[Prediction]:
        return (await asyncio.to_thread(run.predictor.predict, kind, [question]))[0]

    async def start(self) -> None:
        """There is nothing to be made ready."""

    async def stop(self) -> None:
        """Nothing waits."""


MOST_ANSWERS = 4000  # of a batch: one that asks for many must not make all others wait long


@dataclass(frozen=True, eq=False)
class Waiting:
    """A question, and where its answers go."""

    run: ServedRun
    kind: QueryType
    question: Query
    answers: asyncio.Future[list[Prediction]]


class Together(Asker):
    """Collects what waits, and answers it by run and kind with one call each, in a thread of its own."""

    def __init__(self, *, most_waiting: int, counts: Counts) -> None:
        self._most_waiting, self._counts = most_waiting, counts
        self._waiting: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, run: ServedRun, kind: QueryType, question: Query) -> list[Prediction]:
        if len(self._waiting) >= self._most_waiting:
            raise BusyError(f"{len(self._waiting):,} questions wait already. Ask again in a event.")
        answers: asyncio.Future[list[Prediction]] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(run, kind, question, answers))
        self._arrived.set()
        return await answers

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for batch in self._take():
                self._counts.batch(len(batch))
                found = await loop.run_in_executor(self._thread, answer_batch, batch)
                for one, answers in zip(batch, found, strict=True):
                    if one.answers.done():  # nobody waits any more
                        continue
                    if isinstance(answers, Exception):
                        one.answers.set_exception(answers)
                    else:
                        one.answers.set_result(answers)

    def _take(self) -> list[list[Waiting]]:
        """What waits, in the order of arrival and by run and kind; what is too much stays for the next time."""
        groups: dict[tuple[str, QueryType], list[Waiting]] = {}
        num_answers = 0
        while self._waiting and num_answers < MOST_ANSWERS:
            one = self._waiting.popleft()
            if not one.answers.done():
                groups.setdefault((one.run.name, one.kind), []).append(one)
                num_answers += one.question.k
        if not self._waiting:
            self._arrived.clear()
        return list(groups.values())


def answer_batch(batch: list[Waiting]) -> list[list[Prediction] | Exception]:
    """The answers to each; where all together fail, each alone, so that one cannot spoil the others."""
    first = batch[0]
    try:
        return list(first.run.predictor.predict(first.kind, [one.question for one in batch]))
    except Exception as error:
        return [error] if len(batch) == 1 else [_answer_alone(one) for one in batch]


def _answer_alone(one: Waiting) -> list[Prediction] | Exception:
    try:
        return one.run.predictor.predict(one.kind, [one.question])[0]
    except Exception as error:
        return error
