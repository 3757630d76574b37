"""Triple classification: true or false, by whether a triple's evidence reaches the threshold of its relation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.answers.beliefs.candidates import Floats
from dualkg.answers.beliefs.evidence import Ids, evidence_of
from dualkg.answers.beliefs.fitting import ENOUGH
from dualkg.answers.beliefs.negatives import check_false, corrupted
from dualkg.data.graph import Graph, Split
from dualkg.errors import DivergedError, RequestError
from dualkg.models.base import Model

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ClassificationMetrics:
    """How well true and false triples were told apart; precision, recall and F1 are of the true ones."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    auc: float | None  # none where all triples are true, or all false
    num_true: int
    num_false: int

    @classmethod
    def of(cls, evidence: Floats, true: Marks, called_true: Marks) -> ClassificationMetrics:
        right = int((true & called_true).sum())
        precision, recall = right / max(int(called_true.sum()), 1), right / max(int(true.sum()), 1)
        return cls(
            accuracy=float((true == called_true).mean()),
            precision=precision,
            recall=recall,
            f1=2 * right / max(int(called_true.sum() + true.sum()), 1),
            auc=area_under_curve(evidence, true),
            num_true=int(true.sum()),
            num_false=int((~true).sum()),
        )


@dataclass(frozen=True)
class ClassificationReport:
    """Triple classification on one split, thresholds chosen on valid."""

    graph: str
    split: str
    negatives: str  # given or sampled, for the split
    valid_negatives: str  # and for the thresholds
    metrics: ClassificationMetrics
    by_relation: dict[str, ClassificationMetrics]
    thresholds: dict[str, float] = field(repr=False)  # of the relations that have their own; "" is the shared one

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_classification(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    negatives: Ids | None = None,
    valid_negatives: Ids | None = None,
    seed: int = 0,
) -> ClassificationReport:
    """Tell the triples of a split from false ones, which are given `(n, 3)` or made, one for each true one."""
    _check(graph, split)
    learnt = _with_false(graph, "valid", valid_negatives, seed)
    thresholds, shared = choose_thresholds(_evidence(model, learnt[0]), learnt[1], learnt[0][:, 1])
    triples, true = _with_false(graph, split, negatives, seed + 1)
    evidence, relations = _evidence(model, triples), triples[:, 1]
    limits = np.array([thresholds.get(relation, shared) for relation in range(graph.shape.num_relations)])
    called_true = evidence >= limits[relations]
    return ClassificationReport(
        graph=graph.name,
        split=split,
        negatives="sampled" if negatives is None else "given",
        valid_negatives="sampled" if valid_negatives is None else "given",
        metrics=ClassificationMetrics.of(evidence, true, called_true),
        by_relation={
            graph.relations[id]: ClassificationMetrics.of(
                evidence[relations == id], true[relations == id], called_true[relations == id]
            )
            for id in np.unique(relations).tolist()
        },
        thresholds={"": shared, **{graph.relations[id]: limit for id, limit in thresholds.items()}},
    )


def _check(graph: Graph, split: Split) -> None:
    if split == "valid":
        raise RequestError(
            "Thresholds are chosen on valid, so a classification of valid would be judged by what it was chosen on. "
            "Ask for the test split."
        )
    for name in ("valid", split):
        if not len(graph.split(name)):
            raise RequestError(f"Triple classification needs {name} triples, and {graph.name} has none.")


def _with_false(graph: Graph, split: Split, negatives: Ids | None, seed: int) -> tuple[Ids, Marks]:
    """True triples of a split and false ones behind them; and which are true."""
    true = graph.split(split).astype(np.int64)
    if negatives is None:
        negatives = corrupted(graph, true, seed=seed)
    else:
        negatives = np.asarray(negatives, dtype=np.int64).reshape(-1, 3)
        check_false(graph, negatives, split)
    triples = np.concatenate([true, negatives])
    return triples, np.arange(len(triples)) < len(true)


def _evidence(model: Model, triples: Ids) -> Floats:
    found: Floats = evidence_of(model, triples).double().cpu().numpy()
    if not np.isfinite(found).all():
        head, relation, tail = triples[np.flatnonzero(~np.isfinite(found))[0]].tolist()
        raise DivergedError(
            f"The model's evidence for ({head}, {relation}, {tail}) is NaN or infinite, so it cannot be judged. "
            f"Its training has diverged: lower the learning rate or raise the regularizer's weight."
        )
    return found


def choose_thresholds(evidence: Floats, true: Marks, relations: Ids) -> tuple[dict[int, float], float]:
    """The most accurate threshold of each relation with enough true triples, and the one for all others."""
    found = {}
    for relation in np.unique(relations).tolist():
        its = relations == relation
        if true[its].sum() >= ENOUGH and not true[its].all():
            found[relation] = best_threshold(evidence[its], true[its])
    return found, best_threshold(evidence, true)


def best_threshold(evidence: Floats, true: Marks) -> float:
    """Where calling all from there on true is most often right: halfway between two triples; of several, the middle."""
    values, places = np.unique(evidence, return_inverse=True)
    num_true, num_all = np.bincount(places, true, len(values)), np.bincount(places, minlength=len(values))
    # Right, when the first i distinct values are called false: the false among them, the true among the others.
    false_below = np.append(0, np.cumsum(num_all - num_true))
    true_above = num_true.sum() - np.append(0, np.cumsum(num_true))
    right = false_below + true_above
    best = np.flatnonzero(right == right.max())
    cut = int(best[len(best) // 2])
    if cut in (0, len(values)):
        return float(values[0]) if cut == 0 else float(np.nextafter(values[-1], np.inf))
    return float((values[cut - 1] + values[cut]) / 2)


def area_under_curve(evidence: Floats, true: Marks) -> float | None:
    """How often a true triple has more evidence than a false one; a tie counts half. Counted by ranks, not by pairs."""
    num_true, num_false = int(true.sum()), int((~true).sum())
    if not num_true or not num_false:
        return None
    _, places, counts = np.unique(evidence, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
