"""Why: the training triples that support a fact, and entities alike for which the same is known."""

from __future__ import annotations

from fastapi import Request, Response

from dualkg.serve.pages.layout import page, page_router
from dualkg.serve.pages.links import address, entity_link, relation_said
from dualkg.serve.pages.markup import Markup, tag
from dualkg.serve.pages.parts import bar
from dualkg.serve.routes.choices import Asked, AskedRun, Head, Relation, Tail, router
from dualkg.serve.routes.explanation import explain
from dualkg.serve.shapes.facts import Explanation, Likeness, NamedTriple, Reason
from dualkg.serve.shapes.things import Thing

routes = page_router()
programs = router("pages")
NUM_REASONS = 5


@routes.get("/why")
async def why(request: Request, whom: AskedRun, head: Head, relation: Relation, tail: Tail) -> Response:
    """A page of its own; where scripts run, its section is opened beside the answer."""
    found = await explain(whom, head, relation, tail, k=NUM_REASONS)
    heading = tag("h1", "Why ", _triple(whom, found.triple), "?")
    json = address("/why.json", whom, head=head, relation=relation, tail=tail)
    main = heading, _reasons(whom, found)
    return page(request, whom, main, title="Why", styles=["ask.css"], json=json)


@programs.get("/why.json", include_in_schema=False)
async def why_as_json(whom: AskedRun, head: Head, relation: Relation, tail: Tail) -> Explanation:
    return await explain(whom, head, relation, tail, k=NUM_REASONS)


routes.include_router(programs)


def _reasons(whom: Asked, found: Explanation) -> Markup:
    most = max([abs(reason.fall) for reason in found.reasons] or [1.0]) or 1.0
    reasons = [_reason(whom, reason, most) for reason in found.reasons]
    alike = [_alike(whom, likeness) for likeness in found.alike]
    nothing = None if reasons or alike else tag("p", "Nothing in train speaks for it.", class_="soft")
    return tag(
        "section",
        [tag("h3", "It learned this from"), tag("ul", reasons, class_="list")] if reasons else None,
        [tag("h3", "The same is known of what is alike"), tag("ul", alike, class_="list")] if alike else None,
        nothing,
        class_="reasons",
        data_reasons=True,
    )


def _reason(whom: Asked, reason: Reason, most: float) -> Markup:
    itself = tag("span", "itself", class_="chip") if reason.itself else None
    fall = tag("span", f"{reason.fall:+.2f}".replace("-", "−"), class_="number soft")
    return tag("li", tag("span", _triple(whom, reason.triple), itself), bar(abs(reason.fall) / most, known=True), fall)


def _alike(whom: Asked, likeness: Likeness) -> Markup:
    like = tag("span", f"cosine {likeness.cosine:.2f}".replace("-", "−"), class_="number soft")
    return tag("li", tag("span", _triple(whom, likeness.triple)), bar(likeness.cosine, known=True), like)


def _triple(whom: Asked, triple: NamedTriple) -> Markup:
    entities, relations = whom.run.entities, whom.run.relations
    head, tail = (Thing.of(entities, entities.id(name)) for name in (triple.head, triple.tail))
    relation = Thing.of(relations, relations.id(triple.relation))
    return tag(
        "span", entity_link(head, whom), " ", relation_said(relation), " ", entity_link(tail, whom), class_="triple"
    )
