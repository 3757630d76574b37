"""New facts that were accepted or rejected, kept in a file beside the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from threading import Event
from typing import Annotated, Any

from fastapi import HTTPException, Query, Response
from fastapi.responses import PlainTextResponse

from dualkg.inference import decisions as kept
from dualkg.inference.predictor import Query as ModelQuery
from dualkg.serve.limits import MOST_NEW
from dualkg.serve.routes.completion import Names, choices_of, search
from dualkg.serve.routes.queries import AskedRun, router
from dualkg.serve.schemas import (
    DecidedFact,
    Decision,
    DecisionCounts,
    Decisions,
    Line,
    MadeDecision,
    MadeDecisions,
    NewFacts,
    Problem,
)
from dualkg.serve.state import ServedRun, Service

routes = router("decisions")
READ_ONLY = "This server was started with --read-only, and takes no decisions."
REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "Decisions are not taken, or not from a page of another host."},
    415: {"model": Problem, "description": "The body is not called JSON."},
}
Kept = dict[kept.Triple, kept.Decision]


@routes.get("/api/decisions")
async def decisions(context: AskedRun) -> Decisions:
    """The new facts that were accepted or rejected, in the order they were."""
    service, run = context
    found = await _kept(service, run)
    return Decisions(
        **_counts(run, found).model_dump(),
        can_decide=not service.read_only and run.run.folder is not None,
        decisions=[Decision.of(one) for one in found.values()],
    )


@routes.post("/api/decisions", responses=REFUSALS)
async def decide(context: AskedRun, made: MadeDecisions) -> DecisionCounts:
    """Accept or reject new facts, or take that back. All are kept, or none; a later decision is in place of an earlier.

    The body is JSON and says so; a browser must have it from a page of this server.
    """
    service, run = context
    if service.read_only:
        raise HTTPException(403, READ_ONLY)
    file = service.decisions.of(run)
    named = await asyncio.gather(*(_decision(service, run, one) for one in made.decisions))
    # Of one triple the last word counts.
    last = dict(named)
    new = [one for one in last.values() if one is not None]
    undone = [triple for triple, one in last.items() if one is None]

    def change() -> Kept:
        with service.decisions.lock:
            return file.update(new, removed=undone)

    return _counts(run, await service.slowly(change))


@routes.get("/facts.tsv", include_in_schema=False, response_class=PlainTextResponse)
async def accepted_as_tsv(context: AskedRun) -> Response:
    service, run = context
    accepted = [one for one in (await _kept(service, run)).values() if one.verdict == "accepted"]
    name = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "-_.") else "_" for sign in run.name)
    headers = {"Content-Disposition": f'attachment; filename="{name}-accepted.tsv"'}
    return Response(kept.as_tsv(accepted), media_type="text/tab-separated-values; charset=utf-8", headers=headers)


@routes.get("/facts.json", include_in_schema=False)
async def facts_as_json(
    context: AskedRun,
    top: Annotated[int, Query(ge=1, le=MOST_NEW)] = 100,
    relation: Names = [],  # noqa: B006
    head: Names = [],  # noqa: B006
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    types: bool = True,
) -> NewFacts:
    """The page of new facts for programs: the whole list at once, with what was decided."""
    service, run = context
    choices = await choices_of(context, relation, head, top=top, min_probability=min_probability, types=types)
    decided, given_up = await _kept(service, run), Event()
    facts = []
    try:
        async for line in search(service, run, choices, given_up=given_up):
            facts += [_decided(line, decided)] if line.kind == "triple" else []
    finally:
        given_up.set()
    return NewFacts(run=run.name, facts=facts)


def _decided(line: Line, decided: Kept) -> DecidedFact:
    assert line.head is not None
    assert line.relation is not None
    assert line.tail is not None
    one = decided.get((line.head.name, line.relation.name, line.tail.name))
    return DecidedFact(
        head=line.head,
        relation=line.relation,
        tail=line.tail,
        probability=line.probability,
        log_probability=line.log_probability,
        verdict=one.verdict if one else None,
    )


async def _decision(service: Service, run: ServedRun, one: MadeDecision) -> tuple[kept.Triple, kept.Decision | None]:
    """By names, with the probability that the model gives it now; none where it is taken back."""
    head, tail = await service.entity(run, one.head), await service.entity(run, one.tail)
    relation = await service.relation(run, one.relation)
    triple = run.entities[head], run.relations[relation], run.entities[tail]
    if one.verdict == "undecided":
        return triple, None
    [answer] = await service.answers(run, "triple", ModelQuery((head, relation, tail), k=1))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return triple, kept.Decision(*triple, verdict=one.verdict, probability=answer.probability, decided_at=now)


async def _kept(service: Service, run: ServedRun) -> Kept:
    if run.run.folder is None:
        return {}
    file = service.decisions.of(run)

    def load() -> Kept:
        with service.decisions.lock:
            return file.load()

    return await service.slowly(load)


def _counts(run: ServedRun, found: Mapping[kept.Triple, kept.Decision]) -> DecisionCounts:
    number = Counter(one.verdict for one in found.values())
    return DecisionCounts(run=run.name, accepted=number["accepted"], rejected=number["rejected"])
