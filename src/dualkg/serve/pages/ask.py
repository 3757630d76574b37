"""Ask: two parts of a fact are named, and the model finds the third."""

from __future__ import annotations

from fastapi import Request, Response

from dualkg.errors import DualkgError
from dualkg.serve.guards.sentences import refusal_of
from dualkg.serve.pages.answers import answers_shown
from dualkg.serve.pages.form import examples, question_form, unfinished
from dualkg.serve.pages.layout import page, page_router
from dualkg.serve.pages.links import address, spoken
from dualkg.serve.pages.markup import Child, Markup, shown, tag
from dualkg.serve.pages.questions import PARTS, AskedQuestion, PageQuestion, UnknownPartError, answered
from dualkg.serve.routes.choices import Asked, AskedRun, router
from dualkg.serve.shapes.asked import AskedAnswers

routes = page_router()
programs = router("pages")


@routes.get("/")
async def ask(request: Request, whom: AskedRun, question: AskedQuestion) -> Response:
    """The form, and where two parts are given the answers."""
    if not question.begun:
        return _shown(request, whom, question, _beginning(), tag("section", examples(whom)), title="Ask")
    if question.missing:
        heading = tag("h1", "What is missing?", class_="visually-hidden")
        return _shown(request, whom, question, heading, await unfinished(whom, question), title="Ask")
    try:
        found = await answered(whom, question)
    except DualkgError as error:
        status = refusal_of(error, request.method).status
        heading = tag("h1", "What is missing?", class_="visually-hidden")
        problem = tag("section", _problem(whom, question, error))
        return _shown(request, whom, question, heading, problem, title="Ask", status=status)
    title = _title(found)
    heading = tag("h1", title, class_="visually-hidden", dir="auto")
    return _shown(request, whom, question, heading, answers_shown(whom, question, found), title=title, found=found)


@programs.get("/ask.json", include_in_schema=False)
async def ask_as_json(whom: AskedRun, question: AskedQuestion) -> AskedAnswers:
    return await answered(whom, question)


routes.include_router(programs)


def _shown(
    request: Request,
    whom: Asked,
    question: PageQuestion,
    heading: Child,
    rest: Child,
    *,
    title: str,
    status: int = 200,
    found: AskedAnswers | None = None,
) -> Response:
    json = address("/ask.json", whom, **question.choices()) if found else None
    main = heading, question_form(whom, question, found), rest
    return page(
        request, whom, main, title=title, here="Ask", scripts=["ask.js"], styles=["ask.css"], json=json, status=status
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


def _problem(whom: Asked, question: PageQuestion, error: DualkgError) -> list[Markup]:
    """The sentence, and the question with names that may have been meant."""
    parts = [tag("p", str(error), class_="problem", role="alert")]
    if isinstance(error, UnknownPartError) and error.near:
        part = error.part
        links = [
            tag("li", tag("a", shown(name), dir="auto", href=address("/", whom, **question.choices(**{part: name}))))
            for name in error.near
        ]
        parts += [tag("h2", "Did you mean"), tag("ul", links, class_="list near")]
    return parts
