"""The form of Ask, and questions to begin with."""

from __future__ import annotations

import numpy as np

from dualkg.serve.pages.links import address, relation_said, said, spoken
from dualkg.serve.pages.markup import Markup, shown, tag
from dualkg.serve.pages.questions import PARTS, PageQuestion, Part
from dualkg.serve.routes.choices import Asked
from dualkg.serve.shapes.asked import AskedAnswers
from dualkg.serve.shapes.things import Thing

NUM_EXAMPLES = 9
MOST_OFFERED = 40  # relations
MOST_RELATIONS = 2000  # that are sent with the page
HINTS: dict[Part, str] = {"head": "an entity", "relation": "a relation", "tail": "an entity"}


def question_form(whom: Asked, question: PageQuestion, found: AskedAnswers | None) -> Markup:
    """Three slots, of which one is looked for. Works without scripts; they add completion as one types."""
    first = whom.service.runs.names[0]
    return tag(
        "form",
        tag("input", type="hidden", name="run", value=whom.run.name) if whom.run.name != first else None,
        tag("fieldset", tag("legend", "Find the"), [_finding(part, question) for part in PARTS], class_="choice"),
        tag("div", [_slot(whom, part, question, found) for part in PARTS], tag("button", "Ask"), class_="slots"),
        _relations(whom),
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


def _slot(whom: Asked, part: Part, question: PageQuestion, found: AskedAnswers | None) -> Markup:
    name = question.names[part] if part != question.find else None
    thing: Thing | None = getattr(found.question, part) if found else None
    vocabulary = whom.run.relations if part == "relation" else whom.run.entities
    text = shown(vocabulary.spoken(thing.id)) if thing else name
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


def _relations(whom: Asked) -> Markup:
    relations = whom.run.relations
    names = [Thing.of(relations, id) for id in range(min(len(relations), MOST_RELATIONS))]
    return tag("datalist", [tag("option", value=one.name, label=spoken(one.label)) for one in names], id="relations")


async def unfinished(whom: Asked, question: PageQuestion) -> Markup:
    """What is still to be named; where that is the relation, those that the entity has, before all others."""
    asked = tag("p", question.request, class_="lead", role="status")
    if question.missing != ["relation"]:
        return tag("section", asked)
    side: Part = "head" if question.find == "tail" else "tail"
    name = question.names[side] or ""
    if name not in whom.run.entities:
        return tag("section", asked)
    graph, id = whom.run.run.graph, await whom.service.entity(whom.run, name)
    triples = graph.split("train")
    has = np.unique(triples[triples[:, 0 if side == "head" else 2] == id, 1]).tolist()
    rest = [other for other in range(len(graph.relations)) if other not in set(has)]
    links = [
        tag("li", tag("a", relation_said(one), href=address("/", whom, **question.choices(relation=one.name))))
        for one in (Thing.of(graph.relations, relation) for relation in [*has, *rest][:MOST_OFFERED])
    ]
    return tag("section", asked, tag("ul", links, class_="list offered"))


def examples(whom: Asked) -> Markup | None:
    """Questions of test, each of another relation: the model has not seen their answers."""
    graph = whom.run.run.graph
    triples = graph.split("test") if len(graph.split("test")) else graph.split("train")
    if not len(triples):
        return None
    relations, numbers = np.unique(triples[:, 1], return_counts=True)
    items = []
    for place, relation_id in enumerate(relations[np.argsort(-numbers, kind="stable")][:NUM_EXAMPLES], start=1):
        of_relation = triples[triples[:, 1] == relation_id]
        h, r, _ = of_relation[len(of_relation) * place // (NUM_EXAMPLES + 1)].tolist()  # not all of one letter
        head, relation = Thing.of(graph.entities, h), Thing.of(graph.relations, r)
        where = address("/", whom, find="tail", head=head.name, relation=relation.name)
        mark = tag("span", "?", class_="asked")
        items.append(tag("li", tag("a", said(head), " ", relation_said(relation), " ", mark, href=where)))
    heading = tag("h2", "Some to begin with")
    about = tag("p", "Facts that were kept from the model while it learned.", class_="soft")
    return tag("div", heading, about, tag("ul", items, class_="list examples"))
