"""Rows of scores: the targets of a batch, and counts of the candidates that score higher than an
answer.

`cpu.py` and `gpu/scores.py` have the compiled forms.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_ELEMENTS = 1_000_000  # scores that PyTorch compares at a time


class Targets(NamedTuple):
    """The targets of query q are `entities[starts[q] : starts[q + 1]]`, each with its weight in the
    loss.
    """

    entities: Tensor
    weights: Tensor
    starts: Tensor

    @staticmethod
    def one_each(entities: Tensor, weights: Tensor) -> "Targets":
        """One target for each query."""
        return Targets(entities, weights, torch.arange(len(entities) + 1, device=entities.device))

    def part(self, first: int, last: int) -> "Targets":
        """The targets of the queries `first` to `last` − 1."""
        begin = int(self.starts[first])
        end = int(self.starts[last])
        return Targets(
            self.entities[begin:end], self.weights[begin:end], self.starts[first : last + 1] - begin
        )

    @property
    def queries(self) -> Tensor:
        """The query of each target."""
        counts = self.starts.diff()
        numbers = torch.arange(len(counts), device=counts.device)
        return torch.repeat_interleave(
            numbers, counts, output_size=len(self.entities)
        )  # a GPU need not be waited for


def softmax_(scores: Tensor, gradient_: Callable[[Tensor, Targets], Tensor]) -> Tensor:
    """Overwrite scores by their softmax and return their logsumexp, by a kernel of cross entropy.

    The kernel overwrites scores by the gradient and returns the losses: with column 0 as the only
    target of each row, these are the softmax but for that column, and the logsumexp less its score.
    """
    if not scores.shape[1]:
        return scores.new_full((len(scores),), -torch.inf)
    first = scores[:, 0].to(torch.promote_types(scores.dtype, torch.float32), copy=True)
    zeros = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    normalizers = gradient_(scores, Targets.one_each(zeros, torch.ones_like(first))) + first
    scores[:, 0] = (first - normalizers).exp()
    return normalizers


class RankTargets(NamedTuple):
    """Answers to rank in rows of scores, `(num_targets,)` each, sorted by row.

    The known answers of a target's row are `known[first:last]`, slices of an array that all rows
    share.
    """

    rows: Tensor
    answers: Tensor
    first: Tensor
    last: Tensor


def count_with_torch(scores: Tensor, known: Tensor, targets: RankTargets) -> Tensor:
    """The numbers of candidates that score higher than each target and equal to it, `(num_targets,
    2)`.

    Known answers and the target itself are not counted. A row with a NaN or infinite score has
    counts −1.
    """
    counts = count_in_columns(
        scores, scores[targets.rows, targets.answers], known, targets, lambda ids: ids
    )
    return counts[:, :2].masked_fill(counts[:, 2:] > 0, -1)


def count_in_columns(
    scores: Tensor,
    values: Tensor,
    known: Tensor,
    targets: RankTargets,
    columns: Callable[[Tensor], Tensor],
) -> Tensor:
    """Counts of better and tied candidates among some entities, and 1 if a score is not finite,
    `(num_targets, 3)`.

    `values` are the scores of the targets, and `columns` gives the columns of entities, −1 for
    those without one.
    """
    found = torch.zeros(len(values), 3, dtype=torch.int32, device=scores.device)
    if not scores.shape[1]:
        return found
    step = max(1, PIECE_ELEMENTS // scores.shape[1])
    for begin in range(0, len(values), step):
        piece = slice(begin, begin + step)
        rows, answers, first, last = (array[piece] for array in targets)
        # Compared once: threads may differ in whether they treat denormal numbers as zero.
        chosen = scores[rows]
        better = chosen > values[piece, None]
        tied = chosen == values[piece, None]
        num_known = last - first
        which = torch.repeat_interleave(num_known)
        within = (
            torch.arange(len(which), device=rows.device) - (num_known.cumsum(0) - num_known)[which]
        )
        # Each entity once: the answer is among the known answers of its query, or else is added.
        others = known[first[which] + within].long()
        is_other = torch.cat([others != answers[which], torch.ones_like(answers).bool()])
        at = columns(torch.cat([others, answers]))
        of = torch.cat([which, torch.arange(len(rows), device=rows.device)])
        counts = (at >= 0) & is_other
        for column, compared in enumerate((better, tied)):
            excluded = (compared[of, at.clamp(min=0)] & counts).int()
            found[piece, column] = compared.sum(1, dtype=torch.int32).index_add_(
                0, of, excluded, alpha=-1
            )
    found[:, 2] = ~(scores.amax(1).isfinite() & scores.amin(1).isfinite())[targets.rows]
    return found
