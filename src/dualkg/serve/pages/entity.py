"""The page of an entity: its facts, and its neighbourhood as a drawing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastapi import Request, Response

from dualkg.serve.routes.entities import entity_details
from dualkg.serve.routes.queries import EntityInPath, EntityName
from dualkg.serve.schemas import Entity, Fact, Item
from dualkg.serve.service import Context, RequestContext, UnknownNameError
from dualkg.serve.templating import page, page_router, page_url

routes = page_router()
ROW, GAP, LABEL = 27, 14, 34  # heights of a neighbour, of the space between two groups, of a relation in two lines
MAX_ROWS = 22  # on one side
WIDTH, NAME, RELATION, CENTRE = 1056, 206, 148, 186  # widths of the wide drawing and of its columns
NARROW = 356  # width of the narrow drawing
# Known and predicted neighbours of each relation, from the most detailed drawing to the least.
DETAILS = ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1))


@routes.get("/entity")
async def entity_page_by_query(request: Request, context: Context, name: EntityName) -> Response:
    """For names that a browser would change in a path, such as `..`."""
    return await _entity_page(request, context, name)


@routes.get("/entity/{name:name}")
async def entity_page(request: Request, context: Context, name: EntityInPath) -> Response:
    return await _entity_page(request, context, name)


async def _entity_page(request: Request, context: RequestContext, name: str) -> Response:
    try:
        found = await entity_details(context, name)
    except UnknownNameError as error:
        entities = context.run.graph.entities
        similar = [Item.of(entities, entities.id(name)) for name in error.suggestions]
        return page(request, context, "unknown_entity.html", status=404, error=error, similar=similar)
    groups = groups_of(found)
    return page(
        request,
        context,
        "entity.html",
        json=page_url(context, "/entity.json", name=found.entity.name),
        found=found,
        groups=groups,
        drawings=[wide_drawing(groups), narrow_drawing(groups)] if groups else [],
    )


@dataclass(frozen=True)
class Neighbour:
    """The entity at the other end of a fact."""

    entity: Item
    fact: Fact

    @property
    def known(self) -> bool:
        return self.fact.split is not None


@dataclass(frozen=True)
class Group:
    """Neighbours by one relation: tails of the entity if `outwards`, else heads."""

    relation: Item
    outwards: bool
    known: list[Neighbour] = field(default_factory=list)
    predicted: list[Neighbour] = field(default_factory=list)
    num_omitted: int = 0

    @property
    def anchor(self) -> str:
        """The id of the list of all these neighbours on the page."""
        return f"{'to' if self.outwards else 'from'}-{self.relation.id}"

    @property
    def rows(self) -> list[Neighbour | None]:
        """The rows of a drawing; None is the number of omitted neighbours."""
        return [*self.known, *self.predicted, *([None] if self.num_omitted else [])]

    def shortened(self, num_known: int, num_predicted: int) -> Group:
        num_omitted = max(0, len(self.known) - num_known)
        if num_omitted == 1:  # "1 more" takes as much space as the neighbour itself
            num_known, num_omitted = num_known + 1, 0
        known, predicted = self.known[:num_known], self.predicted[:num_predicted]
        return replace(self, known=known, predicted=predicted, num_omitted=num_omitted)


def groups_of(found: Entity) -> list[Group]:
    """Facts by relation and direction: outward ones first, then by size. A triple of two splits counts once."""
    groups: dict[tuple[bool, int], Group] = {}
    facts: dict[tuple[int, int, int], Fact] = {}
    for fact in [*found.known, *found.predicted]:
        facts.setdefault((fact.head.id, fact.relation.id, fact.tail.id), fact)
    for fact in facts.values():
        outwards = fact.head.id == found.entity.id
        group = groups.setdefault((outwards, fact.relation.id), Group(fact.relation, outwards))
        neighbour = Neighbour(fact.tail if outwards else fact.head, fact)
        (group.known if neighbour.known else group.predicted).append(neighbour)
    return sorted(groups.values(), key=lambda group: (not group.outwards, -len(group.known), group.relation.id))


def fitting(groups: list[Group], max_rows: int) -> list[Group]:
    """The groups with as many neighbours as fit into a drawing."""
    for details in DETAILS:
        short = [group.shortened(*details) for group in groups]
        if sum(len(group.rows) for group in short) <= max_rows:
            break
    while sum(len(group.rows) for group in short) > max_rows:
        short.pop()
    return short


@dataclass(frozen=True)
class Box:
    """Where HTML stands within a drawing."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class DrawnRow:
    """An edge, a dot and a name; without a neighbour, how many more there are."""

    neighbour: Neighbour | None
    edge: str
    x: float
    y: float
    box: Box
    rightwards: bool = True

    @property
    def kind(self) -> str:
        return "known" if self.neighbour is None or self.neighbour.known else "predicted"


