"""New facts, streamed: lines of how far it is, then the triples, best first."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse

from dualkg.errors import DualkgError
from dualkg.inference.completion import Completion, complete
from dualkg.serve.batching import BusyError
from dualkg.serve.limits import LONGEST_NAME, MOST_NEW
from dualkg.serve.routes.queries import Asked, AskedRun, router
from dualkg.serve.schemas import Line, Thing
from dualkg.serve.state import ServedRun, Service

routes = router("completion")
PAUSE = 0.25  # seconds between two lines of progress
BUSY = "Another list of new triples is being made. Ask again when it is done."
MOST_NAMES = 100  # of relations, and of heads
Names = Annotated[list[Annotated[str, Query(max_length=LONGEST_NAME)]], Query(max_length=MOST_NAMES)]


async def choices_of(context: Asked, relations: list[str], heads: list[str], **more: Any) -> dict[str, Any]:
    """What `complete` is asked with; all relations and heads where none is named."""
    service, run = context
    return {
        "relations": [await service.relation(run, name) for name in relations] or None,
        "heads": [await service.entity(run, name) for name in heads] or None,
        **more,
    }


class _GivenUpError(Exception):
    """Nobody reads the list any more."""


@routes.get(
    "/api/complete",
    response_class=StreamingResponse,
    responses={200: {"model": Line, "content": {"application/x-ndjson": {}}, "description": "A line of JSON each."}},
)
async def complete_run(
    context: AskedRun,
    top: Annotated[int, Query(ge=1, le=MOST_NEW, description="How many triples.")] = 100,
    relation: Names = [],  # noqa: B006
    head: Names = [],  # noqa: B006
    min_probability: Annotated[float, Query(ge=0, le=1, description="None that is less probable.")] = 0.0,
    types: Annotated[bool, Query(description="Only heads and tails that the relation has in train.")] = True,
) -> StreamingResponse:
    """The most plausible triples that the graph does not have; a line of JSON each, after lines of progress."""
    service, run = context
    if service.completing.locked():
        raise BusyError(BUSY)
    choices = await choices_of(context, relation, head, top=top, min_probability=min_probability, types=types)
    return StreamingResponse(_lines(service, run, choices), media_type="application/x-ndjson")


async def _lines(service: Service, run: ServedRun, choices: dict[str, Any]) -> AsyncIterator[str]:
    given_up = threading.Event()
    try:
        async for line in search(service, run, choices, given_up=given_up):
            yield _written(line)
    except TimeoutError:
        sentence = f"The list took longer than the {service.limits.long_seconds:g} seconds that it may take."
        yield _written(Line(kind="error", error=sentence))
    except DualkgError as error:
        yield _written(Line(kind="error", error=str(error)))
    finally:
        given_up.set()


def _written(line: Line) -> str:
    return line.model_dump_json(exclude_none=True) + "\n"


async def search(
    service: Service, run: ServedRun, choices: dict[str, Any], *, given_up: threading.Event
) -> AsyncIterator[Line]:
    """The search in a thread; it stops at its next block when it is given up."""
    loop, progress = asyncio.get_running_loop(), asyncio.Queue[Line | None]()
    told, late = 0.0, loop.time() + service.limits.long_seconds
    if not service.completing.acquire(blocking=False):
        raise BusyError(BUSY)

    def on_progress(done: int, of: int) -> None:
        nonlocal told
        if given_up.is_set():
            raise _GivenUpError
        if time.monotonic() >= told + PAUSE or done == of:
            told = time.monotonic()
            loop.call_soon_threadsafe(progress.put_nowait, Line(kind="progress", done=done, of=of))

    def find() -> Completion | None:
        try:
            return complete(
                run.predictor.model,
                run.run.graph,
                calibration=run.predictor.calibration,
                on_progress=on_progress,
                **choices,
            )
        except _GivenUpError:
            return None
        finally:
            service.completing.release()
            loop.call_soon_threadsafe(progress.put_nowait, None)

    searching = asyncio.ensure_future(asyncio.to_thread(find))
    while (line := await asyncio.wait_for(progress.get(), late - loop.time())) is not None:
        yield line
    made = await searching
    if made is None:
        return
    for number in range(len(made)):
        yield _triple(run, made, number)
    yield Line(kind="end", triples=len(made))


def _triple(run: ServedRun, made: Completion, number: int) -> Line:
    return Line(
        kind="triple",
        rank=number + 1,
        head=Thing.of(run.entities, int(made.heads[number])),
        relation=Thing.of(run.relations, int(made.relations[number])),
        tail=Thing.of(run.entities, int(made.tails[number])),
        probability=None if made.probability is None else float(made.probability[number]),
        score=float(made.score[number]),
        log_probability=float(made.log_probability[number]),
    )
