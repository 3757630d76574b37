"""Models that read the paths between two entities in place of embeddings of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualkg.data.triples import GraphShape, Triples, inverse_relations
from dualkg.errors import InvalidValue, RequestError
from dualkg.kernels import paths
from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.kernels.hashing import STEP, hash_columns, reaches_share, splitmix64
from dualkg.models.base import (
    MODELS,
    EmbeddingModel,
    Epoch,
    Factors,
    Model,
    Work,
)
from dualkg.tables.base import EntityTables, Side, local_tables

if TYPE_CHECKING:
    from dualkg.data.graph import Graph
    from dualkg.tables.processes import Processes

__all__ = ["PathNetwork"]

MAX_QUERIES = 64  # that are answered at a time
KERNEL_DIMS = (16, 32, 64, 128)
FEW_PAIRS = 0.2  # of the share in train
# Passes over messages: forward and backward, and without a gradient.
TRAINING_PASSES = {"cpu": 1.5, "cuda": 4.0}
RANKING_PASSES = {"cpu": 0.5, "cuda": 1.5}
STEP_CALLS = {"cpu": 750, "cuda": 0}  # small operations of a step, whatever the size of the graph
# What the dense layers of an entity take on a CPU, in messages for each of its numbers.
DENSE_MESSAGES = 1.25


@MODELS.register
class PathNetwork(Model):
    """Scores an entity by the paths that lead to it from the other entity of a query.

    Vectors of `dim` numbers spread from the head over the edges of the graph in `steps` steps. The
    message along an edge is the product of the vector at its beginning with a vector of the edge's
    relation, which depends on the relation of the query. An entity combines the messages that reach
    it by mean, maximum, minimum and standard deviation (Zhu et al., 2021; Corso et al., 2020). The
    score is a function of the vector at an entity.

    In training, the triples of a batch are removed from the graph, and with them a random share
    `edge_dropout` of all others, so that entities without their last edge do not stand out. With
    `remove_pairs`, all edges between the two entities of a triple are removed with it. If it is
    left out, that is so where validation triples have far fewer of such edges than training
    triples, as in FB15k-237. There are no embeddings of entities: the parameters do not depend on
    their number.

    Args:
        shape: A graph, or its shape.
        dim: Numbers of a vector.
        steps: Length of the longest paths.
        edge_dropout: Fraction of other training triples that is removed from the graph in a
            training step.
        remove_pairs: Whether all edges between the two entities of a training triple are removed
            with it.
        reciprocal: True; a path network predicts heads by inverse relations.
        init_scale: Scale of the initial weights.
        seed: Seed of the initial weights.

    Examples:
        >>> network = kg.PathNetwork(graph.shape, dim=8, steps=2)
        >>> sum(weights.numel() for weights in network.parameters()) < 20_000
        True
    """

    reads_graph = True
    scores_all_at_once = True
    options: ClassVar[tuple[str, ...]] = ("steps", "edge_dropout", "remove_pairs")
    recipe_defaults: ClassVar[Mapping[str, Any]] = {
        "model.dim": 32,
        "loss.exclude_known": True,
        "optimizer.name": "Adam",
        "optimizer.learning_rate": 0.005,
        "optimizer.warm_up": 0.02,
        "optimizer.decay_from": 0.5,
        "regularizer.name": "none",
        "training.batch_size": 32,
        "training.epochs": 4,
    }

    def __init__(
        self,
        shape: Graph | GraphShape,
        *,
        dim: int = 32,
        steps: int = 6,
        edge_dropout: float = 0.1,
        remove_pairs: bool | None = None,
        reciprocal: bool = True,
        init_scale: float | None = None,
        seed: int = 0,
    ) -> None:
        if not reciprocal:
            raise RequestError(
                "PathNetwork follows edges in both directions, with inverse relations. Leave "
                "`model.reciprocal` out."
            )
        if init_scale is not None:
            raise RequestError("PathNetwork has no `model.init_scale`. Leave it out.")
        super().__init__(shape, reciprocal=True)
        if not isinstance(dim, int) or dim < 1:
            raise InvalidValue("dim", expected="a whole number of at least 1", found=dim)
        if not isinstance(steps, int) or steps < 1:
            raise InvalidValue("steps", expected="a whole number of at least 1", found=steps)
        if not 0 <= edge_dropout < 1:
            expected = "at least 0 and below 1"
            raise InvalidValue("edge_dropout", expected=expected, found=edge_dropout)
        self.dim = dim
        self.steps = steps
        self.edge_dropout = edge_dropout
        self.remove_pairs = remove_pairs
        self.seed = seed
        # Whether the compiled form is used where there is one, and in which precision.
        self.compiled = True
        self.bf16 = True
        # The processes that share the queries of a batch; each has all parameters and edges.
        self.group: Processes | None = None
        self._triples: Tensor | None = None
        self._edges: paths.Edges | None = None
        self._keys: Tensor | None = None
        self._removes_pairs = bool(remove_pairs)

        generator = torch.Generator().manual_seed(seed)
        num_relations = self.num_relation_ids

        def uniform(*sizes: int, inputs: int) -> nn.Parameter:
            values = torch.rand(*sizes, generator=generator) * 2 - 1
            return nn.Parameter(values / math.sqrt(inputs))

        self.query_vectors = nn.Parameter(torch.randn(num_relations, dim, generator=generator))
        self.factor_weights = uniform(steps, num_relations * dim, dim, inputs=dim)
        self.factor_biases = uniform(steps, num_relations * dim, inputs=dim)
        of_statistics = paths.NUM_STATISTICS * dim
        self.statistics_weights = uniform(
            steps, paths.NUM_SCALERS * dim, of_statistics, inputs=of_statistics
        )
        self.own_weights = uniform(steps, dim, dim, inputs=dim)
        self.own_biases = uniform(steps, dim, inputs=dim)
        self.gains = nn.Parameter(torch.ones(steps, dim))
        self.shifts = nn.Parameter(torch.zeros(steps, dim))
        self.hidden_weight = uniform(2 * dim, 2 * dim, inputs=2 * dim)
        self.hidden_bias = uniform(2 * dim, inputs=2 * dim)
        self.score_weight = uniform(1, 2 * dim, inputs=2 * dim)
        self.score_bias = uniform(1, inputs=2 * dim)
        if not isinstance(shape, tuple):
            self.read_graph(shape)

    # -- the graph --------------------------------------------------------------

    def read_graph(self, graph: Graph) -> None:
        """Take the training triples, over whose edges messages pass."""
        self.check_shape(graph.shape)
        self._triples = torch.as_tensor(graph.train.astype("int64"))
        self._edges = None
        if self.remove_pairs is None:
            self._removes_pairs = _has_few_pairs(graph)

    @property
    def edges(self) -> paths.Edges:
        """The edges of the graph on the device of the model."""
        if self._triples is None:
            raise RequestError(
                "A path network reads the training triples of a graph: build it for a graph, as in "
                "kg.PathNetwork(graph, dim=32), or call its read_graph(graph)."
            )
        if self._edges is None or self._edges.heads.device != self.device:
            triples = self._triples.to(self.device)
            num_entities, num_relations = self.shape
            self._edges = paths.Edges.of(
                triples, num_entities=num_entities, num_relations=num_relations
            )
            self._keys = self._key_of(*triples.unbind(1))
        return self._edges

    def _key_of(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """A number for each triple; triples that are removed together have the same.

        That of an inverse is the same.
        """
        num_entities, num_relations = self.shape
        if self._removes_pairs:
            first = torch.minimum(heads, tails)
            return first * num_entities + torch.maximum(heads, tails)
        is_inverse = relations >= num_relations
        first = torch.where(is_inverse, tails, heads)
        second = torch.where(is_inverse, heads, tails)
        return (first * num_relations + relations % num_relations) * num_entities + second

    def training_edges(self, heads: Tensor, relations: Tensor, tails: Tensor) -> paths.Edges:
        """The edges that are left when the triples of a batch are to be predicted.

        What is dropped follows from the seed and the triples of the batch.
        """
        edges = self.edges
        assert self._keys is not None
        kept = torch.ones_like(self._keys, dtype=torch.bool)
        if self.edge_dropout:
            of_batch = hash_columns(self.seed, heads, relations, tails).sum()
            numbers = torch.arange(len(kept), device=self.device)
            kept = reaches_share(splitmix64(of_batch + numbers * STEP), self.edge_dropout)
        of_batch = self._key_of(heads, relations, tails).sort().values
        places = torch.searchsorted(of_batch, self._keys).clamp_(max=len(of_batch) - 1)
        kept = kept & (of_batch[places] != self._keys)
        return edges.keep(torch.cat([kept, kept]))

    def with_graph(self, graph: Graph) -> PathNetwork:
        """A network with these parameters, whose messages pass over another graph.

        The graph has the same relations.
        """
        other = PathNetwork(graph, **self.config, seed=self.seed)  # type: ignore[arg-type]
        other.use_kernels(compiled=self.compiled, bf16=self.bf16)
        other.load_state_dict(self.state_dict(), assign=True)  # without another copy
        return other.eval()

    # -- cost -------------------------------------------------------------------

    def work(self, epoch: Epoch, *, device: str) -> Work:
        """Every query passes messages along all edges; a CPU computes equal queries once."""
        num_queries = epoch.num_queries if device == "cpu" else epoch.num_examples
        of_messages = self._message_work(
            num_queries, epoch.graph, TRAINING_PASSES[device], device=device
        )
        return of_messages._replace(calls=epoch.num_steps * STEP_CALLS[device])

    def ranking_work(self, num_queries: int, graph: Graph, *, device: str) -> Work:
        return self._message_work(num_queries, graph, RANKING_PASSES[device], device=device)

    def _message_work(
        self, num_queries: int, graph: Graph, num_passes: float, *, device: str
    ) -> Work:
        num_edges = 2 * len(graph.train)
        per_entity = DENSE_MESSAGES * self.dim if device == "cpu" else 1
        num_messages = num_edges + per_entity * graph.shape.num_entities
        bytes_per_number = 2.0 if device == "cuda" else 4.0
        numbers = num_queries * num_messages * self.dim
        return Work(bytes=self.steps * num_passes * bytes_per_number * numbers)

    @property
    def numbers_per_score(self) -> int:
        """One: the network itself limits the queries that it answers at a time."""
        return 1

    @property
    def kernel_obstacle(self) -> str | None:
        if self.device.type == "cpu":
            if find_spec("numba") is None:
                return "needs numba on a CPU, which is not installed"
            return None
        if self.dim not in KERNEL_DIMS:
            dims = ", ".join(str(dim) for dim in KERNEL_DIMS)
            return f"needs a dim of {dims} for a path network; it is {self.dim}"
        unavailable = gpu_kernels_unavailable()
        return str(unavailable) if unavailable else None

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Whether one process trains the network: collectives are not captured."""
        return self.group is None

    def use_kernels(self, *, compiled: bool, bf16: bool) -> None:
        self.compiled = compiled
        self.bf16 = bf16

    def share_with(self, group: Processes | None) -> bool:
        """Each process has all parameters, and takes a part of the queries of a batch."""
        self.group = group if group is not None and group.count > 1 else None
        return True

    # -- scores -----------------------------------------------------------------

    def _form(self) -> ModuleType:
        """The module whose functions are used: compiled, or plain PyTorch."""
        if not self.compiled:
            return paths
        if self.device.type == "cpu":
            from dualkg.kernels import cpu_paths  # It imports numba.
            from dualkg.kernels.cpu import HAS_NUMBA

            return cpu_paths if HAS_NUMBA else paths
        if self.dim not in KERNEL_DIMS or gpu_kernels_unavailable():
            return paths
        from dualkg.kernels.gpu import paths as compiled_paths  # It imports Triton.

        return compiled_paths

    def _factors(self, queries: Tensor) -> Tensor:
        """The vectors of relations in all steps, `(num_steps, batch, num_relations, dim)`."""
        dtype = queries.dtype
        # One product for all steps, and gradients of all steps at once.
        factors = torch.einsum("bi,soi->sbo", queries, self.factor_weights.to(dtype))
        factors = factors + self.factor_biases.to(dtype).unsqueeze(1)
        return factors.view(self.steps, len(queries), self.num_relation_ids, self.dim)

    @property
    def _mixing(self) -> paths.Mixing:
        """The parameters of all steps."""
        return paths.Mixing(
            self.statistics_weights, self.own_weights, self.own_biases, self.gains, self.shifts
        )

    def _spread(
        self,
        heads: Tensor,
        queries: Tensor,
        edges: paths.Edges,
        *,
        form: ModuleType,
        weighted: Sequence[paths.WeightedEdges] | None,
    ) -> Tensor:
        """The vectors of all entities after the last step, `(num_entities, batch, dim)`."""
        dtype = queries.dtype
        if form is not paths and self.bf16:
            dtype = torch.bfloat16
        queries = queries.to(dtype)
        reached = form.reach(heads, edges, self.steps)
        zeros = queries.new_zeros(self.shape.num_entities, len(heads), self.dim)
        numbers = torch.arange(len(heads), device=heads.device)
        vectors = zeros.index_put((heads, numbers), queries)
        factors_of_steps = self._factors(queries).transpose(1, 2)
        mixings = zip(*(parameters.unbind() for parameters in self._mixing), strict=True)
        steps = zip(factors_of_steps.unbind(), mixings, strict=True)
        for step, (factors, weights) in enumerate(steps):
            mixing = paths.Mixing(*weights)
            of_step = {"edges": edges} if weighted is None else weighted[step]._asdict()
            vectors = form.take_step(
                vectors,
                factors,
                queries,
                mixing,
                heads=heads,
                before=reached[step],
                after=reached[step + 1],
                **of_step,
            )
        return vectors

    def _scores(
        self,
        heads: Tensor,
        relations: Tensor,
        edges: paths.Edges,
        *,
        weighted: Sequence[paths.WeightedEdges] | None = None,
    ) -> Tensor:
        """Scores of all entities as tails, `(batch, num_entities)`.

        `weighted` are edges and weights of each step, which the plain form reads.
        """
        form = self._form() if weighted is None else paths
        queries = self.query_vectors[relations]
        of_vectors = self.hidden_weight[:, : self.dim]
        of_queries = self.hidden_weight[:, self.dim :]
        from_queries = nn.functional.linear(queries, of_queries, self.hidden_bias)
        score_weight = self.score_weight.view(-1)
        scores: Tensor
        if form is not paths and self.device.type == "cpu":
            scores = form.score_entities(
                queries,
                self._factors(queries),
                self._mixing,
                heads=heads,
                edges=edges,
                from_queries=from_queries,
                weight=of_vectors,
                score_weight=score_weight,
            )
            return scores + self.score_bias
        vectors = self._spread(heads, queries, edges, form=form, weighted=weighted)
        scores = form.score(vectors, from_queries, of_vectors, score_weight)
        return scores.t() + self.score_bias

    def _shared_scores(self, heads: Tensor, relations: Tensor, edges: paths.Edges) -> Tensor:
        """`_scores`, of which each process computes those of its part of the queries."""
        if self.group is None:
            return self._scores(heads, relations, edges)
        part = self.group.own_part(len(heads))
        # A process without a query of its own has parameters without a gradient, unless it takes
        # one of another.
        rows = slice(part.start, max(part.stop, part.start + 1))
        scores = self._scores(heads[rows], relations[rows], edges)
        return self.group.join_rows(scores[: part.stop - part.start], len(heads))

    def _scores_of_distinct(self, heads: Tensor, relations: Tensor, edges: paths.Edges) -> Tensor:
        """`_shared_scores`, where a CPU computes queries that occur several times once."""
        if self.device.type != "cpu":
            # A step that is captured as a CUDA graph has the same number of queries every time.
            return self._shared_scores(heads, relations, edges)
        heads, relations, rows = self._distinct(heads, relations)
        return self._shared_scores(heads, relations, edges)[rows]

    def _distinct(self, heads: Tensor, relations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads and relations of the distinct queries, and the number of each query among them."""
        keys = heads * self.num_relation_ids + relations
        distinct, rows = torch.unique(keys, return_inverse=True)
        return distinct // self.num_relation_ids, distinct % self.num_relation_ids, rows

    def sum_gradients(self) -> None:
        if self.group is not None:
            self.group.sum_gradients(self.parameters())

    def scores_over(
        self,
        heads: Tensor,
        relations: Tensor,
        edges: paths.Edges,
        *,
        weighted: Sequence[paths.WeightedEdges] | None = None,
    ) -> Tensor:
        """Scores of all entities as tails over some edges of the graph, `(batch, num_entities)`.

        With `weighted`, scores have gradients by the weights of edges in each step.
        """
        return self._scores(heads, relations, edges, weighted=weighted)

    def _answer(self, given: Tensor, relations: Tensor) -> Tensor:
        """Scores of all entities for queries over the whole graph."""
        edges = self.edges
        blocks = []
        size = MAX_QUERIES * (self.group.count if self.group else 1)
        for start in range(0, len(given), size):
            rows = slice(start, start + size)
            blocks.append(self._shared_scores(given[rows], relations[rows], edges))
        if not blocks:
            return self.query_vectors.new_empty(0, self.shape.num_entities)
        return torch.cat(blocks)

    def _inverse(self, relations: Tensor) -> Tensor:
        return inverse_relations(relations, self.shape.num_relations)

    def tail_scores(self, f: Factors) -> Tensor:
        """Scores of all entities as tails.

        For a batch of triples, which are to be predicted, these are not among the edges.
        """
        if f.given_tails is None:
            return self._answer(f.heads, f.relations)
        edges = self.training_edges(f.heads, f.relations, f.tails)
        return self._scores_of_distinct(f.heads, f.relations, edges)

    def head_scores(self, f: Factors) -> Tensor:
        inverses = self._inverse(f.relations)
        if f.given_heads is None:
            return self._answer(f.tails, inverses)
        edges = self.training_edges(f.heads, f.relations, f.tails)
        return self._scores_of_distinct(f.tails, inverses, edges)

    def triple_scores(self, f: Factors) -> Tensor:
        """Scores of triples; a prediction computes a query that several of them have once."""
        if torch.is_grad_enabled():
            # A step that is captured as a CUDA graph has the same number of queries every time.
            scores = self._answer(f.heads, f.relations)
            return scores.gather(1, f.tails[:, None]).squeeze(1)
        heads, relations, rows = self._distinct(f.heads, f.relations)
        return self._answer(heads, relations)[rows, f.tails]

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        relations = f.relations if side == "tail" else self._inverse(f.relations)
        scores = self._answer(f.given(side), relations)
        if candidates.dim() == 1:
            return scores[:, candidates]
        return scores.gather(1, candidates.expand(len(scores), -1))

    def relation_scores(self, f: Factors) -> Tensor:
        num_relations = self.num_relation_ids
        relations = torch.arange(num_relations, device=f.heads.device).repeat(len(f.heads))
        scores = self._answer(f.heads.repeat_interleave(num_relations), relations)
        tails = f.tails.repeat_interleave(num_relations)
        return scores.gather(1, tails[:, None]).view(len(f.heads), num_relations)

    # -- what embeddings have -----------------------------------------------------

    @property
    def path_network(self) -> PathNetwork:
        return self

    def factors(
        self, heads: Tensor | None, relations: Tensor | None, tails: Tensor | None
    ) -> Factors:
        """The ids of a batch; there are no vectors to gather."""
        return Factors(self, heads, relations, tails)  # type: ignore[arg-type]

    @property
    def named(self) -> Model:
        return self

    @property
    def embedding(self) -> EmbeddingModel:
        raise RequestError(
            f"{type(self).__name__} has no embeddings of its own, which this needs. It reads paths "
            "in the graph. Train a model such as ComplEx for embeddings."
        )

    @property
    def entity_tables(self) -> list[nn.Parameter]:
        return []

    @property
    def is_first(self) -> bool:
        return self.group is None or self.group.first

    def share(self, values: Tensor) -> Tensor:
        return values if self.group is None else self.group.share(values)

    @property
    def tables(self) -> EntityTables:
        return local_tables(self.shape.num_entities)

    @property
    def config(self) -> dict[str, object]:
        config: dict[str, object] = {
            "dim": self.dim,
            "steps": self.steps,
            "edge_dropout": self.edge_dropout,
        }
        if self.remove_pairs is not None:
            config["remove_pairs"] = self.remove_pairs
        return config

    @property
    def has_entity_vectors(self) -> bool:
        return False

    def entity_vectors(self) -> Tensor:
        return self.embedding.entity_vectors()

    def extra_repr(self) -> str:
        num_entities, num_relations = self.shape
        return (
            f"dim={self.dim}, steps={self.steps}, {num_entities:,} entities, "
            f"{num_relations:,} relations"
        )


def _has_few_pairs(graph: Graph) -> bool:
    """Whether pairs of validation are much less often joined by another triple than those of train.

    Then a model that reads such triples in training would look for them in vain later.
    """
    if not len(graph.valid) or not len(graph.train):
        return False
    keys = _pair_keys(graph.train, graph.shape.num_entities)
    joined, counts = np.unique(keys, return_counts=True)
    in_train = float(counts[counts > 1].sum() / len(keys))
    of_valid = _pair_keys(graph.valid, graph.shape.num_entities)
    in_valid = float(np.isin(of_valid, joined).mean())
    return in_valid < FEW_PAIRS * in_train


def _pair_keys(triples: Triples, num_entities: int) -> npt.NDArray[np.int64]:
    ends = np.sort(triples[:, [0, 2]].astype(np.int64), axis=1)
    return ends[:, 0] * num_entities + ends[:, 1]
