"""What every model offers, and what a bilinear one gets for its two maps.

A relation is a linear map. A bilinear model writes that map and its transpose, `map_head` and `map_tail`,
with ⟨map_head(h, r), t⟩ = ⟨h, map_tail(t, r)⟩. Scores of one triple, of all tails, of all heads and of all
relations, the dual models and the regularizers are all written once, in terms of the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError

InitScale = float | Literal["xavier"]


class Model(nn.Module, ABC):
    """Scores triples of ids; a higher score is a more plausible triple.

    With `reciprocal` relations, relation `r + num_relations` is the inverse of `r`, and heads are asked for
    as tails of the inverse.
    """

    def __init__(self, shape: GraphShape, *, reciprocal: bool = True) -> None:
        super().__init__()
        self.shape = GraphShape(*shape)
        self.reciprocal = reciprocal

    @property
    def num_relation_ids(self) -> int:
        """How many relation ids the model knows: twice the graph's with reciprocals."""
        return self.shape.num_relations * (2 if self.reciprocal else 1)

    @abstractmethod
    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` three times → scores `(batch,)`."""

    @abstractmethod
    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every entity as tail, `(batch, num_entities)`."""

    @abstractmethod
    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every entity as head, `(batch, num_entities)`."""

    @abstractmethod
    def score_relations(self, heads: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every relation id, `(batch, num_relation_ids)`."""

    def ask_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Answer (head, relation, ?), relations as the graph numbers them."""
        return self.score_tails(heads, relations)

    def ask_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """Answer (?, relation, tail), through the inverse relation where there is one."""
        if self.reciprocal:
            return self.score_tails(tails, relations + self.shape.num_relations)
        return self.score_heads(relations, tails)

    @property
    @abstractmethod
    def bilinear(self) -> BilinearModel:
        """The bilinear model that holds the parameters: itself, or the one it is the dual of."""

    @property
    @abstractmethod
    def choices(self) -> dict[str, object]:
        """What made this model beside the graph's shape: the keywords of its class."""

    @abstractmethod
    def factors(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Factors:
        """What a regularizer may look at for a batch of triples."""

    @abstractmethod
    def entity_vectors(self) -> Tensor:
        """One row an entity, `(num_entities, …)`: what makes two entities similar."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class BilinearModel(Model):
    """A model that scores by ⟨h R, t⟩. A built model writes its tables and the two maps."""

    diagonal = False  # whether a relation acts on each coordinate alone, as N3 asks

    def __init__(
        self,
        shape: GraphShape,
        *,
        dim: int,
        reciprocal: bool = True,
        init_scale: InitScale = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, reciprocal=reciprocal)
        if dim < 1:
            raise RequestError(f"dim must be at least 1; it is {dim}.")
        self.dim = dim
        self.init_scale = init_scale
        self.seed = seed
        self._random = torch.Generator().manual_seed(seed)

    @property
    def choices(self) -> dict[str, object]:
        return {"dim": self.dim, "reciprocal": self.reciprocal, "init_scale": self.init_scale}

    # -- what a model writes ------------------------------------------------------------------------------

    @abstractmethod
    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → h R."""

    @abstractmethod
    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → t Rᵀ, the transpose of `map_head`."""

    @property
    @abstractmethod
    def head_table(self) -> Tensor:
        """Embeddings of the entities as heads, `(num_entities, width)`."""

    @property
    @abstractmethod
    def tail_table(self) -> Tensor:
        """Embeddings of the entities as tails, `(num_entities, width)`."""

    @property
    @abstractmethod
    def relation_table(self) -> Tensor:
        """All numbers of a relation in one row, `(num_relation_ids, …)`."""

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        """|x|² of every coordinate; complex models fold their pairs."""
        return vectors.square()

    # -- what it gets -------------------------------------------------------------------------------------

    def table(self, rows: int, width: int) -> nn.Parameter:
        """A table drawn from N(0, 1)·`init_scale`, or uniformly with Xavier's bound."""
        if self.init_scale == "xavier":
            values = nn.init.xavier_uniform_(torch.empty(rows, width), generator=self._random)
        else:
            values = torch.randn(rows, width, generator=self._random) * self.init_scale
        return nn.Parameter(values)

    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        factors = self.factors(heads, relations, tails)
        return (factors.mapped_head * factors.tail).sum(-1)

    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        return self.map_head(rows(self.head_table, heads), relations) @ self.tail_table.T

    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        return self.map_tail(rows(self.tail_table, tails), relations) @ self.head_table.T

    def score_relations(self, heads: Tensor, tails: Tensor) -> Tensor:
        head, tail = rows(self.head_table, heads), rows(self.tail_table, tails)
        scores = [(mapped * tail).sum(-1) for mapped in self.map_by_every_relation(head)]
        return torch.stack(scores, dim=-1)

    def map_by_every_relation(self, vectors: Tensor, *, transposed: bool = False) -> Iterator[Tensor]:
        """h R, or t Rᵀ, for each relation in turn: never batch × relations × width at once."""
        apply = self.map_tail if transposed else self.map_head
        for relation in range(self.num_relation_ids):
            yield apply(vectors, torch.full((len(vectors),), relation, device=vectors.device))

    def relation_norms(self, relations: Tensor) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`, without a matrix per triple."""
        distinct, position = torch.unique(relations, return_inverse=True)
        return rows(rows(self.relation_table, distinct).square().sum(-1, keepdim=True), position).squeeze(-1)

    def modulus(self, vectors: Tensor) -> Tensor:
        """|x| of every coordinate, with gradient 0 where x is 0."""
        squared = self.squared_modulus(vectors)
        zero = squared == 0
        return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)

    @property
    def bilinear(self) -> BilinearModel:
        return self

    def factors(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Factors:
        return Factors(self, rows(self.head_table, heads), relations, rows(self.tail_table, tails))

    def entity_vectors(self) -> Tensor:
        if self.head_table is self.tail_table:
            return self.head_table
        return torch.cat([self.head_table, self.tail_table], dim=-1)


@dataclass
class Factors:
    """Head and tail vectors of a batch, the ids of its relations, and their images when asked for."""

    model: BilinearModel
    head: Tensor
    relations: Tensor
    tail: Tensor

    @cached_property
    def relation(self) -> Tensor:
        """The rows of the relations. Only for diagonal models: a matrix per triple must never be gathered."""
        return rows(self.model.relation_table, self.relations)

    @cached_property
    def mapped_head(self) -> Tensor:
        return self.model.map_head(self.head, self.relations)

    @cached_property
    def mapped_tail(self) -> Tensor:
        return self.model.map_tail(self.tail, self.relations)


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table by id. An embedding look-up sums its gradient in a fixed order; indexing does not."""
    return F.embedding(ids, table)
