"""Runs, two of them side by side, and the map of one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from dualkg.serve.shapes.things import Thing


class GraphFacts(BaseModel):
    """The graph of a run."""

    name: str
    counts: dict[str, int]
    notes: list[str] = Field(description="What was noticed while reading it.")


class Sparsity(BaseModel):
    """Zeros among the entries of the entity tables."""

    share: float
    storage: dict[str, Any] = Field(description="Numbers and bytes, dense and without zeros.")
    made: dict[str, Any] | None = Field(description="How the run was made sparse, where it was.")


class RunFacts(BaseModel):
    """All that is kept of a run."""

    run: str
    model: str
    graph: GraphFacts
    relations: list[Thing]
    recipe: dict[str, Any]
    recipe_toml: str
    history: list[dict[str, Any]] = Field(
        description="Of each epoch the loss, and where it was ranked the MRR on valid."
    )
    reports: dict[str, Any] = Field(description="By split: metrics as a whole, by direction, relation, cardinality.")
    costs: dict[str, float | None] | None
    calibrated: bool
    reliability: dict[str, Any] | None = Field(description="How probabilities held on test: bins of a diagram.")
    coverage: dict[str, Any] | None = Field(description="How often answer sets had the answer.")
    sparsity: Sparsity | None


class RunNames(BaseModel):
    """The runs that are served; the first is asked where none is named."""

    runs: list[str]


class DifferingQuestion(BaseModel):
    """A question of test, and the rank of its answer in both runs."""

    head: Thing
    relation: Thing
    tail: Thing
    asked: Literal["head", "tail"]
    rank_a: float
    rank_b: float
    difference: float = Field(description="1/rank_a − 1/rank_b.")


class Comparison(BaseModel):
    """Two runs on the questions of test."""

    a: str
    b: str
    graph: str
    split: str
    sentence: str
    metrics: dict[str, Any] = Field(description="Each metric of both, the difference, its 95 % interval and p-value.")
    better: float = Field(description="The share of triples on which a has the higher MRR.")
    worse: float
    equal: float
    num_triples: int
    questions: list[DifferingQuestion]


class EntityMap(BaseModel):
    """All entities in the plane, by id; each axis from −1 to 1."""

    run: str
    x: list[float]
    y: list[float]
    names: list[str]
    labels: list[str] | None = Field(description="None where the graph has none: then people call them by their names.")


class MapInTheMaking(BaseModel):
    """The map is not there yet."""

    run: str
    sentence: str
