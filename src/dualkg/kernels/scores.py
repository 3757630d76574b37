"""Rows of scores: the targets of a batch, and counts of candidates that score above an answer.

`cpu.py`, `cpu_ranks.py` and `gpu/scores.py` have the compiled forms.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_ELEMENTS = 1_000_000  # scores that PyTorch compares at a time


class Targets(NamedTuple):
    """The targets of queries, each with its weight in the loss.

    Those of query q are `entities[starts[q] : starts[q + 1]]`.
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
        starts = self.starts[first : last + 1] - begin
        return Targets(self.entities[begin:end], self.weights[begin:end], starts)

    @property
    def queries(self) -> Tensor:
        """The query of each target."""
        counts = self.starts.diff()
        numbers = torch.arange(len(counts), device=counts.device)
        # With a known output size, nobody has to wait for a GPU to sum the counts.
        return torch.repeat_interleave(numbers, counts, output_size=len(self.entities))


def softmax_(scores: Tensor, gradient_: Callable[[Tensor, Targets], Tensor]) -> Tensor:
    """Overwrite scores by their softmax and return their logsumexp, by a kernel of cross entropy.

    The kernel overwrites scores by the gradient and returns the losses: with column 0 as the only
    target of each row, these are the softmax but for that column, and the logsumexp less its score.
    """
    if not scores.shape[1]:
        return scores.new_full((len(scores),), -torch.inf)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    first_scores = scores[:, 0].to(dtype, copy=True)
    first_columns = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    targets = Targets.one_each(first_columns, torch.ones_like(first_scores))

    normalizers = gradient_(scores, targets) + first_scores
    scores[:, 0] = (first_scores - normalizers).exp()
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
    """The numbers of candidates that score higher than each target, and equal to it.

    The shape is `(num_targets, 2)`. Known answers and the target itself are not counted. A row with
    a NaN or infinite score has counts −1.
    """
    values = scores[targets.rows, targets.answers]
    counts = count_in_columns(scores, values, known, targets, lambda entities: entities)
    is_nonfinite = counts[:, 2:] > 0
    return counts[:, :2].masked_fill(is_nonfinite, -1)


def count_in_columns(
    scores: Tensor,
    values: Tensor,
    known: Tensor,
    targets: RankTargets,
    columns: Callable[[Tensor], Tensor],
) -> Tensor:
    """Counts of better and tied candidates among some entities, and 1 if a score is not finite.

    The shape is `(num_targets, 3)`. `values` are the scores of the targets, and `columns` gives the
    columns of entities, −1 for those without one.
    """
    counts = torch.zeros(len(values), 3, dtype=torch.int32, device=scores.device)
    if not scores.shape[1]:
        return counts

    step = max(1, PIECE_ELEMENTS // scores.shape[1])
    for begin in range(0, len(values), step):
        piece = slice(begin, begin + step)
        piece_targets = RankTargets(*(array[piece] for array in targets))
        target_numbers, positions, is_counted = _excluded_positions(known, piece_targets, columns)

        # Scores are compared once: threads may differ in whether they treat denormal numbers as
        # zero.
        row_scores = scores[piece_targets.rows]
        better = row_scores > values[piece, None]
        tied = row_scores == values[piece, None]
        for column, compared in enumerate((better, tied)):
            excluded = (compared[target_numbers, positions] & is_counted).int()
            num_compared = compared.sum(1, dtype=torch.int32)
            counts[piece, column] = num_compared.index_add_(0, target_numbers, excluded, alpha=-1)

    is_finite = scores.amax(1).isfinite() & scores.amin(1).isfinite()
    counts[:, 2] = ~is_finite[targets.rows]
    return counts


def _excluded_positions(
    known: Tensor, targets: RankTargets, columns: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates that are not ranked: known answers, and the targets themselves.

    Returns the number of the target and the column of each, and whether it is there and is to be
    counted. An answer may be among the known answers of its query; it is counted once.
    """
    rows, answers, first, last = targets
    num_known = last - first
    target_numbers = torch.repeat_interleave(num_known)
    offsets = (num_known.cumsum(0) - num_known)[target_numbers]
    positions_in_slice = torch.arange(len(target_numbers), device=rows.device) - offsets
    known_answers = known[first[target_numbers] + positions_in_slice].long()
    is_other = known_answers != answers[target_numbers]

    positions = columns(torch.cat([known_answers, answers]))
    is_counted = (positions >= 0) & torch.cat([is_other, torch.ones_like(answers).bool()])
    own_numbers = torch.arange(len(rows), device=rows.device)
    return torch.cat([target_numbers, own_numbers]), positions.clamp(min=0), is_counted
