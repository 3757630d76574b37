"""The neighbourhood of an entity as SVG: read from left to right, heads, the entity, tails.

Known edges are drawn through, predicted ones are dashed. Names are HTML within the drawing, so that they are cut off
and rotated as names are elsewhere. There are two drawings, of which the style shows the one that fits the window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Query, Request, Response

from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.layout import (
    LONGEST_SHOWN,
    Child,
    Markup,
    address,
    bar,
    entity_address,
    entity_link,
    page,
    page_router,
    percent,
    relation_said,
    shown,
    spoken,
    tag,
    why_link,
)
from dualkg.serve.routes import entities
from dualkg.serve.routes.queries import Asked, AskedRun, EntityInPath, Head, Relation, Tail, explain, router
from dualkg.serve.schemas import Answer, Entity, Explanation, Fact, NamedTriple, SimilarEntity, SupportingTriple, Thing
from dualkg.serve.state import UnknownError


@dataclass(frozen=True)
class Neighbour:
    """An entity at the other end; `fact` is the triple that leads there."""

    entity: Thing
    fact: Fact

    @property
    def known(self) -> bool:
        return self.fact.split is not None


@dataclass(frozen=True)
class Group:
    """Neighbours by one relation: tails where the entity is the head, which is `outwards`; heads else."""

    relation: Thing
    outwards: bool
    known: list[Neighbour] = field(default_factory=list)
    predicted: list[Neighbour] = field(default_factory=list)
    left_out: int = 0

    @property
    def anchor(self) -> str:
        """Where a page lists all of them."""
        return f"{'to' if self.outwards else 'from'}-{self.relation.id}"

    @property
    def neighbours(self) -> list[Neighbour]:
        return [*self.known, *self.predicted]

    def shortened(self, *, known: int, predicted: int) -> Group:
        left_out = max(0, len(self.known) - known)
        if left_out == 1:  # a line that tells of one more is no shorter
            known, left_out = known + 1, 0
        return replace(self, known=self.known[:known], predicted=self.predicted[:predicted], left_out=left_out)

    @property
    def rows(self) -> int:
        return len(self.known) + len(self.predicted) + (self.left_out > 0)


def groups_of(found: Entity) -> list[Group]:
    """Those that lead outwards first; then by how many they have. A triple that two splits have is one."""
    groups: dict[tuple[bool, int], Group] = {}
    seen: set[tuple[int, int, int]] = set()
    for fact in [*found.known, *found.predicted]:
        ids = fact.head.id, fact.relation.id, fact.tail.id
        if ids in seen:
            continue
        seen.add(ids)
        outwards = fact.head.id == found.entity.id
        group = groups.setdefault((outwards, fact.relation.id), Group(fact.relation, outwards))
        (group.known if fact.split else group.predicted).append(Neighbour(fact.tail if outwards else fact.head, fact))
    return sorted(groups.values(), key=lambda group: (not group.outwards, -len(group.known), group.relation.id))


def drawn(groups: list[Group], *, most: int) -> list[Group]:
    """As much of one side as has room in a drawing of about `most` rows."""
    for known, predicted in ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1)):
        short = [group.shortened(known=known, predicted=predicted) for group in groups]
        if sum(group.rows for group in short) <= most:
            break
    while short and sum(group.rows for group in short) > most:
        short.pop()
    return short


ROW, GAP, LABEL = 27, 14, 34  # heights of a neighbour, between two groups, and of a relation in two lines
MOST_ROWS = 22  # on one side
WIDTH, NAME, RELATION, CENTRE = 1056, 206, 148, 186  # of the wide drawing and its columns
NARROW = 356


def drawing(context: Asked, entity: Thing, groups: list[Group]) -> Markup | None:
    if not groups:
        return None
    return tag("div", _wide(context, entity, groups), _narrow(context, entity, groups), class_="drawings")


def _svg(parts: list[Markup], *, width: int, height: float, kind: str, entity: Thing) -> Markup:
    about = f"Around {shown(entity.label)}"
    return tag(
        "svg", parts, viewBox=f"0 0 {width} {height:g}", class_=f"drawing {kind}", role="group", aria_label=about
    )


@dataclass(frozen=True)
class _Side:
    """The columns of one side: where edges leave the entity, where relations stand, where neighbours do."""

    sign: int  # 1 to the right, -1 to the left
    start: float

    @property
    def relation(self) -> float:
        """The near end of a relation's name."""
        return self.start + self.sign * 52

    @property
    def branch(self) -> float:
        return self.relation + self.sign * RELATION

    @property
    def dot(self) -> float:
        return self.branch + self.sign * 34


