"""What is known of one entity, and what a model would add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import Ids, KnownAnswers
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.inference.calibration import (
    CachedLogProbabilities,
    Calibration,
    DomainRange,
    PriorCorrection,
    query_block_size,
    triple_log_probabilities,
)
from dualkg.inference.explanation import Explanation, explain
from dualkg.inference.extension import NamedTriple, add_entity
from dualkg.inference.inductive import FrozenContext
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.models.base import Model, Side
from dualkg.training.recipe import Recipe

Name = str | int
Known = Literal["mark", "omit"]
TripleOf = Callable[[int], tuple[int, int, int]]


@dataclass(frozen=True)
class Prediction:
    """One answer: what it is, its score, whether the graph already has it (and in which split), how probable it is."""

    name: str
    label: str
    id: int
    score: float
    split: str | None = None
    probability: float | None = None  # where there is a calibration; never of what train has, which is no candidate

    @property
    def known(self) -> bool:
        return self.split is not None

    @property
    def entity(self) -> str:
        return self.name

    @property
    def relation(self) -> str:
        return self.name

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "known": self.known}


class Predictor:
    """Answers questions about a graph with a trained model.

    Entities and relations are named by name, by label, or by id as a number. Scores of one question compare
    with each other, not with those of another question.
    """

    def __init__(
        self,
        model: Model,
        graph: Graph,
        *,
        recipe: Recipe | None = None,
        calibration: Calibration | None = None,
        prediction_sets: PredictionSets | None = None,
    ) -> None:
        model.check_shape(graph.shape)
        self.model = model.eval()
        self.graph = graph
        self.recipe = recipe  # what the model was trained by, for rows that are solved for
        self.calibration = calibration
        self._prediction_sets = prediction_sets

    @cached_property
    def _known(self) -> dict[str, KnownAnswers]:
        return {split: KnownAnswers.of(self.graph, [split]) for split in SPLITS if len(self.graph.split(split))}

    @cached_property
    def all_known(self) -> KnownAnswers:
        return KnownAnswers.of(self.graph)

    @cached_property
    def _domain_range(self) -> DomainRange:
        return DomainRange.of(self.graph)

    @cached_property
    def prior_correction(self) -> PriorCorrection | None:
        """How probable any triple is, where there is a calibration."""
        return None if self.calibration is None else PriorCorrection.of(self.calibration, self.graph)

    @torch.no_grad()
    def tails(self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark") -> list[Prediction]:
        """Answer (head, relation, ?), best first."""
        h, r = self.graph.entities.id(head), self.graph.relations.id(relation)
        scores = self.model.predict_tails(self._ids(h), self._ids(r))[0]
        answers = self._best(scores, self.graph.entities, self.splits_of(h, r), k=k, known=known)
        return self._with_probabilities(answers, lambda id: (h, r, id))

    @torch.no_grad()
    def heads(self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Prediction]:
        """Answer (?, relation, tail), best first."""
        r, t = self.graph.relations.id(relation), self.graph.entities.id(tail)
        scores = self.model.predict_heads(self._ids(r), self._ids(t))[0]
        inverse = r + self.graph.shape.num_relations
        answers = self._best(scores, self.graph.entities, self.splits_of(t, inverse), k=k, known=known)
        return self._with_probabilities(answers, lambda id: (id, r, t))

    @torch.no_grad()
    def relations(self, head: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Prediction]:
        """Answer (head, ?, tail) among the graph's own relations, best first."""
        h, t = self.graph.entities.id(head), self.graph.entities.id(tail)
        scores = self.model.score_relations(self._ids(h), self._ids(t))[0, : self.graph.shape.num_relations]
        answers = self._best(scores, self.graph.relations, self.splits_between(h, t), k=k, known=known)
        return self._with_probabilities(answers, lambda id: (h, id, t))

    @torch.no_grad()
    def score(self, head: Name, relation: Name, tail: Name) -> float:
        """The score of one triple."""
        ids = self.graph.entities.id(head), self.graph.relations.id(relation), self.graph.entities.id(tail)
        return float(self.model.score(*(self._ids(id) for id in ids)))

    def triple(self, head: Name, relation: Name, tail: Name) -> Prediction:
        """One triple as an answer: its tail, with the score and the split that knows it."""
        h, r, t = self.graph.entities.id(head), self.graph.relations.id(relation), self.graph.entities.id(tail)
        names = self.graph.entities
        answer = Prediction(names[t], names.label(t), t, self.score(h, r, t), self.splits_of(h, r).get(t))
        return self._with_probabilities([answer], lambda id: (h, r, id))[0]

    def prediction_set(
        self, head: Name | None, relation: Name, tail: Name | None = None, *, coverage: float = 0.9
    ) -> list[Prediction]:
        """The few answers among which the missing one is with that probability, best first; known ones not among them.

        It asks for the tail, or where `head` is None for the head. See docs/calibration_data.md for what that assumes.
        """
        if (head is None) == (tail is None):
            raise RequestError(
                "An prediction set is asked for by a relation and one of head and tail; the other is None."
            )
        side: Side = "head" if head is None else "tail"
        given = self.graph.entities.id(tail if head is None else head)  # type: ignore[arg-type]
        r, names = self.graph.relations.id(relation), self.graph.entities
        if self._prediction_sets is None:
            self._prediction_sets = PredictionSets.fit(self.model, self.graph)
        found = self._prediction_sets.of(self.model, self.all_known, given, r, side=side, coverage=coverage)
        answers = [
            Prediction(names[id], names.label(id), id, score)
            for id, score in zip(found.entities.tolist(), found.scores.tolist(), strict=True)
        ]
        return self._with_probabilities(answers, lambda id: (given, r, id) if side == "tail" else (id, r, given))

    def add(self, name: str, *, triples: Sequence[NamedTriple]) -> Predictor:
        """A predictor that knows one more entity, placed by triples with known ones; this one stays as it is.

        Calibration and prediction sets go with it: they are of the same relations.
        """
        found = add_entity(self.model, self.graph, name, triples=triples, context=self._context)
        return Predictor(
            found.model,
            found.graph,
            recipe=self.recipe,
            calibration=self.calibration,
            prediction_sets=self._prediction_sets,
        )

    def explain(self, head: Name, relation: Name, tail: Name, *, k: int = 5) -> Explanation:
        """The training triples that most support a triple's score, and entities alike that have the same."""
        return explain(self.model, self.graph, (head, relation, tail), k=k, context=self._context)

    @cached_property
    def _context(self) -> FrozenContext:
        return FrozenContext.of(self.model, self.graph, recipe=self.recipe)

    @torch.no_grad()
    def similar(self, entity: Name, *, k: int = 10) -> list[Prediction]:
        """The entities whose embeddings point the same way; the score is the cosine."""
        id = self.graph.entities.id(entity)
        unit = torch.nn.functional.normalize(self.model.entity_vectors(), dim=-1)
        scores = unit @ unit[id]
        return self._best(scores, self.graph.entities, {id: "itself"}, k=k, known="omit")

    def _ids(self, id: int) -> Tensor:
        return torch.tensor([id], device=self.model.device)

    def _with_probabilities(self, answers: list[Prediction], triple: TripleOf) -> list[Prediction]:
        """Answers with their probabilities, where there is a calibration."""
        return self.with_probabilities([(answers, triple)])[0]

    def with_probabilities(
        self,
        asked: Sequence[tuple[list[Prediction], TripleOf]],
        *,
        log_probability: Callable[[Ids], Tensor] | None = None,
    ) -> list[list[Prediction]]:
        """The same for the answers to several questions, each with what makes a triple of the id of an answer."""
        triples = [triple(answer.id) for answers, triple in asked for answer in answers if answer.split != "train"]
        if self.calibration is None or not triples:
            return [answers for answers, _ in asked]
        ids = np.array(triples)
        measured = log_probability(ids) if log_probability else triple_log_probabilities(self.model, ids)
        relations, patterns = (torch.from_numpy(one) for one in (ids[:, 1], self._domain_range(ids)))
        probabilities = self.calibration.probability(measured.cpu(), relations, patterns)
        found = dict(zip(triples, probabilities.tolist(), strict=True))
        return [
            [a if a.split == "train" else replace(a, probability=found[triple(a.id)]) for a in answers]
            for answers, triple in asked
        ]

    def splits_of(self, entity: int, relation: int) -> dict[int, str]:
        """Which split gives each known answer; the first that does."""
        return self.splits_of_queries([(entity, relation)])[0]

    def splits_of_queries(self, questions: Sequence[tuple[int, ...]]) -> list[dict[int, str]]:
        """The same of several questions, each an entity and a relation."""
        found: list[dict[int, str]] = [{} for _ in questions]
        entities, relations = np.array(questions).T
        for split, known in self._known.items():
            for row, answer in zip(*(ids.tolist() for ids in known(entities, relations)), strict=True):
                found[row].setdefault(answer, split)
        return found

    def splits_between(self, head: int, tail: int) -> dict[int, str]:
        found: dict[int, str] = {}
        for split in SPLITS:
            triples = self.graph.split(split)
            for relation in triples[(triples[:, 0] == head) & (triples[:, 2] == tail), 1].tolist():
                found.setdefault(relation, split)
        return found

    def _best(
        self, scores: Tensor, names: Vocabulary, splits: dict[int, str], *, k: int, known: Known
    ) -> list[Prediction]:
        return self._best_of_many(scores[None], names, [splits], [(k, known)])[0]

    def _best_of_many(
        self, scores: Tensor, names: Vocabulary, splits: list[dict[int, str]], asked: Sequence[tuple[int, Known]]
    ) -> list[list[Prediction]]:
        """The best of each row of scores, as many as are asked for, and without known ones where that is asked for."""
        for k, known in asked:
            if k < 1:
                raise RequestError(f"At least one answer must be asked for; k is {k}.")
            if known not in ("mark", "omit"):
                raise RequestError(f"Known answers are marked or left out: 'mark' or 'omit'; '{known}' came.")
        omitted = [split if known == "omit" else {} for split, (_, known) in zip(splits, asked, strict=True)]
        places = [(row, id) for row, split in enumerate(omitted) for id in split]
        if places:
            scores = scores.clone()
            scores[tuple(torch.tensor(places, device=scores.device).unbind(1))] = -torch.inf
        num_names = scores.shape[1]
        best = scores.topk(min(max(k for k, _ in asked), num_names))
        rows = zip(best.values.tolist(), best.indices.tolist(), splits, omitted, asked, strict=True)
        return [
            [
                Prediction(names[id], names.label(id), id, score, split.get(id))
                for score, id in list(zip(values, ids, strict=True))[: min(k, num_names - len(left_out))]
            ]
            for values, ids, split, left_out, (k, _) in rows
        ]


