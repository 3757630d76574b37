"""The plain way: every request asks the predictor itself, in a thread."""

from __future__ import annotations

import asyncio

from dualkg.answers import Answer
from dualkg.answers.many import Kind, Question, answer_one
from dualkg.serve.asking.asker import Asker
from dualkg.serve.runs import ServedRun


class OneByOne(Asker):
    """What `Together` is measured against, and tested against."""

    async def ask(self, run: ServedRun, kind: Kind, question: Question) -> list[Answer]:
        return await asyncio.to_thread(answer_one, run.predictor, kind, question)

    async def start(self) -> None:
        """There is nothing to be made ready."""

    async def stop(self) -> None:
        """Nothing waits."""
