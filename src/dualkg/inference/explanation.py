"""Explanations: the training triples that support the score of a triple, similar entities with the
same triple, and the paths that lead a path network to it.

The influence of a training triple is the drop of the score without it. To first order the row of an
entity moves by H⁻¹ ∇l, with H the Hessian of its training loss and l the loss of the triple.
docs/explanation.md derives it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.errors import InvalidValue, RequestError
from dualkg.inference.inductive import SIDES, EmbeddingProblem, FrozenContext, with_adjoint
from dualkg.inference.rules import RuleCount, count_rule
from dualkg.inference.supporting_paths import find_paths
from dualkg.models.base import Model
from dualkg.models.paths import PathNetwork
from dualkg.tables.base import Side

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
class PathEdge:
    """A training triple on a path, and whether the path follows it from its tail to its head."""

    triple: NamedTriple
    inverse: bool


@dataclass(frozen=True)
class Rule:
    """The relations of a path as the body of a rule, counted in train.

    `num_cases` are the pairs of entities that the body joins, and `num_true` those among them that
    also have the relation of the explained triple. `confidence` is their quotient. For a rule that
    is not counted, these are None, and `obstacle` completes "The rule is not counted because".
    """

    text: str
    num_cases: int | None
    num_true: int | None
    confidence: float | None
    obstacle: str | None
    sentence: str


@dataclass(frozen=True)
class SupportingPath:
    """A path from the head to the tail, and its share of the prediction of a path network.

    `weight` is the mean of the gradients along the path, and `share` the quotient of it and the sum
    of the weights of all paths that were found.
    """

    edges: tuple[PathEdge, ...]
    weight: float
    share: float
    rule: Rule
    text: str
    sentence: str


@dataclass(frozen=True)
class Explanation:
    """The score of a triple, the split that contains it, and what supports it, strongest first.

    `supporting_triples` and `similar_entities` are None for a model whose embeddings do not have
    them. `supporting_paths` are None without a path network. `network_score` is the score of this
    for the triple, which is then not among its edges. `probability` and `answer_probability` are
    the probabilities of a prediction (see `Prediction`).
    """

    triple: NamedTriple
    score: float
    split: str | None
    supporting_triples: tuple[SupportingTriple, ...] | None
    similar_entities: tuple[SimilarEntity, ...] | None
    network_score: float | None = None
    supporting_paths: tuple[SupportingPath, ...] | None = None
    probability: float | None = None
    answer_probability: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        """The score first, then a sentence for each supporting triple, entity and path."""
        known = f"; it is known ({self.split})" if self.split else ""
        figures = f"score {self.score:.3f}"
        if self.probability is not None:
            figures = f"probability {self.probability:.3f} and {figures}"
        sentences = [f"{self.triple.text} has {figures}{known}."]
        if self.supporting_triples is not None:
            sentences += [support.sentence for support in self.supporting_triples]
            if not self.supporting_triples:
                sentences.append("No training triple of its two entities supports it.")
        if self.similar_entities is not None:
            sentences += [entity.sentence for entity in self.similar_entities]
        if self.supporting_paths is not None:
            sentences += [path.sentence for path in self.supporting_paths]
            if not self.supporting_paths:
                sentences.append("No path from its head to its tail supports it.")
        return sentences


def check_network(model: Model, network_graph: Graph, *, graph: Graph) -> PathNetwork:
    """A model that explains predictions for a graph by paths; refuse any other."""
    network: PathNetwork | None = model.path_network
    if network is None:
        raise RequestError(
            f"`network` should be a run of a PathNetwork; it has the model {type(model).__name__}."
        )
    if not is_same_graph(graph, network_graph):
        if graph.name == network_graph.name:
            found = f"it has other names, triples or splits of {graph.name}"
        else:
            found = f"it was trained on {network_graph.name}, the predictions are of {graph.name}"
        raise RequestError(f"`network` should be a run of the same graph; {found}.")
    return network


def is_same_graph(a: Graph, b: Graph) -> bool:
    """Whether names and triples are the same; a graph in memory may have no fingerprint yet."""
    if a is b:
        return True
    of_a, of_b = (graph.fingerprint or graph.with_fingerprint().fingerprint for graph in (a, b))
    return of_a == of_b


def has_supporting_triples(model: Model) -> bool:
    """Whether the embeddings of a model have influences of triples."""
    try:
        with_adjoint(model)
    except RequestError:
        return False
    return True


def explain(
    context: FrozenContext,
    triple: Sequence[str | int],
    *,
    k: int = 5,
    network: PathNetwork | None = None,
) -> Explanation:
    """Explain the score of a triple by the `k` training triples that support it most.

    The explanation also has `k` similar entities that train has in the same place, and, with a
    `network` of the same graph, the `k` paths that carry the network's prediction.
    """
    explanation = _explanation(context.model, context.graph, triple, k=k, network=network)
    ids = _ids_of(triple, context.graph)
    return replace(
        explanation,
        supporting_triples=supporting_triples(ids, context, k=k),
        similar_entities=similar_entities(ids, context, k=k),
    )


def explain_by_paths(
    model: Model, graph: Graph, triple: Sequence[str | int], *, network: PathNetwork, k: int = 5
) -> Explanation:
    """Explain the score of a triple by the `k` paths that carry the prediction of a network alone.

    This is for path networks themselves, and for models without influences of triples.
    """
    return _explanation(model, graph, triple, k=k, network=network)


def _explanation(
    model: Model,
    graph: Graph,
    triple: Sequence[str | int],
    *,
    k: int,
    network: PathNetwork | None,
) -> Explanation:
    """The score, and the supporting paths of a network."""
    if k < 1:
        raise InvalidValue("k", expected="at least 1", found=k)
    ids = _ids_of(triple, graph)
    head, relation, tail = (torch.tensor([id], device=model.device) for id in ids)
    with torch.no_grad():
        score = model.score(head, relation, tail)
    network_score = None
    paths = None
    if network is not None:
        network_score, paths = supporting_paths(ids, network, graph, k=k)
    return Explanation(
        triple=NamedTriple.of(ids, graph),
        score=float(score),
        split=_split_of(ids, graph),
        supporting_triples=None,
        similar_entities=None,
        network_score=network_score,
        supporting_paths=paths,
    )


def _ids_of(triple: Sequence[str | int], graph: Graph) -> Ids:
    head, relation, tail = triple
    return graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)


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


# -- paths ---------------------------------------------------------------------


def relation_words(label: str) -> str:
    """A relation in words: `spoken_language` is displayed as "spoken language"."""
    return label.strip("_").replace("_", " ") or label


def supporting_paths(
    triple: Ids, network: PathNetwork, graph: Graph, *, k: int
) -> tuple[float, tuple[SupportingPath, ...]]:
    """The score of a network for a triple, and the paths with the largest shares of it."""
    score, found = find_paths(triple, network)
    edges = network.edges
    num_relations = graph.shape.num_relations
    paths = []
    for path in found[:k]:
        numbers = list(path.edges)
        relations = edges.relations[numbers].tolist()
        heads = edges.heads[numbers].tolist()
        tails = edges.tails[numbers].tolist()
        path_edges = []
        for head, relation, tail in zip(heads, relations, tails, strict=True):
            is_inverse = relation >= num_relations
            known = (tail, relation - num_relations, head) if is_inverse else (head, relation, tail)
            path_edges.append(PathEdge(NamedTriple.of(known, graph), is_inverse))
        rule = _rule(relations, triple, graph)
        text = _path_text([heads[0], *tails], relations, graph)
        paths.append(
            SupportingPath(
                edges=tuple(path_edges),
                weight=path.weight,
                share=path.share,
                rule=rule,
                text=text,
                sentence=f"{text}: {share_text(path.share)} of the prediction. {rule.sentence}",
            )
        )
    return score, tuple(paths)


def _path_text(entities: Sequence[int], relations: Sequence[int], graph: Graph) -> str:
    """`Lyon — located in → France — currency → Euro`; inverse relations point to the left."""
    words = [graph.entities.text(entities[0])]
    for relation, entity in zip(relations, entities[1:], strict=True):
        words += [_arrow(relation, graph), graph.entities.text(entity)]
    return " ".join(words)


def _arrow(relation: int, graph: Graph) -> str:
    num_relations = graph.shape.num_relations
    words = relation_words(graph.relations.text(relation % num_relations))
    return f"— {words} →" if relation < num_relations else f"← {words} —"


def _rule(body: Sequence[int], triple: Ids, graph: Graph) -> Rule:
    """The rule of a path: `x — located in → · — currency → y: x — currency → y`."""
    count = count_rule(body, triple, graph)
    arrows = [_arrow(relation, graph) for relation in body]
    return Rule(
        text=f"x {' · '.join(arrows)} y: x {_arrow(triple[1], graph)} y",
        num_cases=count.num_cases,
        num_true=count.num_true,
        confidence=count.confidence,
        obstacle=count.obstacle,
        sentence=_rule_sentence(count),
    )


def _rule_sentence(count: RuleCount) -> str:
    if count.obstacle is not None:
        return f"The rule is not counted because {count.obstacle}."
    if count.confidence is None:
        return "The rule has no other case."
    cases = "1 case" if count.num_cases == 1 else f"{count.num_cases:,} cases"
    return f"The rule holds in {share_text(count.confidence)} of {cases}."


def share_text(share: float) -> str:
    """87 %, and <1 % for what is positive and rounds to nothing."""
    if 0 < share < 0.005:
        return "<1 %"
    return f"{100 * share:.0f} %"
