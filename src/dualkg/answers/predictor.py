"""Questions by name, answers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualkg.answers.beliefs import AnswerSets, Calibration, Kinds, Prospects, evidence_of
from dualkg.answers.explanation import Explanation, explain
from dualkg.answers.newcomers import Surroundings, with_newcomer
from dualkg.answers.newcomers.extension import NamedTriple
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.known import Ids, KnownAnswers
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.models.base import Model, Side
from dualkg.training import Recipe

Name = str | int
Known = Literal["mark", "omit"]
TripleOf = Callable[[int], tuple[int, int, int]]


@dataclass(frozen=True)
class Answer:
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
        answer_sets: AnswerSets | None = None,
    ) -> None:
        model.check_shape(graph.shape)
        self.model = model.eval()
        self.graph = graph
        self.recipe = recipe  # what the model was trained by, for rows that are solved for
        self.calibration = calibration
        self._answer_sets = answer_sets

    @cached_property
    def _known(self) -> dict[str, KnownAnswers]:
        return {split: KnownAnswers.of(self.graph, [split]) for split in SPLITS if len(self.graph.split(split))}

    @cached_property
    def all_known(self) -> KnownAnswers:
        return KnownAnswers.of(self.graph)

    @cached_property
    def _kinds(self) -> Kinds:
        return Kinds.of(self.graph)

    @cached_property
    def prospects(self) -> Prospects | None:
        """How probable any triple is, where there is a calibration."""
        return None if self.calibration is None else Prospects.of(self.calibration, self.graph)

    @torch.no_grad()
    def tails(self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark") -> list[Answer]:
        """Answer (head, relation, ?), best first."""
        h, r = self.graph.entities.id(head), self.graph.relations.id(relation)
        scores = self.model.ask_tails(self._ids(h), self._ids(r))[0]
        answers = self._best(scores, self.graph.entities, self.splits_of(h, r), k=k, known=known)
        return self._believed(answers, lambda id: (h, r, id))

    @torch.no_grad()
    def heads(self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Answer]:
        """Answer (?, relation, tail), best first."""
        r, t = self.graph.relations.id(relation), self.graph.entities.id(tail)
        scores = self.model.ask_heads(self._ids(r), self._ids(t))[0]
        inverse = r + self.graph.shape.num_relations
        answers = self._best(scores, self.graph.entities, self.splits_of(t, inverse), k=k, known=known)
        return self._believed(answers, lambda id: (id, r, t))

    @torch.no_grad()
    def relations(self, head: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Answer]:
        """Answer (head, ?, tail) among the graph's own relations, best first."""
        h, t = self.graph.entities.id(head), self.graph.entities.id(tail)
        scores = self.model.score_relations(self._ids(h), self._ids(t))[0, : self.graph.shape.num_relations]
        answers = self._best(scores, self.graph.relations, self.splits_between(h, t), k=k, known=known)
        return self._believed(answers, lambda id: (h, id, t))

    @torch.no_grad()
    def score(self, head: Name, relation: Name, tail: Name) -> float:
        """The score of one triple."""
        ids = self.graph.entities.id(head), self.graph.relations.id(relation), self.graph.entities.id(tail)
        return float(self.model.score(*(self._ids(id) for id in ids)))

    def judge(self, head: Name, relation: Name, tail: Name) -> Answer:
        """One triple as an answer: its tail, with the score and the split that knows it."""
        h, r, t = self.graph.entities.id(head), self.graph.relations.id(relation), self.graph.entities.id(tail)
        names = self.graph.entities
        answer = Answer(names[t], names.label(t), t, self.score(h, r, t), self.splits_of(h, r).get(t))
        return self._believed([answer], lambda id: (h, r, id))[0]

    def answer_set(
        self, head: Name | None, relation: Name, tail: Name | None = None, *, coverage: float = 0.9
    ) -> list[Answer]:
        """The few answers among which the missing one is with that probability, best first; known ones not among them.

        It asks for the tail, or where `head` is None for the head. See docs/beliefs.md for what that assumes.
        """
        if (head is None) == (tail is None):
            raise RequestError("An answer set is asked for by a relation and one of head and tail; the other is None.")
        side: Side = "head" if head is None else "tail"
        given = self.graph.entities.id(tail if head is None else head)  # type: ignore[arg-type]
        r, names = self.graph.relations.id(relation), self.graph.entities
        if self._answer_sets is None:
            self._answer_sets = AnswerSets.fitted(self.model, self.graph)
        found = self._answer_sets.of(self.model, self.all_known, given, r, side=side, coverage=coverage)
        answers = [
            Answer(names[id], names.label(id), id, score)
            for id, score in zip(found.entities.tolist(), found.scores.tolist(), strict=True)
        ]
        return self._believed(answers, lambda id: (given, r, id) if side == "tail" else (id, r, given))

    def add(self, name: str, *, triples: Sequence[NamedTriple]) -> Predictor:
        """A predictor that knows one more entity, placed by triples with known ones; this one stays as it is.

        Calibration and answer sets go with it: they are of the same relations.
        """
        found = with_newcomer(self.model, self.graph, name, triples=triples, around=self._around)
        return Predictor(
            found.model,
            found.graph,
            recipe=self.recipe,
            calibration=self.calibration,
            answer_sets=self._answer_sets,
        )

    def explain(self, head: Name, relation: Name, tail: Name, *, k: int = 5) -> Explanation:
        """The training triples that most support a triple's score, and entities alike that have the same."""
        return explain(self.model, self.graph, (head, relation, tail), k=k, around=self._around)

    @cached_property
    def _around(self) -> Surroundings:
        return Surroundings.of(self.model, self.graph, recipe=self.recipe)

    @torch.no_grad()
    def similar(self, entity: Name, *, k: int = 10) -> list[Answer]:
        """The entities whose embeddings point the same way; the score is the cosine."""
        id = self.graph.entities.id(entity)
        unit = torch.nn.functional.normalize(self.model.entity_vectors(), dim=-1)
        scores = unit @ unit[id]
        return self._best(scores, self.graph.entities, {id: "itself"}, k=k, known="omit")

    def _ids(self, id: int) -> Tensor:
        return torch.tensor([id], device=self.model.device)

    def _believed(self, answers: list[Answer], triple: TripleOf) -> list[Answer]:
        """Answers with their probabilities, where there is a calibration."""
        return self.all_believed([(answers, triple)])[0]

    def all_believed(
        self, asked: Sequence[tuple[list[Answer], TripleOf]], *, evidence: Callable[[Ids], Tensor] | None = None
    ) -> list[list[Answer]]:
        """The same for the answers to several questions, each with what makes a triple of the id of an answer."""
        triples = [triple(answer.id) for answers, triple in asked for answer in answers if answer.split != "train"]
        if self.calibration is None or not triples:
            return [answers for answers, _ in asked]
        ids = np.array(triples)
        measured = evidence(ids) if evidence else evidence_of(self.model, ids)
        relations, kinds = (torch.from_numpy(one) for one in (ids[:, 1], self._kinds(ids)))
        probabilities = self.calibration.probability(measured.cpu(), relations, kinds)
        found = dict(zip(triples, probabilities.tolist(), strict=True))
        return [
            [a if a.split == "train" else replace(a, probability=found[triple(a.id)]) for a in answers]
            for answers, triple in asked
        ]

    def splits_of(self, entity: int, relation: int) -> dict[int, str]:
        """Which split gives each known answer; the first that does."""
        return self.splits_of_many([(entity, relation)])[0]

    def splits_of_many(self, questions: Sequence[tuple[int, ...]]) -> list[dict[int, str]]:
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

    def _best(self, scores: Tensor, names: Vocabulary, splits: dict[int, str], *, k: int, known: Known) -> list[Answer]:
        return self._best_of_many(scores[None], names, [splits], [(k, known)])[0]

    def _best_of_many(
        self, scores: Tensor, names: Vocabulary, splits: list[dict[int, str]], asked: Sequence[tuple[int, Known]]
    ) -> list[list[Answer]]:
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
                Answer(names[id], names.label(id), id, score, split.get(id))
                for score, id in list(zip(values, ids, strict=True))[: min(k, num_names - len(left_out))]
            ]
            for values, ids, split, left_out, (k, _) in rows
        ]
