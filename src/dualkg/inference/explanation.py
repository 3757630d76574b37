"""Explanations: the training triples that support the score of a triple, and similar entities with
the same triple.

The influence of a training triple is the drop of the score without it. To first order the row of an
entity moves by H⁻¹ ∇l, with H the Hessian of its training loss and l the loss of the triple.
docs/explanation.md derives it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.errors import RequestError
from dualkg.inference.inductive import SIDES, EmbeddingProblem, FrozenContext
from dualkg.models.base import Side

Ids = tuple[int, int, int]
Floats = npt.NDArray[np.float64]
MAX_STEPS = 200  # of conjugate gradients
TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Influence:
    """Rows of train, and the score drop without each: through the embedding of the head, and of the
    tail.
    """

    rows: npt.NDArray[np.int64]
    by_head: Floats
    by_tail: Floats

    @property
    def score_drops(self) -> Floats:
        return self.by_head + self.by_tail


def influence(triple: Ids, context: FrozenContext) -> Influence:
    """The influence of all training triples that contain the head or the tail of a triple."""
    head, _, tail = triple
    train = context.graph.train
    ends = train[:, [0, 2]]
    rows = np.flatnonzero(((ends == head) | (ends == tail)).any(1))
    by_head, by_tail = np.zeros((2, len(rows)))
    # If head and tail are the same entity, they have one row of the table and one problem.
    for entity, found in ((head, by_head), (tail, by_tail))[: 1 if head == tail else 2]:
        its = (ends[rows] == entity).any(1)
        found[its] = score_drops(
            entity, train[rows[its]], score_gradient(entity, triple, context), context
        )
    return Influence(rows, by_head, by_tail)


@torch.no_grad()
def score_gradient(entity: int, triple: Ids, context: FrozenContext) -> Tensor:
    """The gradient of the score of a triple with respect to the rows of one of its entities,
    `(num_rows, width)`.
    """
    head, relation, tail = (torch.tensor([id], device=context.model.device) for id in triple)
    gradient = torch.zeros_like(context.rows_of(entity))
    if entity == triple[0]:
        gradient[0] += context.model.map_tail(context.vectors(tail, "tail"), relation)[0]
    if entity == triple[2]:
        gradient[-1] += context.model.map_head(context.vectors(head, "head"), relation)[0]
    return gradient


def score_drops(
    entity: int, triples: Triples, score_gradient: Tensor, context: FrozenContext
) -> Floats:
    """The drop of a score without each of the triples of an entity, `(num_triples,)`."""
    ids = torch.from_numpy(triples).long().to(score_gradient.device)
    problem = EmbeddingProblem.of(ids.new_tensor([entity]), ids, context, negative_weight=1.0)
    if not problem.groups:
        return np.zeros(len(triples))
    with torch.enable_grad():
        rows = context.rows_of(entity)[None]
        # At exact zeros, autograd misses the second derivative of the third power of a modulus.
        rows = torch.where(rows == 0, 1e-12, rows.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(problem(rows), rows, create_graph=True)

        def hessian_product(direction: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, rows, direction, retain_graph=True)[0]

        solution = conjugate_gradients(hessian_product, score_gradient[None])
        # Σᵢ wᵢ ∇lᵢ is linear in w, so the gradient of its product with the solution in wᵢ is ∇lᵢ ·
        # solution.
        losses = problem.triple_losses(rows, len(triples))
        weights = torch.zeros_like(losses).requires_grad_()
        (summed,) = torch.autograd.grad(losses, rows, weights, create_graph=True)
        (changes,) = torch.autograd.grad((summed * solution).sum(), weights)
    return -changes.double().cpu().numpy()


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Solve H x = `target`; `product` returns H x for a positive definite H."""
    solution = torch.zeros_like(target)
    residual = target.clone()
    direction = residual
    size = float(residual.square().sum())
    small_enough = TOLERANCE**2 * size
    for _ in range(MAX_STEPS):
        if size <= small_enough:
            break
        image = product(direction)
        length = size / float((direction * image).sum())
        solution = solution + length * direction
        residual = residual - length * image
        before = size
        size = float(residual.square().sum())
        direction = residual + (size / before) * direction
    return solution