def _wide(context: Asked, entity: Thing, groups: list[Group]) -> Markup:
    sides = [
        drawn([group for group in groups if group.outwards is outwards], most=MOST_ROWS) for outwards in (False, True)
    ]
    heights = [sum(group.rows * ROW + GAP for group in side) - GAP for side in sides]
    height = max(*heights, 96) + 16
    middle = height / 2
    centre = WIDTH / 2 if all(sides) else (CENTRE / 2 + 1 if sides[1] else WIDTH - CENTRE / 2 - 1)
    parts: list[Markup] = []
    for side, tall, sign in zip(sides, heights, (-1, 1), strict=True):
        parts += _side(context, side, _Side(sign, centre + sign * CENTRE / 2), top=(height - tall) / 2, middle=middle)
    name = tag("div", tag("bdi", shown(entity.label)), class_="centre")
    parts.append(
        tag("foreignObject", name, x=f"{centre - CENTRE / 2:g}", y=f"{middle - 44:g}", width=CENTRE, height=88)
    )
    return _svg(parts, width=WIDTH, height=height, kind="broad", entity=entity)


def _side(context: Asked, groups: list[Group], at: _Side, *, top: float, middle: float) -> Iterator[Markup]:
    for group in groups:
        y = top + group.rows * ROW / 2
        yield _edge((at.start, middle), (at.relation, y), known=bool(group.known), on=at.branch)
        for number in range(group.rows):
            row = top + (number + 0.5) * ROW
            neighbour = group.neighbours[number] if number < len(group.neighbours) else None
            known = neighbour is None or neighbour.known
            yield _edge((at.branch, y), (at.dot, row), known=known)
            yield _node(context, group, neighbour, (at.dot, row), sign=at.sign, width=NAME)
        x = min(at.relation, at.branch)
        said = spoken(group.relation.label)
        label = tag("div", tag("span", tag("bdi", said)), class_="edge-name", title=said)
        yield tag("foreignObject", label, x=f"{x:g}", y=f"{y - LABEL / 2:g}", width=RELATION, height=LABEL)
        top += group.rows * ROW + GAP


def _narrow(context: Asked, entity: Thing, groups: list[Group]) -> Markup:
    """A tree from top to bottom; relations that lead here are told apart by an arrow."""
    groups = drawn(groups, most=2 * MOST_ROWS)
    name = tag("div", tag("bdi", shown(entity.label)), class_="centre")
    parts, y, last = [tag("foreignObject", name, x=1, y=1, width=NARROW - 2, height=58)], 74.0, 60.0
    for group in groups:
        known = bool(group.known)
        parts.append(_line(f"M14 {last:g}V{y + 11:g}h12", known=known))
        last = y + 11
        said = "→ " if group.outwards else "← "
        label = tag("div", said, tag("bdi", spoken(group.relation.label)), class_="edge-name start")
        parts.append(tag("foreignObject", label, x=30, y=f"{y:g}", width=NARROW - 40, height=22))
        y += 24
        for number in range(group.rows):
            neighbour = group.neighbours[number] if number < len(group.neighbours) else None
            row = y + ROW / 2
            known = neighbour is None or neighbour.known
            parts.append(
                _line(f"M36 {(y if number else y - 2) - (ROW / 2 if number else 0):g}V{row:g}H50", known=known)
            )
            parts.append(_node(context, group, neighbour, (50, row), sign=1, width=NARROW - 66))
            y += ROW
        y += 8
    return _svg(parts, width=NARROW, height=y, kind="tall", entity=entity)


def _edge(start: tuple[float, float], end: tuple[float, float], *, known: bool, on: float | None = None) -> Markup:
    """A curve; then straight on, where a relation's name stands."""
    half = (start[0] + end[0]) / 2
    path = f"M{start[0]:g} {start[1]:g}C{half:g} {start[1]:g} {half:g} {end[1]:g} {end[0]:g} {end[1]:g}"
    return _line(path if on is None else f"{path}H{on:g}", known=known)


def _line(path: str, *, known: bool) -> Markup:
    return tag("path", d=path, class_="edge known" if known else "edge predicted")


