"""Types of entities, from a relation such as `instance_of` or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dualkg.data.graph import Graph

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EntityTypes:
    """Pairs of an entity and a type by their ids, `(num_pairs,)`, distinct and by entity.

    `names` are those of the types, and `source` says where they are from. An entity may have
    several types or none.
    """

    source: str
    names: list[str]
    entities: Ids
    types: Ids

    @classmethod
    def of_pairs(cls, source: str, names: list[str], entities: Ids, types: Ids) -> Self:
        pairs = np.unique(np.stack([entities, types], axis=1).astype(np.int64), axis=0)
        return cls(source, names, pairs[:, 0], pairs[:, 1])

    @classmethod
    def of_relation(cls, graph: Graph, relation: str) -> Self:
        """The tails that entities have with a relation in train."""
        triples = graph.train[graph.train[:, 1] == graph.relations.id(relation)]
        tails, types = np.unique(triples[:, 2], return_inverse=True)
        names = [graph.entities[tail] for tail in tails.tolist()]
        return cls.of_pairs(f"the relation {relation}", names, triples[:, 0], types.reshape(-1))

    @classmethod
    def read(cls, path: str | Path, graph: Graph) -> Self:
        """The types of a file with a line for each: entity and type, separated by a tab.

        Entities that the graph does not have are left out. A file without any of its entities is
        refused.
        """
        # Reading text imports the CSV reader of PyArrow, which queries of a saved run do not need.
        from dualkg.data.archives import find_one_source
        from dualkg.data.formats.delimited import read_pairs
        from dualkg.errors import DataError

        source = find_one_source(path, content="types")
        ids: dict[str, int] = {}
        entities = []
        types = []
        for entity, name in read_pairs(source, ("entity", "type")):
            if name and entity in graph.entities:
                entities.append(graph.entities.id(entity))
                types.append(ids.setdefault(name, len(ids)))
        if not entities:
            raise DataError(
                f"{source.name} has types of no entity of {graph.name}. Write lines of entity and "
                "type, separated by a tab."
            )
        return cls.of_pairs(source.file_name, list(ids), np.array(entities), np.array(types))

    @property
    def num_entities(self) -> int:
        """The number of entities that have a type."""
        return len(np.unique(self.entities))

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "names": self.names,
            "entities": self.entities.tolist(),
            "types": self.types.tolist(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], num_entities: int) -> Self:
        """The inverse of `as_dict`; content that does not fit together is a `ValueError`."""
        names = [str(name) for name in saved["names"]]
        entities = np.array(saved["entities"], dtype=np.int64)
        types = np.array(saved["types"], dtype=np.int64)
        if entities.ndim != 1 or entities.shape != types.shape:
            raise ValueError("its types are not pairs of an entity and a type")
        if len(types) and not (types.min() >= 0 and types.max() < len(names)):
            raise ValueError("its types are not among their names")
        if len(entities) and not (entities.min() >= 0 and entities.max() < num_entities):
            raise ValueError(f"its types are not of the {num_entities:,} entities of the graph")
        return cls.of_pairs(str(saved["source"]), names, entities, types)
