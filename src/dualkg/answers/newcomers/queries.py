"""The queries of train, to most of which an entity is a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.answers.newcomers.sums import log_sums
from dualkg.data.graph import Triples
from dualkg.data.known import with_reciprocals
from dualkg.models.base import Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.factors import rows

FEWEST_EXAMPLES = 1_000
MOST_EXAMPLES = {"cpu": 5_000, "cuda": 50_000}  # that are looked at: of more, so many are drawn, and count for all
MOST_PRODUCTS = {"cpu": 10**11, "cuda": 10**13}  # of numbers, to score all entities for them: about a second
ALMOST_SURE = 1 - 1e-6


@dataclass(frozen=True, eq=False)
class Queries:
    """Distinct queries that ask for one side, with the log-sum-exp of the scores of all entities, and their answers.

    `given`, `images` and `sums` are of the queries, `queries` and `answers` of the examples: which query it is, and
    what answers it. Each example counts `share`.
    """

    asked: Side
    given: Tensor
    images: Tensor
    sums: Tensor
    queries: Tensor
    answers: Tensor
    share: float

    def weights_without(self, entity: int, weights: Tensor) -> Tensor:
        """How much each query counts, `(num_queries,)`: by its answers, but for what the entity asks or answers."""
        other = (self.answers != entity) & (self.given[self.queries] != entity)
        return torch.zeros_like(self.sums).index_add(0, self.queries, self.share * weights * other)

    def sums_without(self, row: Tensor) -> Tensor:
        """The log-sum-exp over all entities but the one that has this row."""
        chances = torch.exp(self.images @ row - self.sums).clamp(max=ALMOST_SURE)
        return self.sums + torch.log1p(-chances)


def num_examples(model: BilinearModel) -> int:
    """How many examples are looked at: the fewer, the more entities each is scored against, and the wider they are."""
    device = "cuda" if model.device.type == "cuda" else "cpu"
    quick = MOST_PRODUCTS[device] // max(model.head_table.numel(), 1)
    return max(FEWEST_EXAMPLES, min(MOST_EXAMPLES[device], quick))


def queries_of(model: BilinearModel, train: Triples, *, most: int | None = None) -> Iterator[Queries]:
    """Those of a training split: tails of both directions, or tails and heads where there are no reciprocals."""
    examples = with_reciprocals(train, model.shape.num_relations) if model.reciprocal else train
    chosen, most = torch.from_numpy(examples).long(), most or num_examples(model)
    if len(chosen) > most:
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:most]]
    share = len(examples) / max(len(chosen), 1) / (1 if model.reciprocal else 2)
    heads, relations, tails = chosen.to(model.device).unbind(1)
    yield _queries(model, "tail", heads, relations, tails, share=share)
    if not model.reciprocal:
        yield _queries(model, "head", tails, relations, heads, share=share)


def _queries(
    model: BilinearModel, asked: Side, given: Tensor, relations: Tensor, answers: Tensor, *, share: float
) -> Queries:
    keys, queries = torch.unique(given * model.num_relation_ids + relations, return_inverse=True)
    entities, relations = keys // model.num_relation_ids, keys % model.num_relation_ids
    if asked == "tail":
        images, candidates = model.map_head(rows(model.head_table, entities), relations), model.tail_table
    else:
        images, candidates = model.map_tail(rows(model.tail_table, entities), relations), model.head_table
    return Queries(asked, entities, images, log_sums(images, candidates), queries, answers, share)
