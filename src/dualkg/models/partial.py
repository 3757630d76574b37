"""A model whose entity tables have some of the rows in this process, and the rest elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dualkg.models.base import EmbeddingModel, Factors, Model, ScoreForm, score_rows
from dualkg.models.bilinear import BilinearModel
from dualkg.tables.base import TABLE_NAMES, Side, local_tables, lookup

if TYPE_CHECKING:
    from dualkg.tables.processes import Processes
    from dualkg.tables.scores import EntityScores

__all__ = ["PartialModel"]


def in_processes(model: Model, group: Processes) -> Model:
    """A model as one of several processes trains it: with all parameters, or some rows."""
    return model if model.share_with(group) else PartialModel(model)


class OwnFactors(Factors):
    """The vectors of a batch as they are used to score the entities of this process.

    Each vector that is used is a leaf, so that its gradient by these entities is found separately
    from the rest of the backward pass. Ids of candidates are positions in the own tables.
    """

    def __init__(self, batch: Factors) -> None:
        super().__init__(batch.model, batch.given_heads, batch.given_relations, batch.given_tails)
        self.batch = batch
        self.leaves: list[tuple[Tensor, Tensor]] = []

    def _leaf(self, name: str) -> Tensor:
        vector: Tensor = getattr(self.batch, name)
        if not (torch.is_grad_enabled() and vector.requires_grad):
            return vector
        leaf = vector.detach().requires_grad_()
        self.leaves.append((vector, leaf))
        return leaf

    @cached_property
    def head(self) -> Tensor:
        return self._leaf("head")

    @cached_property
    def tail(self) -> Tensor:
        return self._leaf("tail")

    @cached_property
    def mapped_head(self) -> Tensor:
        return self._leaf("mapped_head")

    @cached_property
    def mapped_tail(self) -> Tensor:
        return self._leaf("mapped_tail")

    def candidates(self, ids: Tensor, *, side: Side) -> Tensor:
        table = self.model.tail_table if side == "tail" else self.model.head_table
        return self.model.tables.own_rows(table, ids)


class PartialModel(Model):
    """A model of which this process has the rows of some entities.

    It scores these, and its `tables` complete what is asked of all entities. Parameters that are
    not entity tables are the same in all processes.

    Args:
        model: A model with the rows of some entities.

    Examples:
        >>> isinstance(run.model, kg.PartialModel)  # one process has all rows
        False
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.shape, reciprocal=model.reciprocal)
        self.model = model

    @property
    def whole(self) -> Model:
        return self.model

    @property
    def embedding(self) -> EmbeddingModel:
        return self.model.embedding

    @property
    def device(self) -> torch.device:
        """The device of the part that this process has."""
        return self.model.device

    @property
    def config(self) -> dict[str, object]:
        return self.model.config

    @property
    def score_form(self) -> ScoreForm | None:
        return self.model.score_form

    @property
    def numbers_per_score(self) -> int:
        return self.model.numbers_per_score

    @property
    def shares_candidates(self) -> bool:
        return self.model.shares_candidates

    @property
    def is_first(self) -> bool:
        return self.tables.is_first

    def share(self, values: Tensor) -> Tensor:
        return self.tables.shard.share(values)

    def mapped(self) -> Model | None:
        """In the first process, the model of all rows; None in the others, which send theirs.

        Its entity tables are in memory-mapped temporary files: never more than a block of them has
        to be in memory. The other parameters are those of this model.
        """
        from dualkg.data.archives import temporary_file

        replaced = {}
        for table in self.entity_tables:
            if not self.is_first:
                for _ in self.tables.rows_of_all(table):  # in which every process takes part
                    pass
                continue
            with temporary_file() as file:
                for block in self.tables.rows_of_all(table):
                    file.write(block.float().numpy().tobytes())
                file.flush()
                rows = np.memmap(file, np.float32, "c")
            tensor = torch.from_numpy(rows).view(-1, table.shape[1])
            replaced[table] = nn.Parameter(tensor, requires_grad=False)
        if not self.is_first:
            return None
        return self.model.with_rows(local_tables(self.tables.num_entities), replaced)

    def entity_vectors(self) -> Tensor:
        return self.model.entity_vectors()

    # -- scores of a batch ----------------------------------------------------

    def triple_scores(self, f: Factors) -> Tensor:
        return self.model.triple_scores(f)

    def relation_scores(self, f: Factors) -> Tensor:
        return self.model.relation_scores(f)

    def tail_scores(self, f: Factors) -> Tensor:
        return self.entity_scores(f, "tail").all_entities()

    def head_scores(self, f: Factors) -> Tensor:
        return self.entity_scores(f, "head").all_entities()

    def entity_scores(self, f: Factors, side: Side) -> EntityScores:
        return self.tables.scores(self._for_own_rows(lambda own: self.model(own, side), f))

    def sum_over_rows(self, function: Callable[[Factors], Tensor], f: Factors) -> Tensor:
        return self.tables.sum(self._for_own_rows(function, f, reads_relations=True))

    def candidate_scores(self, f: Factors, candidates: Tensor, side: Side = "tail") -> Tensor:
        """Each process scores the candidates that it has."""
        scores, columns = self.own_candidate_scores(f, candidates, side)
        if isinstance(columns, slice):
            is_elsewhere = self.tables.positions(candidates) < 0
            return self.tables.sum(scores.masked_fill(is_elsewhere, 0))
        empty = scores.new_zeros(len(scores), len(candidates))
        return self.tables.sum(empty.index_copy(1, columns, scores))

    def own_candidate_scores(
        self, f: Factors, candidates: Tensor, side: Side
    ) -> tuple[Tensor, Tensor | slice]:
        positions = self.tables.positions(candidates)
        columns: Tensor | slice = slice(None)
        if positions.dim() == 1:
            columns = (positions >= 0).nonzero().squeeze(-1)
            positions = positions[columns]
        is_shared = positions.dim() == 1 and self.model.shares_candidates
        score = self.model.candidate_scores if is_shared else self._candidate_pairs
        return self._for_own_rows(lambda own: score(own, positions, side), f), columns

    def own_predictions(
        self, given: Tensor, relations: Tensor, side: Side, rows: slice | None = None
    ) -> Tensor:
        if side == "head" and self.reciprocal:
            side = "tail"
            relations = relations + self.shape.num_relations
        own = OwnFactors(self.queries(given, relations, side))
        if rows is None:
            return self.model(own, side)  # type: ignore[no-any-return]
        return score_rows(self.model, own, side, rows)

    # -- scores of the entities of this process -------------------------------

    def _for_own_rows(
        self,
        function: Callable[[Factors], Tensor],
        f: Factors,
        *,
        reads_relations: bool | None = None,
    ) -> Tensor:
        """What a function of the batch computes from the rows of this process.

        Gradients of the vectors of the batch, and of parameters that every process has, are summed
        over all processes. Where the function does not read such parameters, nothing is sent for
        them.
        """
        own = OwnFactors(f)
        values = function(own)
        if not values.requires_grad:
            return values
        if reads_relations is None:
            reads_relations = not self._scores_by_products
        parameters = [
            (name, table)
            for name, table in self.embedding.named_parameters()
            if reads_relations or name in TABLE_NAMES
        ]
        return self.tables.join(values, own.leaves, parameters)

    @property
    def _scores_by_products(self) -> bool:
        """Whether entities are scored by products with mapped vectors, and by nothing else."""
        model = self.model
        if not isinstance(model, BilinearModel):
            return False
        return model.scores_as(BilinearModel, "candidate_scores")

    def _candidate_pairs(self, own: Factors, positions: Tensor, side: Side) -> Tensor:
        """Scores `(batch, n)` of candidates of each triple, −∞ for those of others."""
        shape = (len(own.relations), positions.shape[-1])
        positions = positions.expand(shape)
        rows, columns = (positions >= 0).nonzero(as_tuple=True)
        scores = self._scores_of_pairs(own, rows, positions[rows, columns], side)
        empty = scores.new_full((shape[0] * shape[1],), -torch.inf)
        return empty.index_copy(0, rows * shape[1] + columns, scores).view(shape)

    def _scores_of_pairs(self, own: Factors, rows: Tensor, positions: Tensor, side: Side) -> Tensor:
        """The score of one own entity for each of some rows of the batch."""
        vectors = own.candidates(positions, side=side)
        if isinstance(self.model, BilinearModel):
            return (lookup(own.query(side), rows) * vectors).sum(-1)
        if side == "tail":
            pairs = Factors(self.embedding, rows, own.relations[rows], positions)
            pairs.head = lookup(own.head, rows)
            pairs.tail = vectors
        else:
            pairs = Factors(self.embedding, positions, own.relations[rows], rows)
            pairs.head = vectors
            pairs.tail = lookup(own.tail, rows)
        return self.model.triple_scores(pairs)
