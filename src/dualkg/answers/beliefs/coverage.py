"""Whether answer sets hold what they promise: how often they have the answer, and how large they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.answers.beliefs.answer_sets import AnswerSets, without_others
from dualkg.answers.beliefs.evidence import Ids
from dualkg.data.graph import Graph, Split
from dualkg.data.known import KnownAnswers
from dualkg.errors import RequestError
from dualkg.models.base import Model, Side

SIDES: tuple[Side, ...] = ("tail", "head")


@dataclass(frozen=True)
class Coverage:
    """Of some questions: the share whose answer set has the answer, and the sizes of the sets."""

    share: float
    mean_size: float
    median_size: float
    num_questions: int
    own: bool | None = None  # of a relation: whether its threshold is its own

    @classmethod
    def of(cls, covered: npt.NDArray[np.bool_], sizes: Ids, *, own: bool | None = None) -> Coverage:
        return cls(float(covered.mean()), float(sizes.mean()), float(np.median(sizes)), covered.size, own)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CoverageReport:
    """Answer sets of every question of a split, both directions."""

    graph: str
    split: str
    wanted: float
    whole: Coverage
    by_direction: dict[str, Coverage]
    by_relation: dict[str, Coverage]

    def as_dict(self) -> dict[str, Any]:
        views = {"by_direction": self.by_direction, "by_relation": self.by_relation}
        return {
            "graph": self.graph,
            "split": self.split,
            "wanted": self.wanted,
            "whole": self.whole.as_dict(),
            **{view: {name: part.as_dict() for name, part in parts.items()} for view, parts in views.items()},
        }


def check_answer_sets(
    answer_sets: AnswerSets, model: Model, graph: Graph, *, split: Split = "test", coverage: float = 0.9
) -> CoverageReport:
    """Make the answer set of every question of a split, and see whether the answer is in it."""
    triples = graph.split(split).astype(np.int64)
    if not len(triples):
        raise RequestError(f"{graph.name} has no {split} triples to check answer sets by.")
    known = KnownAnswers.of(graph)
    found = [_sets_of(answer_sets, model, triples, side, known, coverage) for side in SIDES]
    covered, sizes = np.stack([one for one, _ in found]), np.stack([one for _, one in found])
    relations = triples[:, 1]
    return CoverageReport(
        graph=graph.name,
        split=split,
        wanted=coverage,
        whole=Coverage.of(covered, sizes),
        by_direction={side: Coverage.of(covered[row], sizes[row]) for row, side in enumerate(SIDES)},
        by_relation={
            graph.relations[id]: Coverage.of(
                covered[:, relations == id], sizes[:, relations == id], own=answer_sets.has_own(id, coverage=coverage)
            )
            for id in np.unique(relations).tolist()
        },
    )


def _sets_of(
    answer_sets: AnswerSets, model: Model, triples: Ids, side: Side, known: KnownAnswers, coverage: float
) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Whether the set of each triple's question has the answer, and how many entities it has."""
    present, places = np.unique(triples[:, 1], return_inverse=True)
    most = [answer_sets.threshold(relation, side, coverage=coverage) for relation in present.tolist()]
    least = -torch.tensor(most, device=model.device)[torch.from_numpy(places).to(model.device)]
    covered, sizes, done = [], [], 0
    for log_probabilities, answers in without_others(model, triples, side, known):
        limit = least[done : done + len(answers), None]
        done += len(answers)
        inside = (log_probabilities >= limit) & torch.isfinite(log_probabilities)
        covered.append(inside.gather(1, answers[:, None])[:, 0].cpu().numpy())
        sizes.append(inside.sum(1).cpu().numpy())
    return np.concatenate(covered), np.concatenate(sizes)
