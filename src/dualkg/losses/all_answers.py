"""Cross entropy of questions, each with all the answers that training has to it."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.losses.dropout import Dropouts
from dualkg.losses.training_answers import TrainingAnswers
from dualkg.models.base import Model
from dualkg.models.factors import Factors


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
