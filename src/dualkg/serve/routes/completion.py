"""Completion: new triples as a stream of JSON lines, progress first, then the triples, best first."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Query
from fastapi.responses import StreamingResponse

from dualkg.errors import DualkgError
from dualkg.inference.completion import Completion, complete
from dualkg.serve.batching import BusyError
from dualkg.serve.limits import MAX_NAME_LENGTH, MAX_NEW_TRIPLES
from dualkg.serve.schemas import CompletionLine, Triple
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.templating import api_router

routes = api_router("completion")
PROGRESS_INTERVAL = 0.25  # seconds
# 10,000 lines take a second, in which no other request would be answered. A pause also gives threads their turn.
LINES_AT_ONCE, PAUSE = 20, 0.001
BUSY = "Another completion is running. Try again when it has finished."
Names = Annotated[list[Annotated[str, Query(max_length=MAX_NAME_LENGTH)]], Query(max_length=100)]


class _CancelledError(Exception):
    """The reader of the stream has gone."""


async def completion_options(
    context: Context,
    top: Annotated[int, Query(ge=1, le=MAX_NEW_TRIPLES, description="Number of triples.")] = 100,
    relation: Names = [],  # noqa: B006
    head: Names = [],  # noqa: B006
    min_probability: Annotated[float, Query(ge=0, le=1, description="Only triples at least this probable.")] = 0.0,
    types: Annotated[bool, Query(description="Only heads and tails that the relation has in train.")] = True,
) -> dict[str, Any]:
    """Keyword arguments of `complete`; all relations and heads where none is named."""
    return {
        "relations": [await context.id(name, "relation") for name in relation] or None,
        "heads": [await context.id(name) for name in head] or None,
        "top": top,
        "min_probability": min_probability,
        "types": types,
    }


Options = Annotated[dict[str, Any], Depends(completion_options)]


@routes.get(
    "/api/complete",
    response_class=StreamingResponse,
    responses={200: {"model": CompletionLine, "content": {"application/x-ndjson": {}}, "description": "JSON lines."}},
)
async def complete_run(context: Context, options: Options) -> StreamingResponse:
    """The most plausible triples that the graph does not have, as JSON lines, after lines of progress."""
    return stream(context, options, lambda line: line.model_dump_json(exclude_none=True))


def stream(
    context: RequestContext, options: dict[str, Any], dump: Callable[[CompletionLine], str]
) -> StreamingResponse:
    """A completion as a stream of lines; a late error is its last line."""
    if context.service.completing.locked():
        raise BusyError(BUSY)

    async def lines() -> AsyncIterator[str]:
        group: list[str] = []  # sent at once, since every chunk passes through all layers of the application
        try:
            async with aclosing(completion(context, options)) as found:
                async for line in found:
                    group.append(f"{dump(line)}\n")
                    if line.kind != "triple" or len(group) == LINES_AT_ONCE:
                        yield "".join(group)
                        group.clear()
        except TimeoutError:
            message = f"The completion took longer than its limit of {context.service.limits.stream_seconds:g} seconds."
            yield f"{dump(CompletionLine(kind='error', error=message))}\n"
        except DualkgError as error:
            yield f"{dump(CompletionLine(kind='error', error=str(error)))}\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def completion(context: RequestContext, options: dict[str, Any]) -> AsyncGenerator[CompletionLine, None]:
    """The lines of a completion that runs in a thread; closing the generator stops it at its next block of queries."""
    service, run, loop = context.service, context.run, asyncio.get_running_loop()
    progress, cancelled = asyncio.Queue[CompletionLine | None](), Event()
    reported, deadline = 0.0, loop.time() + service.limits.stream_seconds
    if not service.completing.acquire(blocking=False):
        raise BusyError(BUSY)

    def on_progress(done: int, total: int) -> None:
        nonlocal reported
        if cancelled.is_set():
            raise _CancelledError
        if time.monotonic() >= reported + PROGRESS_INTERVAL or done == total:
            reported = time.monotonic()
            loop.call_soon_threadsafe(progress.put_nowait, CompletionLine(kind="progress", done=done, total=total))

    def work() -> Completion | None:
        try:
            calibration = run.predictor.calibration
            return complete(run.predictor.model, run.graph, calibration=calibration, on_progress=on_progress, **options)
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
            **dict(Triple.of(run.graph, *triple)),
            probability=None if found.probability is None else float(found.probability[number]),
            score=float(found.score[number]),
            log_probability=float(found.log_probability[number]),
        )
        if number % LINES_AT_ONCE == LINES_AT_ONCE - 1:
            await asyncio.sleep(PAUSE)  # sending does not wait, unless the client does not read
    yield CompletionLine(kind="end", num_triples=len(found))