LOOKED_AT = 5  # times as many triples as are wanted are measured from both their ends


@dataclass(frozen=True)
class Fact:
    """A triple by ids; the split that has it, or how likely a model holds it to be."""

    head: int
    relation: int
    tail: int
    split: str | None = None
    probability: float | None = None
    log_probability: float | None = None


@dataclass(frozen=True)
class KnownFacts:
    """The triples that have an entity, the first so many of them, and how many there are."""

    facts: list[Fact]
    number: int


def known_facts(predictor: Predictor, entity: int, *, most: int) -> KnownFacts:
    """By split; those with the entity as head before those with it as tail."""
    facts: list[Fact] = []
    for split in SPLITS:
        triples = predictor.graph.split(split)
        is_head = triples[:, 0] == entity
        for which in (is_head, ~is_head & (triples[:, 2] == entity)):
            facts += [Fact(head, relation, tail, split=split) for head, relation, tail in triples[which].tolist()]
    return KnownFacts(facts[:most], len(facts))


@torch.no_grad()
def predicted_facts(predictor: Predictor, entity: int, *, k: int) -> list[Fact]:
    """New triples with the entity as head or as tail, best first: by probability, or without one by log_probability.

    Every relation is asked from both its ends. Of all answers, `LOOKED_AT` · k that are likeliest to their own
    question, and where there are prior_correction to be missing, are then measured from both ends. A triple of the entity
    with itself is none.
    """
    prior_correction = predictor.prior_correction
    triples = _likeliest(predictor, entity, number=LOOKED_AT * k)
    if not len(triples):
        return []
    log_probability = triple_log_probabilities(predictor.model, triples).cpu()
    worth, probability = log_probability, None
    if prior_correction is not None:
        relations, patterns = (torch.from_numpy(one) for one in (triples[:, 1], prior_correction.domain_range(triples)))
        worth = prior_correction.log_odds(log_probability, relations, patterns)
        probability = worth.sigmoid()
    best = torch.from_numpy(np.lexsort((-log_probability.numpy(), -worth.numpy())))[:k]
    believed = [None] * len(best) if probability is None else probability[best].tolist()
    return [
        Fact(head, relation, tail, probability=likely, log_probability=measured)
        for (head, relation, tail), likely, measured in zip(
            triples[best.numpy()].tolist(), believed, log_probability[best].tolist(), strict=True
        )
    ]


