"""The page of a query and its predictions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from fastapi import Depends, Query, Request, Response

from dualkg.errors import DualkgError, RequestError
from dualkg.inference.predictor import Query as ModelQuery
from dualkg.inference.predictor import QueryType
from dualkg.serve import schemas
from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.middleware import refusal_of
from dualkg.serve.pages.layout import (
    Child,
    Markup,
    address,
    bar,
    entity_link,
    page,
    page_router,
    percent,
    relation_said,
    said,
    shown,
    spoken,
    tag,
    why_link,
)
from dualkg.serve.routes.queries import Asked, AskedRun, router
from dualkg.serve.schemas import Answer, AskedAnswers, SetSize, Thing
from dualkg.serve.state import ServedRun, UnknownError

Part = Literal["head", "relation", "tail"]
PARTS: tuple[Part, ...] = ("head", "relation", "tail")
KINDS: dict[Part, QueryType] = {"head": "heads", "relation": "relations", "tail": "tails"}
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


async def answered(context: AskedRun, question: PageQuestion) -> AskedAnswers:
    """New answers, known ones, and how many of the former the prediction set has."""
    if question.missing:
        raise RequestError(question.request)
    ids = await _ids(context, question)
    new, marked = await asyncio.gather(
        _new(context, question, ids), _answers(context, question, ids, k=question.k, known="mark")
    )
    graph = context.run.run.graph
    return AskedAnswers(
        run=context.run.name,
        find=question.find,
        question=schemas.Question.of(graph, **ids),
        known=_known(context, question, ids, {answer.id: answer for answer in marked}),
        answers=new,
        prediction_set=await _set(context, question, ids),
    )


async def _ids(context: Asked, question: PageQuestion) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in question.given:
        look = context.service.relation if part == "relation" else context.service.entity
        try:
            found[part] = await look(context.run, question.names[part] or "")
        except UnknownError as error:
            raise UnknownPartError(error, part) from None
    return found


def no_answer(run: ServedRun, find: Part, ids: dict[str, int]) -> int | None:
    """The asked entity itself, which is no new answer unless the relation often relates one to itself in train."""
    if find == "relation" or ids["relation"] in run.looping:
        return None
    return ids["head" if find == "tail" else "tail"]


async def _new(context: Asked, question: PageQuestion, ids: dict[str, int]) -> list[Answer]:
    """One more is asked for, as one may be left out."""
    left_out = no_answer(context.run, question.find, ids)
    found = await _answers(context, question, ids, k=question.k + (left_out is not None), known="omit")
    return [answer for answer in found if answer.id != left_out][: question.k]


async def _answers(
    context: Asked, question: PageQuestion, ids: dict[str, int], *, k: int, known: Literal["mark", "omit"]
) -> list[Answer]:
    given = tuple(ids[part] for part in question.given)
    return await context.service.answers(context.run, KINDS[question.find], ModelQuery(given, k, known))


def _known(context: Asked, question: PageQuestion, ids: dict[str, int], ranked: dict[int, Answer]) -> list[Answer]:
    """All that the graph has; those among the best answers with their scores, and before the others."""
    predictor, graph = context.run.predictor, context.run.run.graph
    if question.find == "relation":
        splits, names = predictor.known_relations(ids["head"], ids["tail"]), graph.relations
    else:
        backwards = question.find == "head"
        relation = ids["relation"] + backwards * graph.shape.num_relations
        splits, names = predictor.known_answers(ids["tail" if backwards else "head"], relation), graph.entities
    first = [answer for id, answer in ranked.items() if id in splits]
    rest = [
        Answer(**Thing.of(names, id).model_dump(), score=None, probability=None, known=True, split=splits[id])
        for id in list(splits)[: MOST_KNOWN + len(first)]
        if id not in ranked
    ]
    return (first + sorted(rest, key=lambda answer: answer.label.casefold()))[:MOST_KNOWN]


async def _set(context: Asked, question: PageQuestion, ids: dict[str, int]) -> SetSize | None:
    """None of relations, and of runs that are not calibrated. Its answers are not measured here: there may be many."""
    predictor = context.run.predictor
    sets = predictor._prediction_sets
    if question.find == "relation" or sets is None:
        return None
    given = ids["head" if question.find == "tail" else "tail"]
    left_out = no_answer(context.run, question.find, ids)

    def found() -> int:
        asked = predictor.model, predictor.all_known, given, ids["relation"]
        entities = sets.of(*asked, side=question.find, coverage=question.coverage).entities  # type: ignore[arg-type]
        return sum(id != left_out for id in entities.tolist())

    return SetSize(coverage=question.coverage, size=await context.service.slowly(found))


COVERAGES = (0.5, 0.8, 0.9, 0.95)
MORE = (20, 50, 100, 200)
OPEN = 12  # known answers that are shown unfolded
SPLITS = {"train": "learned from", "valid": "in valid", "test": "in test"}


def answers_shown(context: Asked, question: PageQuestion, found: AskedAnswers) -> list[Markup]:
    parts = [_new_list(context, question, found)]
    if found.known:
        parts.insert(0, _known_list(context, question, found))
    return parts


def _known_list(context: Asked, question: PageQuestion, found: AskedAnswers) -> Markup:
    items = [
        tag(
            "li",
            _name(context, question, found, answer),
            " ",
            tag("span", SPLITS.get(answer.split or "", answer.split or ""), class_="chip"),
            tag("span", " model: ", percent(answer.probability), class_="chip believed")
            if answer.probability
            else None,
        )
        for answer in found.known
    ]
    number = len(found.known)
    heading = tag("h2", "Known already ", tag("span", f"{number:,}", class_="soft number"))
    fold = tag("details", tag("summary", heading), tag("ul", items, class_="list known-answers"), open=number <= OPEN)
    return tag("section", fold, aria_label="Known answers")


def _new_list(context: Asked, question: PageQuestion, found: AskedAnswers) -> Markup:
    size = found.prediction_set.size if found.prediction_set else 0
    rows: list[Markup] = []
    for number, answer in enumerate(found.answers, start=1):
        rows.append(_row(context, question, found, answer, number))
        if number == size:
            rows.append(tag("li", "Here the prediction set ends", class_="fence"))
    heading = tag("h2", "New answers", id="new")
    none = tag("p", "There are none: the graph has all of them.", class_="soft")
    return tag(
        "section",
        tag("div", heading, _coverages(context, question) if found.prediction_set else None, class_="between"),
        _set_line(context, question, found.prediction_set) if found.prediction_set else _no_set(context, question),
        tag("ol", rows, class_="list answers") if rows else none,
        _more(context, question, found),
        aria_labelledby="new",
    )


def _row(context: Asked, question: PageQuestion, found: AskedAnswers, answer: Answer, number: int) -> Markup:
    inside = found.prediction_set is not None and number <= found.prediction_set.size
    belief: Child
    if answer.probability is not None:
        belief = [bar(answer.probability), tag("span", percent(answer.probability), class_="percent")]
    else:
        belief = tag("span", "no score" if answer.score is None else f"score {answer.score:.2f}", class_="soft number")
    why = why_link(_triple(found, answer), context, about=shown(answer.label))
    return tag(
        "li",
        tag("span", number, class_="rank number"),
        tag("span", _name(context, question, found, answer), class_="what"),
        tag("span", belief, class_="belief" if answer.probability is not None else "belief plain"),
        why,
        class_="answer inside" if inside else "answer",
    )


def _name(context: Asked, question: PageQuestion, found: AskedAnswers, answer: Answer) -> Markup:
    if question.find != "relation":
        return entity_link(answer, context)
    choices = {"find": "tail", "head": _named(found, "head"), "relation": answer.name}
    return tag("a", relation_said(answer), href=address("/", context, **choices))


def _triple(found: AskedAnswers, answer: Answer) -> tuple[str, str, str]:
    head, relation, tail = (answer.name if part == found.find else _named(found, part) for part in PARTS)
    return head, relation, tail


def _named(found: AskedAnswers, part: str) -> str:
    thing: Thing = getattr(found.question, part)
    return thing.name


def _coverages(context: Asked, question: PageQuestion) -> Markup:
    links = [
        tag(
            "a",
            f"{coverage:.0%}".replace("%", " %"),
            href=address("/", context, **question.choices(coverage=coverage)),
            aria_current="true" if coverage == question.coverage else None,
        )
        for coverage in COVERAGES
    ]
    return tag("div", links, class_="choice", role="group", aria_label="How often the prediction set has the answer")


def _set_line(context: Asked, question: PageQuestion, found: SetSize) -> Markup:
    """How much of all entities the set is, as a sentence and as a strip."""
    everything = len(context.run.entities)
    often = f"{found.coverage:.3g}" if found.coverage > 0.99 else f"{100 * found.coverage:.3g} %"
    if not found.size:
        sentence = f"No new answer is likely enough: the prediction set for {often} is empty."
    else:
        sentence = (
            f"The prediction set: {often} of the time the missing {question.find} is "
            f"{'the first of' if found.size == 1 else f'among the first {found.size:,} of'} {everything:,}."
        )
    strip = tag("svg", tag("rect", width=f"{100 * found.size / everything:.2f}%", height="100%"), class_="strip")
    return tag("div", tag("p", sentence, class_="soft"), strip, class_="set")


def _no_set(context: Asked, question: PageQuestion) -> Markup | None:
    if context.run.predictor.calibration is not None:
        return None
    return tag("p", "Scores compare among these alone. For probabilities: dualkg calibrate RUN", class_="soft")


def _more(context: Asked, question: PageQuestion, found: AskedAnswers) -> Markup | None:
    more = next((number for number in MORE if number > question.k), None)
    if more is None or len(found.answers) < question.k:
        return None
    return tag(
        "p", tag("a", f"Show {more}", href=address("/", context, **question.choices(k=more)), class_="button plain")
    )


NUM_EXAMPLES = 9
MOST_OFFERED = 40  # relations
MOST_RELATIONS = 2000  # that are sent with the page
HINTS: dict[Part, str] = {"head": "an entity", "relation": "a relation", "tail": "an entity"}


def question_form(context: Asked, question: PageQuestion, found: AskedAnswers | None) -> Markup:
    """Three slots, of which one is looked for. Works without scripts; they add completion as one types."""
    first = context.service.runs.names[0]
    return tag(
        "form",
        tag("input", type="hidden", name="run", value=context.run.name) if context.run.name != first else None,
        tag("fieldset", tag("legend", "Find the"), [_finding(part, question) for part in PARTS], class_="choice"),
        tag("div", [_slot(context, part, question, found) for part in PARTS], tag("button", "Ask"), class_="slots"),
        _relations(context),
        action="/",
        autocomplete="off",
        role="search",
        aria_label="A question",
        class_="question",
        data_question=True,
    )


def _finding(part: Part, question: PageQuestion) -> Markup:
    radio = tag("input", type="radio", name="find", value=part, checked=part == question.find)
    return tag("label", radio, part)


def _slot(context: Asked, part: Part, question: PageQuestion, found: AskedAnswers | None) -> Markup:
    name = question.names[part] if part != question.find else None
    thing: Thing | None = getattr(found.question, part) if found else None
    vocabulary = context.run.relations if part == "relation" else context.run.entities
    text = shown(vocabulary.text(thing.id)) if thing else name
    field = tag(
        "input",
        id=part,
        name=part,
        value=text,
        placeholder=HINTS[part],
        dir="auto",
        autocomplete="off",
        list="relations" if part == "relation" else None,
        data_name=thing.name if thing else None,
    )
    mark = tag("span", "?", class_="asked", aria_hidden="true")
    return tag("div", tag("label", part.capitalize(), for_=part), field, mark, class_=f"slot for-{part}")


def _relations(context: Asked) -> Markup:
    relations = context.run.relations
    names = [Thing.of(relations, id) for id in range(min(len(relations), MOST_RELATIONS))]
    return tag("datalist", [tag("option", value=one.name, label=spoken(one.label)) for one in names], id="relations")


async def unfinished(context: Asked, question: PageQuestion) -> Markup:
    """What is still to be named; where that is the relation, those that the entity has, before all others."""
    asked = tag("p", question.request, class_="lead", role="status")
    if question.missing != ["relation"]:
        return tag("section", asked)
    side: Part = "head" if question.find == "tail" else "tail"
    name = question.names[side] or ""
    if name not in context.run.entities:
        return tag("section", asked)
    graph, id = context.run.run.graph, await context.service.entity(context.run, name)
    triples = graph.split("train")
    has = np.unique(triples[triples[:, 0 if side == "head" else 2] == id, 1]).tolist()
    rest = [other for other in range(len(graph.relations)) if other not in set(has)]
    links = [
        tag("li", tag("a", relation_said(one), href=address("/", context, **question.choices(relation=one.name))))
        for one in (Thing.of(graph.relations, relation) for relation in [*has, *rest][:MOST_OFFERED])
    ]
    return tag("section", asked, tag("ul", links, class_="list offered"))


def examples(context: Asked) -> Markup | None:
    """Questions of test, each of another relation: the model has not seen their answers."""
    graph = context.run.run.graph
    triples = graph.split("test") if len(graph.split("test")) else graph.split("train")
    if not len(triples):
        return None
    relations, numbers = np.unique(triples[:, 1], return_counts=True)
    items = []
    for place, relation_id in enumerate(relations[np.argsort(-numbers, kind="stable")][:NUM_EXAMPLES], start=1):
        of_relation = triples[triples[:, 1] == relation_id]
        h, r, _ = of_relation[len(of_relation) * place // (NUM_EXAMPLES + 1)].tolist()  # not all of one letter
        head, relation = Thing.of(graph.entities, h), Thing.of(graph.relations, r)
        where = address("/", context, find="tail", head=head.name, relation=relation.name)
        mark = tag("span", "?", class_="asked")
        items.append(tag("li", tag("a", said(head), " ", relation_said(relation), " ", mark, href=where)))
    heading = tag("h2", "Some to begin with")
    about = tag("p", "Facts that were kept from the model while it learned.", class_="soft")
    return tag("div", heading, about, tag("ul", items, class_="list examples"))


routes = page_router()
programs = router("pages")


@routes.get("/")
async def ask(request: Request, context: AskedRun, question: AskedQuestion) -> Response:
    """The form, and where two parts are given the answers."""
    if not question.begun:
        return _shown(request, context, question, _beginning(), tag("section", examples(context)), title="Ask")
    if question.missing:
        heading = tag("h1", "What is missing?", class_="visually-hidden")
        return _shown(request, context, question, heading, await unfinished(context, question), title="Ask")
    try:
        found = await answered(context, question)
    except DualkgError as error:
        status = refusal_of(error, request.method).status
        heading = tag("h1", "What is missing?", class_="visually-hidden")
        problem = tag("section", _problem(context, question, error))
        return _shown(request, context, question, heading, problem, title="Ask", status=status)
    title = _title(found)
    heading = tag("h1", title, class_="visually-hidden", dir="auto")
    return _shown(
        request, context, question, heading, answers_shown(context, question, found), title=title, found=found
    )


@programs.get("/ask.json", include_in_schema=False)
async def ask_as_json(context: AskedRun, question: AskedQuestion) -> AskedAnswers:
    return await answered(context, question)


routes.include_router(programs)


def _shown(
    request: Request,
    context: Asked,
    question: PageQuestion,
    heading: Child,
    rest: Child,
    *,
    title: str,
    status: int = 200,
    found: AskedAnswers | None = None,
) -> Response:
    json = address("/ask.json", context, **question.choices()) if found else None
    main = heading, question_form(context, question, found), rest
    return page(
        request,
        context,
        main,
        title=title,
        here="Ask",
        scripts=["ask.js"],
        styles=["ask.css"],
        json=json,
        status=status,
    )


def _beginning() -> Markup:
    lead = "Name two parts of a fact. The model finds the third, and says how sure it is."
    return tag("div", tag("h1", "What is missing?"), tag("p", lead, class_="lead"), class_="beginning")


def _title(found: AskedAnswers) -> str:
    """The question as a line of text."""
    said = []
    for part in PARTS:
        thing = getattr(found.question, part)
        said.append("?" if thing is None else spoken(thing.label) if part == "relation" else shown(thing.label))
    return ", ".join(said)


def _problem(context: Asked, question: PageQuestion, error: DualkgError) -> list[Markup]:
    """The sentence, and the question with names that may have been meant."""
    parts = [tag("p", str(error), class_="problem", role="alert")]
    if isinstance(error, UnknownPartError) and error.near:
        part = error.part
        links = [
            tag("li", tag("a", shown(name), dir="auto", href=address("/", context, **question.choices(**{part: name}))))
            for name in error.near
        ]
        parts += [tag("h2", "Did you mean"), tag("ul", links, class_="list near")]
    return parts
