"""A question as an address holds it: two of head, relation and tail, and which is looked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query

from dualkg.answers.many import Kind, Question
from dualkg.errors import RequestError
from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.routes.choices import Asked, AskedRun
from dualkg.serve.runs import ServedRun, UnknownError
from dualkg.serve.shapes import things
from dualkg.serve.shapes.asked import AskedAnswers, SetSize
from dualkg.serve.shapes.things import Answer, Thing

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
KINDS: dict[Part, Kind] = {"head": "heads", "relation": "relations", "tail": "tails"}
MOST_KNOWN = 500  # known answers that a page shows
USUAL = {"k": 20, "coverage": 0.9}
Name = Annotated[str | None, Query(max_length=LONGEST_NAME)]


@dataclass(frozen=True)
class PageQuestion:
    """What was given, as it was given."""

    names: dict[Part, str | None]
    find: Part
    k: int
    coverage: float

    @property
    def given(self) -> list[Part]:
        """The two that are needed."""
        return [part for part in PARTS if part != self.find]

    @property
    def missing(self) -> list[Part]:
        return [part for part in self.given if not self.names[part]]

    @property
    def request(self) -> str:
        """What to do about what is missing."""
        return f"Name the {' and the '.join(self.missing)} to find the {self.find}."

    @property
    def begun(self) -> bool:
        return len(self.missing) < len(self.given)

    def choices(self, **changes: str | int | float | None) -> dict[str, str | int | float | None]:
        """As the address of a page has it; what is as usual is left out."""
        named: dict[str, str | None] = {part: self.names[part] for part in self.given}
        counts = {"k": self.k, "coverage": self.coverage}
        found: dict[str, str | int | float | None] = {"find": self.find, **named, **counts, **changes}
        return {key: value for key, value in found.items() if USUAL.get(key) != value}


async def page_question(
    head: Name = None,
    relation: Name = None,
    tail: Name = None,
    find: Part | None = None,
    k: Annotated[int, Query(ge=1, le=200)] = 20,
    coverage: Annotated[float, Query(gt=0, lt=1)] = 0.9,
) -> PageQuestion:
    """Where nothing says what is looked for, it is what was not given."""
    names: dict[Part, str | None] = {"head": head, "relation": relation, "tail": tail}
    missing: list[Part] = [part for part in PARTS if not names[part]]
    return PageQuestion(names, find or (missing[0] if len(missing) == 1 else "tail"), k, coverage)


AskedQuestion = Annotated[PageQuestion, Depends(page_question)]


class UnknownPartError(UnknownError):
    """A name that nothing has, and which part of the question it was."""

    def __init__(self, error: UnknownError, part: Part) -> None:
        super().__init__(str(error), error.near)
        self.part = part


async def answered(whom: AskedRun, question: PageQuestion) -> AskedAnswers:
    """New answers, known ones, and how many of the former the answer set has."""
    if question.missing:
        raise RequestError(question.request)
    ids = await _ids(whom, question)
    new, marked = await asyncio.gather(
        _new(whom, question, ids), _answers(whom, question, ids, k=question.k, known="mark")
    )
    graph = whom.run.run.graph
    return AskedAnswers(
        run=whom.run.name,
        find=question.find,
        question=things.Question.of(graph, **ids),
        known=_known(whom, question, ids, {answer.id: answer for answer in marked}),
        answers=new,
        answer_set=await _set(whom, question, ids),
    )


async def _ids(whom: Asked, question: PageQuestion) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in question.given:
        look = whom.service.relation if part == "relation" else whom.service.entity
        try:
            found[part] = await look(whom.run, question.names[part] or "")
        except UnknownError as error:
            raise UnknownPartError(error, part) from None
    return found


def no_answer(run: ServedRun, find: Part, ids: dict[str, int]) -> int | None:
    """The asked entity itself, which is no new answer unless the relation often relates one to itself in train."""
    if find == "relation" or ids["relation"] in run.looping:
        return None
    return ids["head" if find == "tail" else "tail"]


async def _new(whom: Asked, question: PageQuestion, ids: dict[str, int]) -> list[Answer]:
    """One more is asked for, as one may be left out."""
    left_out = no_answer(whom.run, question.find, ids)
    found = await _answers(whom, question, ids, k=question.k + (left_out is not None), known="omit")
    return [answer for answer in found if answer.id != left_out][: question.k]


async def _answers(
    whom: Asked, question: PageQuestion, ids: dict[str, int], *, k: int, known: Literal["mark", "omit"]
) -> list[Answer]:
    given = tuple(ids[part] for part in question.given)
    return await whom.service.answers(whom.run, KINDS[question.find], Question(given, k, known))


def _known(whom: Asked, question: PageQuestion, ids: dict[str, int], ranked: dict[int, Answer]) -> list[Answer]:
    """All that the graph has; those among the best answers with their scores, and before the others."""
    predictor, graph = whom.run.predictor, whom.run.run.graph
    if question.find == "relation":
        splits, names = predictor.splits_between(ids["head"], ids["tail"]), graph.relations
    else:
        backwards = question.find == "head"
        relation = ids["relation"] + backwards * graph.shape.num_relations
        splits, names = predictor.splits_of(ids["tail" if backwards else "head"], relation), graph.entities
    first = [answer for id, answer in ranked.items() if id in splits]
    rest = [
        Answer(**Thing.of(names, id).model_dump(), score=None, probability=None, known=True, split=splits[id])
        for id in list(splits)[: MOST_KNOWN + len(first)]
        if id not in ranked
    ]
    return (first + sorted(rest, key=lambda answer: answer.label.casefold()))[:MOST_KNOWN]


async def _set(whom: Asked, question: PageQuestion, ids: dict[str, int]) -> SetSize | None:
    """None of relations, and of runs that are not calibrated. Its answers are not measured here: there may be many."""
    predictor = whom.run.predictor
    sets = predictor._answer_sets
    if question.find == "relation" or sets is None:
        return None
    given = ids["head" if question.find == "tail" else "tail"]
    left_out = no_answer(whom.run, question.find, ids)

    def found() -> int:
        asked = predictor.model, predictor.all_known, given, ids["relation"]
        entities = sets.of(*asked, side=question.find, coverage=question.coverage).entities  # type: ignore[arg-type]
        return sum(id != left_out for id in entities.tolist())

    return SetSize(coverage=question.coverage, size=await whom.service.slowly(found))