def _likeliest(predictor: Predictor, entity: int, *, number: int) -> Ids:
    """Triples `(n, 3)` that no split has, the likeliest answers of all questions that the entity can be given in."""
    model, shape = predictor.model, predictor.graph.shape
    found: list[tuple[float, int, int, int]] = []
    every = torch.arange(shape.num_relations, device=model.device)
    for relations in torch.split(every, query_block_size(model)):
        given = torch.full_like(relations, entity)
        for backward in (False, True):
            scores = model.predict_heads(relations, given) if backward else model.predict_tails(given, relations)
            likely = scores.log_softmax(-1)
            if predictor.prior_correction is not None:
                open_ = predictor.prior_correction.query_priors(entity, relations.cpu(), "tail" if backward else "head")
                likely += open_.log().to(likely)[:, None]
            inverse = relations.cpu().numpy() + (shape.num_relations if backward else 0)
            rows, known = predictor.all_known(np.full(len(inverse), entity), inverse)
            likely[torch.from_numpy(rows).to(likely.device), torch.from_numpy(known).to(likely.device)] = -torch.inf
            likely[:, entity] = -torch.inf
            best = likely.flatten().topk(min(number, likely.numel()))
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                row, other = divmod(place, shape.num_entities)
                ends = (other, entity) if backward else (entity, other)
                found.append((value, ends[0], int(relations[row]), ends[1]))
    found.sort(key=lambda one: -one[0])
    return np.array([triple for value, *triple in found[:number] if value > -np.inf], dtype=np.int64).reshape(-1, 3)


