"""The neighbourhood of an entity as SVG: read from left to right, heads, the entity, tails.

Known edges are drawn through, predicted ones are dashed. Names are HTML within the drawing, so that they are cut off
and turned as names are elsewhere. There are two drawings, of which the style shows the one that fits the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dualkg.serve.pages.links import entity_address, spoken
from dualkg.serve.pages.markup import Markup, shown, tag
from dualkg.serve.pages.neighbourhood import Group, Neighbour, drawn
from dualkg.serve.pages.parts import percent
from dualkg.serve.routes.choices import Asked
from dualkg.serve.shapes.things import Thing

ROW, GAP, LABEL = 27, 14, 34  # heights of a neighbour, between two groups, and of a relation in two lines
MOST_ROWS = 22  # on one side
WIDTH, NAME, RELATION, CENTRE = 1056, 206, 148, 186  # of the wide drawing and its columns
NARROW = 356


def drawing(whom: Asked, entity: Thing, groups: list[Group]) -> Markup | None:
    if not groups:
        return None
    return tag("div", _wide(whom, entity, groups), _narrow(whom, entity, groups), class_="drawings")


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


def _wide(whom: Asked, entity: Thing, groups: list[Group]) -> Markup:
    sides = [
        drawn([group for group in groups if group.outwards is outwards], most=MOST_ROWS) for outwards in (False, True)
    ]
    heights = [sum(group.rows * ROW + GAP for group in side) - GAP for side in sides]
    height = max(*heights, 96) + 16
    middle = height / 2
    centre = WIDTH / 2 if all(sides) else (CENTRE / 2 + 1 if sides[1] else WIDTH - CENTRE / 2 - 1)
    parts: list[Markup] = []
    for side, tall, sign in zip(sides, heights, (-1, 1), strict=True):
        parts += _side(whom, side, _Side(sign, centre + sign * CENTRE / 2), top=(height - tall) / 2, middle=middle)
    name = tag("div", tag("bdi", shown(entity.label)), class_="centre")
    parts.append(
        tag("foreignObject", name, x=f"{centre - CENTRE / 2:g}", y=f"{middle - 44:g}", width=CENTRE, height=88)
    )
    return _svg(parts, width=WIDTH, height=height, kind="broad", entity=entity)


def _side(whom: Asked, groups: list[Group], at: _Side, *, top: float, middle: float) -> Iterator[Markup]:
    for group in groups:
        y = top + group.rows * ROW / 2
        yield _edge((at.start, middle), (at.relation, y), known=bool(group.known), on=at.branch)
        for number in range(group.rows):
            row = top + (number + 0.5) * ROW
            neighbour = group.neighbours[number] if number < len(group.neighbours) else None
            known = neighbour is None or neighbour.known
            yield _edge((at.branch, y), (at.dot, row), known=known)
            yield _node(whom, group, neighbour, (at.dot, row), sign=at.sign, width=NAME)
        x = min(at.relation, at.branch)
        said = spoken(group.relation.label)
        label = tag("div", tag("span", tag("bdi", said)), class_="edge-name", title=said)
        yield tag("foreignObject", label, x=f"{x:g}", y=f"{y - LABEL / 2:g}", width=RELATION, height=LABEL)
        top += group.rows * ROW + GAP


def _narrow(whom: Asked, entity: Thing, groups: list[Group]) -> Markup:
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
            parts.append(_node(whom, group, neighbour, (50, row), sign=1, width=NARROW - 66))
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
    whom: Asked, group: Group, neighbour: Neighbour | None, at: tuple[float, float], *, sign: int, width: int
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
        link = tag("a", tag("bdi", name), belief, told, href=entity_address(neighbour.entity.name, whom), title=name)
    box = tag("div", link, class_=f"node {kind} {'after' if sign > 0 else 'before'}")
    x = at[0] - 8 if sign > 0 else at[0] + 8 - width
    dot = tag("circle", cx=f"{at[0]:g}", cy=f"{at[1]:g}", r=0 if neighbour is None else 4, class_=f"dot {kind}")
    holder = tag("foreignObject", box, x=f"{x:g}", y=f"{at[1] - ROW / 2:g}", width=width, height=ROW)
    return Markup(dot + holder)
