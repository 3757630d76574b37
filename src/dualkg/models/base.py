"""The interface of all models: scores of triples and of queries, and the vectors of a batch as
losses see them.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.data.graph import Graph, GraphShape
from dualkg.errors import RequestError
from dualkg.models.score_text import ScoreText

InitScale = float | Literal["xavier"]
Side = Literal["tail", "head"]
SIDES: tuple[Side, ...] = ("tail", "head")
ScoreForm = Literal["products", "squared distances"]
BLOCK_ROWS = 2**14  # of a table that are drawn at a time where a process keeps a shard of it
_skip_initialization: ContextVar[bool] = ContextVar("skip_initialization", default=False)

# The `Shard` whose rows are made, or None: its module imports this one. And the device that they
# are made on.
_shard: ContextVar[tuple[Any, torch.device | None]] = ContextVar("shard", default=(None, None))


def lookup(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Rows of a table by id; an embedding look-up sums its gradient in a fixed order, which
    indexing does not.

    With `sparse`, the gradient of a table that is a parameter has only the rows that were read.
    """
    return F.embedding(ids, table, sparse=sparse and table.is_leaf)


@contextmanager
def _during(setting: ContextVar[Any], value: object) -> Iterator[None]:
    token = setting.set(value)
    try:
        yield
    finally:
        setting.reset(token)


