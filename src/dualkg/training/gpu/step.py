"""The step itself: score, take the gradient back, update."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.kernels.targets import Targets
from dualkg.losses import CrossEntropy
from dualkg.losses.questions import Questions
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel
from dualkg.models.diagonal import DiagonalModel
from dualkg.models.factors import Factors
from dualkg.models.rescal import RESCAL
from dualkg.models.tucker import TuckER
from dualkg.regularizers import PowerSum, Regularizer, sees_batch_alone
from dualkg.training.gpu.streams import stream
from dualkg.training.gpu.table import Table
from dualkg.training.gpu.vectors import Scored, vectors_of
from dualkg.training.optimizers import AnyOptimizer

MOST_MATRICES = 65_535  # the most programs that a GPU starts along the axis of relations
MOST_FORMED = 2**28  # numbers of matrices that are formed for a step, of all relations


class HalfStep:
    """Descend on loss plus regularizer for one batch; what `PlainStep` does, but for rounding in the products."""

    def __init__(
        self, model: BilinearModel, loss: CrossEntropy, regularizer: PowerSum, optimizer: AnyOptimizer
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.eps = float(optimizer.param_groups[0]["eps"])
        if loss.by_question and not model.reciprocal:
            raise ValueError("questions are put together for tails, and this model asks for heads too")
        self.room: int | None = None  # for questions of a batch; as many as it has triples, if nothing is known of it
        self.rate = torch.zeros((), device=model.device)
        self.now = torch.zeros((), dtype=torch.int32, device=model.device)
        # The side that asks for tails, and without reciprocal relations the one that asks for heads: the column of a
        # triple that is given, and the one that is asked for.
        self.sides = [(0, 2)] if model.reciprocal else [(0, 2), (2, 0)]
        scored = {id(self._asked(asked)) for _, asked in self.sides}
        self.tables = {
            name: Table(table, optimizer.state[table]["sum"], id(table) in scored)
            for name, table in model.named_parameters()
            if name in ("entities", "tails")
        }
        self.vectors = vectors_of(self, regularizer)
        self.beside = stream(model.device, "beside")

    @staticmethod
    def applies_to(model: Model, regularizer: Regularizer, *, predicts_relations: bool) -> bool:
        """Whether model and regularizer are ours, so that kernels know what they do, and look at the batch alone."""
        if type(model) not in MODELS.values() or not sees_batch_alone(regularizer):
            return False
        if isinstance(model, RESCAL | TuckER):
            formed = model.num_relation_ids * model.dim**2 if isinstance(model, TuckER) else 0
            few = model.num_relation_ids <= MOST_MATRICES and formed <= MOST_FORMED
            return few and model.two_maps and not predicts_relations
        # The kernel of penalties takes one modulus of all numbers of a coordinate; of squares that is their sum anyway.
        return (
            isinstance(model, DiagonalModel)
            and model.linear_in_relations
            and (model.one_modulus or regularizer.power == 2)
        )

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step and return the objective before it."""
        self.rate.fill_(learning_rate)
        return self.step(batch.contiguous())

    @torch.no_grad()
    def step(self, batch: Tensor) -> Tensor:
        """Take one step at the learning rate that is set."""
        self.now += 1
        questions = self._questions(batch)
        num_questions = len(batch) if questions is None else len(questions.starts) - 1
        num_losses, num_penalties = len(self.sides) * num_questions, self.vectors.num_blocks * len(batch)
        num_predicted = len(batch) if self.loss.relation_weight else 0
        parts = torch.zeros(num_losses + num_predicted + num_penalties + 1, device=batch.device)  # of the objective
        sizes = [num_losses, num_predicted, num_penalties, 1]
        of_entities, of_relations, penalties, rest = torch.split(parts, sizes)
        losses = of_entities.view(len(self.sides), -1)
        images = self._score(batch, questions, losses)
        pairs = self._predict_relations(batch, of_relations) if num_predicted else None
        self.vectors.add_gradients(batch, Scored(images, pairs, questions), penalties)
        self.vectors.update_relations(batch, rest[0])
        torch.cuda.current_stream().wait_stream(self.beside)
        for table in self.tables.values():
            table.update(self.now, self.rate, self.eps)
        return parts.sum()

    def _questions(self, batch: Tensor) -> Questions | None:
        """Those of the batch, where some of them may have several answers."""
        if not self.loss.by_question:
            return None
        return Questions.of(batch[:, 0], batch[:, 1], room=len(batch) if self.room is None else self.room)

    def _score(self, batch: Tensor, questions: Questions | None, losses: Tensor) -> list[Tensor]:
        """Score all entities for the questions of each side, write their losses, and find the gradients of the images.

        The gradient of a table goes on beside what follows: nobody waits for it but the update.
        """
        from dualkg.kernels.gpu.softmax import softmax_gradient_

        size, f = losses.shape[1], Factors(self.model, *batch.unbind(-1))
        upstream: list[Tensor] = [losses] * len(self.sides)
        for table in self.tables.values():
            sides = [number for number, (_, asked) in enumerate(self.sides) if self._asked(asked) is table.parameter]
            if table.copy is None or table.product is None:
                continue
            images = table.images.of(len(sides) * size, table.copy.shape[1], table.copy)
            scores = table.scores.of(len(sides) * size, len(table.copy), table.copy)
            masks = {}
            for number, part in zip(sides, images.view(len(sides), size, -1), strict=True):
                given, asked = self.sides[number]
                self.vectors.map(batch, given, part, questions)
                if (dropout := self.loss.dropouts.images) is not None:
                    masks[number] = dropout.mask(f, part, backward=asked == 0, questions=questions)
                    part *= masks[number]
            torch.mm(images, table.copy.T, out=scores)
            for number, part in zip(sides, scores.view(len(sides), size, -1), strict=True):
                targets = self._targets(batch[:, self.sides[number][1]], questions)
                softmax_gradient_(part, targets, self.model.shape.num_entities, losses[number])
            found = torch.mm(scores, table.copy, out_dtype=torch.float32).view(len(sides), size, -1)
            for number, part in zip(sides, found, strict=True):
                upstream[number] = part.mul_(masks[number]) if masks else part
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                torch.mm(scores.T, images, out=table.product)
        return upstream

    def _targets(self, entities: Tensor, questions: Questions | None) -> Targets:
        shares = self._share(entities)
        return Targets.one_each(entities, shares) if questions is None else Targets(entities, shares, questions.starts)

    def _asked(self, column: int) -> Tensor:
        return self.model.tail_table if column == 2 else self.model.head_table

    def _share(self, targets: Tensor) -> Tensor:
        """What each query counts in the mean."""
        size = len(self.sides)
        if self.loss.entity_weights is None:
            return torch.full(targets.shape, 1 / (len(targets) * size), device=targets.device)
        chosen = self.loss.entity_weights[targets]
        return chosen / (chosen.sum() * size)

    def _predict_relations(self, batch: Tensor, losses: Tensor) -> Tensor:
        """Score all relations for each pair of entities; what the pairs got of it is returned."""
        from dualkg.kernels.gpu.softmax import softmax_gradient_

        relations = self.vectors.relations.bfloat16()
        images = torch.empty(len(batch), relations.shape[1], dtype=relations.dtype, device=batch.device)
        self.vectors.pair(batch, images)
        scores = images @ relations.T
        shares = torch.full_like(losses, self.loss.relation_weight / len(batch))
        softmax_gradient_(scores, Targets.one_each(batch[:, 1], shares), scores.shape[1], losses)
        self.vectors.add_to_all_relations(torch.mm(scores.T, images, out_dtype=torch.float32))
        return torch.mm(scores, relations, out_dtype=torch.float32)
