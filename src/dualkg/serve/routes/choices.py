"""What several routes are asked with."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.serve.limits import LONGEST_NAME, MOST_ANSWERS
from dualkg.serve.runs import ServedRun
from dualkg.serve.service import Service, service_of
from dualkg.serve.shapes.problems import Problem


class NameConvertor(PathConvertor):
    """A name as the rest of an address: with slashes in it, and even with line ends."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())


def _name(about: str) -> Any:
    return Query(max_length=LONGEST_NAME, description=about)


Head = Annotated[str, _name("The head, by its name or label.")]
Relation = Annotated[str, _name("The relation, by its name or label.")]
Tail = Annotated[str, _name("The tail, by its name or label.")]
EntityName = Annotated[str, _name("An entity, by its name or label.")]
EntityInPath = Annotated[str, Path(max_length=LONGEST_NAME, description="An entity, by its name or label.")]
K = Annotated[int, Query(ge=1, le=MOST_ANSWERS, description="How many answers.")]
Known = Annotated[
    Literal["mark", "omit"], Query(description="Answers that the graph already has: marked, or left out.")
]
Served = Annotated[Service, Depends(service_of)]


class Asked(NamedTuple):
    """Whom a request asks: the service, about one of its runs."""

    service: Service
    run: ServedRun


async def asked_run(
    request: Request,
    run: Annotated[str | None, Query(max_length=LONGEST_NAME, description="A run; the first, where left out.")] = None,
) -> Asked:
    service = await service_of(request)
    return Asked(service, service.runs.get(run))


AskedRun = Annotated[Asked, Depends(asked_run)]  # one for both: each dependency takes a tenth of a millisecond

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request was wrong."},
    401: {"model": Problem, "description": "A token is asked for."},
    404: {"model": Problem, "description": "Nothing is named so."},
    413: {"model": Problem, "description": "The body is too large."},
    422: {"model": Problem, "description": "A value is not what it should be."},
    503: {"model": Problem, "description": "There is too much to do, or it took too long."},
}


def router(tag: str) -> APIRouter:
    return APIRouter(tags=[tag], responses=PROBLEMS)
