"""Triple classification: true or false, by whether a triple's log_probability reaches the threshold of its relation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.archives import one_source
from dualkg.data.encoding import read_triples
from dualkg.data.graph import SPLITS, Graph, Split, triple_keys
from dualkg.errors import DataError, DivergedError, RequestError
from dualkg.inference.calibration import MIN_TRIPLES, Floats, Ids, triple_log_probabilities
from dualkg.models.base import Model

TRIES = 20  # draws from the entities of a side before any entity will do, and as many again of any


def corrupt_triples(graph: Graph, triples: Ids, *, seed: int = 0) -> Ids:
    """For each triple a false one: its head or its tail, by a coin, is another entity.

    The other entity has stood on that side of the relation in train, so that the false triple is of the right kind.
    Where none does that is not true too, it may be any entity. A triple that some split has is never made.
    """
    random = np.random.default_rng(seed)
    triples = np.asarray(triples, dtype=np.int64)
    made = triples.copy()
    columns = np.where(random.random(len(made)) < 0.5, 0, 2)
    pools = _seen_on_each_side(graph)
    left = np.arange(len(made))
    for number in range(2 * TRIES):
        if not len(left):
            return made
        of_side = number < TRIES
        made[left, columns[left]] = _draw(made[left, 1], columns[left], pools, graph, random, of_side=of_side)
        left = left[is_known(graph, made[left])]
    for place in left:
        made[place] = _any_false(graph, triples[place], random)
    return made


def _seen_on_each_side(graph: Graph) -> dict[int, tuple[Ids, Ids]]:
    """By column, the distinct entities of each relation on that side, and where those of each begin and end."""
    pools = {}
    for column in (0, 2):
        pairs = np.unique(graph.train[:, [1, column]].astype(np.int64), axis=0)
        bounds = np.searchsorted(pairs[:, 0], np.arange(graph.shape.num_relations + 1))
        pools[column] = (pairs[:, 1], bounds)
    return pools


def _draw(
    relations: Ids,
    columns: Ids,
    pools: dict[int, tuple[Ids, Ids]],
    graph: Graph,
    random: np.random.Generator,
    *,
    of_side: bool,
) -> Ids:
    """One entity each, of those on the side of the relation, or any."""
    drawn = random.integers(0, graph.shape.num_entities, len(relations))
    if not of_side:
        return drawn
    for column, (entities, bounds) in pools.items():
        first, num = bounds[relations], bounds[relations + 1] - bounds[relations]
        its = (columns == column) & (num > 0)
        drawn[its] = entities[first[its] + random.integers(0, num[its])]
    return drawn


def _any_false(graph: Graph, triple: Ids, random: np.random.Generator) -> Ids:
    """A false triple where there are so few that chance found none: of all with another tail, or else another head."""
    for column in (2, 0):
        others = np.tile(triple, (graph.shape.num_entities, 1))
        others[:, column] = np.arange(graph.shape.num_entities)
        false = others[~is_known(graph, others)]
        if len(false):
            return np.asarray(random.choice(false), dtype=np.int64)
    head, relation, tail = graph.entities[triple[0]], graph.relations[triple[1]], graph.entities[triple[2]]
    raise RequestError(
        f"({head}, {relation}, {tail}) cannot be made false: with every other entity it is a triple of the graph too. "
        f"Give false triples of your own."
    )


def is_known(graph: Graph, triples: Ids) -> npt.NDArray[np.bool_]:
    """Whether some split has each triple."""
    known = np.concatenate([graph.split(name) for name in SPLITS])
    keys = triple_keys(np.concatenate([known, triples]), graph.shape)
    found: npt.NDArray[np.bool_] = np.isin(keys[len(known) :], keys[: len(known)])
    return found


def read_negatives(path: str | Path, graph: Graph) -> Ids:
    """False triples of a file, by the names of a graph; in any format that triples are read from."""
    read = read_triples({"negatives": one_source(path)})
    try:
        entities, relations = (
            np.array(vocabulary.ids(names.to_pylist()), dtype=np.int64)
            for vocabulary, names in ((graph.entities, read.entities), (graph.relations, read.relations))
        )
    except RequestError as error:
        raise DataError(f"{path} is not of the graph {graph.name}: {error}") from None
    heads, links, tails = read.triples["negatives"].T
    triples = np.stack([entities[heads], relations[links], entities[tails]], axis=1)
    check_false(graph, triples, str(path))
    return triples


def check_false(graph: Graph, triples: Ids, what: str) -> None:
    """Refuse false triples that the graph has as true ones."""
    true = np.flatnonzero(is_known(graph, triples))
    if len(true):
        head, relation, tail = triples[true[0]].tolist()
        named = f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"
        raise DataError(
            f"{len(true):,} of the {len(triples):,} false triples of {what} are triples of {graph.name}, {named} for "
            f"one. A false triple must be false; remove them."
        )


def matching_valid_file(path: str | Path, split: str) -> Path | None:
    """The file of false triples for valid matching_valid_file that of a split: valid_negatives.txt by test_negatives.txt."""
    path = Path(path)
    other = path.with_name(path.name.replace(split, "valid"))
    return other if other != path and other.is_file() else None


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
    def of(cls, log_probability: Floats, true: Marks, called_true: Marks) -> ClassificationMetrics:
        right = int((true & called_true).sum())
        precision, recall = right / max(int(called_true.sum()), 1), right / max(int(true.sum()), 1)
        return cls(
            accuracy=float((true == called_true).mean()),
            precision=precision,
            recall=recall,
            f1=2 * right / max(int(called_true.sum() + true.sum()), 1),
            auc=area_under_curve(log_probability, true),
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
    log_probability, relations = _evidence(model, triples), triples[:, 1]
    limits = np.array([thresholds.get(relation, shared) for relation in range(graph.shape.num_relations)])
    called_true = log_probability >= limits[relations]
    return ClassificationReport(
        graph=graph.name,
        split=split,
        negatives="sampled" if negatives is None else "given",
        valid_negatives="sampled" if valid_negatives is None else "given",
        metrics=ClassificationMetrics.of(log_probability, true, called_true),
        by_relation={
            graph.relations[id]: ClassificationMetrics.of(
                log_probability[relations == id], true[relations == id], called_true[relations == id]
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
        negatives = corrupt_triples(graph, true, seed=seed)
    else:
        negatives = np.asarray(negatives, dtype=np.int64).reshape(-1, 3)
        check_false(graph, negatives, split)
    triples = np.concatenate([true, negatives])
    return triples, np.arange(len(triples)) < len(true)


def _evidence(model: Model, triples: Ids) -> Floats:
    found: Floats = triple_log_probabilities(model, triples).double().cpu().numpy()
    if not np.isfinite(found).all():
        head, relation, tail = triples[np.flatnonzero(~np.isfinite(found))[0]].tolist()
        raise DivergedError(
            f"The model's log_probability for ({head}, {relation}, {tail}) is NaN or infinite, so it cannot be judged. "
            f"Its training has diverged: lower the learning rate or raise the regularizer's weight."
        )
    return found


def choose_thresholds(log_probability: Floats, true: Marks, relations: Ids) -> tuple[dict[int, float], float]:
    """The most accurate threshold of each relation with enough true triples, and the one for all others."""
    found = {}
    for relation in np.unique(relations).tolist():
        its = relations == relation
        if true[its].sum() >= MIN_TRIPLES and not true[its].all():
            found[relation] = best_threshold(log_probability[its], true[its])
    return found, best_threshold(log_probability, true)


def best_threshold(log_probability: Floats, true: Marks) -> float:
    """Where calling all from there on true is most often right: halfway between two triples; of several, the middle."""
    values, places = np.unique(log_probability, return_inverse=True)
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


def area_under_curve(log_probability: Floats, true: Marks) -> float | None:
    """How often a true triple has more log_probability than a false one; a tie counts half. Counted by ranks, not by pairs."""
    num_true, num_false = int(true.sum()), int((~true).sum())
    if not num_true or not num_false:
        return None
    _, places, counts = np.unique(log_probability, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
