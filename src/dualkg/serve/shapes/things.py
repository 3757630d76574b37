"""Entities, relations, questions and their answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from dualkg import answers
from dualkg.answers.lookup import Match
from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary


class Thing(BaseModel):
    """An entity or a relation."""

    id: int
    name: str = Field(description="What it is asked by.")
    label: str = Field(description="What people call it; the name where it has no label.")

    @classmethod
    def of(cls, vocabulary: Vocabulary, id: int) -> Thing:
        return cls(id=id, name=vocabulary[id], label=vocabulary.label(id))


class Answer(Thing):
    """One answer; scores compare within one question alone."""

    score: float | None = Field(description="Of the triple; of similar entities the cosine.")
    probability: float | None = Field(
        description="Calibrated; none where the run was not calibrated, and of what train has."
    )
    known: bool = Field(description="Whether the graph already has it.")
    split: str | None = Field(description="Which split has it.")

    @classmethod
    def of(cls, found: answers.Answer) -> Answer:  # type: ignore[override]
        return cls.model_construct(
            id=found.id,
            name=found.name,
            label=found.label,
            score=found.score,
            probability=found.probability,
            known=found.known,
            split=found.split,
        )


class Question(BaseModel):
    """What was given; what was asked for is none."""

    head: Thing | None = None
    relation: Thing | None = None
    tail: Thing | None = None

    @classmethod
    def of(
        cls, graph: Graph, *, head: int | None = None, relation: int | None = None, tail: int | None = None
    ) -> Question:
        return cls(
            head=None if head is None else Thing.of(graph.entities, head),
            relation=None if relation is None else Thing.of(graph.relations, relation),
            tail=None if tail is None else Thing.of(graph.entities, tail),
        )


class Answers(BaseModel):
    """A question and its answers, best first."""

    run: str
    question: Question
    answers: list[Answer]


class Alike(BaseModel):
    """An entity, and those that are most like it; the score is the cosine."""

    run: str
    entity: Thing
    answers: list[Answer]


class AnswerSet(Answers):
    """The few answers among which the missing one is with a promised probability."""

    coverage: float
    size: int = Field(description="How many there are; `answers` has the first of them.")


class Score(BaseModel):
    """A triple, and what the model says of it."""

    head: Thing
    relation: Thing
    tail: Thing
    score: float | None
    probability: float | None
    known: bool
    split: str | None


class Scores(BaseModel):
    """Triples in the order they were asked about."""

    run: str
    scores: list[Score]


class FoundName(Thing):
    """A name that fits what was typed, and in which way."""

    how: Literal["same", "beginning", "word", "inside", "misspelt"]

    @classmethod
    def matching(cls, vocabulary: Vocabulary, match: Match) -> FoundName:
        return cls(id=match.id, name=vocabulary[match.id], label=vocabulary.label(match.id), how=match.how)


class FoundNames(BaseModel):
    """Entities by a few letters of their names, best first."""

    run: str
    q: str
    entities: list[FoundName]
