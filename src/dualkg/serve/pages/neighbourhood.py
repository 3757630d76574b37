"""What is around an entity, by relation and direction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dualkg.serve.shapes.facts import Entity, Fact
from dualkg.serve.shapes.things import Thing


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
