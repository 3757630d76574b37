"""What a model asks of an index: by which metric, of which table, and with which vectors."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.index.base import Metric
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.distance import NormModel
from dualkg.models.dual import Dual
from dualkg.models.factors import Factors


@dataclass(frozen=True, eq=False)
class Questions:
    """A batch of (head, relation, ?), or of (?, relation, tail), as vectors that an index is searched with.

    Heads are asked for as tails of the inverse relation where there is one, and else with the mapped tail.
    """

    model: Model
    factors: Factors
    side: Side

    @classmethod
    def for_tails(cls, model: Model, heads: Tensor, relations: Tensor) -> Questions:
        return cls(model, model.factors(heads, relations, None), "tail")

    @classmethod
    def for_heads(cls, model: Model, relations: Tensor, tails: Tensor) -> Questions:
        if model.reciprocal:
            return cls.for_tails(model, tails, relations + model.shape.num_relations)
        return cls(model, model.factors(None, relations, tails), "head")

    @property
    def vectors(self) -> Tensor:
        """`(batch, width)`: what the rows of the table are compared with."""
        return self.factors.mapped_head if self.side == "tail" else self.factors.mapped_tail

    def scores(self, ids: Tensor) -> Tensor:
        """The model's own scores of some entities for each question, `(batch, n)`."""
        return self.model.candidate_scores(self.factors, ids, self.side)


def metric_of(model: Model) -> Metric:
    """How an index finds what scores best: by inner products for a bilinear model, by distances for its dual.

    A model is refused where both directions cannot be asked so.
    """
    both_ways = model.reciprocal
    if isinstance(model, BilinearModel):
        return "inner product"
    if isinstance(model, Dual) and model.side == "tail" and both_ways:
        return "euclidean"
    if isinstance(model, NormModel) and model.norm != 1 and not model.meets_between and (both_ways or model.isometric):
        return "euclidean"
    raise RequestError(
        f"An index finds the largest inner products, or the smallest Euclidean distances from one table; "
        f"{_why_not(model)}. Ask it without an index."
    )


def _why_not(model: Model) -> str:
    name = type(model.embedding).__name__
    if isinstance(model, Dual):
        if model.side == "head":
            return f"the dual of {name} on the side of the head measures to where each relation takes the tails"
        return f"the dual of {name} without reciprocal relations measures to where each relation takes the heads"
    if isinstance(model, NormModel) and model.norm == 1:
        return f"{name} with norm 1 adds up absolute differences"
    if isinstance(model, NormModel) and not model.meets_between:
        return f"{name} without reciprocal relations measures to where each relation takes the heads"
    return f"{name} scores otherwise"


def tables_of(model: Model) -> dict[Side, Tensor]:
    """The tables to be searched: for tails, and for heads where those are asked for of another one."""
    embedding = model.embedding
    tables: dict[Side, Tensor] = {"tail": embedding.tail_table.detach().cpu()}
    if not model.reciprocal and embedding.head_table is not embedding.tail_table:
        tables["head"] = embedding.head_table.detach().cpu()
    return tables


def fingerprint(table: Tensor) -> str:
    """What tells a table from another: a hash of its shape and of a thousand of its rows."""
    rows = table[:: max(1, len(table) // 1000)].float().contiguous()
    return sha256(str(tuple(table.shape)).encode() + rows.numpy().tobytes()).hexdigest()


def sample_questions(model: Model, graph: Graph, asked: Side, *, num: int, seed: int) -> Questions:
    """Some distinct questions for tails, or for heads, that training triples answer."""
    if not len(graph.train):
        raise RequestError(f"{graph.name} has no training triples, and an index is measured with their questions.")
    pairs = np.unique(graph.train[:, :2] if asked == "tail" else graph.train[:, 1:], axis=0)
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:num]
    first, second = torch.from_numpy(pairs[chosen].astype(np.int64)).to(model.device).unbind(1)
    ask = Questions.for_tails if asked == "tail" else Questions.for_heads
    return ask(model, first, second)


@torch.no_grad()
def check_agreement(questions: Questions, found: Tensor) -> None:
    """Refuse a model of one's own that does not score as its kind does.

    `found` are the rows that are best by the metric, `(batch,)`; the model must know none that is better.
    """
    model, f = questions.model, questions.factors
    scores = model.tail_scores(f) if questions.side == "tail" else model.head_scores(f)
    ours = scores.gather(1, found[:, None].to(scores.device))[:, 0]
    if (scores.amax(1) - ours > 1e-3 * scores.abs().amax(1)).any():
        raise RequestError(
            f"What is best by the maps of {type(model.embedding).__name__} is not what it scores best, so an index "
            f"would not find its answers. Ask it without an index."
        )
