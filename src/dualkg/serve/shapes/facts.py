"""Triples: known ones, predicted ones, and why."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from dualkg.answers import explanation, facts
from dualkg.data.graph import Graph
from dualkg.serve.shapes.things import Answer, Thing


class Fact(BaseModel):
    """A triple; the split that has it, or how likely it is."""

    head: Thing
    relation: Thing
    tail: Thing
    split: str | None = None
    probability: float | None = None
    evidence: float | None = Field(None, description="½ log p(tail | head, relation) + ½ log p(head | relation, tail).")

    @classmethod
    def of(cls, graph: Graph, fact: facts.Fact) -> Fact:
        return cls(
            head=Thing.of(graph.entities, fact.head),
            relation=Thing.of(graph.relations, fact.relation),
            tail=Thing.of(graph.entities, fact.tail),
            split=fact.split,
            probability=fact.probability,
            evidence=fact.evidence,
        )


class Entity(BaseModel):
    """What is known of an entity, what the model would add, and which entities are like it."""

    run: str
    entity: Thing
    num_known: int = Field(description="How many triples have it; `known` has the first of them.")
    known: list[Fact]
    predicted: list[Fact]
    similar: list[Answer]


class NamedTriple(BaseModel):
    """A triple by its names, and as people say it."""

    head: str
    relation: str
    tail: str
    spoken: str


class Reason(BaseModel):
    """A training triple, and by how much the score falls without it."""

    triple: NamedTriple
    fall: float
    by_head: float
    by_tail: float
    itself: bool
    sentence: str


class Likeness(BaseModel):
    """An entity like the head, or like the tail, for which the same is known."""

    entity: str
    side: Literal["head", "tail"]
    cosine: float
    triple: NamedTriple
    sentence: str


class Explanation(BaseModel):
    """Why a triple has its score, the strongest reason first."""

    run: str
    triple: NamedTriple
    score: float | None
    split: str | None
    reasons: list[Reason]
    alike: list[Likeness]
    sentences: list[str]

    @classmethod
    def of(cls, run: str, found: explanation.Explanation) -> Explanation:
        parts: dict[str, Any] = found.as_dict()
        for name, ones in (("reasons", found.reasons), ("alike", found.alike)):
            parts[name] = [part | {"sentence": one.sentence()} for part, one in zip(parts[name], ones, strict=True)]  # type: ignore[attr-defined]
        return cls.model_validate({"run": run, **parts, "sentences": found.sentences()})


class Line(BaseModel):
    """One line of a completion: how far it is, a new triple, its end, or why it ended early."""

    kind: Literal["progress", "triple", "end", "error"]
    done: int | None = Field(None, description="Queries that are done, of a line of progress.")
    of: int | None = Field(None, description="All queries, of a line of progress.")
    rank: int | None = None
    head: Thing | None = None
    relation: Thing | None = None
    tail: Thing | None = None
    probability: float | None = None
    score: float | None = None
    evidence: float | None = None
    triples: int | None = Field(None, description="How many there were, of the last line.")
    error: str | None = None
