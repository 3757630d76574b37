"""All that routes share while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from fastapi import Request

from dualkg.answers.many import Kind, Question
from dualkg.serve.asking import Asker
from dualkg.serve.counts import Counts
from dualkg.serve.decided import DecisionFiles
from dualkg.serve.journal import Journal
from dualkg.serve.limits import Limits
from dualkg.serve.maps import Maps
from dualkg.serve.runs import ServedRun, ServedRuns
from dualkg.serve.shapes.things import Answer

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

    async def answers(self, run: ServedRun, kind: Kind, question: Question) -> list[Answer]:
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
