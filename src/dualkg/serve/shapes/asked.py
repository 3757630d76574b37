"""The page Ask, for programs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from dualkg.serve.shapes.things import Answer, Question


class SetSize(BaseModel):
    """The best so many new answers have the missing one with a promised probability."""

    coverage: float
    size: int


class AskedAnswers(BaseModel):
    """A question with its new answers, best first, and those that the graph has."""

    run: str
    find: Literal["head", "relation", "tail"]
    question: Question
    known: list[Answer]
    answers: list[Answer]
    answer_set: SetSize | None = Field(description="None for relations, and of runs that are not calibrated.")