def _node(
    context: Asked, group: Group, neighbour: Neighbour | None, at: tuple[float, float], *, sign: int, width: int
) -> Markup:
    """A dot and a name; without a neighbour, how many more there are."""
    kind = "known" if neighbour is None or neighbour.known else "predicted"
    if neighbour is None:
        link = tag("a", f"{group.left_out:,} more", href=f"#{group.anchor}", class_="more")
    else:
        name = shown(neighbour.entity.label)
        likely = neighbour.fact.probability
        belief = tag("span", percent(likely), class_="percent") if likely is not None and not neighbour.known else None
        told = tag("span", ", predicted", class_="visually-hidden") if kind == "predicted" else None
        link = tag("a", tag("bdi", name), belief, told, href=entity_address(neighbour.entity.name, context), title=name)
    box = tag("div", link, class_=f"node {kind} {'after' if sign > 0 else 'before'}")
    x = at[0] - 8 if sign > 0 else at[0] + 8 - width
    dot = tag("circle", cx=f"{at[0]:g}", cy=f"{at[1]:g}", r=0 if neighbour is None else 4, class_=f"dot {kind}")
    holder = tag("foreignObject", box, x=f"{x:g}", y=f"{at[1] - ROW / 2:g}", width=width, height=ROW)
    return Markup(dot + holder)


routes = page_router()
programs = router("pages")
NameInQuery = Annotated[str, Query(max_length=LONGEST_NAME)]


@programs.get("/entity.json", include_in_schema=False)
async def entity_by_query_as_json(context: AskedRun, name: NameInQuery) -> Entity:
    return await entities.entity(context, name)


routes.include_router(programs)


@routes.get("/entity")
async def entity_by_query(request: Request, context: AskedRun, name: NameInQuery) -> Response:
    """For names that an address would change or mistake, such as `..`."""
    return await entity(request, context, name)


@routes.get("/entity/{name:name}")
async def entity(request: Request, context: AskedRun, name: EntityInPath) -> Response:
    try:
        found = await entities.entity(context, name)
    except UnknownError as error:
        return _unknown(request, context, name, error)
    groups = groups_of(found)
    drawn = drawing(context, found.entity, groups)
    main = (
        _heading(context, found),
        tag("section", tag("h2", "Around it", id="around"), _legend(), drawn, aria_labelledby="around")
        if drawn
        else None,
        tag("div", _known(context, found, groups), _predicted(context, found), _alike(context, found), class_="two"),
        _lookup(context, "Go to another entity"),
    )
    return page(
        request,
        context,
        main,
        title=shown(found.entity.label),
        scripts=["entity.js"],
        styles=["ask.css", "entity.css"],
        json=address("/entity.json", context, name=found.entity.name),
    )


def _unknown(request: Request, context: Asked, name: str, error: UnknownError) -> Response:
    """A page with the nearest names."""
    things = [Thing.of(context.run.entities, context.run.entities.id(near)) for near in error.near]
    near: Child = None
    if things:
        links = [tag("li", entity_link(thing, context)) for thing in things]
        near = tag("section", tag("h2", "Nearest names"), tag("ul", links, class_="list near"))
    main = tag("h1", "No such entity"), tag("p", str(error), class_="lead"), near, _lookup(context, "Look for another")
    styles = ["ask.css", "entity.css"]
    return page(request, context, main, title="No such entity", scripts=["entity.js"], styles=styles, status=404)


def _lookup(context: Asked, label: str) -> Markup:
    """To the page of an entity by its name; with completion where scripts run."""
    other = context.run.name != context.service.runs.names[0]
    field = tag("input", id="name", name="name", dir="auto", autocomplete="off", placeholder="an entity")
    return tag(
        "form",
        tag("input", type="hidden", name="run", value=context.run.name) if other else None,
        tag("div", tag("label", label, for_="name"), field, class_="field"),
        tag("button", "Open", class_="plain"),
        action="/entity",
        role="search",
        class_="lookup",
        data_lookup=True,
    )


