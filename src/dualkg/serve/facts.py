"""New facts: completion as a stream of JSON lines, decisions on the new triples, and the page of a
curator.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Query, Response
from fastapi.responses import StreamingResponse

from dualkg.errors import DualkgError
from dualkg.inference.completion import Completion, complete
from dualkg.inference.decisions import Decision, DecisionStore, Triple, as_csv, as_tsv
from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_NEW_TRIPLES
from dualkg.serve.schemas import CompletionLine
from dualkg.serve.service import BusyError, Context, RequestContext
from dualkg.serve.templating import api_router, fill, page, page_router, page_url, relation_text

routes = api_router("completion")
decision_routes = api_router("decisions")
pages = page_router()
PROGRESS_INTERVAL = 0.25  # seconds
# 10,000 lines take a second, in which no other request would be answered. A pause also gives
# threads their turn.
LINES_AT_ONCE = 20
PAUSE = 0.001
BUSY = "Another completion is running. Try again when it has finished."
LENGTHS = (50, 100, 500, 2000)  # of the list of a page
REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {
        "model": schemas.Error,
        "description": "Decisions are not accepted, or not from a page of another host.",
    },
    415: {"model": schemas.Error, "description": "The content type is not JSON."},
}
ByTriple = Mapping[Triple, Decision]
Names = Annotated[list[Annotated[str, Query(max_length=MAX_NAME_LENGTH)]], Query(max_length=100)]


class _CancelledError(Exception):
    """The reader of the stream has gone."""


async def completion_options(
    context: Context,
    top: Annotated[int, Query(ge=1, le=MAX_NEW_TRIPLES, description="Number of triples.")] = 100,
    relation: Names = [],  # noqa: B006
    head: Names = [],  # noqa: B006
    min_probability: Annotated[
        float, Query(ge=0, le=1, description="Only triples at least this probable.")
    ] = 0.0,
    types: Annotated[
        bool, Query(description="Only heads and tails that the relation has in train.")
    ] = True,
) -> dict[str, Any]:
    """Keyword arguments of `complete`; all relations and heads where none is named."""
    relations = [await context.id(name, "relation") for name in relation] or None
    heads = [await context.id(name) for name in head] or None
    return {
        "relations": relations,
        "heads": heads,
        "top": top,
        "min_probability": min_probability,
        "types": types,
    }


Options = Annotated[dict[str, Any], Depends(completion_options)]


@routes.get(
    "/api/complete",
    response_class=StreamingResponse,
    responses={
        200: {
            "model": CompletionLine,
            "content": {"application/x-ndjson": {}},
            "description": "JSON lines.",
        }
    },
)
async def complete_run(context: Context, options: Options) -> StreamingResponse:
    """The most plausible triples that the graph does not have, as JSON lines, after lines of
    progress.
    """
    return _stream(context, options, lambda line: line.model_dump_json(exclude_none=True))


def _stream(
    context: RequestContext, options: dict[str, Any], dump: Callable[[CompletionLine], str]
) -> StreamingResponse:
    """A completion as a stream of lines; a late error is its last line."""
    if context.service.completing.locked():
        raise BusyError(BUSY)

    async def lines() -> AsyncIterator[str]:
        group: list[
            str
        ] = []  # sent at once, since every chunk passes through all layers of the application
        try:
            async with aclosing(completion(context, options)) as found:
                async for line in found:
                    group.append(f"{dump(line)}\n")
                    if line.kind != "triple" or len(group) == LINES_AT_ONCE:
                        yield "".join(group)
                        group.clear()
        except (TimeoutError, DualkgError) as error:
            late = f"The completion took longer than its limit of {context.service.limits.stream_seconds:g} seconds."
            message = late if isinstance(error, TimeoutError) else str(error)
            yield f"{dump(CompletionLine(kind='error', error=message))}\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def completion(
    context: RequestContext, options: dict[str, Any]
) -> AsyncGenerator[CompletionLine, None]:
    """The lines of a completion that runs in a thread; closing the generator stops it at its next
    block of queries.
    """
    service = context.service
    run = context.run
    loop = asyncio.get_running_loop()
    progress = asyncio.Queue[CompletionLine | None]()
    cancelled = Event()
    reported = 0.0
    deadline = loop.time() + service.limits.stream_seconds
    if not service.completing.acquire(blocking=False):
        raise BusyError(BUSY)

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        if cancelled.is_set():
            raise _CancelledError
        if time.monotonic() >= reported + PROGRESS_INTERVAL or done == total:
            reported = time.monotonic()
            loop.call_soon_threadsafe(
                progress.put_nowait, CompletionLine(kind="progress", done=done, total=total)
            )

    def work() -> Completion | None:
        try:
            calibration = run.predictor.calibration
            return complete(
                run.predictor.model,
                run.graph,
                calibration=calibration,
                on_progress=on_progress,
                **options,
            )
        except _CancelledError:
            return None
        finally:
            service.completing.release()
            loop.call_soon_threadsafe(progress.put_nowait, None)

    running = loop.run_in_executor(service.completions, work)
    try:
        while (line := await asyncio.wait_for(progress.get(), deadline - loop.time())) is not None:
            yield line
    finally:
        cancelled.set()
    if (found := await running) is None:
        return
    for number, triple in enumerate(found.triples.tolist()):
        yield CompletionLine(
            kind="triple",
            rank=number + 1,
            **dict(schemas.Triple.of(run.graph, *triple)),
            probability=None if found.probability is None else float(found.probability[number]),
            score=float(found.score[number]),
            log_probability=float(found.log_probability[number]),
        )
        if number % LINES_AT_ONCE == LINES_AT_ONCE - 1:
            await asyncio.sleep(PAUSE)  # sending does not wait, unless the client does not read
    yield CompletionLine(kind="end", num_triples=len(found))


@decision_routes.get("/api/decisions")
async def decisions(context: Context) -> schemas.DecisionList:
    """The new facts that were accepted or rejected, in the order of the decisions."""
    found = await _load_decisions(context)
    can_decide = not context.service.read_only and context.run.run.folder is not None
    return schemas.DecisionList(
        **_counts(context, found), can_decide=can_decide, decisions=list(found.values())
    )


@decision_routes.post("/api/decisions", responses=REFUSALS)
async def decide(context: Context, new: schemas.NewDecisions) -> schemas.DecisionCounts:
    """Accept or reject new facts, or take decisions back. Either all are stored or none; a later
    one counts.

    The body must be declared as JSON; a browser must send it from a page of this server.
    """
    if context.service.read_only:
        raise HTTPException(
            403, "This server was started with --read-only and accepts no decisions."
        )
    by_triple = dict(await asyncio.gather(*(_decision(context, one) for one in new.decisions)))
    made = [one for one in by_triple.values() if one is not None]
    undone = [triple for triple, one in by_triple.items() if one is None]
    service = context.service
    run = context.run
    found = await context.in_thread(
        lambda: service.decisions(run, lambda store: store.update(made, removed=undone))
    )
    return schemas.DecisionCounts(**_counts(context, found))


async def _decision(
    context: RequestContext, new: schemas.NewDecision
) -> tuple[Triple, Decision | None]:
    """The decision by names, with the current probability of the triple; none if it is taken
    back.
    """
    ids = await context.ids(**new.model_dump(exclude={"verdict"}))
    head, relation, tail = (
        schemas.vocabulary_of(context.run.graph, part)[id] for part, id in ids.items()
    )
    triple = head, relation, tail
    if new.verdict == "undecided":
        return triple, None
    [found] = await context.predict("triple", *ids.values(), k=1)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return triple, Decision(
        *triple, verdict=new.verdict, probability=found.probability, decided_at=now
    )


async def _load_decisions(context: RequestContext) -> ByTriple:
    if context.run.run.folder is None:
        return {}
    return await context.in_thread(
        lambda: context.service.decisions(context.run, DecisionStore.load)
    )


def _counts(context: RequestContext, found: ByTriple) -> dict[str, Any]:
    number = Counter(one.verdict for one in found.values())
    return {"run": context.run.name, "accepted": number["accepted"], "rejected": number["rejected"]}


@decision_routes.get("/facts.tsv", include_in_schema=False)
@decision_routes.get("/facts.csv", include_in_schema=False)
async def accepted_facts(context: Context) -> Response:
    """TSV for programs, and CSV for spreadsheets, which recognize UTF-8 by a byte order mark."""
    accepted = [
        one for one in (await _load_decisions(context)).values() if one.verdict == "accepted"
    ]
    if context.request.url.path.endswith(".tsv"):
        suffix = "tsv"
        media_type = "text/tab-separated-values"
        body = as_tsv(accepted).encode()
    else:
        suffix = "csv"
        media_type = "text/csv"
        body = as_csv(accepted).encode("utf-8-sig")
    name = re.sub(r"[^a-zA-Z0-9._-]", "_", context.run.name)
    headers = {"Content-Disposition": f'attachment; filename="{name}-accepted.{suffix}"'}
    return Response(body, media_type=f"{media_type}; charset=utf-8", headers=headers)


@decision_routes.get("/facts.json", include_in_schema=False)
async def new_facts(context: Context, options: Options) -> schemas.NewFacts:
    """The page of new facts as JSON: the whole list at once, with the decisions."""
    decided = await _load_decisions(context)
    facts = []
    async with aclosing(completion(context, options)) as lines:
        async for line in lines:
            if line.kind == "triple":
                fact = schemas.NewFact.model_validate(line)
                facts.append(fact.model_copy(update={"verdict": _verdict(decided, line)}))
    return schemas.NewFacts(run=context.run.name, facts=facts)


def _verdict(decided: ByTriple, line: CompletionLine) -> str | None:
    head, relation, tail = (
        item.name if item else "" for item in (line.head, line.relation, line.tail)
    )
    decision = decided.get((head, relation, tail))
    return decision.verdict if decision else None


@pages.get("/facts")
async def facts_page(
    context: Context,
    relation: Annotated[str, Query(max_length=MAX_NAME_LENGTH)] = "",
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    top: Annotated[int, Query(ge=1, le=LENGTHS[-1])] = LENGTHS[1],
) -> Response:
    """The frame of the list; a script adds the rows as they are found."""
    params = {"relation": relation or None, "min_probability": min_probability or None, "top": top}
    return page(
        context,
        "facts.html",
        json=page_url(context, "/facts.json", **params),
        relations=sorted(context.run.relations, key=lambda item: relation_text(item.label)),
        chosen=context.run.relations[await context.id(relation, "relation")] if relation else None,
        min_probability=min_probability,
        top=top,
        lengths=sorted({*LENGTHS, top}),
        decisions=await decisions(context),
    )


@pages.get("/facts/rows")
async def fact_rows(context: Context, options: Options) -> StreamingResponse:
    """The lines of `/api/complete`, with each triple as a row of the page."""
    status = await decisions(context)
    decided = {one.triple: one for one in status.decisions}

    def dump(line: CompletionLine) -> str:
        if line.kind != "triple":
            return line.model_dump_json(exclude_none=True)
        values = {"fact": line, "verdict": _verdict(decided, line), "can_decide": status.can_decide}
        return json.dumps({"kind": line.kind, "html": fill(context, "fact_row.html", **values)})

    return _stream(context, options, dump)
