"""The missing one of head, relation and tail; scores of triples; entities alike."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field, StrictInt, StrictStr

from dualkg.answers.many import Question
from dualkg.serve.limits import LONGEST_NAME, MOST_TRIPLES
from dualkg.serve.routes.choices import AskedRun, EntityName, Head, K, Known, Relation, Tail, router
from dualkg.serve.runs import ServedRun
from dualkg.serve.service import Service
from dualkg.serve.shapes import things
from dualkg.serve.shapes.things import Alike, Answer, Answers, AnswerSet, Score, Scores, Thing

routes = router("questions")
Name = Annotated[StrictStr, Field(max_length=LONGEST_NAME)] | StrictInt


@routes.get("/api/tails")
async def tails(whom: AskedRun, head: Head, relation: Relation, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (head, relation, ?)."""
    service, run = whom
    h, r = await service.entity(run, head), await service.relation(run, relation)
    answers = await service.answers(run, "tails", Question((h, r), k, known))
    return _answers(run, things.Question.of(run.run.graph, head=h, relation=r), answers)


@routes.get("/api/heads")
async def heads(whom: AskedRun, relation: Relation, tail: Tail, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (?, relation, tail)."""
    service, run = whom
    r, t = await service.relation(run, relation), await service.entity(run, tail)
    answers = await service.answers(run, "heads", Question((r, t), k, known))
    return _answers(run, things.Question.of(run.run.graph, relation=r, tail=t), answers)


@routes.get("/api/relations")
async def relations(whom: AskedRun, head: Head, tail: Tail, k: K = 10, known: Known = "mark") -> Answers:
    """Answer (head, ?, tail)."""
    service, run = whom
    h, t = await service.entity(run, head), await service.entity(run, tail)
    answers = await service.answers(run, "relations", Question((h, t), k, known))
    return _answers(run, things.Question.of(run.run.graph, head=h, tail=t), answers)


@routes.get("/api/similar")
async def similar(whom: AskedRun, entity: EntityName, k: K = 10) -> Alike:
    """The entities whose embeddings point the same way; the score is the cosine."""
    service, run = whom
    id = await service.entity(run, entity)
    answers = await service.answers(run, "similar", Question((id,), k))
    return Alike(run=run.name, entity=Thing.of(run.entities, id), answers=answers)


@routes.get("/api/answer-set")
async def answer_set(
    whom: AskedRun,
    entity: EntityName,
    relation: Relation,
    asked: Annotated[Literal["tail", "head"], Query(description="What is missing; the entity is the other.")] = "tail",
    coverage: Annotated[float, Query(gt=0, lt=1, description="How often it has the missing answer.")] = 0.9,
    k: K = 100,
) -> AnswerSet:
    """The few new answers among which the missing one is with that probability."""
    service, run = whom
    id, r = await service.entity(run, entity), await service.relation(run, relation)
    head, tail = (id, None) if asked == "tail" else (None, id)
    found = await service.slowly(lambda: run.predictor.answer_set(head, r, tail, coverage=coverage))
    question = things.Question.of(run.run.graph, head=head, relation=r, tail=tail)
    shown = [Answer.of(answer) for answer in found[:k]]
    return AnswerSet(run=run.name, question=question, answers=shown, coverage=coverage, size=len(found))


@routes.get("/api/score")
async def score(whom: AskedRun, head: Head, relation: Relation, tail: Tail) -> Scores:
    """The score of one triple, and its probability."""
    service, run = whom
    return Scores(run=run.name, scores=[await _score(service, run, (head, relation, tail))])


class Triples(BaseModel):
    """Triples to be scored: head, relation and tail, each by name, or by its id as a number."""

    triples: list[tuple[Name, Name, Name]] = Field(min_length=1, max_length=MOST_TRIPLES)


@routes.post("/api/score")
async def scores(whom: AskedRun, asked: Triples) -> Scores:
    """The scores of many triples, in the order they came."""
    service, run = whom
    found = await asyncio.gather(*(_score(service, run, triple) for triple in asked.triples))
    return Scores(run=run.name, scores=found)


async def _score(service: Service, run: ServedRun, triple: tuple[str | int, str | int, str | int]) -> Score:
    head, relation, tail = triple
    ids = await service.entity(run, head), await service.relation(run, relation), await service.entity(run, tail)
    [answer] = await service.answers(run, "triple", Question(ids, k=1))
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


def _answers(run: ServedRun, question: things.Question, answers: list[Answer]) -> Answers:
    return Answers.model_construct(run=run.name, question=question, answers=answers)
