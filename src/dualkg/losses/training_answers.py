"""What the training split already answers, where a model is: which candidates are no negatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import GraphShape, Triples
from dualkg.data.known import KnownAnswers

FIRST_COUNT = 4  # the count of a query with one answer in subsampling, as in RotatE's published code


class Answers(NamedTuple):
    """The answers of some questions in a row: of which question each is, which entity, and whether there is one there.

    `counts` says how many each question has, `(questions,)`; the others are as long as there is room, at their end
    filled up with what is no answer, so that nothing depends on how many there are.
    """

    counts: Tensor
    questions: Tensor
    entities: Tensor
    there: Tensor


class TrainingAnswers:
    """The answers of training to each query (entity, relation id), heads being answers to (tail, r + num_relations).

    A query is numbered by its place among all that are known, and an answer is one whole number, query · num_entities
    + entity: in order, so that a search finds whether a candidate is among them, on any device.
    """

    def __init__(self, train: Triples, shape: GraphShape, *, device: torch.device) -> None:
        known = KnownAnswers([train], shape)
        sizes = np.diff(known.offsets)
        numbered = np.repeat(np.arange(len(sizes)), sizes) * shape.num_entities + known.answers
        self.shape = shape
        self.queries, self.sizes, self.numbered = (
            torch.from_numpy(array).to(device) for array in (known.queries, sizes, numbered)
        )
        self.starts = self.sizes.cumsum(0) - self.sizes

    def contain(self, entities: Tensor, relations: Tensor, candidates: Tensor) -> Tensor:
        """Queries `(batch,)` and candidates `(batch, n)`, or `(n,)` for all → which are known answers, `(batch, n)`."""
        place, found = self._places(entities, relations)
        wanted = place[:, None] * self.shape.num_entities + candidates
        return _is_at(self.numbered, wanted, _place(self.numbered, wanted)) & found[:, None]

    def counts(self, entities: Tensor, relations: Tensor) -> Tensor:
        """How many answers each query has, `(batch,)`; 0 if it is not known."""
        place, found = self._places(entities, relations)
        return torch.where(found, self.sizes[place], 0)

    def of(self, entities: Tensor, relations: Tensor, *, room: int) -> Answers:
        """All answers of queries that training knows, `(batch,)` each, where there is room for so many together."""
        place, _ = self._places(entities, relations)
        counts = self.sizes[place]
        ends, number = counts.cumsum(0), torch.arange(room, device=counts.device)
        questions = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
        there = number < ends[-1]
        behind = torch.where(there, number - (ends - counts)[questions], 0)
        found = self.numbered[self.starts[place[questions]] + behind] % self.shape.num_entities
        return Answers(counts, questions, found, there)

    def most_of(self, num_queries: int) -> int:
        """How many answers so many queries have together at most."""
        return int(self.sizes.topk(min(num_queries, len(self.sizes))).values.sum())

    def subsampling_weights(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """w = 1 / √(count(h, r) + count(t, r⁻¹)), `(batch,)`: what is often seen counts less.

        Both counts start at 4 for a single answer and grow by one with each other, as in the published code: the
        rarest triple then counts 1/√8 and one with twice 8 answers 1/√22, not 1/√2 and 1/√16. A triple and its
        reciprocal weigh the same.
        """
        num_relations = self.shape.num_relations
        inverses = torch.where(relations < num_relations, relations + num_relations, relations - num_relations)
        counts = self.counts(heads, relations) + self.counts(tails, inverses) + 2 * (FIRST_COUNT - 1)
        return counts.to(torch.get_default_dtype()).rsqrt()

    def head_chances(self) -> Tensor:
        """With which chance each relation's head is the side to corrupt, `(num_relations,)`: Wang et al., 2014.

        It is tph / (tph + hpt), tails per head against heads per tail. Both are the relation's triples divided by its
        distinct heads, or tails, so it is the share of tails among the two. A relation without triples has a half.
        """
        num_relations = self.shape.num_relations
        distinct = torch.bincount(self.queries.cpu() % (2 * num_relations), minlength=2 * num_relations).double()
        heads, tails = distinct.split(num_relations)  # type: ignore[no-untyped-call]
        chances: Tensor = torch.where(heads + tails > 0, tails / (heads + tails).clamp(min=1), 0.5)
        return chances.to(self.queries.device)

    def _places(self, entities: Tensor, relations: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each query, and whether there is one."""
        keys = entities * (2 * self.shape.num_relations) + relations
        place = _place(self.queries, keys)
        return place, _is_at(self.queries, keys, place)


def _place(ordered: Tensor, wanted: Tensor) -> Tensor:
    """Where each would stand; at the end, on the last that is there."""
    return torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)


def _is_at(ordered: Tensor, wanted: Tensor, place: Tensor) -> Tensor:
    return ordered[place] == wanted