QueryType = Literal["tails", "heads", "relations", "triple", "similar"]
QUERY_TYPES: tuple[QueryType, ...] = ("tails", "heads", "relations", "triple", "similar")


@dataclass(frozen=True)
class Query:
    """What is given, by ids and in the order of `Predictor`'s own arguments; how many answers, and which."""

    given: tuple[int, ...]
    k: int = 10
    known: Known = "mark"


def predict_one(predictor: Predictor, kind: QueryType, question: Query) -> list[Prediction]:
    """The plain form: one question, one call of the predictor."""
    given, k, known = question.given, question.k, question.known
    match kind:
        case "tails":
            return predictor.tails(*given, k=k, known=known)
        case "heads":
            return predictor.heads(*given, k=k, known=known)
        case "relations":
            return predictor.relations(*given, k=k, known=known)
        case "triple":
            return [predictor.triple(*given)]
        case "similar":
            return predictor.similar(*given, k=k)


class BatchedPredictor:
    """Answers as a `Predictor` does, but all questions of a kind together: one product for the scores, and one pass for
    the probabilities, which remembers what it has summed. Meant for one thread.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.model = predictor.model
        self.graph = predictor.graph
        self._evidence = CachedLogProbabilities(predictor.model)

    @torch.no_grad()
    def answer(self, kind: QueryType, questions: Sequence[Query]) -> list[list[Prediction]]:
        """The answers to each question, in the order of the questions; memory is that of a block of them."""
        ways: dict[QueryType, Callable[[Sequence[Query]], list[list[Prediction]]]] = {
            "tails": self._tails,
            "heads": self._heads,
            "relations": self._relations,
            "triple": self._triples,
            "similar": self._similar,
        }
        size = query_block_size(self.model)
        blocks = (questions[start : start + size] for start in range(0, len(questions), size))
        return [answers for block in blocks for answers in ways[kind](block)]

    def _tails(self, questions: Sequence[Query]) -> list[list[Prediction]]:
        heads, relations = self._columns(questions)
        scores = self.model.predict_tails(heads, relations)
        return self._with_probabilities(self._best_entities(scores, questions), questions, lambda g, id: (*g, id))

    def _heads(self, questions: Sequence[Query]) -> list[list[Prediction]]:
        relations, tails = self._columns(questions)
        scores = self.model.predict_heads(relations, tails)
        inverse = self.graph.shape.num_relations
        rotated = [Query((q.given[1], q.given[0] + inverse), q.k, q.known) for q in questions]
        return self._with_probabilities(self._best_entities(scores, rotated), questions, lambda g, id: (id, *g))

    def _relations(self, questions: Sequence[Query]) -> list[list[Prediction]]:
        heads, tails = self._columns(questions)
        scores = self.model.score_relations(heads, tails)[:, : self.graph.shape.num_relations]
        splits = [self.predictor.splits_between(*q.given) for q in questions]
        found = self.predictor._best_of_many(scores, self.graph.relations, splits, _wanted(questions))
        return self._with_probabilities(found, questions, lambda g, id: (g[0], id, g[1]))

    def _triples(self, questions: Sequence[Query]) -> list[list[Prediction]]:
        heads, relations, tails = self._columns(questions)
        names = self.graph.entities
        splits = self.predictor.splits_of_queries([q.given[:2] for q in questions])
        scores = self.model.score(heads, relations, tails).tolist()
        found = [
            [Prediction(names[t], names.label(t), t, score, split.get(t))]
            for t, score, split in zip(tails.tolist(), scores, splits, strict=True)
        ]
        return self._with_probabilities(found, questions, lambda g, id: (g[0], g[1], id))

    def _similar(self, questions: Sequence[Query]) -> list[list[Prediction]]:
        (entities,) = self._columns(questions)
        scores = self._unit[entities] @ self._unit.T
        itself: list[dict[int, str]] = [{q.given[0]: "itself"} for q in questions]
        return self.predictor._best_of_many(scores, self.graph.entities, itself, [(q.k, "omit") for q in questions])

    @cached_property
    def _unit(self) -> Tensor:
        """The entities' vectors at length 1, `(num_entities, width)`."""
        return torch.nn.functional.normalize(self.model.entity_vectors(), dim=-1)

    def _columns(self, questions: Sequence[Query]) -> tuple[Tensor, ...]:
        return torch.tensor([q.given for q in questions], device=self.model.device).unbind(1)

    def _best_entities(self, scores: Tensor, questions: Sequence[Query]) -> list[list[Prediction]]:
        """Of each row the best; `given` is an entity and a relation, of which r + num_relations is the inverse."""
        splits = self.predictor.splits_of_queries([q.given for q in questions])
        return self.predictor._best_of_many(scores, self.graph.entities, splits, _wanted(questions))

    def _with_probabilities(
        self, found: list[list[Prediction]], questions: Sequence[Query], triple: Callable[..., tuple[int, int, int]]
    ) -> list[list[Prediction]]:
        def of(given: tuple[int, ...]) -> TripleOf:
            return lambda id: triple(given, id)

        asked = [(answers, of(question.given)) for answers, question in zip(found, questions, strict=True)]
        return self.predictor.with_probabilities(asked, log_probability=self._evidence)


def _wanted(questions: Sequence[Query]) -> list[tuple[int, Known]]:
    return [(question.k, question.known) for question in questions]
