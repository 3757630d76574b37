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
from dualkg.errors import InvalidValue
from dualkg.inference.inductive import SIDES, EmbeddingProblem, FrozenContext
from dualkg.tables.lookup import Side

Ids = tuple[int, int, int]
Floats = npt.NDArray[np.float64]

# Of conjugate gradients.
MAX_STEPS = 200
TOLERANCE = 1e-5

# At exact zeros, autograd misses the second derivative of the third power of a modulus.
NEARLY_ZERO = 1e-12


# -- influence ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Influence:
    """Rows of train, and the score drop without each: by the embedding of the head, and of the
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
    ends = context.graph.train[:, [0, 2]]
    rows = np.flatnonzero(((ends == head) | (ends == tail)).any(1))

    by_head = _influence_by(head, triple, rows, context=context)
    if head == tail:  # One entity has one row of the table, and one problem.
        by_tail = np.zeros(len(rows))
    else:
        by_tail = _influence_by(tail, triple, rows, context=context)
    return Influence(rows, by_head, by_tail)


def _influence_by(
    entity: int, triple: Ids, rows: npt.NDArray[np.int64], *, context: FrozenContext
) -> Floats:
    """The score drop without each row of train by the embedding of one entity, `(num_rows,)`."""
    triples = context.graph.train[rows]
    has_entity = (triples[:, [0, 2]] == entity).any(1)
    gradient = score_gradient(entity, triple, context)

    drops = np.zeros(len(rows))
    drops[has_entity] = score_drops(entity, triples[has_entity], gradient, context=context)
    return drops


@torch.no_grad()
def score_gradient(entity: int, triple: Ids, context: FrozenContext) -> Tensor:
    """The gradient of the score of a triple by the rows of an entity, `(num_rows, width)`."""
    model = context.model
    head, relation, tail = (torch.tensor([id], device=model.device) for id in triple)

    gradient = torch.zeros_like(context.rows_of(entity))
    if entity == triple[0]:
        gradient[0] += model.map_tail(context.vectors(tail, "tail"), relation)[0]
    if entity == triple[2]:
        gradient[-1] += model.map_head(context.vectors(head, "head"), relation)[0]
    return gradient


def score_drops(
    entity: int, triples: Triples, score_gradient: Tensor, *, context: FrozenContext
) -> Floats:
    """The drop of a score without each of the triples of an entity, `(num_triples,)`."""
    ids = torch.from_numpy(triples).long().to(score_gradient.device)
    problem = EmbeddingProblem.of(ids.new_tensor([entity]), ids, context, negative_weight=1.0)
    if not problem.groups:
        return np.zeros(len(triples))

    with torch.enable_grad():
        rows = context.rows_of(entity)[None]
        rows = torch.where(rows == 0, NEARLY_ZERO, rows.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(problem(rows), rows, create_graph=True)

        def hessian_product(direction: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, rows, direction, retain_graph=True)[0]

        solution = conjugate_gradients(hessian_product, score_gradient[None])

        # Σᵢ wᵢ ∇lᵢ is linear in w, so the derivative of its product with the solution by wᵢ is
        # ∇lᵢ · solution.
        losses = problem.triple_losses(rows, len(triples))
        weights = torch.zeros_like(losses).requires_grad_()
        (weighted_sum,) = torch.autograd.grad(losses, rows, weights, create_graph=True)
        (changes,) = torch.autograd.grad((weighted_sum * solution).sum(), weights)
    return -changes.double().cpu().numpy()


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Solve H x = `target`; `product` returns H x for a positive definite H."""
    solution = torch.zeros_like(target)
    residual = target.clone()
    direction = residual
    squared_norm = float(residual.square().sum())
    small_enough = TOLERANCE**2 * squared_norm

    for _ in range(MAX_STEPS):
        if squared_norm <= small_enough:
            break
        direction_product = product(direction)
        length = squared_norm / float((direction * direction_product).sum())
        solution = solution + length * direction
        residual = residual - length * direction_product

        previous = squared_norm
        squared_norm = float(residual.square().sum())
        direction = residual + (squared_norm / previous) * direction
    return solution


# -- explanations ------------------------------------------------------------


@dataclass(frozen=True)
class NamedTriple:
    """A triple by name, and as text with labels."""

    head: str
    relation: str
    tail: str
    text: str

    @classmethod
    def of(cls, triple: Sequence[int], graph: Graph) -> Self:
        head, relation, tail = triple
        entities = graph.entities
        relations = graph.relations
        text = f"({entities.text(head)}, {relations.text(relation)}, {entities.text(tail)})"
        return cls(entities[head], relations[relation], entities[tail], text)


