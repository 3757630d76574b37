"""Type constraints of an evaluation: candidates are in the domain or the range of the relation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import Graph


@dataclass(frozen=True, eq=False)
class TypeConstraint:
    """The entities that train has as tail of each relation, and as head.

    Tails of relation r are `entities[offsets[r]:offsets[r + 1]]`; its heads are listed in the same
    way as r + num_relations. A relation that train does not have allows all entities.
    """

    num_entities: int
    entities: Tensor
    offsets: list[int]

    @classmethod
    def of(cls, graph: Graph, device: torch.device | str = "cpu") -> TypeConstraint:
        num_entities, num_relations = graph.shape
        heads, relations, tails = graph.train.astype(np.int64).T
        both_directions = np.concatenate([relations, relations + num_relations])
        answers = np.concatenate([tails, heads])
        keys = np.unique(both_directions * num_entities + answers)
        offsets = np.searchsorted(keys, np.arange(2 * num_relations + 1) * num_entities)
        entities = torch.from_numpy(keys % num_entities).to(device)
        return cls(num_entities, entities, offsets.tolist())

    def allowed(self, relations: Tensor, *, backward: bool) -> Tensor:
        """Whether each entity is a candidate of the queries of these relations.

        Shape `(batch, num_entities)`.
        """
        num_relations = len(self.offsets) // 2
        distinct, rows = torch.unique(relations, return_inverse=True)
        shape = (len(distinct), self.num_entities)
        table = torch.zeros(shape, dtype=torch.bool, device=relations.device)
        for row, relation in enumerate(distinct.tolist()):
            listed = relation + num_relations if backward else relation
            first, last = self.offsets[listed : listed + 2]
            if first < last:
                table[row, self.entities[first:last]] = True
            else:
                table[row] = True
        return table[rows]