@dataclass(frozen=True)
class NamedTriple:
    """A triple by name, and as text with labels."""

    head: str
    relation: str
    tail: str
    text: str

    @classmethod
    def of(cls, triple: Sequence[int], graph: Graph) -> Self:
        parts = list(zip((graph.entities, graph.relations, graph.entities), triple, strict=True))
        text = ", ".join(vocabulary.text(id) for vocabulary, id in parts)
        head, relation, tail = (vocabulary[id] for vocabulary, id in parts)
        return cls(head, relation, tail, f"({text})")


@dataclass(frozen=True)
class SupportingTriple:
    """A training triple and the score drop without it, through the embeddings of the head and of
    the tail.
    """

    triple: NamedTriple
    score_drop: float
    by_head: float
    by_tail: float
    same_triple: bool  # whether it is the explained triple
    sentence: str


@dataclass(frozen=True)
class SimilarEntity:
    """An entity similar to the head or the tail, with a training triple that has it in that
    place.
    """

    entity: str
    side: Side
    cosine: float
    triple: NamedTriple
    sentence: str


@dataclass(frozen=True)
class Explanation:
    """The score of a triple, the split that contains it, and what supports it, strongest first."""

    triple: NamedTriple
    score: float
    split: str | None
    supporting_triples: tuple[SupportingTriple, ...]
    similar_entities: tuple[SimilarEntity, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        """The score first, then a sentence for each supporting triple and each similar entity."""
        known = f"; it is known ({self.split})" if self.split else ""
        none = ["No training triple of its two entities supports it."]
        supporting = [one.sentence for one in self.supporting_triples] or none
        similar = [one.sentence for one in self.similar_entities]
        return [f"{self.triple.text} has score {self.score:.3f}{known}.", *supporting, *similar]


def explain(context: FrozenContext, triple: Sequence[str | int], *, k: int = 5) -> Explanation:
    """Find the `k` training triples that most support the score of a triple, and `k` similar
    entities with the same.
    """
    if k < 1:
        raise RequestError(f"k must be at least 1; got {k}.")
    graph, model, (head, relation, tail) = context.graph, context.model, triple
    ids = graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)
    score = float(model.score(*(torch.tensor([id], device=model.device) for id in ids)).detach())
    split = next(
        (name for name in SPLITS if (graph.split(name) == np.array(ids)).all(1).any()), None
    )
    supporting = supporting_triples(ids, context, k=k)
    similar = similar_entities(ids, context, k=k)
    return Explanation(NamedTriple.of(ids, graph), score, split, supporting, similar)


def supporting_triples(
    triple: Ids, context: FrozenContext, *, k: int
) -> tuple[SupportingTriple, ...]:
    """The training triples without which the score would drop most."""
    found = influence(triple, context)
    graph = context.graph
    drops = found.score_drops
    best = [place for place in np.argsort(-drops, kind="stable")[:k].tolist() if drops[place] > 0]
    supporting = []
    for place, known in zip(best, graph.train[found.rows[best]].tolist(), strict=True):
        drop, by_head, by_tail = (float(of[place]) for of in (drops, found.by_head, found.by_tail))
        named = NamedTriple.of(known, graph)
        same = known == list(triple)
        itself = " itself" if same else ""
        sentence = f"{named.text}{itself} is known: without it the score drops by about {drop:.2g}."
        supporting.append(SupportingTriple(named, drop, by_head, by_tail, same, sentence))
    return tuple(supporting)


@torch.no_grad()
def similar_entities(triple: Ids, context: FrozenContext, *, k: int) -> tuple[SimilarEntity, ...]:
    """The most similar entities among those that train has in place of the head or of the tail."""
    graph = context.graph
    unit = torch.nn.functional.normalize(context.model.entity_vectors(), dim=-1)
    same = graph.train == np.array(triple)
    found: list[SimilarEntity] = []
    for column in (0, 2):
        entity = triple[column]
        side = SIDES[column // 2]
        triples = np.unique(
            graph.train[~same[:, column] & same[:, 1] & same[:, 2 - column]], axis=0
        )
        others = torch.from_numpy(triples[:, column]).long().to(unit.device)
        best = (unit[others] @ unit[entity]).topk(min(k, len(others)))
        for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            other = int(others[place])
            names = f"{graph.entities.text(other)} is similar to {graph.entities.text(entity)}"
            known = NamedTriple.of(triples[place].tolist(), graph)
            sentence = f"{names} (cosine {cosine:.2f}), and {known.text} is known."
            found.append(SimilarEntity(graph.entities[other], side, cosine, known, sentence))
    return tuple(sorted((one for one in found if one.cosine > 0), key=lambda one: -one.cosine)[:k])
