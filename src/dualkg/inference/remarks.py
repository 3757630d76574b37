"""What train says against a new triple: an end of an unusual type, or an answer that is known."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

import numpy as np

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.inspection import answers_per_query
from dualkg.inference.scoring import Ids
from dualkg.without_torch.query_classes import NUM_KNOWN, QueryClasses, is_unusual

TypeFit = Literal["known", "likely", "unusual"]
# A relation with at most as many answers per query, on average, has one as a rule.
FUNCTIONAL = 1.1


class Remarks(NamedTuple):
    """Remarks on one triple.

    An end has a `known` type if train has the entity at that end of the relation, a `likely` one if
    its other roles are evidence of it, and else an `unusual` one. `known_tail` is a known tail of
    the head if the relation has one as a rule, and `known_head` likewise.
    """

    head_type: TypeFit
    tail_type: TypeFit
    known_tail: int | None
    known_head: int | None


@dataclass(frozen=True, eq=False)
class Remarker:
    """Finds the remarks on new triples of a graph."""

    graph: Graph
    known: KnownAnswers
    classes: QueryClasses

    @classmethod
    def of(cls, graph: Graph, known: KnownAnswers, classes: QueryClasses | None = None) -> Self:
        return cls(graph, known, classes or QueryClasses.of(graph))

    @cached_property
    def functional(self) -> tuple[Ids, Ids]:
        """The relations that have one tail for each head as a rule, and those with one head."""
        means = answers_per_query(self.graph.train, self.graph.shape)
        tails, heads = (np.flatnonzero((mean > 0) & (mean <= FUNCTIONAL)) for mean in means)
        return tails, heads

    def of_triples(self, triples: Ids) -> list[Remarks]:
        """The remarks on triples `(num_triples, 3)`."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).reshape(-1, 3).T
        head_roles = self.classes.roles(relations, tails=False)
        tail_roles = self.classes.roles(relations, tails=True)
        head_types = _type_fits(self.classes.of_pairs(heads, head_roles))
        tail_types = _type_fits(self.classes.of_pairs(tails, tail_roles))
        known_tails = self._known_answers(heads, relations, self.functional[0])
        inverse = relations + self.graph.shape.num_relations
        known_heads = self._known_answers(
            tails, inverse, self.functional[1] + self.graph.shape.num_relations
        )
        return [
            Remarks(*remarks)
            for remarks in zip(head_types, tail_types, known_tails, known_heads, strict=True)
        ]

    def _known_answers(self, entities: Ids, relations: Ids, functional: Ids) -> list[int | None]:
        """The first known answer of each query of a functional relation, else None."""
        answers: list[int | None] = [None] * len(entities)
        queries = np.flatnonzero(np.isin(relations, functional))
        if not len(queries):
            return answers
        rows, known = self.known(entities[queries], relations[queries])
        for row, answer in zip(rows[::-1].tolist(), known[::-1].tolist(), strict=True):
            answers[queries[row]] = answer
        return answers


def _type_fits(query_classes: Ids) -> list[TypeFit]:
    fits = np.where(query_classes < NUM_KNOWN, "known", "likely")
    of_classes: list[TypeFit] = np.where(is_unusual(query_classes), "unusual", fits).tolist()
    return of_classes
