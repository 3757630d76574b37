"""A prediction: a candidate with its score, its probability and the split that contains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

QueryType = Literal["tails", "heads", "relations", "triple", "similar"]
Figures = tuple[float | None, float | None]  # probability and answer probability


@dataclass(frozen=True)
class Prediction:
    """A candidate with its score.

    `split` is the first split that contains the triple, None if it is new. `probability` is that of
    the triple, as in a completion, and `answer_probability` that of the triple if its queries are
    known to lack an answer. Both are None without a calibration, and for triples of train, which
    are no candidates.

    Attributes:
        name: Name of the candidate.
        label: Its label, or its name.
        id: Its id.
        score: Comparable within one query.
        split: The first split that contains the triple; None if it is new.
        probability: Of the triple, as in a completion; None without a calibration, and for triples
            of train.
        answer_probability: Of the triple if its query is known to lack an answer; None likewise.

    Examples:
        >>> best = run.predictor().tails("France", "borders", k=1)[0]
        >>> best.entity in graph.entities.names.to_pylist(), best.known == (best.split is not None)
        (True, True)
    """

    name: str
    label: str
    id: int
    score: float
    split: str | None = None
    probability: float | None = None
    answer_probability: float | None = None

    @property
    def known(self) -> bool:
        """Whether the triple is in a split of the graph."""
        return self.split is not None

    @property
    def entity(self) -> str:
        """The name of the predicted entity."""
        return self.name

    @property
    def relation(self) -> str:
        """The name of the predicted relation."""
        return self.name

    def as_dict(self) -> dict[str, Any]:
        """All fields and `known`, for JSON."""
        return {**asdict(self), "known": self.known}

    def with_probabilities(
        self, probability: float | None, answer_probability: float | None
    ) -> Prediction:
        """The same prediction with other probabilities."""
        # `dataclasses.replace` takes three times as long.
        return Prediction(
            self.name,
            self.label,
            self.id,
            self.score,
            self.split,
            probability,
            answer_probability,
        )


def query_type(given: Sequence[object | None]) -> QueryType:
    """The type of a query (head, relation, tail) by its part that is None."""
    types: tuple[QueryType, ...] = ("heads", "relations", "tails")
    return types[given.index(None)] if None in given else "triple"


def calibrated(
    kind: QueryType,
    given: Sequence[tuple[int, ...]],
    predictions: list[list[Prediction]],
    figures_of: Callable[[npt.NDArray[np.int64]], Iterable[Figures]],
) -> list[list[Prediction]]:
    """The predictions for queries of one type with their figures, by probability.

    `figures_of` has those of triples `(n, 3)`. Triples of train have none, and come first.
    """
    triples: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for ids, answers in zip(given, predictions, strict=True):
        for prediction in answers:
            if prediction.split != "train":
                triples[_completed(kind, ids, prediction.id)] = None
    if not triples:
        return predictions

    figures = figures_of(np.array(list(triples), dtype=np.int64))
    by_triple = dict(zip(triples, figures, strict=True))
    with_figures = []
    for ids, answers in zip(given, predictions, strict=True):
        new_answers = []
        for answer in answers:
            figures_of_answer = by_triple.get(_completed(kind, ids, answer.id), (None, None))
            new_answers.append(answer.with_probabilities(*figures_of_answer))
        with_figures.append(sorted(new_answers, key=_by_probability))
    return with_figures


def _by_probability(prediction: Prediction) -> tuple[bool, float]:
    """The sort key of calibrated predictions, which keeps the order of those that are equal."""
    if prediction.probability is None:
        return False, 0.0
    return True, -prediction.probability


def _completed(kind: QueryType, given: tuple[int, ...], answer: int) -> tuple[int, ...]:
    """The triple that a prediction completes."""
    position = {"heads": 0, "relations": 1}.get(kind, 2)
    return (*given[:position], answer, *given[position:2])
