"""Why a model gives a triple its score: the training triples that support it, and entities alike that have the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dualkg.answers.explanation.influence import influence
from dualkg.answers.newcomers.surroundings import Surroundings
from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.errors import RequestError
from dualkg.models.base import Model, Side
from dualkg.training import Recipe

Name = str | int
Ids = tuple[int, int, int]


@dataclass(frozen=True)
class NamedTriple:
    """A triple by its names, and as people say it."""

    head: str
    relation: str
    tail: str
    spoken: str

    @classmethod
    def of(cls, triple: Ids, graph: Graph) -> NamedTriple:
        head, relation, tail = triple
        kinds = ((graph.entities, head), (graph.relations, relation), (graph.entities, tail))
        spoken = ", ".join(kind.spoken(id) for kind, id in kinds)
        return cls(graph.entities[head], graph.relations[relation], graph.entities[tail], f"({spoken})")


@dataclass(frozen=True)
class Reason:
    """A training triple, and by how much the score falls without it: through the row of the head, and of the tail."""

    triple: NamedTriple
    fall: float
    by_head: float
    by_tail: float
    itself: bool

    def sentence(self) -> str:
        what = f"{self.triple.spoken} itself" if self.itself else self.triple.spoken
        return f"Because {what} is known: without it the score falls by about {self.fall:.2g}."


@dataclass(frozen=True)
class Likeness:
    """An entity like the head, or like the tail, for which the same is known."""

    entity: str
    side: Side
    cosine: float
    triple: NamedTriple
    spoken: str

    def sentence(self) -> str:
        return f"Because {self.spoken} (cosine {self.cosine:.2f}), and {self.triple.spoken} is known."


@dataclass(frozen=True)
class Explanation:
    """The score of a triple, the split that knows it, and what supports it, the strongest first."""

    triple: NamedTriple
    score: float
    split: str | None
    reasons: tuple[Reason, ...]
    alike: tuple[Likeness, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        """The score first, then a sentence for each reason and each entity alike."""
        known = f"; it is known ({self.split})" if self.split else ""
        found = [f"{self.triple.spoken} has score {self.score:.3f}{known}."]
        found += [reason.sentence() for reason in self.reasons]
        if not self.reasons:
            found.append("No training triple of its two entities supports it.")
        return found + [likeness.sentence() for likeness in self.alike]


def explain(
    model: Model,
    graph: Graph,
    triple: tuple[Name, Name, Name],
    *,
    k: int = 5,
    recipe: Recipe | None = None,
    around: Surroundings | None = None,
) -> Explanation:
    """The `k` training triples that most support a triple's score, and as many entities alike that have the same.

    `recipe` is what the model was trained by; `around` what was made of both before, to be used again.
    """
    if k < 1:
        raise RequestError(f"At least one reason must be asked for; k is {k}.")
    head, relation, tail = triple
    ids = graph.entities.id(head), graph.relations.id(relation), graph.entities.id(tail)
    around = around or Surroundings.of(model, graph, recipe=recipe)
    with torch.no_grad():
        score = float(model.score(*(torch.tensor([id], device=model.device) for id in ids)))
    split = next((name for name in SPLITS if _holds(graph.split(name), ids)), None)
    return Explanation(
        NamedTriple.of(ids, graph), score, split, reasons_for(ids, graph, around, k=k), alike(ids, model, graph, k=k)
    )


def reasons_for(triple: Ids, graph: Graph, around: Surroundings, *, k: int) -> tuple[Reason, ...]:
    """The training triples without which the score would fall most."""
    found = influence(triple, around)
    best = np.argsort(-found.falls, kind="stable")[:k]
    return tuple(
        Reason(
            NamedTriple.of(known, graph),
            fall=float(found.falls[place]),
            by_head=float(found.by_head[place]),
            by_tail=float(found.by_tail[place]),
            itself=known == triple,
        )
        for place in best.tolist()
        if found.falls[place] > 0
        for known in [_ids(around.train[found.places[place]])]
    )


@torch.no_grad()
def alike(triple: Ids, model: Model, graph: Graph, *, k: int) -> tuple[Likeness, ...]:
    """Of the entities that train has in the place of the head or of the tail, those that are most like it."""
    unit = torch.nn.functional.normalize(model.entity_vectors(), dim=-1)
    found: list[Likeness] = []
    for side, entity, triples in _in_its_place(triple, graph.train):
        others = torch.from_numpy(triples[:, 0 if side == "head" else 2]).long().to(unit.device)
        cosines = unit[others] @ unit[entity]
        best = cosines.topk(min(k, len(others)))
        for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            other = int(others[place])
            spoken = f"{graph.entities.spoken(other)} is like {graph.entities.spoken(entity)}"
            known = NamedTriple.of(_ids(triples[place]), graph)
            found.append(Likeness(graph.entities[other], side, cosine, known, spoken))
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
