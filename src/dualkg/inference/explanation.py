"""How much the score of a triple would fall without each of the training triples of its two entities.

Without one triple, the problem of an entity has its least point elsewhere: to first order the row moves by H⁻¹ ∇l, with
H the Hessian of the whole problem and l what the triple adds to it. docs/explain.md has the derivation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.errors import RequestError
from dualkg.inference.inductive import EmbeddingProblem, FrozenContext
from dualkg.models.base import Model, Side
from dualkg.training.recipe import Recipe

MOST_STEPS = 200
TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Influence:
    """Places of triples in train, and by how much the score falls without each: by the rows of head and of tail."""

    rows: npt.NDArray[np.int64]
    by_head: npt.NDArray[np.float64]
    by_tail: npt.NDArray[np.float64]

    @property
    def score_drops(self) -> npt.NDArray[np.float64]:
        return self.by_head + self.by_tail


def influence(triple: tuple[int, int, int], context: FrozenContext) -> Influence:
    """Of all training triples that have the head or the tail of this one."""
    head, _, tail = triple
    ends = context.train[:, [0, 2]]
    places = np.flatnonzero(((ends == head) | (ends == tail)).any(1))
    by_head = np.zeros(len(places))
    by_tail = np.zeros(len(places))
    for entity, found in ((head, by_head), (tail, by_tail)):
        if entity == head and found is by_tail:
            break  # head and tail are one entity, and one problem
        mine = (ends[places] == entity).any(1)
        found[mine] = score_drops(entity, context.train[places[mine]], score_slope(entity, triple, context), context)
    return Influence(places, by_head, by_tail)


@torch.no_grad()
def score_slope(entity: int, triple: tuple[int, int, int], context: FrozenContext) -> Tensor:
    """The gradient of a triple's score with respect to the rows of one of its entities, `(num_rows, width)`."""
    head, relation, tail = (torch.tensor([id], device=context.model.device) for id in triple)
    slope = torch.zeros_like(context.rows_of(entity))
    if entity == triple[0]:
        slope[0] += context.model.map_tail(context.vectors(tail, "tail"), relation)[0]
    if entity == triple[2]:
        slope[-1] += context.model.map_head(context.vectors(head, "head"), relation)[0]
    return slope


def score_drops(entity: int, triples: Triples, slope: Tensor, context: FrozenContext) -> npt.NDArray[np.float64]:
    """By how much what has this gradient in an entity's rows falls without each of its triples, `(num_triples,)`."""
    ids = torch.from_numpy(triples).long().to(slope.device)
    problem = EmbeddingProblem.of(ids.new_tensor([entity]), ids, context, negative_weight=1.0)
    if not problem.groups:
        return np.zeros(len(triples))
    with torch.enable_grad():
        rows = nudged(context.rows_of(entity)[None]).requires_grad_()
        (gradient,) = torch.autograd.grad(problem(rows), rows, create_graph=True)

        def curved(direction: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, rows, direction, retain_graph=True)[0]

        moved = solved(curved, slope[None])
        # Σᵢ wᵢ ∇lᵢ is linear in w: its product with the solution has ∇lᵢ · solution as gradient in wᵢ.
        losses = problem.triple_losses(rows, len(triples))
        weights = torch.zeros_like(losses).requires_grad_()
        (summed,) = torch.autograd.grad(losses, rows, weights, create_graph=True)
        (rises,) = torch.autograd.grad((summed * moved).sum(), weights)
    return -rises.double().cpu().numpy()


def nudged(rows: Tensor) -> Tensor:
    """Rows without exact zeros: there the third power of a modulus has a second derivative that autograd misses."""
    return torch.where(rows == 0, 1e-12, rows.detach())


def solved(product: Callable[[Tensor], Tensor], wanted: Tensor) -> Tensor:
    """The x with H x = `wanted`, by conjugate gradients; `product` gives H x of a positive definite H."""
    found = torch.zeros_like(wanted)
    left = wanted.clone()
    direction, size = left, float(left.square().sum())
    enough = TOLERANCE**2 * size
    for _ in range(MOST_STEPS):
        if size <= enough:
            break
        image = product(direction)
        length = size / float((direction * image).sum())
        found, left = found + length * direction, left - length * image
        before, size = size, float(left.square().sum())
        direction = left + (size / before) * direction
    return found


Name = str | int
Ids = tuple[int, int, int]


@dataclass(frozen=True)
class NamedTriple:
    """A triple by its names, and as people say it."""

    head: str
    relation: str
    tail: str
    text: str

    @classmethod
    def of(cls, triple: Ids, graph: Graph) -> NamedTriple:
        head, relation, tail = triple
        kinds = ((graph.entities, head), (graph.relations, relation), (graph.entities, tail))
        spoken = ", ".join(kind.text(id) for kind, id in kinds)
        return cls(graph.entities[head], graph.relations[relation], graph.entities[tail], f"({spoken})")


