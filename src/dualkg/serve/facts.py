"""New facts: a completion as JSON lines, and the page of a curator."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Response
from fastapi.responses import StreamingResponse

from dualkg.errors import DualkgError, RequestError
from dualkg.inference.completion import Completion
from dualkg.inference.decisions import Decision, Triple
from dualkg.serve import schemas
from dualkg.serve.background import SearchProgress
from dualkg.serve.decisions import decided_facts, decisions
from dualkg.serve.downloads import Filtered, Table, fact_row, table
from dualkg.serve.entity_facts import Remarks
from dualkg.serve.errors import BusyError
from dualkg.serve.schemas import MAX_NAME_LENGTH, MAX_NEW_TRIPLES, CompletionLine, Item
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import (
    CopiedQuery,
    api_router,
    call_arguments,
    fill,
    page,
    page_router,
    page_url,
    relation_text,
    snippets,
)

routes = api_router("completion")
pages = page_router()
# 10,000 lines take a second, in which no other request would be answered. A pause also gives
# threads their turn.
LINES_AT_ONCE = 20
PAUSE = 0.001
REMARKS_AT_ONCE = 200  # triples; for a client that leaves early, few remarks are made
ROUNDED = 200
SO_FAR = 50  # triples of a list that is shown while the search goes on
LENGTHS = (50, 100, 500, 2000)  # triples that a page may list
DEFAULT_LENGTH = 100
NUM_BEST = 6
# More are found than are listed, since those that were decided on are left out.
NUM_FOUND = 100
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
Relations = Annotated[
    list[Name], Query(max_length=100, description="Only these relations; repeatable.")
]
Heads = Annotated[list[Name], Query(max_length=100, description="Only these heads; repeatable.")]


async def completion_options(
    context: Context,
    top: Annotated[int, Query(ge=1, le=MAX_NEW_TRIPLES, description="Number of triples.")] = 100,
    relation: Relations = [],  # noqa: B006
    head: Heads = [],  # noqa: B006
    min_probability: Annotated[
        float, Query(ge=0, le=1, description="Only triples at least this probable.")
    ] = 0.0,
    types: Annotated[
        bool, Query(description="Leave out heads and tails of an unusual type.")
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
    decided = context.decided
    context.service.searches.check(context.run.name, options)

    async def marked() -> AsyncGenerator[CompletionLine, None]:
        async with aclosing(completion(context, options)) as lines:
            async for line in lines:
                if line.kind == "triple":
                    line.verdict = decided.verdict(*names_of(line))
                yield line

    return _stream(context, marked, lambda line: line.model_dump_json(exclude_none=True))


def _stream(
    context: RequestContext,
    list_lines: Callable[[], AsyncGenerator[CompletionLine, None]],
    dump: Callable[[CompletionLine], str],
) -> StreamingResponse:
    """A list as a stream of lines; a late error is its last line."""

    async def lines() -> AsyncIterator[str]:
        # Lines are sent in groups, since every chunk passes through all layers of the application.
        group: list[str] = []
        try:
            async with aclosing(list_lines()) as completion_lines:
                async for line in completion_lines:
                    group.append(f"{dump(line)}\n")
                    if line.kind != "triple" or len(group) == LINES_AT_ONCE:
                        yield "".join(group)
                        group.clear()
        except TimeoutError:
            seconds = context.service.limits.stream_seconds
            message = f"The completion took longer than its limit of {seconds:g} seconds."
            yield f"{dump(CompletionLine(kind='error', error=message))}\n"
        except DualkgError as error:
            yield f"{dump(CompletionLine(kind='error', error=str(error)))}\n"

    headers = {"X-Accel-Buffering": "no"}  # a proxy passes each line on at once
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


async def completion(
    context: RequestContext, options: dict[str, Any], *, so_far: bool = False
) -> AsyncGenerator[CompletionLine, None]:
    """The lines of a completion, which several requests may share.

    With `so_far`, the best triples so far come as lists; each list, also the last, replaces the one
    before. Closing the generator stops the search, unless another request follows the search.
    """
    service = context.service
    run = context.run
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.limits.stream_seconds
    if service.is_stopping:
        raise BusyError("The server is stopping.")
    predictor = run.predictor
    complete = partial(
        run.complete,
        predictor.model,
        run.graph,
        calibration=predictor.calibration,
    )
    result: Completion | None = None
    async with aclosing(service.searches.reports(run.name, options, complete)) as reports:
        while result is None:
            report = await asyncio.wait_for(anext(reports), deadline - loop.time())
            if isinstance(report, SearchProgress):
                yield CompletionLine(kind="progress", **report._asdict())
            elif isinstance(report, Completion):
                result = report
            elif so_far:
                yield CompletionLine(kind="list", is_final=False)
                async for line in _triple_lines(context, report.best, limit=SO_FAR):
                    yield line

    if so_far:
        yield CompletionLine(kind="list", is_final=True)
    async for line in _triple_lines(context, result):
        yield line
    yield CompletionLine(kind="end", num_triples=len(result))


async def _triple_lines(
    context: RequestContext, completed: Completion, *, limit: int | None = None
) -> AsyncGenerator[CompletionLine, None]:
    """The first triples of a completion with their remarks."""
    run = context.run
    triples = completed.triples[:limit]
    remarks: list[Remarks] = []
    for index in range(len(triples)):
        if index == len(remarks):
            block = triples[index : index + REMARKS_AT_ONCE]
            remarks += await context.in_thread(partial(run.remarker.of_triples, block))
        line = _triple_line(run, completed, index)
        line.remark(run.graph, remarks[index])
        yield line
        if index % LINES_AT_ONCE == LINES_AT_ONCE - 1:
            await asyncio.sleep(PAUSE)  # sending does not wait, unless the client does not read


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


Show = Annotated[
    Literal["all", "open", "accepted", "rejected"],
    Query(description="All new facts, the undecided ones, or those that were decided on."),
]


def _searched(context: RequestContext, options: dict[str, Any], show: str) -> dict[str, Any]:
    """The options of a search that finds enough triples for a list without some of them."""
    decided = context.decided
    num_wanted = options["top"] * (2 if decided.symmetric else 1)
    if show == "open":
        # Rounded up, so that each decision does not make another search.
        num_wanted += ROUNDED * -(-2 * len(decided) // ROUNDED)
    return {**options, "top": num_wanted}


async def listed_facts(
    context: RequestContext, options: dict[str, Any], show: str, *, so_far: bool = False
) -> AsyncGenerator[CompletionLine, None]:
    """The lines of a list of at most `top` new facts.

    Accepted and rejected facts are all those of the decision store that the options admit. The
    reverse of a symmetric fact is left out.
    """
    if show in ("accepted", "rejected"):
        for line in await _decided_lines(context, options, show):
            yield line
        return

    decided = context.decided
    top = options["top"]
    number = 0
    seen: set[Triple] = set()
    searched = _searched(context, options, show)
    async with aclosing(completion(context, searched, so_far=so_far)) as lines:
        async for line in lines:
            if line.kind == "list":
                number = 0
                seen.clear()
                decided = context.decided  # somebody may decide during the search
            elif line.kind == "triple":
                triple = names_of(line)
                head, relation, tail = triple
                line.verdict = decided.verdict(*triple)
                is_symmetric = relation in decided.symmetric
                is_listed = is_symmetric and (tail, relation, head) in seen
                if number == top or is_listed or (show == "open" and line.verdict):
                    continue
                seen.add(triple)
                number += 1
                line.rank = number
                line.both_directions = is_symmetric or None
            elif line.kind == "end":
                line.num_triples = number
            yield line


async def _decided_lines(
    context: RequestContext, options: dict[str, Any], show: str
) -> list[CompletionLine]:
    """Decided facts with what the model says about them now, the most probable first."""
    graph = context.run.graph
    decided = context.decided
    relations = {graph.relations[id] for id in options["relations"] or ()}
    heads = {graph.entities[id] for id in options["heads"] or ()}

    def is_chosen(decision: Decision) -> bool:
        admits_relation = not relations or decision.relation in relations
        admits_head = not heads or decision.head in heads
        return decision.verdict == show and admits_relation and admits_head

    lines: list[CompletionLine] = []
    for fact in await decided_facts(context, is_chosen):
        prediction = fact.prediction
        is_probable = (prediction.probability or 0.0) >= options["min_probability"]
        if len(lines) == options["top"] or not is_probable:
            break
        triple = schemas.Triple.of(graph, *fact.ids)
        line = CompletionLine(
            kind="triple",
            rank=len(lines) + 1,
            **dict(triple),
            probability=prediction.probability,
            answer_probability=prediction.answer_probability,
            score=prediction.score,
            verdict=fact.verdict,
            both_directions=triple.relation.name in decided.symmetric or None,
        )
        if prediction.split is None:  # else the graph has learned it since
            line.remark(graph, fact.remarks)
        lines.append(line)
    return [*lines, CompletionLine(kind="end", num_triples=len(lines))]


def names_of(line: CompletionLine) -> Triple:
    """The names of a line of a triple."""
    head, relation, tail = (
        item.name if item else "" for item in (line.head, line.relation, line.tail)
    )
    return head, relation, tail


@routes.get("/facts.json", include_in_schema=False)
async def new_facts(
    context: Context, options: Options, filter: Filtered, show: Show = "all"
) -> schemas.NewFacts:
    """The page of new facts as JSON: the whole list at once, with the decisions."""
    async with aclosing(listed_facts(context, options, show)) as lines:
        facts = [
            schemas.NewFact.model_validate(line)
            async for line in lines
            if line.kind == "triple" and filter.admits(context, line)
        ]
    return schemas.NewFacts(run=context.run.name, facts=facts)


@table("new-facts", of_facts=True)
async def facts_table(
    context: Context, options: Options, filter: Filtered, show: Show = "all"
) -> Table:
    """The list of the page, with the ranks that facts have in the whole list."""
    rows = []
    async with aclosing(listed_facts(context, options, show)) as lines:
        async for line in lines:
            if line.kind == "triple" and filter.admits(context, line):
                rows.append({"rank": line.rank, **fact_row(line)})
    return Table(context.run.name, rows)


def _copied(relation: str, min_probability: float, top: int, types: bool) -> CopiedQuery:
    """The list as a query of the API, in Python and as a command."""
    least = min_probability or None
    arguments = call_arguments(
        top=top,
        relations=[relation] if relation else None,
        min_probability=least,
        types=types or None,
    )
    return CopiedQuery(
        path="/api/complete",
        parameters={
            "relation": relation or None,
            "min_probability": least,
            "top": top,
            "types": types,
        },
        command="complete",
        options={
            "relation": relation or None,
            "min_probability": least,
            "top": top,
            "types": types,
        },
        python=f"import dualkg as kg\n\nkg.complete(RUN, {arguments})",
    )


@pages.get("/facts")
async def facts_page(
    context: Context,
    relation: Annotated[str, Query(max_length=MAX_NAME_LENGTH)] = "",
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    top: Annotated[int, Query(ge=1, le=LENGTHS[-1])] = DEFAULT_LENGTH,
    types: bool | None = None,
    show: Show = "all",
) -> Response:
    """The frame of the list; a script adds the rows as they are found.

    All entities are searched by default, unless that takes long.
    """
    chosen = await context.relation(relation)
    if types is None:
        types = context.run.search_takes_long(chosen)
    params = {
        "relation": relation or None,
        "min_probability": min_probability or None,
        "top": top,
        "types": str(types).lower(),
    }
    if show != "all":
        params["show"] = show
    return page(
        context,
        "facts.html",
        json=page_url(context, "/facts.json", **params),
        relations=sorted(context.run.relations, key=lambda item: relation_text(item.label)),
        chosen=chosen,
        types=types,
        min_probability=min_probability,
        top=top,
        show=show,
        params=params,
        lengths=sorted({*LENGTHS, top}),
        decisions=await decisions(context),
        copies=snippets(context, _copied(relation, min_probability, top, types)),
    )


@pages.get("/facts/rows")
async def fact_rows(context: Context, options: Options, show: Show = "all") -> StreamingResponse:
    """The lines of the list, with each triple as a row of the page."""

    def dump(line: CompletionLine) -> str:
        if line.kind != "triple":
            return line.model_dump_json(exclude_none=True)
        return json.dumps({"kind": line.kind, "html": fill(context, "fact_row.html", fact=line)})

    if show in ("all", "open"):
        context.service.searches.check(context.run.name, _searched(context, options, show))
    return _stream(context, lambda: listed_facts(context, options, show, so_far=True), dump)


async def best_facts(context: RequestContext, relation: Item | None) -> list[CompletionLine]:
    """The best new facts that nobody has decided on."""
    options = {
        "top": NUM_FOUND,
        "types": context.run.search_takes_long(relation),
        "relations": [relation.id] if relation else None,
    }
    async with aclosing(completion(context, options)) as lines:
        found = [line async for line in lines if line.kind == "triple"]

    decided = context.decided
    undecided = []
    seen: set[Triple] = set()
    for line in found:
        triple = names_of(line)
        is_reverse = triple[1] in decided.symmetric and triple[::-1] in seen
        if not is_reverse and not decided.on(*triple):
            seen.add(triple)
            undecided.append(line)
    return undecided[:NUM_BEST]


@table("best-facts", of_facts=True)
async def best_facts_table(context: Context, relation: Name = "") -> Table:
    facts = await best_facts(context, await context.relation(relation))
    return Table(context.run.name, [fact_row(fact) for fact in facts])


@pages.get("/facts/best")
async def best_facts_page(context: Context, relation: Name = "") -> Response:
    """The list as a page of its own, from which scripts take the list."""
    chosen = await context.relation(relation)
    error = None
    facts: list[CompletionLine] = []
    try:
        facts = await best_facts(context, chosen)
    except RequestError as problem:  # such as a model without probabilities
        error = problem
    json = page_url(
        context,
        "/facts.json",
        relation=relation or None,
        top=NUM_FOUND,
        types=str(context.run.search_takes_long(chosen)).lower(),
    )
    return page(context, "best_facts.html", json=json, facts=facts, relation=chosen, error=error)
