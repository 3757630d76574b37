"""The role of each entity in a graph: how many triples it has, and in which relation most often."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import SPLITS, Graph

Ids = npt.NDArray[np.int64]
End = Literal["head", "tail"]


class Role(NamedTuple):
    """A relation, and the end of its triples at which an entity is."""

    relation: int
    end: End


@dataclass(frozen=True, eq=False)
class EntityRoles:
    """Degrees and commonest roles of entities, counted on all splits.

    `degrees` `(num_entities,)` count triples, a self-loop once. `commonest` `(num_entities,)` are
    relation ids, plus `num_relations` for the tail of a relation, and −1 for an entity without
    triples. Of two roles that are equally common, the one with the lower number counts.
    """

    num_relations: int
    degrees: Ids
    commonest: Ids

    @classmethod
    def of(cls, graph: Graph) -> Self:
        num_entities = graph.shape.num_entities
        num_relations = graph.shape.num_relations
        triples = np.concatenate([graph.split(split) for split in SPLITS]).astype(np.int64)
        heads, relations, tails = triples.T

        degrees = np.bincount(heads, minlength=num_entities)
        not_loops = heads != tails
        degrees += np.bincount(tails[not_loops], minlength=num_entities)

        num_roles = 2 * num_relations
        as_heads = heads * num_roles + relations
        as_tails = tails * num_roles + relations + num_relations
        keys = np.concatenate([as_heads, as_tails])
        roles_of_entities, counts = np.unique(keys, return_counts=True)
        entities, roles = np.divmod(roles_of_entities, num_roles)
        # The last assignment counts: by entity, the rarest role comes first.
        order = np.lexsort((-roles, counts, entities))
        commonest = np.full(num_entities, -1)
        commonest[entities[order]] = roles[order]
        return cls(num_relations, degrees, commonest)

    def of_entity(self, entity: int) -> Role | None:
        """The commonest role of an entity; None without triples."""
        role = int(self.commonest[entity])
        if role < 0:
            return None
        relation = role % self.num_relations
        return Role(relation, "head" if role < self.num_relations else "tail")