@dataclass(frozen=True)
class SupportingTriple:
    """A training triple, and by how much the score falls without it: through the row of the head, and of the tail."""

    triple: NamedTriple
    score_drop: float
    by_head: float
    by_tail: float
    same_triple: bool

    def sentence(self) -> str:
        what = f"{self.triple.text} itself" if self.same_triple else self.triple.text
        return f"Because {what} is known: without it the score falls by about {self.score_drop:.2g}."


@dataclass(frozen=True)
class SimilarEntity:
    """An entity like the head, or like the tail, for which the same is known."""

    entity: str
    side: Side
    cosine: float
    triple: NamedTriple
    text: str

    def sentence(self) -> str:
        return f"Because {self.text} (cosine {self.cosine:.2f}), and {self.triple.text} is known."


@dataclass(frozen=True)
class Explanation:
    """The score of a triple, the split that knows it, and what supports it, the strongest first."""

    triple: NamedTriple
    score: float
    split: str | None
    supporting_triples: tuple[SupportingTriple, ...]
    similar_entities: tuple[SimilarEntity, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        """The score first, then a sentence for each reason and each entity alike."""
        known = f"; it is known ({self.split})" if self.split else ""
        found = [f"{self.triple.text} has score {self.score:.3f}{known}."]
        found += [reason.sentence() for reason in self.supporting_triples]
        if not self.supporting_triples:
            found.append("No training triple of its two entities supports it.")
        return found + [likeness.sentence() for likeness in self.similar_entities]


def explain(
    model: Model,
    graph: Graph,
    triple: tuple[Name, Name, Name],
    *,
    k: int = 5,
    recipe: Recipe | None = None,
    context: FrozenContext | None = None,
) -> Explanation:
    """The `k` training triples that most support a triple's score, and as many entities alike that have the same.

    `recipe` is what the model was trained by; `context` what was made of both before, to be used again.
    """
    if k < 1:
        raise RequestError(f"At least one reason must be asked for; k is {k}.")
    head, relation, tail = triple
    ids = graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)
    context = context or FrozenContext.of(model, graph, recipe=recipe)
    with torch.no_grad():
        score = float(model.score(*(torch.tensor([id], device=model.device) for id in ids)))
    split = next((name for name in SPLITS if _holds(graph.split(name), ids)), None)
    return Explanation(
        NamedTriple.of(ids, graph),
        score,
        split,
        supporting_triples(ids, graph, context, k=k),
        similar_entities(ids, model, graph, k=k),
    )


def supporting_triples(triple: Ids, graph: Graph, context: FrozenContext, *, k: int) -> tuple[SupportingTriple, ...]:
    """The training triples without which the score would fall most."""
    found = influence(triple, context)
    best = np.argsort(-found.score_drops, kind="stable")[:k]
    return tuple(
        SupportingTriple(
            NamedTriple.of(known, graph),
            score_drop=float(found.score_drops[place]),
            by_head=float(found.by_head[place]),
            by_tail=float(found.by_tail[place]),
            same_triple=known == triple,
        )
        for place in best.tolist()
        if found.score_drops[place] > 0
        for known in [_ids(context.train[found.rows[place]])]
    )


@torch.no_grad()
def similar_entities(triple: Ids, model: Model, graph: Graph, *, k: int) -> tuple[SimilarEntity, ...]:
    """Of the entities that train has in the place of the head or of the tail, those that are most like it."""
    unit = torch.nn.functional.normalize(model.entity_vectors(), dim=-1)
    found: list[SimilarEntity] = []
    for side, entity, triples in _in_its_place(triple, graph.train):
        others = torch.from_numpy(triples[:, 0 if side == "head" else 2]).long().to(unit.device)
        cosines = unit[others] @ unit[entity]
        best = cosines.topk(min(k, len(others)))
        for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            other = int(others[place])
            spoken = f"{graph.entities.text(other)} is like {graph.entities.text(entity)}"
            known = NamedTriple.of(_ids(triples[place]), graph)
            found.append(SimilarEntity(graph.entities[other], side, cosine, known, spoken))
    return tuple(sorted((one for one in found if one.cosine > 0), key=lambda one: -one.cosine)[:k])


def _in_its_place(triple: Ids, train: Triples) -> Iterator[tuple[Side, int, Triples]]:
    """The training triples that differ from this one in the head alone, and those that differ in the tail alone."""
    same = train == np.array(triple)
    yield "head", triple[0], np.unique(train[~same[:, 0] & same[:, 1] & same[:, 2]], axis=0)
    yield "tail", triple[2], np.unique(train[same[:, 0] & same[:, 1] & ~same[:, 2]], axis=0)


def _holds(triples: Triples, triple: Ids) -> bool:
    return bool((triples == np.array(triple)).all(1).any())


def _ids(row: Triples) -> Ids:
    head, relation, tail = row.tolist()
    return head, relation, tail
