"""The page of an entity: its facts, and its neighbourhood as a drawing."""

from dataclasses import dataclass, field, replace

from fastapi import Response

from dualkg.serve.routes.entities import entity
from dualkg.serve.routes.queries import EntityName
from dualkg.serve.schemas import Entity, Fact, Item
from dualkg.serve.service import Context, UnknownNameError
from dualkg.serve.templating import page, page_router, page_url

routes = page_router()
MAX_ROWS = 22  # on one side of the wide drawing
# Known and predicted neighbours of each relation, from the most detailed drawing to the least.
DETAILS = ((8, 3), (5, 3), (4, 2), (3, 2), (2, 2), (2, 1), (1, 1))


@routes.get("/entity")  # for names that a browser would change in a path, such as `..`
@routes.get("/entity/{name:name}")
async def entity_page(context: Context, name: EntityName) -> Response:
    try:
        found = await entity(context, name)
    except UnknownNameError as error:
        entities = context.run.graph.entities
        similar = [Item.of(entities, entities.id(name)) for name in error.suggestions]
        return page(context, "unknown_entity.html", status=404, error=error, similar=similar)
    groups = groups_of(found)
    return page(
        context,
        "entity.html",
        json=page_url(context, "/entity.json", name=found.entity.name),
        found=found,
        groups=groups,
        sides=[fitting([group for group in groups if group.outwards is out], MAX_ROWS) for out in (False, True)],
        tree=fitting(groups, 2 * MAX_ROWS),
    )


@dataclass(frozen=True)
class Group:
    """Facts with one relation: their tails are neighbours of the entity if `outwards`, else their heads."""

    relation: Item
    outwards: bool
    known: list[Fact] = field(default_factory=list)
    predicted: list[Fact] = field(default_factory=list)
    num_omitted: int = 0

    @property
    def anchor(self) -> str:
        """The id of the list of all these facts on the page."""
        return f"{'to' if self.outwards else 'from'}-{self.relation.id}"

    @property
    def rows(self) -> list[Fact | None]:
        """The rows of a drawing; None is the number of omitted neighbours."""
        return [*self.known, *self.predicted, *([None] if self.num_omitted else [])]

    def neighbour(self, fact: Fact) -> Item:
        return fact.tail if self.outwards else fact.head

    def shortened(self, num_known: int, num_predicted: int) -> "Group":
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
        (group.predicted if fact.split is None else group.known).append(fact)
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
