"""Decisions: new facts that were accepted or rejected, stored in the run folder."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import HTTPException, Response

from dualkg.inference.decisions import Decision, DecisionStore, Triple, as_csv, as_tsv
from dualkg.inference.predictor import Query as ModelQuery
from dualkg.serve import schemas
from dualkg.serve.routes.completion import Options, completion
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import api_router

routes = api_router("decisions")
READ_ONLY = "This server was started with --read-only and accepts no decisions."
REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {"model": schemas.Error, "description": "Decisions are not accepted, or not from a page of another host."},
    415: {"model": schemas.Error, "description": "The content type is not JSON."},
}
ByTriple = Mapping[Triple, Decision]


@routes.get("/api/decisions")
async def decisions(context: Context) -> schemas.DecisionList:
    """The new facts that were accepted or rejected, in the order of the decisions."""
    found = await load_decisions(context)
    can_decide = not context.service.read_only and context.run.run.folder is not None
    return schemas.DecisionList(**_counts(context, found), can_decide=can_decide, decisions=list(found.values()))


@routes.post("/api/decisions", responses=REFUSALS)
async def decide(context: Context, new: schemas.NewDecisions) -> schemas.DecisionCounts:
    """Accept or reject new facts, or take decisions back. Either all are stored or none; a later one counts.

    The body must be declared as JSON; a browser must send it from a page of this server.
    """
    if context.service.read_only:
        raise HTTPException(403, READ_ONLY)
    by_triple = dict(await asyncio.gather(*(_decision(context, one) for one in new.decisions)))
    made = [one for one in by_triple.values() if one is not None]
    undone = [triple for triple, one in by_triple.items() if one is None]
    found = await _in_store(context, lambda store: store.update(made, removed=undone))
    return schemas.DecisionCounts(**_counts(context, found))


@routes.get("/facts.tsv", include_in_schema=False)
async def accepted_as_tsv(context: Context) -> Response:
    """For programs."""
    return await _accepted(context, lambda found: as_tsv(found).encode(), "tsv", "text/tab-separated-values")


@routes.get("/facts.csv", include_in_schema=False)
async def accepted_as_csv(context: Context) -> Response:
    """For spreadsheets, which recognize UTF-8 by a byte order mark."""
    return await _accepted(context, lambda found: as_csv(found).encode("utf-8-sig"), "csv", "text/csv")


async def _accepted(
    context: RequestContext, dump: Callable[[list[Decision]], bytes], suffix: str, media_type: str
) -> Response:
    accepted = [one for one in (await load_decisions(context)).values() if one.verdict == "accepted"]
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "_" for char in context.run.name)
    headers = {"Content-Disposition": f'attachment; filename="{name}-accepted.{suffix}"'}
    return Response(dump(accepted), media_type=f"{media_type}; charset=utf-8", headers=headers)


@routes.get("/facts.json", include_in_schema=False)
async def new_facts(context: Context, options: Options) -> schemas.NewFacts:
    """The page of new facts as JSON: the whole list at once, with the decisions."""
    decided, facts = await load_decisions(context), []
    async with aclosing(completion(context, options)) as lines:
        async for line in lines:
            if line.kind == "triple" and line.head and line.relation and line.tail:
                decision = decided.get((line.head.name, line.relation.name, line.tail.name))
                fact = schemas.NewFact.model_validate(line)
                facts.append(fact.model_copy(update={"verdict": decision.verdict}) if decision else fact)
    return schemas.NewFacts(run=context.run.name, facts=facts)


async def _decision(context: RequestContext, new: schemas.NewDecision) -> tuple[Triple, Decision | None]:
    """The decision by names, with the current probability of the triple; none if it is taken back."""
    ids = await context.ids(**new.model_dump(exclude={"verdict"}))
    head, relation, tail = (schemas.vocabulary_of(context.run.graph, part)[id] for part, id in ids.items())
    triple = head, relation, tail
    if new.verdict == "undecided":
        return triple, None
    [found] = await context.predict("triple", ModelQuery(tuple(ids.values()), k=1))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return triple, Decision(*triple, verdict=new.verdict, probability=found.probability, decided_at=now)


async def load_decisions(context: RequestContext) -> ByTriple:
    return {} if context.run.run.folder is None else await _in_store(context, DecisionStore.load)


async def _in_store(context: RequestContext, work: Callable[[DecisionStore], ByTriple]) -> ByTriple:
    store = context.service.decisions(context.run)

    def locked() -> ByTriple:
        with context.service.deciding:
            return work(store)

    return await context.in_thread(locked)


def _counts(context: RequestContext, found: ByTriple) -> dict[str, Any]:
    number = Counter(one.verdict for one in found.values())
    return {"run": context.run.name, "accepted": number["accepted"], "rejected": number["rejected"]}
