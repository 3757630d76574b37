"""The interface of all models: scores of triples and of queries, and the vectors of a batch."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualkg.data.triples import GraphShape
from dualkg.errors import InvalidValue, RequestError
from dualkg.kernels.noise import fill_normal_, fill_uniform_, table_key
from dualkg.registry import Registry
from dualkg.tables.base import TABLE_NAMES, EntityTables, Side, local_tables, lookup

if TYPE_CHECKING:
    from dualkg.data.graph import Graph
    from dualkg.tables.processes import Processes
    from dualkg.tables.scores import EntityScores

__all__ = ["EmbeddingModel", "Model"]

InitScale = float | Literal["xavier"]
SIDES: tuple[Side, ...] = ("tail", "head")
ScoreForm = Literal["products", "squared distances"]
SCORE_PASSES = 4  # passes over the scores of a batch
UPDATE_PASSES = 6  # passes over tables, their gradients and Adagrad's sums
VECTOR_PASSES = 20  # passes over the vectors of a batch: maps, penalties and their gradients
RANKING_PASSES = 3  # passes over the scores of a query that is ranked
SMALL_OPERATIONS = 200  # operations of a step besides these, such as fetching rows
MODELS: Registry[type[Model]] = Registry("model", group="dualkg.models")
"""Models by name, as recipes write them: `MODELS["ComplEx"]` is `kg.ComplEx`."""


class Work(NamedTuple):
    """What a computation costs on any machine: arithmetic, bytes that pass, and small operations.

    Budgets that choose something are counted in work, so that a busy machine chooses what a quiet
    one does.
    """

    operations: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0


class Epoch(NamedTuple):
    """The sizes of an epoch, from which a model computes its work.

    `num_queries` are the queries that are scored, which may have several examples, each against
    `num_candidates` entities. A step updates `num_rows` rows of the entity tables. With
    `num_relations`, each example is also scored with that many relations.
    """

    graph: Graph
    num_examples: int
    num_queries: int
    num_candidates: int
    num_steps: int
    num_rows: int
    num_relations: int = 0


def overridden(instance: object) -> set[str]:
    """Names of the nearest class of dualkg that the class of an instance defines again.

    For a class of dualkg itself there are none.
    """
    classes = type(instance).__mro__
    is_own = [kind.__module__.startswith("dualkg.") for kind in classes]
    nearest = is_own.index(True)
    names = set()
    for kind in classes[:nearest]:
        names |= {name for name in vars(kind) if hasattr(classes[nearest], name)}
    return {name for name in names if not name.startswith(("__", "_abc_"))}


def _shape_of(graph: Graph | GraphShape) -> GraphShape:
    shape: Any = graph if isinstance(graph, tuple) else getattr(graph, "shape", None)
    # The shape of an array is a tuple, too.
    is_pair = isinstance(shape, GraphShape) or (isinstance(graph, tuple) and len(graph) == 2)
    if not is_pair or not all(isinstance(size, int) for size in shape):
        given = f"{type(graph)} was given"
        if isinstance(graph, (str, Path)):
            given = f"'{graph}' was given. Load it: kg.load_graph('{graph}')"
        raise RequestError(
            f"A model is built for a graph or its shape, as in kg.ComplEx(graph, dim=100); {given}."
        )
    return GraphShape(*shape)


class Model(nn.Module, ABC):
    """Scores triples of ids; a higher score is a more plausible triple.

    With `reciprocal` relations, `r + num_relations` is the inverse of `r`, and heads are predicted
    as its tails.

    Args:
        shape: A graph, or its shape.
        reciprocal: Whether each relation has an inverse with parameters of its own.

    Examples:
        >>> run.model.score(*torch.tensor([[3], [1], [7]])).shape
        torch.Size([1])
    """

    # Whether scores are computed from the training triples of a graph, and not from embeddings.
    reads_graph = False
    # Whether the score of one answer to a query costs as much as the scores of all.
    scores_all_at_once = False
    # Whether no operation waits for a size that the GPU computed, as a CUDA graph needs.
    capturable = False
    # Keyword arguments of a subclass, which are attributes too.
    options: ClassVar[tuple[str, ...]] = ()
    # Recipe keys that have other defaults for this model.
    recipe_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, shape: Graph | GraphShape, *, reciprocal: bool = True) -> None:
        super().__init__()
        self.shape = _shape_of(shape)
        self.reciprocal = reciprocal

    @classmethod
    def with_tables(cls, tables: EntityTables, shape: Graph | GraphShape, /, **config: Any) -> Self:
        """Build a model whose entity rows, if it has any, are kept by `tables`."""
        return cls(shape, **config)

    def read_graph(self, graph: Graph) -> None:
        """Take what the model reads of a graph besides its shape: nothing in most models."""

    @property
    def path_network(self) -> Any:
        """The model as a `PathNetwork`, whose scores are explained by paths, or else None."""
        return None

    def check_shape(self, shape: GraphShape) -> None:
        """Refuse a graph with another number of entities or relations than the model has."""
        if tuple(shape) != tuple(self.shape):
            raise RequestError(
                f"The model was made for {self.shape.num_entities:,} entities and "
                f"{self.shape.num_relations:,} relations; the graph has "
                f"{shape.num_entities:,} and {shape.num_relations:,}."
            )

    @property
    def num_relation_ids(self) -> int:
        """The number of relation ids: twice the graph's with reciprocal relations."""
        return self.shape.num_relations * (2 if self.reciprocal else 1)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    # -- scores by ids --------------------------------------------------------

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
        """Scores of all entities for the queries (?, relation, tail), `(batch, num_entities)`.

        The inverse relation is used where there is one.
        """
        if self.reciprocal:
            return self.score_tails(tails, relations + self.shape.num_relations)
        return self.score_heads(relations, tails)

    def predict_candidates(
        self, given: Tensor, relations: Tensor, candidates: Tensor, side: Side
    ) -> Tensor:
        """Scores of candidates `(batch, n)` for the queries whose `side` is missing."""
        if side == "head" and self.reciprocal:
            side = "tail"
            relations = relations + self.shape.num_relations
        return self.candidate_scores(self.queries(given, relations, side), candidates, side)

    def own_predictions(
        self, given: Tensor, relations: Tensor, side: Side, rows: slice | None = None
    ) -> Tensor:
        """Scores of the entities that this process has, or of some rows of its tables.

        The queries are those whose `side` is missing, as in `predict_tails` and `predict_heads`.
        """
        if rows is not None:
            if side == "head" and self.reciprocal:
                side = "tail"
                relations = relations + self.shape.num_relations
            return score_rows(self, self.queries(given, relations, side), side, rows)
        if side == "tail":
            return self.predict_tails(given, relations)
        return self.predict_heads(relations, given)

    # -- vectors of a batch ---------------------------------------------------

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The vectors of a batch of triples, or of queries, where the ids to predict are None."""
        return Factors(self.embedding, heads, relations, tails)

    def queries(self, given: Tensor, relations: Tensor, side: Side) -> Factors:
        """The vectors of queries whose `side` is missing."""
        if side == "tail":
            return self.factors(given, relations, None)
        return self.factors(None, relations, given)

    def forward(self, f: Factors, side: Side) -> Tensor:
        """The scores of all entities on one side of a batch, `(batch, num_entities)`."""
        return self.tail_scores(f) if side == "tail" else self.head_scores(f)

    # -- cost -------------------------------------------------------------------

    def work(self, epoch: Epoch, *, device: str) -> Work:
        """The work of an epoch on "cpu" or "cuda", with the passes of the gradients."""
        return self.embedding.work(epoch, device=device)

    def ranking_work(self, num_queries: int, graph: Graph, *, device: str) -> Work:
        """The work of scoring all entities of a graph for some queries."""
        return self.embedding.ranking_work(num_queries, graph, device=device)

    @property
    def numbers_per_score(self) -> int:
        """Numbers in memory for each score of candidates: a vector, unless a product has none."""
        return self.embedding.entities.shape[1]

    @property
    def kernel_obstacle(self) -> str | None:
        """What prevents the model's own compiled kernels here, as the end of a sentence."""
        return None

    def use_kernels(self, *, compiled: bool, bf16: bool) -> None:
        """Compute with the model's own compiled kernels, and in bfloat16, or without."""

    # -- several processes ----------------------------------------------------

    def share_with(self, group: Processes | None) -> bool:
        """Share the queries of a batch with the processes of a group, or with none.

        False is a model that cannot, and of which each process has some rows.
        """
        return False

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all that share the model have computed."""
        return True

    def share(self, values: Tensor) -> Tensor:
        """Replace values on the host by those of the first process that shares the model."""
        return values

    # -- entity tables --------------------------------------------------------

    @property
    def tables(self) -> EntityTables:
        """Where the rows of the entities are."""
        return self.embedding.tables

    @property
    def entity_tables(self) -> list[nn.Parameter]:
        """The tables of entity embeddings: one, or one for heads and one for tails."""
        return self.embedding.entity_tables

    @property
    def named(self) -> Model:
        """The model whose class a recipe names: itself, or the one it is the dual of."""
        return self.embedding

    @property
    def whole(self) -> Model:
        """The model itself, or the one whose rows this is a part of."""
        return self

    def entity_scores(self, f: Factors, side: Side) -> EntityScores:
        """Scores of all entities as tails, or as heads, for losses over all entities."""
        return self.tables.scores(self(f, side))

    def sum_over_rows(self, function: Callable[[Factors], Tensor], f: Factors) -> Tensor:
        """A scalar that is a sum over the rows of the entity tables."""
        return function(f)

    def sum_gradients(self) -> None:
        """Complete the gradients of parameters where this process has computed a part of them."""

    def with_rows(
        self, tables: EntityTables, replaced: Mapping[nn.Parameter, nn.Parameter]
    ) -> Self:
        """This model with other entity tables; all other parameters are the same objects."""
        # What the copy shares with this model is named as if it were copied already.
        shared = [*self.parameters(), *self.buffers()]
        copies: dict[int, Any] = {id(tensor): tensor for tensor in shared}
        copies |= {id(table): other for table, other in replaced.items()}
        copies[id(self.tables)] = tables
        return deepcopy(self, copies)

    # -- to be implemented ----------------------------------------------------

    @property
    def score_form(self) -> ScoreForm | None:
        """⟨x, t⟩ or −‖x − t‖² of a mapped vector x and rows t.

        None is anything else, for which there is no fast step.
        """
        return None

    @property
    def has_entity_vectors(self) -> bool:
        """Whether `entity_vectors` has something to compare entities by."""
        return True

    @property
    def shares_candidates(self) -> bool:
        """Whether `candidate_scores` reads each candidate of a batch once, not once a triple."""
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
        """Scores of candidate tails, or heads, `(batch, n)`.

        Candidates are ids `(n,)` that the batch shares, or `(batch, n)`.
        """
        batch_size = len(f.relations)
        num_candidates = candidates.shape[-1]
        given = f.given(side).repeat_interleave(num_candidates)
        relations = f.relations.repeat_interleave(num_candidates)
        predicted = candidates.expand(batch_size, num_candidates).reshape(-1)
        if side == "tail":
            scores = self.score(given, relations, predicted)
        else:
            scores = self.score(predicted, relations, given)
        return scores.view(batch_size, num_candidates)

    def own_candidate_scores(
        self, f: Factors, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor | slice]:
        """Scores of those candidates that this process has, `(batch, n)`, and their columns.

        The score of a candidate of another process is −∞ where its column has own ones.
        """
        return self.candidate_scores(f, candidates, side), slice(None)


def score_rows(model: Model, f: Factors, side: Side, rows: slice) -> Tensor:
    """Scores of some rows of the tables of this process for queries, `(batch, num_rows)`."""
    # The vectors of the queries are read from the whole tables, before some rows replace them.
    _ = (f.head, f.mapped_head) if side == "tail" else (f.tail, f.mapped_tail)
    some_rows = {
        name: model.tables.block(table, rows, model.device)
        for name, table in model.named_parameters()
        if name.rpartition(".")[2] in TABLE_NAMES
    }
    scores: Tensor = functional_call(model, some_rows, (f, side))
    return scores


class EmbeddingModel(Model):
    """A model with a row for every entity and every relation.

    Args:
        shape: A graph, or its shape.
        dim: Dimension of an embedding.
        reciprocal: Whether each relation has an inverse with parameters of its own.
        init_scale: Scale of the initial embeddings, a number or "xavier".
        seed: Seed of the initial embeddings.

    Examples:
        >>> isinstance(run.model, kg.EmbeddingModel)
        True
    """

    # Whether a relation acts on each coordinate separately, as N3 requires.
    diagonal = False
    # Whether map_tail is the adjoint of map_head, and so maps a tail to where its head is expected,
    # as DURA requires. A class says it: every model defines both maps, and a model that maps both
    # sides defines two that have nothing to do with each other.
    has_adjoint = False
    # Whether the numbers of an entity are coordinates, so that sums of their powers are norms.
    euclidean = True
    # Real numbers of one coordinate: 2 if it is complex.
    numbers_per_coordinate = 1
    # Real numbers of an entity after those of its coordinates.
    num_biases = 0
    # Whether an entity has one vector as head and another as tail.
    two_entity_tables = False
    default_init_scale: InitScale = 1e-3

    _tables: EntityTables | None = None

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
            raise InvalidValue("dim", expected="a whole number", found=repr(dim))
        if dim < 1:
            raise InvalidValue("dim", expected="at least 1", found=dim)
        self.dim = dim
        self.init_scale = self.default_init_scale if init_scale is None else init_scale
        if self._tables is None:
            self._tables = local_tables(self.shape.num_entities)
        self._seed = seed
        self._random = torch.Generator().manual_seed(seed)
        self._num_drawn = 0
        self._draws_entities = False
        width = self.entity_width(dim)
        self._check_size(width)
        self.entities = self._entity_table(width)
        self.relations = self.relation_table(self.num_relation_ids, self.relation_width(dim))
        if self.two_entity_tables:
            self.tails = self._entity_table(width)

    @classmethod
    def with_tables(cls, tables: EntityTables, shape: Graph | GraphShape, /, **config: Any) -> Self:
        """Build a model whose entity rows are kept by `tables`.

        The tables are set before the constructor runs, so that a subclass need not pass them on.
        """
        model = cls.__new__(cls)
        model.set_tables(tables)
        model.__init__(shape, **config)  # type: ignore[misc]
        return model

    @property
    def tables(self) -> EntityTables:
        assert self._tables is not None
        return self._tables

    def set_tables(self, tables: EntityTables) -> None:
        """Let the rows of the entities be kept by other tables."""
        self._tables = tables

    @property
    def device(self) -> torch.device:
        """The device that computes, where the relations are; entity tables may be elsewhere."""
        return self.relations.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert parameters; the tables decide where the rows of entities are."""
        entity_tables = {id(table) for table in self.entity_tables}

        def move(tensor: Tensor) -> Tensor:
            return self.tables.moved(tensor, fn) if id(tensor) in entity_tables else fn(tensor)

        moved: Self = super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return moved

    def _check_size(self, width: int) -> None:
        """Refuse tables larger than the memory for them before allocating them."""
        num_entity_tables = 2 if self.two_entity_tables else 1
        numbers = self.tables.num_rows * width * num_entity_tables
        numbers += self.num_relation_ids * self.relation_width(self.dim)
        numbers += self.num_shared_parameters(self.dim)
        device = self.tables.device
        if device is not None and device.type == "cuda":
            available = torch.cuda.mem_get_info(device)[0]
        else:
            device = None
            available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * numbers > available:
            has = "this machine has" if device is None else f"free on {device} are"
            # Twice the tables are Adagrad's sums and gradients, at least.
            num_processes = math.ceil(2 * 4 * numbers / available)
            raise RequestError(
                f"{type(self).__name__} with dim {self.dim:,} needs {4 * numbers / 2**30:,.1f} GiB "
                f"for its tables; {has} {available / 2**30:,.1f}. Choose a smaller `model.dim`, or "
                "split the tables over several processes: "
                f"torchrun --nproc-per-node {num_processes} -m dualkg …"
            )

    @property
    def config(self) -> dict[str, object]:
        names = ("dim", "reciprocal", "init_scale", *self.options)
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        num_entities, num_relations = self.shape
        return f"dim={self.dim}, {num_entities:,} entities, {num_relations:,} relations"

    def scores_as(self, kind: type, *more: str) -> bool:
        """Whether all entities are scored by the methods of a base class."""
        names = ("tail_scores", "head_scores", "head_table", "tail_table", "factors", *more)
        return all(getattr(type(self), name) is getattr(kind, name) for name in names)

    # -- to be implemented ----------------------------------------------------

    @abstractmethod
    def map_head(self, head: Tensor, relations: Tensor) -> Tensor:
        """The mapped heads of vectors `(batch, width)`, h R in bilinear models.

        Relation ids are `(batch,)`.
        """

    @abstractmethod
    def map_tail(self, tail: Tensor, relations: Tensor) -> Tensor:
        """The mapped tails of vectors `(batch, width)`, t Rᵀ in bilinear models.

        Relation ids are `(batch,)`.
        """

    def entity_width(self, dim: int) -> int:
        """The number of real numbers in the row of an entity."""
        return dim * self.numbers_per_coordinate + self.num_biases

    def relation_width(self, dim: int) -> int:
        """The number of real numbers in the row of a relation."""
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

    # -- cost -------------------------------------------------------------------

    def work(self, epoch: Epoch, *, device: str) -> Work:
        """Scores of all queries, maps and penalties of all examples, updates of all steps.

        A product takes two operations a number, and its gradients take two more products.
        """
        width = self.entity_width(self.dim)
        num_scores = epoch.num_queries * epoch.num_candidates
        operations = 6.0 * num_scores * width
        if epoch.num_relations:
            operations += 6.0 * epoch.num_examples * epoch.num_relations * width
        relation_width = self.relation_width(self.dim)
        if relation_width > width:
            operations += 6.0 * epoch.num_examples * relation_width
        num_bytes = 4.0 * (
            SCORE_PASSES * num_scores
            + VECTOR_PASSES * epoch.num_examples * width
            + UPDATE_PASSES * epoch.num_steps * epoch.num_rows * width
        )
        return Work(operations, num_bytes, epoch.num_steps * SMALL_OPERATIONS)

    def ranking_work(self, num_queries: int, graph: Graph, *, device: str) -> Work:
        num_scores = float(num_queries) * graph.shape.num_entities
        operations = 2 * num_scores * self.entity_width(self.dim)
        return Work(operations, RANKING_PASSES * 4 * num_scores)

    # -- tables ---------------------------------------------------------------

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
        """The rows of all entities, or those that this process has."""
        self._draws_entities = True
        table = self.table(self.shape.num_entities, width)
        self._draws_entities = False
        if len(table) == self.tables.num_rows:
            return table
        # A class of one's own may draw whole tables.
        return nn.Parameter(self.tables.take(table.detach()))

    def table(self, rows: int, width: int) -> nn.Parameter:
        """New embeddings `(rows, width)`, drawn as `init_scale` says."""
        return nn.Parameter(self.init_noise(rows, width))

    def init_noise(self, rows: int, width: int) -> Tensor:
        """Numbers drawn from N(0, 1) · `init_scale`, or uniformly within Xavier's bound."""
        if self.init_scale == "xavier":
            return self.drawn(rows, width, bound=math.sqrt(6 / (rows + width)))
        return self.drawn(rows, width).mul_(self.init_scale)

    def drawn(self, rows: int, width: int, *, bound: float | None = None) -> Tensor:
        """Random numbers `(rows, width)`: from N(0, 1), or uniform between −bound and bound.

        Of entity tables, they are the rows that this process has. Large ones are drawn row by row,
        others in order, by one generator for the whole model.
        """
        self._num_drawn += 1
        if self._draws_entities and self.tables.draws_by_row(width):
            key = table_key(self._seed, self._num_drawn)
            if bound is None:
                return self.tables.draw_rows(width, partial(fill_normal_, key=key))
            return self.tables.draw_rows(width, partial(fill_uniform_, key=key, bound=bound))

        def draw(block: Tensor) -> Tensor:
            if bound is None:
                return block.normal_(generator=self._random)
            return block.uniform_(-bound, bound, generator=self._random)

        if self._draws_entities:
            return self.tables.draw(width, draw)
        numbers = torch.zeros(rows, width)
        return draw(numbers) if self.tables.initialize else numbers

    # -- vectors --------------------------------------------------------------

    def relation_norms(self, relations: Tensor) -> Tensor:
        """Squared Frobenius norms of the relations, `(batch,)`, without a matrix per triple."""
        norms = self.relations.square().sum(-1, keepdim=True)
        return lookup(norms, relations).squeeze(-1)

    def modulus(self, vectors: Tensor) -> Tensor:
        """|x| of every coordinate, with gradient 0 where x is 0."""
        squared = self.squared_modulus(vectors)
        is_zero = squared == 0
        return squared.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)

    def map_by_all_relations(
        self, vectors: Tensor, *, transposed: bool = False
    ) -> Iterator[Tensor]:
        """Heads, or tails, mapped by each relation in turn.

        An array of batch × relations × width never exists.
        """
        apply = self.map_tail if transposed else self.map_head
        for relation in range(self.num_relation_ids):
            yield apply(vectors, torch.full((len(vectors),), relation, device=vectors.device))

    def entity_vectors(self) -> Tensor:
        if self.two_entity_tables:
            return torch.cat([self.head_table, self.tail_table], dim=-1)
        return self.entities


