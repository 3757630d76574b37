"""Why a triple has its score."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from dualkg.serve.routes.choices import AskedRun, Head, Relation, Tail, router
from dualkg.serve.shapes.facts import Explanation

routes = router("questions")
MOST_REASONS = 50


@routes.get("/api/explain")
async def explain(
    whom: AskedRun,
    head: Head,
    relation: Relation,
    tail: Tail,
    k: Annotated[int, Query(ge=1, le=MOST_REASONS, description="How many reasons.")] = 5,
) -> Explanation:
    """The training triples that support a triple's score, and entities alike that have the same."""
    service, run = whom
    ids = await service.entity(run, head), await service.relation(run, relation), await service.entity(run, tail)
    found = await service.slowly(lambda: run.predictor.explain(*ids, k=k))
    return Explanation.of(run.name, found)
