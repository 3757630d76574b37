"""Many questions of one kind, answered by one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dualkg.answers.beliefs.evidence import queries_at_once
from dualkg.answers.beliefs.repeated import RepeatedEvidence
from dualkg.answers.predictor import Answer, Known, Predictor, TripleOf

Kind = Literal["tails", "heads", "relations", "triple", "similar"]
KINDS: tuple[Kind, ...] = ("tails", "heads", "relations", "triple", "similar")


@dataclass(frozen=True)
class Question:
    """What is given, by ids and in the order of `Predictor`'s own arguments; how many answers, and which."""

    given: tuple[int, ...]
    k: int = 10
    known: Known = "mark"


def answer_one(predictor: Predictor, kind: Kind, question: Question) -> list[Answer]:
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
            return [predictor.judge(*given)]
        case "similar":
            return predictor.similar(*given, k=k)


class ManyPredictor:
    """Answers as a `Predictor` does, but all questions of a kind together: one product for the scores, and one pass for
    the probabilities, which remembers what it has summed. Meant for one thread.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.model = predictor.model
        self.graph = predictor.graph
        self._evidence = RepeatedEvidence(predictor.model)

    @torch.no_grad()
    def answer(self, kind: Kind, questions: Sequence[Question]) -> list[list[Answer]]:
        """The answers to each question, in the order of the questions; memory is that of a block of them."""
        ways: dict[Kind, Callable[[Sequence[Question]], list[list[Answer]]]] = {
            "tails": self._tails,
            "heads": self._heads,
            "relations": self._relations,
            "triple": self._triples,
            "similar": self._similar,
        }
        size = queries_at_once(self.model)
        blocks = (questions[start : start + size] for start in range(0, len(questions), size))
        return [answers for block in blocks for answers in ways[kind](block)]

    def _tails(self, questions: Sequence[Question]) -> list[list[Answer]]:
        heads, relations = self._columns(questions)
        scores = self.model.ask_tails(heads, relations)
        return self._believed(self._best_entities(scores, questions), questions, lambda g, id: (*g, id))

    def _heads(self, questions: Sequence[Question]) -> list[list[Answer]]:
        relations, tails = self._columns(questions)
        scores = self.model.ask_heads(relations, tails)
        inverse = self.graph.shape.num_relations
        turned = [Question((q.given[1], q.given[0] + inverse), q.k, q.known) for q in questions]
        return self._believed(self._best_entities(scores, turned), questions, lambda g, id: (id, *g))

    def _relations(self, questions: Sequence[Question]) -> list[list[Answer]]:
        heads, tails = self._columns(questions)
        scores = self.model.score_relations(heads, tails)[:, : self.graph.shape.num_relations]
        splits = [self.predictor.splits_between(*q.given) for q in questions]
        found = self.predictor._best_of_many(scores, self.graph.relations, splits, _wanted(questions))
        return self._believed(found, questions, lambda g, id: (g[0], id, g[1]))

    def _triples(self, questions: Sequence[Question]) -> list[list[Answer]]:
        heads, relations, tails = self._columns(questions)
        names = self.graph.entities
        splits = self.predictor.splits_of_many([q.given[:2] for q in questions])
        scores = self.model.score(heads, relations, tails).tolist()
        found = [
            [Answer(names[t], names.label(t), t, score, split.get(t))]
            for t, score, split in zip(tails.tolist(), scores, splits, strict=True)
        ]
        return self._believed(found, questions, lambda g, id: (g[0], g[1], id))

    def _similar(self, questions: Sequence[Question]) -> list[list[Answer]]:
        (entities,) = self._columns(questions)
        scores = self._unit[entities] @ self._unit.T
        itself: list[dict[int, str]] = [{q.given[0]: "itself"} for q in questions]
        return self.predictor._best_of_many(scores, self.graph.entities, itself, [(q.k, "omit") for q in questions])

    @cached_property
    def _unit(self) -> Tensor:
        """The entities' vectors at length 1, `(num_entities, width)`."""
        return torch.nn.functional.normalize(self.model.entity_vectors(), dim=-1)

    def _columns(self, questions: Sequence[Question]) -> tuple[Tensor, ...]:
        return torch.tensor([q.given for q in questions], device=self.model.device).unbind(1)

    def _best_entities(self, scores: Tensor, questions: Sequence[Question]) -> list[list[Answer]]:
        """Of each row the best; `given` is an entity and a relation, of which r + num_relations is the inverse."""
        splits = self.predictor.splits_of_many([q.given for q in questions])
        return self.predictor._best_of_many(scores, self.graph.entities, splits, _wanted(questions))

    def _believed(
        self, found: list[list[Answer]], questions: Sequence[Question], triple: Callable[..., tuple[int, int, int]]
    ) -> list[list[Answer]]:
        def of(given: tuple[int, ...]) -> TripleOf:
            return lambda id: triple(given, id)

        asked = [(answers, of(question.given)) for answers, question in zip(found, questions, strict=True)]
        return self.predictor.all_believed(asked, evidence=self._evidence)


def _wanted(questions: Sequence[Question]) -> list[tuple[int, Known]]:
    return [(question.k, question.known) for question in questions]
