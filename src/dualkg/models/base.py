"""What every model offers: scores of triples, of all tails, of all heads, of all relations; and tables of vectors."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor, nn

from dualkg.data.graph import GraphShape
from dualkg.errors import RequestError
from dualkg.models.factors import Factors, rows

InitScale = float | Literal["xavier"]
Side = Literal["tail", "head"]
_skip_initialization: ContextVar[bool] = ContextVar("skip_initialization", default=False)


@contextmanager
def skip_initialization() -> Iterator[None]:
    """Models that are made meanwhile have zeros for noise: drawing it takes seconds, and other weights come at once."""
    token = _skip_initialization.set(True)
    try:
        yield
    finally:
        _skip_initialization.reset(token)


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

    def predict_tails(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Answer (head, relation, ?), relations as the graph numbers them."""
        return self.score_tails(heads, relations)

    def predict_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """Answer (?, relation, tail), through the inverse relation where there is one."""
        if self.reciprocal:
            return self.score_tails(tails, relations + self.shape.num_relations)
        return self.score_heads(relations, tails)

    @property
    @abstractmethod
    def embedding(self) -> EmbeddingModel:
        """The model that holds the tables: itself, or the one it is the dual of."""

    @property
    @abstractmethod
    def config(self) -> dict[str, object]:
        """What made this model beside the graph's shape: the keywords of its class."""

    def factors(self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None) -> Factors:
        """The vectors of a batch of triples, or of queries, which leave out what they ask for."""
        return Factors(self.embedding, heads, relations, tails)

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

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        """Scores of some entities as tails, or heads, `(batch, n)`; the same `(n,)` for all, or `(batch, n)` ids."""
        batch = len(f.relations)
        candidates = candidates.expand(batch, candidates.shape[-1])
        num = candidates.shape[1]
        repeated = {"tail": f.given_heads, "head": f.given_tails}[side]
        assert repeated is not None
        given, relations = (ids.repeat_interleave(num) for ids in (repeated, f.relations))
        asked = candidates.reshape(-1)
        ids = (given, relations, asked) if side == "tail" else (asked, relations, given)
        return self.score(*ids).view(batch, num)

    @abstractmethod
    def entity_vectors(self) -> Tensor:
        """One row an entity, `(num_entities, …)`: what makes two entities similar."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class EmbeddingModel(Model):
    """A model with a row for every entity and every relation. Regularizers ask of it what its vectors mean."""

    diagonal = False  # whether a relation acts on each coordinate alone, as N3 asks
    has_adjoint = False  # whether map_head and map_tail both say where a vector goes, as DURA asks
    euclidean = True  # whether the numbers of an entity are coordinates, so that their powers add up to norms
    numbers_per_coordinate = 1  # real numbers that make one coordinate of an embedding
    two_entity_tables = False  # whether an entity is another vector as tail than as head
    score_arrays = 3  # of batch × entities, which autograd keeps of all scores and their softmax
    default_init_scale: InitScale = 1e-3

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
        self.init_scale = self.default_init_scale if init_scale is None else init_scale
        self._random = torch.Generator().manual_seed(seed)
        width = self.entity_width(dim)
        self._check_size(width)
        self.entities = self.table(self.shape.num_entities, width)
        self.relations = self.relation_table(self.num_relation_ids, self.relation_width(dim))
        if self.two_entity_tables:
            self.tails = self.table(self.shape.num_entities, width)

    def _check_size(self, width: int) -> None:
        """Refuse tables that this machine could not hold, before they are made."""
        num_tables = 2 if self.two_entity_tables else 1
        numbers = self.shape.num_entities * width * num_tables
        numbers += self.num_relation_ids * self.relation_width(self.dim) + self.num_shared_parameters(self.dim)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * numbers > there:
            raise RequestError(
                f"{type(self).__name__} with dim {self.dim:,} needs {4 * numbers / 2**30:,.1f} GiB for its tables; "
                f"this machine has {there / 2**30:,.1f}. Choose a smaller dim."
            )

    @property
    def config(self) -> dict[str, object]:
        return {"dim": self.dim, "reciprocal": self.reciprocal, "init_scale": self.init_scale}

    # -- what a kind of model writes ----------------------------------------------------------------------

    @abstractmethod
    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → where the relation takes the head."""

    @abstractmethod
    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → where the relation takes the tail."""

    def entity_width(self, dim: int) -> int:
        """How many real numbers an entity has."""
        return dim * self.numbers_per_coordinate

    def relation_width(self, dim: int) -> int:
        """How many real numbers a relation has."""
        return dim * self.numbers_per_coordinate

    def num_shared_parameters(self, dim: int) -> int:
        """How many real numbers belong to no entity and no relation."""
        return 0

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        """|x|² of every coordinate; complex models fold their pairs."""
        return vectors.square()

    # -- what it gets -------------------------------------------------------------------------------------

    @property
    def embedding(self) -> EmbeddingModel:
        return self

    @property
    def head_table(self) -> Tensor:
        """Embeddings of the entities as heads, `(num_entities, width)`."""
        return self.entities

    @property
    def tail_table(self) -> Tensor:
        """Embeddings of the entities as tails, `(num_entities, width)`."""
        return self.tails if self.two_entity_tables else self.entities

    def table(self, rows: int, width: int) -> nn.Parameter:
        """A table of fresh numbers."""
        return nn.Parameter(self.init_noise(rows, width))

    def init_noise(self, rows: int, width: int) -> Tensor:
        """Numbers drawn from N(0, 1)·`init_scale`, or uniformly with Xavier's bound."""
        if _skip_initialization.get():
            return torch.zeros(rows, width)
        if self.init_scale == "xavier":
            return nn.init.xavier_uniform_(torch.empty(rows, width), generator=self._random)
        return torch.randn(rows, width, generator=self._random) * self.init_scale

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """Fresh relations; as entities are drawn, where a model does not say otherwise."""
        return self.table(rows, width)

    def relation_norms(self, relations: Tensor) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`, without a matrix per triple."""
        return rows(self.relations.square().sum(-1, keepdim=True), relations).squeeze(-1)

    def modulus(self, vectors: Tensor) -> Tensor:
        """|x| of every coordinate, with gradient 0 where x is 0."""
        squared = self.squared_modulus(vectors)
        zero = squared == 0
        return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)

    def map_by_all_relations(self, vectors: Tensor, *, transposed: bool = False) -> Iterator[Tensor]:
        """Where each relation takes heads, or tails, in turn: never batch × relations × width at once."""
        apply = self.map_tail if transposed else self.map_head
        for relation in range(self.num_relation_ids):
            yield apply(vectors, torch.full((len(vectors),), relation, device=vectors.device))

    def entity_vectors(self) -> Tensor:
        if self.two_entity_tables:
            return torch.cat([self.head_table, self.tail_table], dim=-1)
        return self.entities