@dataclass
class Factors:
    """The vectors of a batch, `(batch, width)` each.

    They are gathered or mapped on first use, and then cached.
    """

    model: EmbeddingModel
    given_heads: Tensor | None
    given_relations: Tensor | None
    given_tails: Tensor | None

    def fresh(self) -> Factors:
        """The same ids, with nothing mapped yet; rows that other processes sent are kept."""
        copy = Factors(self.model, self.given_heads, self.given_relations, self.given_tails)
        if self.model.tables.fetches_rows:
            for name in ("head", "tail"):
                if name in vars(self):
                    setattr(copy, name, vars(self)[name])
        return copy

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
        return self.model.tables.rows(self.model.head_table, self.heads)

    @cached_property
    def tail(self) -> Tensor:
        return self.model.tables.rows(self.model.tail_table, self.tails)

    def candidates(self, ids: Tensor, *, side: Side) -> Tensor:
        """Rows of candidate tails, or heads, `(…, width)`.

        On its first use by a batch, heads and tails are gathered in the same look-up: the backward
        pass of each look-up makes a gradient as large as the table.
        """
        model = self.model
        is_triple = self.given_heads is not None and self.given_tails is not None
        is_gathered = "head" in vars(self) or "tail" in vars(self)
        if is_gathered or not is_triple or model.two_entity_tables or model.tables.fetches_rows:
            table = model.tail_table if side == "tail" else model.head_table
            return model.tables.rows(table, ids)
        parts = (self.heads, self.tails, ids.flatten())
        rows = model.tables.rows(model.head_table, torch.cat(parts))
        self.head, self.tail, chosen = torch.split(rows, [len(part) for part in parts])
        return chosen.view(*ids.shape, -1)

    @cached_property
    def relation(self) -> Tensor:
        """The rows of the relations, for diagonal models alone.

        A matrix per triple must never be gathered.
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
        """The ids of the entities that are to be predicted."""
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
