"""What every model offers, and what a bilinear one gets for its two maps.

A relation is a linear map. A bilinear model writes that map and its transpose, `map_head` and `map_tail`,
with ⟨map_head(h, r), t⟩ = ⟨h, map_tail(t, r)⟩. Scores of one triple, of all tails, of all heads and of all
relations, the dual models and the regularizers are all written once, in terms of the two.
"""

from __future__ import annotations

import os
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

    def check_shape(self, shape: GraphShape) -> None:
        """Refuse a graph that the model was not made for: its ids would mean other things."""
        if tuple(shape) != tuple(self.shape):
            raise RequestError(
                f"The model was made for {self.shape.num_entities:,} entities and {self.shape.num_relations:,} "
                f"relations; the graph has {shape.num_entities:,} and {shape.num_relations:,}."
            )

    @property
    def num_relation_ids(self) -> int:
        """How many relation ids the model knows: twice the graph's with reciprocals."""
        return self.shape.num_relations * (2 if self.reciprocal else 1)

    # -- scores of ids ------------------------------------------------------------------------------------

    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` three times → scores `(batch,)`."""
        return self.triple_scores(self.factors(heads, relations, tails))

    def score_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every entity as tail, `(batch, num_entities)`."""
        return self.tail_scores(self.factors(heads, relations, None))

    def score_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every entity as head, `(batch, num_entities)`."""
        return self.head_scores(self.factors(None, relations, tails))

    def score_relations(self, heads: Tensor, tails: Tensor) -> Tensor:
        """Ids `(batch,)` twice → a score for every relation id, `(batch, num_relation_ids)`."""
        return self.relation_scores(self.factors(heads, None, tails))

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

    def factors(self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None) -> Factors:
        """The vectors of a batch of triples, or of queries, which leave out what they ask for."""
        return Factors(self.bilinear, heads, relations, tails)

    # -- what a kind of model writes ----------------------------------------------------------------------

    @abstractmethod
    def triple_scores(self, f: Factors) -> Tensor:
        """What `score` gives, from vectors that may already be there."""

    @abstractmethod
    def tail_scores(self, f: Factors) -> Tensor:
        """What `score_tails` gives."""

    @abstractmethod
    def head_scores(self, f: Factors) -> Tensor:
        """What `score_heads` gives."""

    @abstractmethod
    def relation_scores(self, f: Factors) -> Tensor:
        """What `score_relations` gives."""

    @abstractmethod
    def entity_vectors(self) -> Tensor:
        """One row an entity, `(num_entities, …)`: what makes two entities similar."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class BilinearModel(Model):
    """A model that scores by ⟨h R, t⟩. A built model writes its tables and the two maps."""

    diagonal = False  # whether a relation acts on each coordinate alone, as N3 asks
    numbers_per_coordinate = 1  # real numbers that make one coordinate of an embedding
    two_entity_tables = False  # whether an entity is another vector as tail than as head
    usual_init_scale: InitScale = 1e-3

    def __init__(
        self,
        shape: GraphShape,
        *,
        dim: int,
        reciprocal: bool = True,
        init_scale: InitScale | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, reciprocal=reciprocal)
        if dim < 1:
            raise RequestError(f"dim must be at least 1; it is {dim}.")
        self.dim = dim
        self.init_scale = self.usual_init_scale if init_scale is None else init_scale
        self._random = torch.Generator().manual_seed(seed)
        width = dim * self.numbers_per_coordinate
        self._check_size(width)
        self.entities = self.table(self.shape.num_entities, width)
        self.relations = self.table(self.num_relation_ids, self.relation_width(dim))
        if self.two_entity_tables:
            self.tails = self.table(self.shape.num_entities, width)

    def _check_size(self, width: int) -> None:
        """Refuse tables that this machine could not hold, before they are made."""
        num_tables = 2 if self.two_entity_tables else 1
        numbers = self.shape.num_entities * width * num_tables
        numbers += self.num_relation_ids * self.relation_width(self.dim)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * numbers > there:
            raise RequestError(
                f"{type(self).__name__} with dim {self.dim:,} needs {4 * numbers / 2**30:,.1f} GiB for its tables; "
                f"this machine has {there / 2**30:,.1f}. Choose a smaller dim."
            )

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

    def relation_width(self, dim: int) -> int:
        """How many real numbers a relation has."""
        return dim * self.numbers_per_coordinate

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        """|x|² of every coordinate; complex models fold their pairs."""
        return vectors.square()

    # -- what it gets -------------------------------------------------------------------------------------

    @property
    def head_table(self) -> Tensor:
        """Embeddings of the entities as heads, `(num_entities, width)`."""
        return self.entities

    @property
    def tail_table(self) -> Tensor:
        """Embeddings of the entities as tails, `(num_entities, width)`."""
        return self.tails if self.two_entity_tables else self.entities

    def table(self, rows: int, width: int) -> nn.Parameter:
        """A table drawn from N(0, 1)·`init_scale`, or uniformly with Xavier's bound."""
        if self.init_scale == "xavier":
            values = nn.init.xavier_uniform_(torch.empty(rows, width), generator=self._random)
        else:
            values = torch.randn(rows, width, generator=self._random) * self.init_scale
        return nn.Parameter(values)

    def triple_scores(self, f: Factors) -> Tensor:
        return (f.mapped_head * f.tail).sum(-1)

    def tail_scores(self, f: Factors) -> Tensor:
        return f.mapped_head @ self.tail_table.T

    def head_scores(self, f: Factors) -> Tensor:
        return f.mapped_tail @ self.head_table.T

    def relation_scores(self, f: Factors) -> Tensor:
        return torch.stack([(image * f.tail).sum(-1) for image in self.map_by_every_relation(f.head)], dim=-1)

    def map_by_every_relation(self, vectors: Tensor, *, transposed: bool = False) -> Iterator[Tensor]:
        """h R, or t Rᵀ, for each relation in turn: never batch × relations × width at once."""
        apply = self.map_tail if transposed else self.map_head
        for relation in range(self.num_relation_ids):
            yield apply(vectors, torch.full((len(vectors),), relation, device=vectors.device))

    def image_norms(self, relations: Tensor, *, transposed: bool) -> Tensor:
        """‖h R‖² of all heads, or ‖t Rᵀ‖² of all tails, for some relations: `(num_relations asked, num_entities)`."""
        table, apply = (self.tail_table, self.map_tail) if transposed else (self.head_table, self.map_head)
        images = (apply(table, relation.expand(len(table))) for relation in relations)
        return torch.stack([image.square().sum(-1) for image in images])

    def sums_of_norms(self, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Σ‖h‖² over all heads, and Σ‖h R‖² over all heads and relations; or those of tails, t and t Rᵀ."""
        table = self.tail_table if transposed else self.head_table
        relations = torch.arange(self.num_relation_ids, device=table.device)
        return table.square().sum(), self.image_norms(relations, transposed=transposed).sum()

    def relation_norms(self, relations: Tensor) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`, without a matrix per triple."""
        return rows(self.relations.square().sum(-1, keepdim=True), relations).squeeze(-1)

    def modulus(self, vectors: Tensor) -> Tensor:
        """|x| of every coordinate, with gradient 0 where x is 0."""
        squared = self.squared_modulus(vectors)
        zero = squared == 0
        return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)

    @property
    def bilinear(self) -> BilinearModel:
        return self

    def entity_vectors(self) -> Tensor:
        if self.two_entity_tables:
            return torch.cat([self.head_table, self.tail_table], dim=-1)
        return self.entities


@dataclass
class Factors:
    """The vectors of a batch, `(batch, width)`, each gathered or mapped when first asked for, and then kept."""

    model: BilinearModel
    given_heads: Tensor | None
    given_relations: Tensor | None
    given_tails: Tensor | None

    @property
    def heads(self) -> Tensor:
        return _given(self.given_heads, "heads")

    @property
    def relations(self) -> Tensor:
        return _given(self.given_relations, "relations")

    @property
    def tails(self) -> Tensor:
        return _given(self.given_tails, "tails")

    @cached_property
    def head(self) -> Tensor:
        return rows(self.model.head_table, self.heads)

    @cached_property
    def tail(self) -> Tensor:
        return rows(self.model.tail_table, self.tails)

    @cached_property
    def relation(self) -> Tensor:
        """The rows of the relations. Only for diagonal models: a matrix per triple must never be gathered."""
        return rows(self.model.relations, self.relations)

    @cached_property
    def relation_norm(self) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`."""
        return self.model.relation_norms(self.relations)

    @cached_property
    def mapped_head(self) -> Tensor:
        return self.model.map_head(self.head, self.relations)

    @cached_property
    def mapped_tail(self) -> Tensor:
        return self.model.map_tail(self.tail, self.relations)

    @property
    def tail_gap(self) -> Tensor:
        """What the tail lacks of the mapped head: the dual on the tail's side scores by its length."""
        return self.mapped_head - self.tail

    @property
    def head_gap(self) -> Tensor:
        return self.mapped_tail - self.head


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table by id. An embedding look-up sums its gradient in a fixed order; indexing does not."""
    return F.embedding(ids, table)


def _given(ids: Tensor | None, what: str) -> Tensor:
    if ids is None:
        raise ValueError(f"these factors are of queries that do not give their {what}")
    return ids
