"""Entity: what is known of it, what the model would add, what is like it, and a drawing that can be walked."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.drawing import drawing
from dualkg.serve.pages.layout import page, page_router
from dualkg.serve.pages.links import address, entity_link, relation_said
from dualkg.serve.pages.markup import LONGEST_SHOWN, Child, Markup, shown, tag
from dualkg.serve.pages.neighbourhood import Group, groups_of
from dualkg.serve.pages.parts import bar, percent, why_link
from dualkg.serve.routes import entities
from dualkg.serve.routes.choices import Asked, AskedRun, EntityInPath, router
from dualkg.serve.runs import UnknownError
from dualkg.serve.shapes.facts import Entity, Fact
from dualkg.serve.shapes.things import Answer, Thing

routes = page_router()
programs = router("pages")
NameInQuery = Annotated[str, Query(max_length=LONGEST_NAME)]


@programs.get("/entity.json", include_in_schema=False)
async def entity_by_query_as_json(whom: AskedRun, name: NameInQuery) -> Entity:
    return await entities.entity(whom, name)


routes.include_router(programs)


@routes.get("/entity")
async def entity_by_query(request: Request, whom: AskedRun, name: NameInQuery) -> Response:
    """For names that an address would change or mistake, such as `..`."""
    return await entity(request, whom, name)


@routes.get("/entity/{name:name}")
async def entity(request: Request, whom: AskedRun, name: EntityInPath) -> Response:
    try:
        found = await entities.entity(whom, name)
    except UnknownError as error:
        return _unknown(request, whom, name, error)
    groups = groups_of(found)
    drawn = drawing(whom, found.entity, groups)
    main = (
        _heading(whom, found),
        tag("section", tag("h2", "Around it", id="around"), _legend(), drawn, aria_labelledby="around")
        if drawn
        else None,
        tag("div", _known(whom, found, groups), _predicted(whom, found), _alike(whom, found), class_="two"),
        _lookup(whom, "Go to another entity"),
    )
    return page(
        request,
        whom,
        main,
        title=shown(found.entity.label),
        scripts=["entity.js"],
        styles=["ask.css", "entity.css"],
        json=address("/entity.json", whom, name=found.entity.name),
    )


def _unknown(request: Request, whom: Asked, name: str, error: UnknownError) -> Response:
    """A page with the nearest names."""
    things = [Thing.of(whom.run.entities, whom.run.entities.id(near)) for near in error.near]
    near: Child = None
    if things:
        links = [tag("li", entity_link(thing, whom)) for thing in things]
        near = tag("section", tag("h2", "Nearest names"), tag("ul", links, class_="list near"))
    main = tag("h1", "No such entity"), tag("p", str(error), class_="lead"), near, _lookup(whom, "Look for another")
    styles = ["ask.css", "entity.css"]
    return page(request, whom, main, title="No such entity", scripts=["entity.js"], styles=styles, status=404)


def _lookup(whom: Asked, label: str) -> Markup:
    """To the page of an entity by its name; with completion where scripts run."""
    other = whom.run.name != whom.service.runs.names[0]
    field = tag("input", id="name", name="name", dir="auto", autocomplete="off", placeholder="an entity")
    return tag(
        "form",
        tag("input", type="hidden", name="run", value=whom.run.name) if other else None,
        tag("div", tag("label", label, for_="name"), field, class_="field"),
        tag("button", "Open", class_="plain"),
        action="/entity",
        role="search",
        class_="lookup",
        data_lookup=True,
    )


def _heading(whom: Asked, found: Entity) -> Markup:
    thing, long = found.entity, len(found.entity.label) > LONGEST_SHOWN
    name = [tag("code", shown(thing.name), dir="auto"), " · "] if thing.name != thing.label else None
    asked = [
        tag("a", text, href=address("/", whom, find=find, **{part: thing.name}), class_="button plain")
        for text, find, part in (("Ask what it leads to", "tail", "head"), ("Ask what leads to it", "head", "tail"))
    ]
    facts = f"{found.num_known:,} known {'fact' if found.num_known == 1 else 'facts'}"
    return tag(
        "div",
        tag("h1", shown(thing.label), dir="auto", class_="long" if long else None, tabindex=0 if long else None),
        tag("p", name, f"entity {thing.id:,} · {facts}", class_="soft"),
        tag("p", asked, class_="actions"),
        class_="entity-heading",
    )


def _legend() -> Markup:
    def line(kind: str) -> Markup:
        return tag("svg", tag("path", d="M0 5H34", class_=f"edge {kind}"), viewBox="0 0 34 10", aria_hidden="true")

    return tag("p", line("known"), " known ", line("predicted"), " predicted", class_="legend soft small")


def _known(whom: Asked, found: Entity, groups: list[Group]) -> Markup:
    rows = [_row(whom, group) for group in groups if group.known]
    shown_of = None
    if found.num_known > len(found.known):
        shown_of = tag("p", f"The first {len(found.known):,} of {found.num_known:,}.", class_="soft")
    nothing = None if rows else tag("p", "The graph says nothing of it.", class_="soft")
    return tag(
        "section",
        tag("h2", "Known facts ", tag("span", f"{found.num_known:,}", class_="soft number"), id="known"),
        shown_of,
        tag("dl", rows, class_="facts") if rows else nothing,
        aria_labelledby="known",
        class_="of-known",
    )


def _row(whom: Asked, group: Group) -> Markup:
    """A relation, and all it leads to or comes from."""
    others = [
        tag(
            "li",
            entity_link(one.entity, whom),
            tag("span", one.fact.split, class_="chip") if _held_out(one.fact) else "",
        )
        for one in group.known
    ]
    it = tag("span", "it", class_="soft")
    said = relation_said(group.relation)
    term = [it, " ", said] if group.outwards else [said, " ", it]
    return tag("div", tag("dt", term), tag("dd", tag("ul", others, class_="list")), id=group.anchor)


def _held_out(fact: Fact) -> bool:
    return fact.split not in (None, "train")


def _predicted(whom: Asked, found: Entity) -> Markup:
    rows = [_prediction(whom, found.entity, fact) for fact in found.predicted]
    return tag(
        "section",
        tag("h2", "Predicted facts", id="predicted"),
        tag("ul", rows, class_="list predictions") if rows else tag("p", "There are none.", class_="soft"),
        aria_labelledby="predicted",
        class_="of-predicted",
    )


def _prediction(whom: Asked, entity: Thing, fact: Fact) -> Markup:
    ends = [
        tag("span", "it", class_="soft") if end.id == entity.id else entity_link(end, whom)
        for end in (fact.head, fact.tail)
    ]
    belief: Child = tag("span", "no probability", class_="soft")
    if fact.probability is not None:
        belief = [bar(fact.probability), tag("span", percent(fact.probability), class_="percent")]
    elif fact.evidence is not None:
        belief = tag("span", f"evidence {fact.evidence:.2f}".replace("-", "−"), class_="soft number")
    names = fact.head.name, fact.relation.name, fact.tail.name
    about = " ".join(shown(thing.label) for thing in (fact.head, fact.relation, fact.tail))
    return tag(
        "li",
        tag("span", ends[0], " ", relation_said(fact.relation), " ", ends[1], class_="what"),
        tag("span", belief, class_="belief" if fact.probability is not None else "belief plain"),
        why_link(names, whom, about=about),
        class_="answer",
    )


def _alike(whom: Asked, found: Entity) -> Markup | None:
    if not found.similar:
        return None
    return tag(
        "section",
        tag("h2", "Nearest neighbours", id="alike"),
        tag("p", "Entities whose vectors point the same way; the number is the cosine.", class_="soft small"),
        tag("ul", [_similar(whom, answer) for answer in found.similar], class_="list alike"),
        aria_labelledby="alike",
        class_="of-alike",
    )


def _similar(whom: Asked, answer: Answer) -> Markup:
    cosine = answer.score or 0.0
    number = tag("span", f"{cosine:.2f}".replace("-", "−"), class_="number soft")
    return tag("li", entity_link(answer, whom), bar(cosine, known=True), number)
