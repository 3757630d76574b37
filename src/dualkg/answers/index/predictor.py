"""Questions by name, answered through an index."""

from __future__ import annotations

import torch

from dualkg.answers.index.building import ModelIndex
from dualkg.answers.index.exact import best_of
from dualkg.answers.index.questions import Questions
from dualkg.answers.predictor import Answer, Known, Name, Predictor


class IndexedPredictor:
    """Answers as a `Predictor` does, but looks for tails and heads in an index; other questions are the predictor's.

    What the index finds, the model scores itself. So that known answers may be left out, as many more are looked for
    as the question has. Where the index finds too few, every entity is scored.
    """

    def __init__(self, predictor: Predictor, index: ModelIndex) -> None:
        index.check_model(predictor.model)
        self.predictor = predictor
        self.graph = predictor.graph
        self.index = index

    @torch.no_grad()
    def tails(self, head: Name, relation: Name, *, k: int = 10, known: Known = "mark") -> list[Answer]:
        """Answer (head, relation, ?), best first."""
        plain, graph = self.predictor, self.graph
        h, r = graph.entities.id(head), graph.relations.id(relation)
        questions = Questions.for_tails(plain.model, plain._ids(h), plain._ids(r))
        found = self._best(questions, plain.splits_of(h, r), k=k, known=known)
        if found is None:
            return plain.tails(h, r, k=k, known=known)
        return plain._believed(found, lambda id: (h, r, id))

    @torch.no_grad()
    def heads(self, relation: Name, tail: Name, *, k: int = 10, known: Known = "mark") -> list[Answer]:
        """Answer (?, relation, tail), best first."""
        plain, graph = self.predictor, self.graph
        r, t = graph.relations.id(relation), graph.entities.id(tail)
        questions = Questions.for_heads(plain.model, plain._ids(r), plain._ids(t))
        found = self._best(questions, plain.splits_of(t, r + graph.shape.num_relations), k=k, known=known)
        if found is None:
            return plain.heads(r, t, k=k, known=known)
        return plain._believed(found, lambda id: (id, r, t))

    def _best(self, questions: Questions, splits: dict[int, str], *, k: int, known: Known) -> list[Answer] | None:
        """The best answers, or none where the index found too few or the request is one to be refused."""
        names = self.graph.entities
        omitted = set(splits) if known == "omit" else set()
        index = self.index.for_side(questions.side)
        wanted = min(k, index.shape[0] - len(omitted))
        if wanted < 1 or known not in ("mark", "omit"):
            return None
        ids = index.search(questions.vectors, k + len(omitted)).ids[0]
        kept = torch.tensor([id for id in ids.tolist() if id >= 0 and id not in omitted], dtype=torch.int64)
        if len(kept) < wanted:
            return None
        kept = kept.sort().values
        scores = questions.scores(kept[None].to(self.predictor.model.device)).cpu()
        best = best_of(scores, wanted)
        return [
            Answer(names[id], names.label(id), id, score, splits.get(id))
            for score, id in zip(best.scores[0].tolist(), kept[best.ids[0]].tolist(), strict=True)
        ]
