"""A block of queries of one relation: which of their answers make triples that are good enough.

Evidence is the mean of two logarithms of probabilities, neither above 0. So the first query alone rules out most
triples, and the second query is asked only for the answers that some query of the block finds likely enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.answers.completion.pool import Found
from dualkg.answers.completion.queries import Queries

LEAST = -1e30  # less evidence than any triple has, and more than −∞


@dataclass(frozen=True, eq=False)
class Handicaps:
    """How much more evidence a triple needs than the likeliest kind of its relation."""

    by_kind: Tensor  # `(2, 2)`: by what a query gives, then by the answer, 1 if it is new to its side
    given: Tensor  # whether an entity is new to its side, 0 or 1, `(num_entities,)`
    answers: Tensor

    def of(self, given: Tensor, answers: Tensor) -> Tensor:
        """`(num_given, num_answers)`."""
        return self.by_kind[self.given[given]][:, self.answers[answers]]

    def of_given(self, given: Tensor) -> Tensor:
        """The least that a query's triples have, `(num_given,)`."""
        return self.by_kind.amin(1)[self.given[given]]

    def of_answers(self, answers: Tensor) -> Tensor:
        return self.by_kind.amin(0)[self.answers[answers]]


@dataclass(frozen=True, eq=False)
class Asked:
    """The queries of a relation from both ends; which answers count, and which pairs do not."""

    first: Queries
    second: Queries
    answers: Tensor  # in order
    ruled_out: Tensor  # `(num_pairs, 2)`: what a query gives and an answer, in order of the first
    handicaps: Handicaps | None = None


def best_of(asked: Asked, given: Tensor, *, least: float, top: int, margin: float = 0.0) -> Found:
    """The new triples of a block with at least so much evidence: the best `top`, and what ties with the last.

    Evidence counts less its handicap. `given` is in order. Where evidence may be off by a `margin`, all that might be
    among them are.
    """
    least = max(least - margin, LEAST)
    given, answers, scores = _likely(asked, given, least)
    answers, scores, turned = _from_the_other_end(asked, given, answers, scores, least)
    if not scores.numel():
        return Found.none()
    evidence = turned - asked.second.normalizers[answers]
    evidence.add_(scores).sub_(asked.first.normalizers[given, None]).div_(2)
    counted = evidence if asked.handicaps is None else evidence - asked.handicaps.of(given, answers)
    rows, columns = (counted >= _enough(counted, least, top, margin)).nonzero(as_tuple=True)
    ends, scored = (given[rows], answers[columns]), scores
    if asked.first.side == "head":
        ends, scored = (ends[1], ends[0]), turned
    relations = torch.full_like(rows, asked.first.relation)
    found = (ends[0], relations, ends[1], scored[rows, columns], evidence[rows, columns])
    return Found(*(column.cpu().numpy() for column in found))


def _likely(asked: Asked, given: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and answers that share a triple with so much evidence, as far as can be told yet; and all scores."""
    answers, scores = asked.answers, asked.first.scores(given)
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]
    _rule_out(scores, asked, given)
    needed = 2 * least - asked.second.largest[answers]  # of the logarithm that the first query tells
    floor = asked.first.normalizers[given] + needed.min()
    if asked.handicaps is not None:
        floor += 2 * asked.handicaps.of_given(given)
        needed = needed + 2 * asked.handicaps.of_answers(answers)
    rows = scores.amax(1) >= floor
    given, scores = given[rows], scores[rows]
    columns = (scores >= floor[rows, None]).any(0)
    answers, scores, needed = answers[columns], scores[:, columns], needed[columns]
    if len(answers) and needed.min() < needed.max():  # some answers were asked about before, or are of other kinds
        enough = scores >= asked.first.normalizers[given, None] + needed
        rows, columns = enough.any(1), enough.any(0)
        given, answers, scores = given[rows], answers[columns], scores[rows][:, columns]
    return given, answers, scores


def _rule_out(scores: Tensor, asked: Asked, given: Tensor) -> None:
    """Write −∞ over pairs that do not count."""
    ends = torch.searchsorted(asked.ruled_out[:, 0].contiguous(), torch.stack([given[0], given[-1] + 1]))
    pairs = asked.ruled_out[ends[0] : ends[1]]
    rows, columns = (
        torch.searchsorted(ids, pairs[:, side].contiguous()).clamp_(max=len(ids) - 1)
        for side, ids in enumerate((given, asked.answers))
    )
    there = (given[rows] == pairs[:, 0]) & (asked.answers[columns] == pairs[:, 1])
    scores[rows[there], columns[there]] = -torch.inf


def _from_the_other_end(
    asked: Asked, given: Tensor, answers: Tensor, scores: Tensor, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The answers that are left once the second queries are asked, and the scores of their pairs from both ends.

    A normalizer is at least that of the block's own entities, and a query that this rules out is not asked in full.
    """
    if not scores.numel():
        return answers, scores, scores
    second, turned = asked.second, scores
    if second.model.reciprocal:  # without inverse relations both ends have one score
        turned = second.scores_of(answers, given).T.contiguous()  # what follows goes through it row by row
    floor = torch.where(second.normalizers[answers].isnan(), turned.logsumexp(0), second.normalizers[answers])
    bound = scores - asked.first.normalizers[given, None]
    bound = bound.add_(turned).sub_(floor)
    if asked.handicaps is not None:
        bound.sub_(asked.handicaps.of(given, answers), alpha=2)
    enough = bound >= 2 * least
    columns = enough.any(0)
    second.ask(answers[columns])
    return answers[columns], scores[:, columns], turned[:, columns]


def _enough(evidence: Tensor, least: float, top: int, margin: float) -> float:
    """That of the `top`-th best where more have at least `least`."""
    if int((evidence >= least).sum()) <= top:
        return least
    return max(least, float(evidence.flatten().topk(top).values[-1]) - 2 * margin)
