"""The answers to a question: known ones folded, new ones with bars, the answer set drawn around the first of them."""

from __future__ import annotations

from dualkg.serve.pages.links import address, entity_link, relation_said
from dualkg.serve.pages.markup import Child, Markup, shown, tag
from dualkg.serve.pages.parts import bar, percent, why_link
from dualkg.serve.pages.questions import PARTS, PageQuestion
from dualkg.serve.routes.choices import Asked
from dualkg.serve.shapes.asked import AskedAnswers, SetSize
from dualkg.serve.shapes.things import Answer, Thing

COVERAGES = (0.5, 0.8, 0.9, 0.95)
MORE = (20, 50, 100, 200)
OPEN = 12  # known answers that are shown unfolded
SPLITS = {"train": "learned from", "valid": "in valid", "test": "in test"}


def answers_shown(whom: Asked, question: PageQuestion, found: AskedAnswers) -> list[Markup]:
    parts = [_new(whom, question, found)]
    if found.known:
        parts.insert(0, _known(whom, question, found))
    return parts


def _known(whom: Asked, question: PageQuestion, found: AskedAnswers) -> Markup:
    items = [
        tag(
            "li",
            _name(whom, question, found, answer),
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


def _new(whom: Asked, question: PageQuestion, found: AskedAnswers) -> Markup:
    size = found.answer_set.size if found.answer_set else 0
    rows: list[Markup] = []
    for number, answer in enumerate(found.answers, start=1):
        rows.append(_row(whom, question, found, answer, number))
        if number == size:
            rows.append(tag("li", "Here the answer set ends", class_="fence"))
    heading = tag("h2", "New answers", id="new")
    none = tag("p", "There are none: the graph has all of them.", class_="soft")
    return tag(
        "section",
        tag("div", heading, _coverages(whom, question) if found.answer_set else None, class_="between"),
        _set(whom, question, found.answer_set) if found.answer_set else _no_set(whom, question),
        tag("ol", rows, class_="list answers") if rows else none,
        _more(whom, question, found),
        aria_labelledby="new",
    )


def _row(whom: Asked, question: PageQuestion, found: AskedAnswers, answer: Answer, number: int) -> Markup:
    inside = found.answer_set is not None and number <= found.answer_set.size
    belief: Child
    if answer.probability is not None:
        belief = [bar(answer.probability), tag("span", percent(answer.probability), class_="percent")]
    else:
        belief = tag("span", "no score" if answer.score is None else f"score {answer.score:.2f}", class_="soft number")
    why = why_link(_triple(found, answer), whom, about=shown(answer.label))
    return tag(
        "li",
        tag("span", number, class_="rank number"),
        tag("span", _name(whom, question, found, answer), class_="what"),
        tag("span", belief, class_="belief" if answer.probability is not None else "belief plain"),
        why,
        class_="answer inside" if inside else "answer",
    )


def _name(whom: Asked, question: PageQuestion, found: AskedAnswers, answer: Answer) -> Markup:
    if question.find != "relation":
        return entity_link(answer, whom)
    choices = {"find": "tail", "head": _named(found, "head"), "relation": answer.name}
    return tag("a", relation_said(answer), href=address("/", whom, **choices))


def _triple(found: AskedAnswers, answer: Answer) -> tuple[str, str, str]:
    head, relation, tail = (answer.name if part == found.find else _named(found, part) for part in PARTS)
    return head, relation, tail


def _named(found: AskedAnswers, part: str) -> str:
    thing: Thing = getattr(found.question, part)
    return thing.name


def _coverages(whom: Asked, question: PageQuestion) -> Markup:
    links = [
        tag(
            "a",
            f"{coverage:.0%}".replace("%", " %"),
            href=address("/", whom, **question.choices(coverage=coverage)),
            aria_current="true" if coverage == question.coverage else None,
        )
        for coverage in COVERAGES
    ]
    return tag("div", links, class_="choice", role="group", aria_label="How often the answer set has the answer")


def _set(whom: Asked, question: PageQuestion, found: SetSize) -> Markup:
    """How much of all entities the set is, as a sentence and as a strip."""
    everything = len(whom.run.entities)
    often = f"{found.coverage:.3g}" if found.coverage > 0.99 else f"{100 * found.coverage:.3g} %"
    if not found.size:
        sentence = f"No new answer is likely enough: the answer set for {often} is empty."
    else:
        sentence = (
            f"The answer set: {often} of the time the missing {question.find} is "
            f"{'the first of' if found.size == 1 else f'among the first {found.size:,} of'} {everything:,}."
        )
    strip = tag("svg", tag("rect", width=f"{100 * found.size / everything:.2f}%", height="100%"), class_="strip")
    return tag("div", tag("p", sentence, class_="soft"), strip, class_="set")


def _no_set(whom: Asked, question: PageQuestion) -> Markup | None:
    if whom.run.predictor.calibration is not None:
        return None
    return tag("p", "Scores compare among these alone. For probabilities: dualkg calibrate RUN", class_="soft")


def _more(whom: Asked, question: PageQuestion, found: AskedAnswers) -> Markup | None:
    more = next((number for number in MORE if number > question.k), None)
    if more is None or len(found.answers) < question.k:
        return None
    return tag(
        "p", tag("a", f"Show {more}", href=address("/", whom, **question.choices(k=more)), class_="button plain")
    )