def only_rows(rows: Any, *, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Build models whose entity tables have some of the rows alone, with the numbers they have in
    the whole tables.

    They are made on the device, whole ones with None, by blocks: the memory of the host may be
    smaller than they are.
    """
    return _during(_shard, (rows, device))


def skip_initialization() -> AbstractContextManager[None]:
    """Build models with zeros in place of random numbers, which take seconds to draw, before
    loading saved weights.
    """
    return _during(_skip_initialization, True)


def overridden(instance: object) -> set[str]:
    """Names of the nearest class of dualkg that the class of an instance defines again; empty for
    dualkg's own.
    """
    kinds = type(instance).__mro__
    nearest = next(
        index for index, kind in enumerate(kinds) if kind.__module__.startswith("dualkg.")
    )
    names = {
        name for kind in kinds[:nearest] for name in vars(kind) if hasattr(kinds[nearest], name)
    }
    # The text of a score changes nothing that is computed.
    return {name for name in names if not name.startswith(("__", "_abc_")) and name != "score_text"}


def _shape_of(graph: Graph | GraphShape) -> GraphShape:
    shape = graph.shape if isinstance(graph, Graph) else graph
    if not (
        isinstance(shape, tuple)
        and len(shape) == 2
        and all(isinstance(size, int) for size in shape)
    ):
        name = isinstance(graph, (str, Path))
        given = (
            f"'{graph}' was given. Load it: kg.load_graph('{graph}')"
            if name
            else f"{type(graph)} was given"
        )
        raise RequestError(
            f"A model is built for a graph or its shape, as in kg.ComplEx(graph, dim=100); {given}."
        )
    return GraphShape(*shape)


class Model(nn.Module, ABC):
    """Scores triples of ids; a higher score is a more plausible triple.

    With `reciprocal` relations, `r + num_relations` is the inverse of `r`, and heads are predicted
    as its tails.
    """

    score_arrays = 3  # of batch × entities, which autograd keeps of all scores and their softmax

    def __init__(self, shape: Graph | GraphShape, *, reciprocal: bool = True) -> None:
        super().__init__()
        self.shape = _shape_of(shape)
        self.reciprocal = reciprocal

    def check_shape(self, shape: GraphShape) -> None:
        """Refuse a graph with another number of entities or relations than the model was built
        for.
        """
        if tuple(shape) != tuple(self.shape):
            raise RequestError(
                f"The model was made for {self.shape.num_entities:,} entities and "
                f"{self.shape.num_relations:,} relations; the graph has {shape.num_entities:,} "
                f"and {shape.num_relations:,}."
            )

    @property
    def num_relation_ids(self) -> int:
        """The number of relation ids: twice the graph's with reciprocal relations."""
        return self.shape.num_relations * (2 if self.reciprocal else 1)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

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
        """Scores of all entities for the queries (head, relation, ?), `(batch, num_entities)`."""
        return self.score_tails(heads, relations)

    def predict_heads(self, relations: Tensor, tails: Tensor) -> Tensor:
        """Scores of all entities for the queries (?, relation, tail), by the inverse relation where
        there is one.
        """
        if self.reciprocal:
            return self.score_tails(tails, relations + self.shape.num_relations)
        return self.score_heads(relations, tails)

    def predict_candidates(
        self, given: Tensor, relations: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        """Scores of candidates `(batch, n)` for the queries whose `side` is missing, as above,
        `(batch, n)`.
        """
        if side == "head" and self.reciprocal:
            side = "tail"
            relations = relations + self.shape.num_relations
        return self.candidate_scores(self.queries(given, relations, side), candidates, side)

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The vectors of a batch of triples, or of queries, where the ids to predict are None."""
        return Factors(self.embedding, heads, relations, tails)

    def queries(self, given: Tensor, relations: Tensor, side: Side) -> Factors:
        """The vectors of queries whose `side` is missing."""
        return (
            self.factors(given, relations, None)
            if side == "tail"
            else self.factors(None, relations, given)
        )

    # -- to be implemented ----------------------------------------------------

    @property
    def score_form(self) -> ScoreForm | None:
        """⟨x, t⟩ or −‖x − t‖² of a mapped vector x and rows t; None is anything else, which has no
        fast step.
        """
        return None

    @property
    def shares_candidates(self) -> bool:
        """Whether candidates of a whole batch have one vector each in `candidate_scores`, not one
        for every triple.
        """
        return False

    @property
    @abstractmethod
    def embedding(self) -> EmbeddingModel:
        """The model that holds the tables: itself, or the one it is the dual of."""

    @property
    @abstractmethod
    def config(self) -> dict[str, object]:
        """The keyword arguments that build this model again, given the graph's shape."""

    @abstractmethod
    def triple_scores(self, f: Factors) -> Tensor:
        """`score` of a batch whose vectors may already be gathered, `(batch,)`."""

    @abstractmethod
    def tail_scores(self, f: Factors) -> Tensor:
        """`score_tails` of a batch, `(batch, num_entities)`."""

    @abstractmethod
    def head_scores(self, f: Factors) -> Tensor:
        """`score_heads` of a batch, `(batch, num_entities)`."""

    @abstractmethod
    def relation_scores(self, f: Factors) -> Tensor:
        """`score_relations` of a batch, `(batch, num_relation_ids)`."""

    @abstractmethod
    def entity_vectors(self) -> Tensor:
        """One row per entity, `(num_entities, …)`, by which entities are compared."""

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        """Scores of candidate tails, or heads, `(batch, n)`; ids `(n,)` shared by the batch, or
        `(batch, n)`.
        """
        batch = len(f.relations)
        num = candidates.shape[-1]
        given, relations = (ids.repeat_interleave(num) for ids in (f.given(side), f.relations))
        predicted = candidates.expand(batch, num).reshape(-1)
        ids = (given, relations, predicted) if side == "tail" else (predicted, relations, given)
        return self.score(*ids).view(batch, num)


class EmbeddingModel(Model):
    """A model with a row for every entity and every relation."""

    diagonal = False  # whether a relation acts on each coordinate separately, as N3 requires
    has_adjoint = False  # whether both map_head and map_tail give mapped vectors, as DURA requires
    # Whether the numbers of an entity are coordinates, so that sums of their powers are norms.
    euclidean = True
    numbers_per_coordinate = 1  # real numbers of one coordinate: 2 if complex
    num_biases = 0  # real numbers of an entity after those of its coordinates
    two_entity_tables = False  # whether an entity has one vector as head and another as tail
    capturable = (
        False  # whether no operation waits for a size that the GPU computed, as a CUDA graph needs
    )
    default_init_scale: InitScale = 1e-3
    options: tuple[str, ...] = ()  # keyword arguments of a subclass, which are attributes too
    sparse_gradients = False  # whether gradients of entity tables have only the rows of a batch
    # The score for readers of exported embeddings. A subclass that scores otherwise has its own.
    score_text: ClassVar[ScoreText | None] = None

    def __init__(
        self,
        shape: Graph | GraphShape,
        *,
        dim: int,
        reciprocal: bool = True,
        init_scale: InitScale | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, reciprocal=reciprocal)
        if not isinstance(dim, int | np.integer):
            raise RequestError(f"dim must be a whole number; it is {dim!r}.")
        if dim < 1:
            raise RequestError(f"dim must be at least 1; it is {dim}.")
        self.dim = dim
        self.init_scale = self.default_init_scale if init_scale is None else init_scale
        self._random = torch.Generator().manual_seed(seed)
        self._makes_entities = False  # while the tables of entities are made
        width = self.entity_width(dim)
        self._check_size(width)
        self.entities = self._entity_table(width)
        self.relations = self.relation_table(self.num_relation_ids, self.relation_width(dim))
        if self.two_entity_tables:
            self.tails = self._entity_table(width)

    def _check_size(self, width: int) -> None:
        """Refuse tables larger than the memory for them before allocating them."""
        shard, device = _shard.get()
        numbers = (
            (shard.size if shard else self.shape.num_entities)
            * width
            * (2 if self.two_entity_tables else 1)
        )
        numbers += self.num_relation_ids * self.relation_width(
            self.dim
        ) + self.num_shared_parameters(self.dim)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = "this machine has"
        if device is not None and device.type == "cuda":
            memory = torch.cuda.mem_get_info(device)[0]
            where = f"free on {device} are"
        if 4 * numbers > memory:
            raise RequestError(
                f"{type(self).__name__} with dim {self.dim:,} needs {4 * numbers / 2**30:,.1f} "
                f"GiB for its tables; {where} {memory / 2**30:,.1f}. Choose a smaller dim, or "
                "split the tables over several processes: torchrun --nproc-per-node "
                f"{math.ceil(8 * numbers / memory)} -m dualkg …"
            )

    @property
    def config(self) -> dict[str, object]:
        return {
            name: getattr(self, name) for name in ("dim", "reciprocal", "init_scale", *self.options)
        }

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {self.shape.num_entities:,} entities, {self.shape.num_relations:,} relations"

    def scores_as(self, kind: type, *more: str) -> bool:
        """Whether all entities are scored by the methods of a base class."""
        names = ("tail_scores", "head_scores", "head_table", "tail_table", "factors", *more)
        return all(getattr(type(self), name) is getattr(kind, name) for name in names)

    # -- to be implemented ----------------------------------------------------

    @abstractmethod
    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → the mapped heads, h R in bilinear
        models.
        """

    @abstractmethod
    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """Vectors `(batch, width)` and relation ids `(batch,)` → the mapped tails, t Rᵀ in bilinear
        models.
        """

    def entity_width(self, dim: int) -> int:
        return dim * self.numbers_per_coordinate + self.num_biases

    def relation_width(self, dim: int) -> int:
        return dim * self.numbers_per_coordinate

    def num_shared_parameters(self, dim: int) -> int:
        """Real numbers that belong to no entity and no relation."""
        return 0

    def squared_modulus(self, vectors: Tensor) -> Tensor:
        """|x|² of every coordinate, `(…, dim)` where coordinates are complex."""
        return vectors.square()

    def relation_table(self, rows: int, width: int) -> nn.Parameter:
        """New relations, drawn as entities are unless a model overrides it."""
        return self.table(rows, width)

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

    @property
    def entity_tables(self) -> list[nn.Parameter]:
        """The tables of entity embeddings: one, or one for heads and one for tails."""
        return [self.entities, self.tails] if self.two_entity_tables else [self.entities]

    def _entity_table(self, width: int) -> nn.Parameter:
        """The rows of all entities, or of the shard that is being built."""
        self._makes_entities = True
        shard = _shard.get()[0]
        table = self.table(self.shape.num_entities, width)
        self._makes_entities = False
        if shard is None or len(table) == shard.size:
            return table
        return nn.Parameter(
            table.detach()[shard.ids]
        )  # of a class of one's own that draws whole tables

    def table(self, rows: int, width: int) -> nn.Parameter:
        return nn.Parameter(self.init_noise(rows, width))

    def init_noise(self, rows: int, width: int) -> Tensor:
        """Numbers drawn from N(0, 1) · `init_scale`, or uniformly within Xavier's bound."""
        if self.init_scale == "xavier":
            bound = math.sqrt(6 / (rows + width))
            return self.drawn(
                rows, width, lambda block: block.uniform_(-bound, bound, generator=self._random)
            )
        return self.drawn(rows, width, lambda block: block.normal_(generator=self._random)).mul_(
            self.init_scale
        )

    def drawn(self, rows: int, width: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Random numbers `(rows, width)`; of a shard, its rows of the same table, which is drawn
        block by block.
        """
        shard, device = _shard.get() if self._makes_entities else (None, None)
        found = torch.zeros(shard.size if shard else rows, width, device=device)
        if _skip_initialization.get():
            return found
        if shard is None and device is None:
            return draw(found)
        for start in range(0, max(rows - BLOCK_ROWS, 0) + 1, BLOCK_ROWS):
            # The last block has the rest: PyTorch draws normal numbers by sixteen, and the end of a
            # table again.
            ids = torch.arange(start, rows if rows - start < 2 * BLOCK_ROWS else start + BLOCK_ROWS)
            positions = shard.positions(ids) if shard else ids
            here = positions >= 0
            found[positions[here].to(found.device)] = draw(torch.empty(len(ids), width))[here].to(
                found.device
            )
        return found

    def rows(self, table: Tensor, entities: Tensor) -> Tensor:
        """Rows of a table of entities by id, with `sparse_gradients` or dense ones."""
        return lookup(table, entities, sparse=self.sparse_gradients)

    def relation_norms(self, relations: Tensor) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`, without a matrix per triple."""
        return lookup(self.relations.square().sum(-1, keepdim=True), relations).squeeze(-1)

    def modulus(self, vectors: Tensor) -> Tensor:
        """|x| of every coordinate, with gradient 0 where x is 0."""
        squared = self.squared_modulus(vectors)
        zero = squared == 0
        return squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)

    def map_by_all_relations(
        self, vectors: Tensor, *, transposed: bool = False
    ) -> Iterator[Tensor]:
        """Heads, or tails, mapped by each relation in turn: batch × relations × width never exists
        at once.
        """
        apply = self.map_tail if transposed else self.map_head
        for relation in range(self.num_relation_ids):
            yield apply(vectors, torch.full((len(vectors),), relation, device=vectors.device))

    def entity_vectors(self) -> Tensor:
        return (
            torch.cat([self.head_table, self.tail_table], dim=-1)
            if self.two_entity_tables
            else self.entities
        )


@dataclass
class Factors:
    """The vectors of a batch, `(batch, width)` each, gathered or mapped on first use and then
    cached.
    """

    model: EmbeddingModel
    given_heads: Tensor | None
    given_relations: Tensor | None
    given_tails: Tensor | None

    def fresh(self) -> Factors:
        """The same ids, with nothing mapped yet."""
        return Factors(self.model, self.given_heads, self.given_relations, self.given_tails)

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
        return self.model.rows(self.model.head_table, self.heads)

    @cached_property
    def tail(self) -> Tensor:
        return self.model.rows(self.model.tail_table, self.tails)

    def candidates(self, ids: Tensor, *, side: Side) -> Tensor:
        """Rows of candidate tails, or heads, `(…, width)`.

        On its first use by a batch, heads and tails are gathered in the same look-up: the backward
        pass of each look-up makes a gradient as large as the table.
        """
        model = self.model
        gathered = not {"head", "tail"}.isdisjoint(vars(self))
        if (
            gathered
            or model.two_entity_tables
            or self.given_heads is None
            or self.given_tails is None
        ):
            return model.rows(model.tail_table if side == "tail" else model.head_table, ids)
        parts = (self.given_heads, self.given_tails, ids.flatten())
        found = model.rows(model.head_table, torch.cat(parts))
        self.head, self.tail, chosen = torch.split(found, [len(part) for part in parts])
        return chosen.view(*ids.shape, -1)

    @cached_property
    def relation(self) -> Tensor:
        """The rows of the relations. Only for diagonal models: a matrix per triple must never be
        gathered.
        """
        return lookup(self.model.relations, self.relations)

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

    def given(self, side: Side) -> Tensor:
        """The ids of the entities from which a side is predicted."""
        return self.heads if side == "tail" else self.tails

    def answers(self, side: Side) -> Tensor:
        return self.tails if side == "tail" else self.heads

    def query(self, side: Side) -> Tensor:
        """The mapped vectors by which a side is predicted."""
        return self.mapped_head if side == "tail" else self.mapped_tail

    @property
    def tail_residual(self) -> Tensor:
        """h R − t, whose squared norm is minus the score of the dual on the tail's side."""
        return self.mapped_head - self.tail

    @property
    def head_residual(self) -> Tensor:
        """t Rᵀ − h, whose squared norm is minus the score of the dual on the head's side."""
        return self.mapped_tail - self.head


def _given(ids: Tensor | None, name: str) -> Tensor:
    if ids is None:
        raise ValueError(f"these factors are of queries that do not give their {name}")
    return ids
