"""What a request that cannot be answered gets."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """The sentence that the command line would give."""

    error: str
    near: list[str] = Field(default_factory=list, description="Names that may have been meant.")


class Health(BaseModel):
    status: str
