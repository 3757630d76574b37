"""A prediction: a candidate with its score, its probability and the split that contains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
