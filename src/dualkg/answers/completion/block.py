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
class Asked:
    """The queries of a relation from both ends; which answers count, and which pairs do not."""

    first: Queries
    second: Queries
    answers: Tensor  # in order
    ruled_out: Tensor  # `(num_pairs, 2)`: what a query gives and an answer, in order of the first
    new_answers: Tensor  # whether an entity is new as an answer, 0 or 1, `(num_entities,)`


def best_of(asked: Asked, given: Tensor, *, needed: Tensor, top: int) -> Found:
    """The new triples of a block with as much evidence as is needed: the best `top`, and what ties with the last.

    `needed` is for answers that train has on their side, and for new ones, `(2,)`; there are so many triples of either.
    `given` is in order.
    """
    needed = needed.clamp(min=LEAST).to(asked.answers.device)
    given, answers, scores = _likely(asked, given, needed)
    answers, scores, turned = _from_the_other_end(asked, given, answers, scores, needed)
    if not scores.numel():
        return Found.none()
    evidence = turned - asked.second.normalizers[answers]
    evidence.add_(scores).sub_(asked.first.normalizers[given, None]).div_(2)
    enough = _enough(evidence, asked.new_answers[answers], needed, top)
    rows, columns = (evidence >= enough).nonzero(as_tuple=True)
    ends, scored = (given[rows], answers[columns]), scores
    if asked.first.side == "head":
        ends, scored = (ends[1], ends[0]), turned
    relations = torch.full_like(rows, asked.first.relation)
    found = (ends[0], relations, ends[1], scored[rows, columns], evidence[rows, columns])
    return Found(*(column.cpu().numpy() for column in found))


def _likely(asked: Asked, given: Tensor, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and answers that share a triple with so much evidence, as far as can be told yet; and all scores."""
    answers, scores = asked.answers, asked.first.scores(given)
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]
    _rule_out(scores, asked, given)
    # Of the logarithm that the first query tells.
    first = 2 * needed[asked.new_answers[answers]] - asked.second.largest[answers]
    floor = asked.first.normalizers[given] + first.min()
    rows = scores.amax(1) >= floor
    given, scores = given[rows], scores[rows]
    columns = (scores >= floor[rows, None]).any(0)
    answers, scores, first = answers[columns], scores[:, columns], first[columns]
    if len(answers) and first.min() < first.max():  # some answers were asked about before, or are of the other kind
        enough = scores >= asked.first.normalizers[given, None] + first
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
    asked: Asked, given: Tensor, answers: Tensor, scores: Tensor, needed: Tensor
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
    columns = (bound >= 2 * needed[asked.new_answers[answers]]).any(0)
    second.ask(answers[columns])
    return answers[columns], scores[:, columns], turned[:, columns]


def _enough(evidence: Tensor, new: Tensor, needed: Tensor, top: int) -> Tensor:
    """For each answer what is needed, or where more than `top` triples with its kind of answers have that: their best.

    Which of two kinds is more probable is not told by evidence alone, so each is looked at for itself.
    """
    enough = needed[new]
    for kind in (0, 1):
        columns = (new == kind).nonzero().squeeze(1)
        of_kind = evidence if len(columns) == len(new) else evidence[:, columns]
        if int((of_kind >= needed[kind]).sum()) > top:
            last = float(of_kind.flatten().topk(top).values[-1])
            enough[columns] = enough[columns].clamp(min=last)
    return enough