def _heading(context: Asked, found: Entity) -> Markup:
    thing, long = found.entity, len(found.entity.label) > LONGEST_SHOWN
    name = [tag("code", shown(thing.name), dir="auto"), " · "] if thing.name != thing.label else None
    asked = [
        tag("a", text, href=address("/", context, find=find, **{part: thing.name}), class_="button plain")
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


def _known(context: Asked, found: Entity, groups: list[Group]) -> Markup:
    rows = [_row(context, group) for group in groups if group.known]
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


def _row(context: Asked, group: Group) -> Markup:
    """A relation, and all it leads to or comes from."""
    others = [
        tag(
            "li",
            entity_link(one.entity, context),
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


def _predicted(context: Asked, found: Entity) -> Markup:
    rows = [_prediction(context, found.entity, fact) for fact in found.predicted]
    return tag(
        "section",
        tag("h2", "Predicted facts", id="predicted"),
        tag("ul", rows, class_="list predictions") if rows else tag("p", "There are none.", class_="soft"),
        aria_labelledby="predicted",
        class_="of-predicted",
    )


def _prediction(context: Asked, entity: Thing, fact: Fact) -> Markup:
    ends = [
        tag("span", "it", class_="soft") if end.id == entity.id else entity_link(end, context)
        for end in (fact.head, fact.tail)
    ]
    belief: Child = tag("span", "no probability", class_="soft")
    if fact.probability is not None:
        belief = [bar(fact.probability), tag("span", percent(fact.probability), class_="percent")]
    elif fact.log_probability is not None:
        belief = tag("span", f"log_probability {fact.log_probability:.2f}".replace("-", "−"), class_="soft number")
    names = fact.head.name, fact.relation.name, fact.tail.name
    about = " ".join(shown(thing.label) for thing in (fact.head, fact.relation, fact.tail))
    return tag(
        "li",
        tag("span", ends[0], " ", relation_said(fact.relation), " ", ends[1], class_="what"),
        tag("span", belief, class_="belief" if fact.probability is not None else "belief plain"),
        why_link(names, context, about=about),
        class_="answer",
    )


def _alike(context: Asked, found: Entity) -> Markup | None:
    if not found.similar:
        return None
    return tag(
        "section",
        tag("h2", "Nearest neighbours", id="alike"),
        tag("p", "Entities whose vectors point the same way; the number is the cosine.", class_="soft small"),
        tag("ul", [_similar(context, answer) for answer in found.similar], class_="list alike"),
        aria_labelledby="alike",
        class_="of-alike",
    )


def _similar(context: Asked, answer: Answer) -> Markup:
    cosine = answer.score or 0.0
    number = tag("span", f"{cosine:.2f}".replace("-", "−"), class_="number soft")
    return tag("li", entity_link(answer, context), bar(cosine, known=True), number)


explanation_routes = page_router()
explanation_programs = router("pages")
NUM_REASONS = 5


@explanation_routes.get("/why")
async def why(request: Request, context: AskedRun, head: Head, relation: Relation, tail: Tail) -> Response:
    """A page of its own; where scripts run, its section is opened beside the answer."""
    found = await explain(context, head, relation, tail, k=NUM_REASONS)
    heading = tag("h1", "Why ", _triple(context, found.triple), "?")
    json = address("/why.json", context, head=head, relation=relation, tail=tail)
    main = heading, _reasons(context, found)
    return page(request, context, main, title="Why", styles=["ask.css"], json=json)


@explanation_programs.get("/why.json", include_in_schema=False)
async def why_as_json(context: AskedRun, head: Head, relation: Relation, tail: Tail) -> Explanation:
    return await explain(context, head, relation, tail, k=NUM_REASONS)


explanation_routes.include_router(explanation_programs)


def _reasons(context: Asked, found: Explanation) -> Markup:
    most = max([abs(reason.score_drop) for reason in found.supporting_triples] or [1.0]) or 1.0
    reasons = [_reason(context, reason, most) for reason in found.supporting_triples]
    alike = [_similar_line(context, likeness) for likeness in found.similar_entities]
    nothing = None if reasons or alike else tag("p", "Nothing in train speaks for it.", class_="soft")
    return tag(
        "section",
        [tag("h3", "It learned this from"), tag("ul", reasons, class_="list")] if reasons else None,
        [tag("h3", "The same is known of what is alike"), tag("ul", alike, class_="list")] if alike else None,
        nothing,
        class_="reasons",
        data_reasons=True,
    )


def _reason(context: Asked, reason: SupportingTriple, most: float) -> Markup:
    itself = tag("span", "itself", class_="chip") if reason.same_triple else None
    fall = tag("span", f"{reason.score_drop:+.2f}".replace("-", "−"), class_="number soft")
    return tag(
        "li", tag("span", _triple(context, reason.triple), itself), bar(abs(reason.score_drop) / most, known=True), fall
    )


def _similar_line(context: Asked, likeness: SimilarEntity) -> Markup:
    like = tag("span", f"cosine {likeness.cosine:.2f}".replace("-", "−"), class_="number soft")
    return tag("li", tag("span", _triple(context, likeness.triple)), bar(likeness.cosine, known=True), like)


def _triple(context: Asked, triple: NamedTriple) -> Markup:
    entities, relations = context.run.entities, context.run.relations
    head, tail = (Thing.of(entities, entities.id(name)) for name in (triple.head, triple.tail))
    relation = Thing.of(relations, relations.id(triple.relation))
    return tag(
        "span",
        entity_link(head, context),
        " ",
        relation_said(relation),
        " ",
        entity_link(tail, context),
        class_="triple",
    )
