"""What several routes are asked with."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field, StrictInt, StrictStr
from starlette.convertors import PathConvertor, register_url_convertor

from dualkg.inference.predictor import Query as ModelQuery
from dualkg.serve import schemas
from dualkg.serve.limits import LONGEST_NAME, MOST_ANSWERS, MOST_TRIPLES
from dualkg.serve.schemas import Alike, Answer, Answers, Explanation, PredictionSet, Problem, Score, Scores, Thing
from dualkg.serve.state import ServedRun, Service, service_of


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


explanation_routes = router("questions")
MOST_REASONS = 50


@explanation_routes.get("/api/explain")
async def explain(
    context: AskedRun,
    head: Head,
    relation: Relation,
    tail: Tail,
    k: Annotated[int, Query(ge=1, le=MOST_REASONS, description="How many reasons.")] = 5,
) -> Explanation:
    """The training triples that support a triple's score, and entities alike that have the same."""
    service, run = context
    ids = await service.entity(run, head), await service.relation(run, relation), await service.entity(run, tail)
    found = await service.slowly(lambda: run.predictor.explain(*ids, k=k))
    return Explanation.of(run.name, found)


routes = router("questions")
Name = Annotated[StrictStr, Field(max_length=LONGEST_NAME)] | StrictInt


@routes.get("/api/tails")
async def tails(context: AskedRun, head: Head, relation: Relation, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (head, relation, ?)."""
    service, run = context
    h, r = await service.entity(run, head), await service.relation(run, relation)
    answers = await service.answers(run, "tails", ModelQuery((h, r), k, known))
    return _answers(run, schemas.Question.of(run.run.graph, head=h, relation=r), answers)


@routes.get("/api/heads")
async def heads(context: AskedRun, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (?, relation, tail)."""
    service, run = context
    r, t = await service.relation(run, relation), await service.entity(run, tail)
    answers = await service.answers(run, "heads", ModelQuery((r, t), k, known))
    return _answers(run, schemas.Question.of(run.run.graph, relation=r, tail=t), answers)


@routes.get("/api/relations")
async def relations(context: AskedRun, head: Head, tail: Tail, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (head, ?, tail)."""
    service, run = context
    h, t = await service.entity(run, head), await service.entity(run, tail)
    answers = await service.answers(run, "relations", ModelQuery((h, t), k, known))
    return _answers(run, schemas.Question.of(run.run.graph, head=h, tail=t), answers)


@routes.get("/api/similar")
async def similar(context: AskedRun, entity: EntityName, k: K = 10) -> Alike:
    """The entities whose embeddings point the same way; the score is the cosine."""
    service, run = context
    id = await service.entity(run, entity)
    answers = await service.answers(run, "similar", ModelQuery((id,), k))
    return Alike(run=run.name, entity=Thing.of(run.entities, id), answers=answers)


@routes.get("/api/prediction-set")
async def prediction_set(
    context: AskedRun,
    entity: EntityName,
    relation: Relation,
    asked: Annotated[Literal["tail", "head"], Query(description="What is missing; the entity is the other.")] = "tail",
    coverage: Annotated[float, Query(gt=0, lt=1, description="How often it has the missing answer.")] = 0.9,
    k: K = 100,
) -> PredictionSet:
    """The few new answers among which the missing one is with that probability."""
    service, run = context
    id, r = await service.entity(run, entity), await service.relation(run, relation)
    head, tail = (id, None) if asked == "tail" else (None, id)
    found = await service.slowly(lambda: run.predictor.prediction_set(head, r, tail, coverage=coverage))
    question = schemas.Question.of(run.run.graph, head=head, relation=r, tail=tail)
    shown = [Answer.of(answer) for answer in found[:k]]
    return PredictionSet(run=run.name, question=question, answers=shown, coverage=coverage, size=len(found))


@routes.get("/api/score")
async def score(context: AskedRun, head: Head, relation: Relation, tail: Tail) -> Scores:
    """The score of one triple, and its probability."""
    service, run = context
    return Scores(run=run.name, scores=[await _score(service, run, (head, relation, tail))])


class Triples(BaseModel):
    """Triples to be scored: head, relation and tail, each by name, or by its id as a number."""

    triples: list[tuple[Name, Name, Name]] = Field(min_length=1, max_length=MOST_TRIPLES)


@routes.post("/api/score")
async def scores(context: AskedRun, asked: Triples) -> Scores:
    """The scores of many triples, in the order they came."""
    service, run = context
    found = await asyncio.gather(*(_score(service, run, triple) for triple in asked.triples))
    return Scores(run=run.name, scores=found)


async def _score(service: Service, run: ServedRun, triple: tuple[str | int, str | int, str | int]) -> Score:
    head, relation, tail = triple
    ids = await service.entity(run, head), await service.relation(run, relation), await service.entity(run, tail)
    [answer] = await service.answers(run, "triple", ModelQuery(ids, k=1))
    graph = run.run.graph
    return Score(
        head=Thing.of(graph.entities, ids[0]),
        relation=Thing.of(graph.relations, ids[1]),
        tail=Thing.of(graph.entities, ids[2]),
        score=answer.score,
        probability=answer.probability,
        known=answer.known,
        split=answer.split,
    )


def _answers(run: ServedRun, question: schemas.Question, answers: list[Answer]) -> Answers:
    return Answers.model_construct(run=run.name, question=question, answers=answers)