@dataclass(frozen=True)
class DrawnGroup:
    group: Group
    edge: str
    box: Box
    rows: list[DrawnRow] = field(default_factory=list)


@dataclass(frozen=True)
class Drawing:
    """A neighbourhood; the style sheet chooses between the wide and the narrow one."""

    kind: str
    width: float
    height: float
    centre: Box
    groups: list[DrawnGroup]


def wide_drawing(groups: list[Group]) -> Drawing:
    """From left to right: heads, the entity, tails."""
    sides = [fitting([group for group in groups if group.outwards is out], MAX_ROWS) for out in (False, True)]
    heights = [sum(len(group.rows) * ROW + GAP for group in side) - GAP for side in sides]
    height = max(*heights, 96) + 16
    middle = height / 2
    centre = WIDTH / 2 if all(sides) else (CENTRE / 2 + 1 if sides[1] else WIDTH - CENTRE / 2 - 1)
    drawn = []
    for side, side_height, sign in zip(sides, heights, (-1, 1), strict=True):
        start = centre + sign * CENTRE / 2
        near = start + sign * 52  # where the relation's name begins, seen from the entity
        branch = near + sign * RELATION
        dot = branch + sign * 34
        top = (height - side_height) / 2
        for group in side:
            y = top + len(group.rows) * ROW / 2
            box = Box(min(near, branch), y - LABEL / 2, RELATION, LABEL)
            rows = []
            for number, neighbour in enumerate(group.rows):
                row = top + (number + 0.5) * ROW
                name = Box(dot - 8 if sign > 0 else dot + 8 - NAME, row - ROW / 2, NAME, ROW)
                rows.append(DrawnRow(neighbour, _curve((branch, y), (dot, row)), dot, row, name, sign > 0))
            drawn.append(DrawnGroup(group, f"{_curve((start, middle), (near, y))}H{branch:g}", box, rows))
            top += len(group.rows) * ROW + GAP
    return Drawing("broad", WIDTH, height, Box(centre - CENTRE / 2, middle - 44, CENTRE, 88), drawn)


def narrow_drawing(groups: list[Group]) -> Drawing:
    """A tree from top to bottom."""
    drawn, y, last = [], 74.0, 60.0
    for group in fitting(groups, 2 * MAX_ROWS):
        edge, box = f"M14 {last:g}V{y + 11:g}h12", Box(30, y, NARROW - 40, 22)
        last, rows, y = y + 11, [], y + 24
        for number, neighbour in enumerate(group.rows):
            row, above = y + ROW / 2, y - ROW / 2 if number else y - 2
            name = Box(42, row - ROW / 2, NARROW - 66, ROW)
            rows.append(DrawnRow(neighbour, f"M36 {above:g}V{row:g}H50", 50, row, name))
            y += ROW
        drawn.append(DrawnGroup(group, edge, box, rows))
        y += 8
    return Drawing("tall", NARROW, y, Box(1, 1, NARROW - 2, 58), drawn)


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    half = (start[0] + end[0]) / 2
    return f"M{start[0]:g} {start[1]:g}C{half:g} {start[1]:g} {half:g} {end[1]:g} {end[0]:g} {end[1]:g}"