@dataclass(frozen=True)
class SupportingTriple:
    """A training triple, and the score drop without it by the embeddings of head and tail.

    `same_triple` says whether it is the explained triple itself.
    """

    triple: NamedTriple
    score_drop: float
    by_head: float
    by_tail: float
    same_triple: bool
    sentence: str


@dataclass(frozen=True)
class SimilarEntity:
    """An entity similar to the head or the tail, with a training triple that has it there."""

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
        score = f"{self.triple.text} has score {self.score:.3f}{known}."

        supporting = [support.sentence for support in self.supporting_triples]
        if not supporting:
            supporting = ["No training triple of its two entities supports it."]
        similar = [entity.sentence for entity in self.similar_entities]
        return [score, *supporting, *similar]


def explain(context: FrozenContext, triple: Sequence[str | int], *, k: int = 5) -> Explanation:
    """Explain the score of a triple by the `k` training triples that support it most.

    The explanation also has `k` similar entities that train has in the same place.
    """
    if k < 1:
        raise InvalidValue("k", expected="at least 1", found=k)
    graph = context.graph
    model = context.model
    head, relation, tail = triple
    ids = (graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail))

    head_id, relation_id, tail_id = (torch.tensor([id], device=model.device) for id in ids)
    score = model.score(head_id, relation_id, tail_id).detach()
    return Explanation(
        triple=NamedTriple.of(ids, graph),
        score=float(score),
        split=_split_of(ids, graph),
        supporting_triples=supporting_triples(ids, context, k=k),
        similar_entities=similar_entities(ids, context, k=k),
    )


def _split_of(triple: Ids, graph: Graph) -> str | None:
    """The first split that contains a triple."""
    for name in SPLITS:
        if (graph.split(name) == np.array(triple)).all(1).any():
            return name
    return None


def supporting_triples(
    triple: Ids, context: FrozenContext, *, k: int
) -> tuple[SupportingTriple, ...]:
    """The training triples without which the score would drop most."""
    graph = context.graph
    influences = influence(triple, context)
    drops = influences.score_drops

    supporting = []
    for place in np.argsort(-drops, kind="stable")[:k].tolist():
        drop = float(drops[place])
        if not drop > 0:
            break
        known = graph.train[influences.rows[place]].tolist()
        is_same = known == list(triple)
        named = NamedTriple.of(known, graph)
        subject = f"{named.text} itself" if is_same else named.text
        supporting.append(
            SupportingTriple(
                triple=named,
                score_drop=drop,
                by_head=float(influences.by_head[place]),
                by_tail=float(influences.by_tail[place]),
                same_triple=is_same,
                sentence=f"{subject} is known: without it the score drops by about {drop:.2g}.",
            )
        )
    return tuple(supporting)


@torch.no_grad()
def similar_entities(triple: Ids, context: FrozenContext, *, k: int) -> tuple[SimilarEntity, ...]:
    """The most similar entities among those that train has in place of the head or of the tail."""
    unit_vectors = torch.nn.functional.normalize(context.model.entity_vectors(), dim=-1)
    similar = [
        *_similar_in_column(0, triple, unit_vectors, graph=context.graph, k=k),
        *_similar_in_column(2, triple, unit_vectors, graph=context.graph, k=k),
    ]
    positive = [entity for entity in similar if entity.cosine > 0]
    positive.sort(key=lambda entity: -entity.cosine)
    return tuple(positive[:k])


def _similar_in_column(
    column: int, triple: Ids, unit_vectors: Tensor, *, graph: Graph, k: int
) -> list[SimilarEntity]:
    """The `k` most similar entities that train has in one column, with the rest of the triple."""
    entity = triple[column]
    is_same = graph.train == np.array(triple)
    differs_there = ~is_same[:, column] & is_same[:, 1] & is_same[:, 2 - column]
    triples = np.unique(graph.train[differs_there], axis=0)

    candidates = torch.from_numpy(triples[:, column]).long().to(unit_vectors.device)
    cosines = unit_vectors[candidates] @ unit_vectors[entity]
    best = cosines.topk(min(k, len(candidates)))

    similar = []
    for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        candidate = int(candidates[place])
        known = NamedTriple.of(triples[place].tolist(), graph)
        names = f"{graph.entities.text(candidate)} is similar to {graph.entities.text(entity)}"
        similar.append(
            SimilarEntity(
                entity=graph.entities[candidate],
                side=SIDES[column // 2],
                cosine=cosine,
                triple=known,
                sentence=f"{names} (cosine {cosine:.2f}), and {known.text} is known.",
            )
        )
    return similar
