"""Cross entropy of questions, each with all the answers that training has to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import GraphShape, Triples
from dualkg.errors import RequestError
from dualkg.losses.dropout import Dropouts
from dualkg.models.base import Factors, Model


def frequency_weights(train: Triples, num_entities: int, share: float) -> Tensor:
    """w(t) = share·#t / max # + (1 − share), `(num_entities,)`: Appendix D.1, `share` being its w0.

    #t counts an entity as head and as tail of the training triples, not again of their reciprocals.
    """
    if not 0 <= share <= 1:
        raise RequestError(f"The frequency weight w0 lies between 0 and 1; it is {share}.")
    counts = np.bincount(np.concatenate([train[:, 0], train[:, 2]]), minlength=num_entities)
    relative = torch.from_numpy(counts / max(int(counts.max(initial=0)), 1)).to(torch.get_default_dtype())
    return share * relative + (1 - share)


def cross_entropy(scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
    """Mean of −log softmax(scores)[target]; weighted by w(target) and divided by the batch's summed weights.

    With `smoothing`, that share of each target is spread evenly over all candidates, the target among them. It is the
    target's weight that counts then too, where PyTorch would weigh every candidate by its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()


class CrossEntropy:
    """The loss of a batch of triples under a model.

    With reciprocal relations a batch holds both directions and tails alone are asked for; without them every
    triple is asked for its tail and for its head. `relation_weight` adds the cross entropy of the relation
    given head and tail, over all relation ids. `dropouts` are for what entities are scored with, and
    `label_smoothing` is for the answers among entities, not among relations. `grouped_by_query` says that neighbours in a
    batch which ask for tails of the same head and relation are one question.
    """

    def __init__(
        self,
        *,
        entity_weights: Tensor | None = None,
        relation_weight: float = 0.0,
        dropouts: Dropouts | None = None,
        label_smoothing: float = 0.0,
        grouped_by_query: bool = False,
    ) -> None:
        if not relation_weight >= 0:
            raise RequestError(f"The weight of relation prediction is at least 0; it is {relation_weight}.")
        if not 0 <= label_smoothing < 1:
            raise RequestError(f"The share of label smoothing is at least 0 and below 1; it is {label_smoothing}.")
        self.entity_weights = entity_weights
        self.relation_weight = relation_weight
        self.dropouts = dropouts or Dropouts()
        self.label_smoothing = label_smoothing
        self.grouped_by_query = grouped_by_query

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the triples whose factors these are, as the model scores them."""
        asked = self.dropouts(f, both=not model.reciprocal, grouped_by_query=self.grouped_by_query)
        loss = self._of_entities(model.tail_scores(asked), f.tails)
        if not model.reciprocal:
            loss = (loss + self._of_entities(model.head_scores(asked), f.heads)) / 2
        if self.relation_weight:
            loss = loss + self.relation_weight * cross_entropy(model.relation_scores(f), f.relations)
        return loss

    def _of_entities(self, scores: Tensor, answers: Tensor) -> Tensor:
        return cross_entropy(scores, answers, self.entity_weights, smoothing=self.label_smoothing)


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


class AllAnswers:
    """The loss of a batch of questions (head, relation, ?): their answers share the target evenly.

    A question with n answers counts n to the `count_power`: with 0 all questions count alike, with 1 all triples, and
    the loss is then in the mean that of `CrossEntropy`, which asks a question once for every answer. The tails of the
    batch are not looked at, but by `dropouts`.
    """

    def __init__(
        self,
        answers: TrainingAnswers,
        *,
        batch_size: int,
        count_power: float = 0.0,
        dropouts: Dropouts | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise RequestError(f"The share of label smoothing is at least 0 and below 1; it is {label_smoothing}.")
        self.answers = answers
        self.room = answers.most_of(batch_size)
        self.count_power = count_power
        self.dropouts = dropouts or Dropouts()
        self.label_smoothing = label_smoothing

    def __call__(self, model: Model, f: Factors) -> Tensor:
        """The loss of the questions whose factors these are, as the model scores them."""
        scores = model.tail_scores(self.dropouts(f))
        found = self.answers.of(f.heads, f.relations, room=self.room)
        counts = found.counts.to(scores.dtype)
        weights = counts**self.count_power
        whole = scores.logsumexp(-1)
        if self.label_smoothing:
            whole = whole - self.label_smoothing * scores.mean(-1)
        at_answers = scores.flatten().gather(0, found.questions * scores.shape[1] + found.entities)
        shares = torch.where(found.there, (weights / counts)[found.questions], 0)
        gained = (1 - self.label_smoothing) * (shares * at_answers).sum()
        return ((weights * whole).sum() - gained) / weights.sum()
