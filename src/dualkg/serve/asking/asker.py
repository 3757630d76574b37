"""What a route asks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dualkg.answers import Answer
from dualkg.answers.many import Kind, Question
from dualkg.errors import DualkgError
from dualkg.serve.runs import ServedRun


class BusyError(DualkgError):
    """There is more to do than the server takes on; the same request may do well later."""


class Asker(ABC):
    """Answers questions of many requests."""

    @abstractmethod
    async def ask(self, run: ServedRun, kind: Kind, question: Question) -> list[Answer]:
        """The answers to one question, or the sentence that refuses it as a DualkgError."""

    @abstractmethod
    async def start(self) -> None:
        """Before the first question."""

    @abstractmethod
    async def stop(self) -> None:
        """After the last."""
