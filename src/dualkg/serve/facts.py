"""New facts: a completion as JSON lines, decisions on new triples, and the page of a curator."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import compress
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Query, Response
from fastapi.responses import StreamingResponse

from dualkg.errors import DualkgError
from dualkg.inference.completion import Completion
from dualkg.inference.decisions import (
    Decision,
    DecisionStore,
    Triple,
    Verdict,
    as_csv,
    as_tsv,
)
from dualkg.serve import schemas
from dualkg.serve.errors import (
    CompletionRunning,
    DecisionsRefused,
    TimeLimitExceeded,
    public_message,
)
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_NEW_TRIPLES
from dualkg.serve.schemas import CompletionLine
from dualkg.serve.service import Context, RequestContext, ServedRun
from dualkg.serve.templating import api_router, fill, page, page_router, page_url, relation_text

routes = api_router("completion")
decision_routes = api_router("decisions")
pages = page_router()
PROGRESS_INTERVAL = 0.25  # seconds
# 10,000 lines take a second, in which no other request would be answered. A pause also gives
# threads their turn.
LINES_AT_ONCE = 20
PAUSE = 0.001
LENGTHS = (50, 100, 500, 2000)  # triples that a page may list
DEFAULT_LENGTH = 100
REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {
        "model": schemas.Error,
        "description": "Decisions are not accepted, or not from a page of another host.",
    },
    415: {"model": schemas.Error, "description": "The content type is not JSON."},
}
ByTriple = Mapping[Triple, Decision]
Names = Annotated[list[Annotated[str, Query(max_length=MAX_NAME_LENGTH)]], Query(max_length=100)]


class _ReaderGone(Exception):
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
    relations = [await context.id(name, "relation") for name in relation]
    heads = [await context.id(name) for name in head]
    return {
        "relations": relations or None,
        "heads": heads or None,
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
    """The most plausible triples that the graph does not have, as JSON lines.

    Lines of progress come first.
    """
    return _stream(context, options, lambda line: line.model_dump_json(exclude_none=True))


def _stream(
    context: RequestContext, options: dict[str, Any], dump: Callable[[CompletionLine], str]
) -> StreamingResponse:
    """A completion as a stream of lines; a late error is its last line."""
    if context.service.completing.locked():
        raise CompletionRunning

    async def lines() -> AsyncIterator[str]:
        # Lines are sent in groups, since every chunk passes through all layers of the application.
        group: list[str] = []
        try:
            async with aclosing(completion(context, options)) as completion_lines:
                async for line in completion_lines:
                    group.append(f"{dump(line)}\n")
                    if line.kind != "triple" or len(group) == LINES_AT_ONCE:
                        yield "".join(group)
                        group.clear()
        except TimeoutError:
            seconds = context.service.limits.stream_seconds
            yield f"{dump(_error_line(TimeLimitExceeded('The completion', seconds=seconds)))}\n"
        except DualkgError as error:
            yield f"{dump(_error_line(error))}\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _error_line(error: DualkgError) -> CompletionLine:
    return CompletionLine(kind="error", error=public_message(error))


async def completion(
    context: RequestContext, options: dict[str, Any]
) -> AsyncGenerator[CompletionLine, None]:
    """The lines of a completion that runs in a thread.

    Closing the generator stops the completion at its next block of queries.
    """
    service = context.service
    run = context.run
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.limits.stream_seconds
    progress = asyncio.Queue[CompletionLine | None]()  # None is the end
    cancelled = Event()
    last_report = 0.0
    if not service.completing.acquire(blocking=False):
        raise CompletionRunning

    def on_progress(done: int, total: int) -> None:
        nonlocal last_report
        if cancelled.is_set():
            raise _ReaderGone
        now = time.monotonic()
        if now >= last_report + PROGRESS_INTERVAL or done == total:
            last_report = now
            line = CompletionLine(kind="progress", done=done, total=total)
            loop.call_soon_threadsafe(progress.put_nowait, line)

    def work() -> Completion | None:
        try:
            return run.complete(
                run.predictor.model,
                run.graph,
                calibration=run.predictor.calibration,
                on_progress=on_progress,
                **options,
            )
        except _ReaderGone:
            return None
        finally:
            service.completing.release()
            loop.call_soon_threadsafe(progress.put_nowait, None)

    running = loop.run_in_executor(service.completions, work)
    try:
        while True:
            line = await asyncio.wait_for(progress.get(), deadline - loop.time())
            if line is None:
                break
            yield line
    finally:
        cancelled.set()

    completed = await running
    if completed is None:
        return
    for index in range(len(completed)):
        yield _triple_line(run, completed, index)
        if index % LINES_AT_ONCE == LINES_AT_ONCE - 1:
            await asyncio.sleep(PAUSE)  # sending does not wait, unless the client does not read
    yield CompletionLine(kind="end", num_triples=len(completed))


def _triple_line(run: ServedRun, completed: Completion, index: int) -> CompletionLine:
    triple = schemas.Triple.of(
        run.graph,
        int(completed.heads[index]),
        int(completed.relations[index]),
        int(completed.tails[index]),
    )
    probability = None
    answer_probability = None
    if completed.probability is not None and completed.answer_probability is not None:
        probability = float(completed.probability[index])
        answer_probability = float(completed.answer_probability[index])
    return CompletionLine(
        kind="triple",
        rank=index + 1,
        head=triple.head,
        relation=triple.relation,
        tail=triple.tail,
        probability=probability,
        answer_probability=answer_probability,
        score=float(completed.score[index]),
        log_probability=float(completed.log_probability[index]),
    )


@decision_routes.get("/api/decisions")
async def decisions(context: Context) -> schemas.DecisionList:
    """The new facts that were accepted or rejected, in the order of the decisions."""
    decided = await _load_decisions(context)
    can_decide = not context.service.read_only and context.run.run.folder is not None
    return schemas.DecisionList(
        **_counts(context, decided), can_decide=can_decide, decisions=list(decided.values())
    )


@decision_routes.post("/api/decisions", responses=REFUSALS)
async def decide(context: Context, new: schemas.NewDecisions) -> schemas.DecisionCounts:
    """Accept or reject new facts, or take decisions back.

    Either all are stored or none; a later one counts. The body must be declared as JSON; a browser
    must send it from a page of this server.
    """
    service = context.service
    run = context.run
    if service.read_only:
        raise DecisionsRefused

    names = [(decision.head, decision.relation, decision.tail) for decision in new.decisions]
    is_made = [decision.verdict != "undecided" for decision in new.decisions]
    ids = await context.ids_of(names)
    predictions = await context.score(list(compress(ids, is_made)))
    probabilities = iter([prediction.probability for prediction in predictions])
    by_triple: dict[Triple, Decision | None] = {}  # none if a decision is taken back
    for decision, of_triple, made_now in zip(new.decisions, ids, is_made, strict=True):
        triple = _names(context, of_triple)
        by_triple[triple] = None
        if made_now:
            by_triple[triple] = Decision(
                *triple,
                verdict=decision.verdict,  # type: ignore[arg-type]
                probability=next(probabilities),
                decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
                made_from=context.run.run.identity,
            )
    made = [decision for decision in by_triple.values() if decision]
    taken_back = [triple for triple, decision in by_triple.items() if not decision]

    def update(store: DecisionStore) -> ByTriple:
        return store.update(made, removed=taken_back)

    decided = await context.in_thread(lambda: service.decisions(run, update))
    return schemas.DecisionCounts(**_counts(context, decided))


def _names(context: RequestContext, ids: tuple[int, ...]) -> Triple:
    graph = context.run.graph
    head, relation, tail = ids
    return graph.entities[head], graph.relations[relation], graph.entities[tail]


async def _load_decisions(context: RequestContext) -> ByTriple:
    service = context.service
    run = context.run
    if run.run.folder is None:
        return {}
    return await context.in_thread(lambda: service.decisions(run, DecisionStore.load))


def _counts(context: RequestContext, decided: ByTriple) -> dict[str, Any]:
    numbers = Counter(decision.verdict for decision in decided.values())
    return {
        "run": context.run.name,
        "accepted": numbers["accepted"],
        "rejected": numbers["rejected"],
    }


@decision_routes.get("/facts.tsv", include_in_schema=False)
async def accepted_facts_as_tsv(context: Context) -> Response:
    """The accepted facts for programs."""
    body = as_tsv(await _accepted(context)).encode()
    return _download(context, body, suffix="tsv", media_type="text/tab-separated-values")


@decision_routes.get("/facts.csv", include_in_schema=False)
async def accepted_facts_as_csv(context: Context) -> Response:
    """The accepted facts for spreadsheets, which recognize UTF-8 by a byte order mark."""
    body = as_csv(await _accepted(context)).encode("utf-8-sig")
    return _download(context, body, suffix="csv", media_type="text/csv")


async def _accepted(context: RequestContext) -> list[Decision]:
    decided = await _load_decisions(context)
    return [decision for decision in decided.values() if decision.verdict == "accepted"]


def _download(context: RequestContext, body: bytes, *, suffix: str, media_type: str) -> Response:
    run = re.sub(r"[^a-zA-Z0-9._-]", "_", context.run.name)
    headers = {"Content-Disposition": f'attachment; filename="{run}-accepted.{suffix}"'}
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
                fact.verdict = _verdict(decided, line)
                facts.append(fact)
    return schemas.NewFacts(run=context.run.name, facts=facts)


def _verdict(decided: ByTriple, line: CompletionLine) -> Verdict | None:
    """The decision on the triple of a line."""
    items = (line.head, line.relation, line.tail)
    head, relation, tail = (item.name if item else "" for item in items)
    decision = decided.get((head, relation, tail))
    return decision.verdict if decision else None


@pages.get("/facts")
async def facts_page(
    context: Context,
    relation: Annotated[str, Query(max_length=MAX_NAME_LENGTH)] = "",
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    top: Annotated[int, Query(ge=1, le=LENGTHS[-1])] = DEFAULT_LENGTH,
) -> Response:
    """The frame of the list; a script adds the rows as they are found."""
    params = {"relation": relation or None, "min_probability": min_probability or None, "top": top}
    return page(
        context,
        "facts.html",
        json=page_url(context, "/facts.json", **params),
        relations=sorted(context.run.relations, key=lambda item: relation_text(item.label)),
        chosen=await context.relation(relation),
        min_probability=min_probability,
        top=top,
        lengths=sorted({*LENGTHS, top}),
        decisions=await decisions(context),
    )


@pages.get("/facts/rows")
async def fact_rows(context: Context, options: Options) -> StreamingResponse:
    """The lines of `/api/complete`, with each triple as a row of the page."""
    status = await decisions(context)
    decided = {decision.triple: decision for decision in status.decisions}

    def dump(line: CompletionLine) -> str:
        if line.kind != "triple":
            return line.model_dump_json(exclude_none=True)
        row = fill(
            context,
            "fact_row.html",
            fact=line,
            verdict=_verdict(decided, line),
            can_decide=status.can_decide,
        )
        return json.dumps({"kind": line.kind, "html": row})

    return _stream(context, options, dump)
