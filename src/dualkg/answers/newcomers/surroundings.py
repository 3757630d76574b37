"""What the problem of one entity takes as given: the trained tables, the penalty, and the queries of others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualkg.answers.newcomers.queries import Queries, queries_of
from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.losses import frequency_weights
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.factors import Factors, rows
from dualkg.regularizers import DURA, PowerSum, Regularizer, sees_batch_alone
from dualkg.training import Recipe
from dualkg.training.choices import build_regularizer

RIDGE = 0.03  # of an example, where the regularizer leaves some direction free


@dataclass(frozen=True)
class Penalty:
    """What each example adds for the size of its vectors: the regularizer, and a ridge where that is not enough."""

    regularizer: PowerSum | None
    ridge: float

    @classmethod
    def of(cls, regularizer: Regularizer) -> Penalty:
        """Squares of heads and tails make the problem strongly convex; without them a ridge does.

        A sum of absolute values (RegP1) is not smooth, and one over all entities (UnweightedDURA) is not of examples:
        in their place there is the ridge alone.
        """
        if not sees_batch_alone(regularizer) or regularizer.power == 1 or not regularizer.weight:
            return cls(None, RIDGE)
        shares = regularizer.shares
        enough = regularizer.power == 2 and min(shares.get("head", 0.0), shares.get("tail", 0.0)) > 0
        return cls(regularizer, 0.0 if enough else RIDGE)

    @property
    def quadratic(self) -> bool:
        return self.regularizer is None or self.regularizer.power == 2

    def __call__(self, f: Factors) -> Tensor:
        """Of each example, `(batch,)`."""
        size = self.ridge * (f.head.square().sum(-1) + f.tail.square().sum(-1))
        return size if self.regularizer is None else size + self.regularizer.weight * self.regularizer.per_triple(f)

    def slopes(self, f: Factors, side: Side, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum over examples, `counts` `(batch,)` of each, that have the same vector on a side and 0 on the other.

        Beside it its gradients with respect to that vector, `(width,)`, and to its images `(batch, width)`, as if these
        were made of nothing.
        """
        vectors, images = (f.head, f.mapped_head) if side == "head" else (f.tail, f.mapped_tail)
        vector = vectors[0]
        slope = (2 * self.ridge * counts.sum()) * vector
        value, of_images = 0.5 * (slope @ vector), torch.zeros_like(images)
        if self.regularizer is None:
            return value, slope, of_images
        found, counts = self.regularizer.gradients(f), len(counts) * counts  # those are of a mean
        if f"mapped_{side}" in found:
            of_images = counts[:, None] * found[f"mapped_{side}"]
        plain = counts @ found[side] if side in found else torch.zeros_like(vector)
        # Euler: x · ∇|x|ᵖ = p |x|ᵖ.
        value = value + (plain @ vector + (of_images * images).sum()) / self.regularizer.power
        return value, slope + plain, of_images


@dataclass(frozen=True, eq=False)
class Surroundings:
    """A trained model with its train, and the rows `(num_newcomers, num_rows, width)` of entities it does not know.

    Newcomers are counted on from the entities of the model. They are no candidates for the queries of others.
    `answer_weights` is empty where all answers count alike.
    """

    model: BilinearModel
    train: Triples
    penalty: Penalty
    queries: tuple[Queries, ...]
    frequency_weight: float
    answer_weights: Tensor
    newcomers: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, graph: Graph, *, recipe: Recipe | None = None) -> Surroundings:
        """Of a model as it was trained; without a recipe as if by cross entropy and DURA, with the usual weights."""
        bilinear = with_two_maps(model)
        bilinear.check_shape(graph.shape)
        regularizer = build_regularizer(recipe.regularizer) if recipe else DURA(0.05, plain=0.5, mapped=1.5)
        share = recipe.loss.frequency_weight if recipe else 0.0
        around = cls(
            model=bilinear,
            train=graph.train,
            penalty=Penalty.of(regularizer),
            queries=tuple(queries_of(bilinear, graph.train)),
            frequency_weight=share,
            answer_weights=bilinear.head_table.new_empty(0),
            newcomers=bilinear.head_table.new_empty(
                0, 2 if bilinear.two_entity_tables else 1, bilinear.head_table.shape[1]
            ),
        )
        return replace(around, answer_weights=around._answer_weights(graph.train, graph.shape.num_entities))

    @property
    def num_known(self) -> int:
        return self.model.shape.num_entities

    @property
    def usual_triples(self) -> float:
        """How many triples an entity of train is in, on average."""
        return 2 * len(self.train) / max(self.num_known, 1)

    def with_newcomers(self, num_newcomers: int, train: Triples) -> Surroundings:
        """The same with rows of zeros for newcomers; `train` has their triples too."""
        fresh = self.newcomers.new_zeros(num_newcomers, *self.newcomers.shape[1:])
        weights = self._answer_weights(train, self.num_known + num_newcomers)
        return replace(self, newcomers=fresh, answer_weights=weights)

    def vectors(self, entities: Tensor, side: Side) -> Tensor:
        """The rows of entities, new or not, `(batch, width)`."""
        found = rows(self._table(side), entities.clamp(max=self.num_known - 1))
        new = entities >= self.num_known
        if bool(new.any()):
            found[new] = self.newcomers[entities[new] - self.num_known, 0 if side == "head" else -1]
        return found

    def rows_of(self, entity: int) -> Tensor:
        """The rows of one entity, `(num_rows, width)`: the same one as head and as tail, or two."""
        one = torch.tensor([entity], device=self.model.device)
        sides: tuple[Side, ...] = ("head", "tail") if self.model.two_entity_tables else ("head",)
        return torch.cat([self.vectors(one, side) for side in sides])

    def candidates(self, side: Side, *, without: int) -> Tensor:
        """The entities that the model knows, but for one."""
        table = self._table(side)
        return table if without >= len(table) else torch.cat([table[:without], table[without + 1 :]])

    def weights_of(self, answers: Tensor) -> Tensor:
        """How much each of these answers counts: 1, or by its frequency with 1 as the mean."""
        if not len(self.answer_weights):
            return torch.ones_like(answers, dtype=self.newcomers.dtype)
        return self.answer_weights[answers]

    def _answer_weights(self, train: Triples, num_entities: int) -> Tensor:
        """w(t) of the recipe's loss, over its mean: training divides by the summed weights of a batch."""
        if not self.frequency_weight:
            return self.newcomers.new_empty(0)
        weights = frequency_weights(train, num_entities, self.frequency_weight).to(self.newcomers)
        seen = torch.from_numpy(train[:, [0, 2]].reshape(-1)).long().to(weights.device)
        return weights / weights[seen].mean()

    def _table(self, side: Side) -> Tensor:
        return (self.model.head_table if side == "head" else self.model.tail_table).detach()


def with_two_maps(model: Model) -> BilinearModel:
    """The model, where its relations are linear maps with a transpose; others are refused."""
    if isinstance(model, BilinearModel) and model.two_maps:
        return model
    raise RequestError(
        f"The row of one entity is a convex problem of its own where a model scores by ⟨h R, t⟩: CP, DistMult, "
        f"ComplEx, RESCAL, SimplE, QuatE, or TuckER without batch_norm. This {type(model).__name__} is none of them."
    )
