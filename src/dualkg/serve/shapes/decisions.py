"""Decisions on new facts, as they come and as they are told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr

from dualkg.answers import decisions
from dualkg.serve.limits import LONGEST_NAME, MOST_TRIPLES
from dualkg.serve.shapes.facts import Fact

Name = Annotated[StrictStr, Field(max_length=LONGEST_NAME)] | StrictInt


class MadeDecision(BaseModel):
    """What was decided on a triple, each part by its name, or by its id as a number; `undecided` takes it back."""

    head: Name
    relation: Name
    tail: Name
    verdict: Literal["accepted", "rejected", "undecided"]


class MadeDecisions(BaseModel):
    """Decisions on new facts; they are kept all together, or not at all."""

    decisions: list[MadeDecision] = Field(min_length=1, max_length=MOST_TRIPLES)


class Decision(BaseModel):
    """A new fact that was accepted or rejected, by its names."""

    head: str
    relation: str
    tail: str
    verdict: Literal["accepted", "rejected"]
    probability: float | None = Field(description="That it had when it was decided on.")
    decided: str = Field(description="When, as ISO 8601 in UTC.")

    @classmethod
    def of(cls, made: decisions.Decision) -> Decision:
        return cls.model_validate(made, from_attributes=True)


class DecisionCounts(BaseModel):
    """How many new facts were accepted and rejected so far."""

    run: str
    accepted: int
    rejected: int


class Decisions(DecisionCounts):
    """All decisions, in the order they were made."""

    can_decide: bool = Field(description="Whether more are taken.")
    decisions: list[Decision]


class DecidedFact(Fact):
    """A new fact, and what was decided on it."""

    verdict: Literal["accepted", "rejected"] | None = None


class NewFacts(BaseModel):
    """The most plausible triples that the graph does not have, best first."""

    run: str
    facts: list[DecidedFact]
