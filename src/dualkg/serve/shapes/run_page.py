"""The page of one run, or of two side by side."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dualkg.serve.shapes.runs import Comparison, RunFacts


class RunPage(BaseModel):
    """One run, or two with what is between them."""

    runs: list[RunFacts]
    comparison: Comparison | None = None
    problem: str | None = Field(None, description="Why the two cannot be compared.")
