"""Triple classification: a triple is true if its log-probability reaches the threshold of its
relation.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from dualkg.data.encoding import read_triples
from dualkg.data.filters import occur
from dualkg.data.graph import SPLITS, Graph, Split
from dualkg.data.readers import one_source
from dualkg.errors import DataError, RequestError
from dualkg.inference.calibration import MIN_TRIPLES, DomainRange, Flags
from dualkg.inference.scoring import Floats, Ids, triple_log_probabilities
from dualkg.models.base import Model

MAX_DRAWS = (
    20  # of an entity from the domain or range of a relation, and as many again of any entity
)


def corrupt_triples(graph: Graph, triples: Ids, *, seed: int = 0) -> Ids:
    """Make a negative triple of each triple by replacing its head or its tail, chosen at random.

    The new entity is drawn from the domain or range of the relation in train, or from all entities
    if those give only known triples. A triple that some split contains is never returned.
    """
    random = np.random.default_rng(seed)
    triples = np.asarray(triples, dtype=np.int64)
    made = triples.copy()
    columns = np.where(random.random(len(made)) < 0.5, 0, 2)
    num_entities = graph.shape.num_entities
    train = DomainRange.of(graph)
    starts = np.arange(graph.shape.num_relations + 1) * num_entities
    left = np.arange(len(made))
    for number in range(2 * MAX_DRAWS):
        if not len(left):
            return made
        relations = made[left, 1]
        replaced = columns[left]
        drawn = random.integers(0, num_entities, len(left))
        for column, keys in ((0, train.heads), (2, train.tails)) if number < MAX_DRAWS else ():
            first, last = (np.searchsorted(keys, starts[relations + end]) for end in (0, 1))
            its = (replaced == column) & (last > first)
            drawn[its] = keys[first[its] + random.integers(0, (last - first)[its])] % num_entities
        made[left, replaced] = drawn
        left = left[is_known(graph, made[left])]
    for row in left:
        made[row] = _any_negative(graph, triples[row], random)
    return made


def _any_negative(graph: Graph, triple: Ids, random: np.random.Generator) -> Ids:
    """A negative triple by trying all tails and then all heads, for relations that are nearly
    complete.
    """
    for column in (2, 0):
        others = np.tile(triple, (graph.shape.num_entities, 1))
        others[:, column] = np.arange(graph.shape.num_entities)
        false = others[~is_known(graph, others)]
        if len(false):
            return np.asarray(random.choice(false), dtype=np.int64)
    raise RequestError(
        f"No negative can be made of {_named(graph, triple)}: it is a triple of the graph with "
        "every other entity too. Give your own negatives."
    )


def is_known(graph: Graph, triples: Ids) -> Flags:
    """Whether some split contains each triple."""
    return occur(triples, (graph.split(name) for name in SPLITS), graph.shape)


def read_negatives(path: str | Path, graph: Graph, *, max_size: int | str | None = None) -> Ids:
    """Read negative triples by the names of a graph, in any format of triples."""
    read = read_triples({"negatives": one_source(path, max_size=max_size)})
    try:
        entities = np.array(graph.entities.ids(read.entities.to_pylist()), dtype=np.int64)
        relations = np.array(graph.relations.ids(read.relations.to_pylist()), dtype=np.int64)
    except RequestError as error:
        raise DataError(f"{path} does not fit the graph {graph.name}: {error}") from None
    heads, links, tails = read.triples["negatives"].T
    return np.stack([entities[heads], relations[links], entities[tails]], axis=1)


def _named(graph: Graph, triple: Ids) -> str:
    head, relation, tail = triple.tolist()
    return f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"


def matching_valid_file(path: str | Path, split: str) -> Path | None:
    """The file of valid negatives in the folder of that of a split: valid_negatives.txt for
    test_negatives.txt.
    """
    path = Path(path)
    other = path.with_name(path.name.replace(split, "valid"))
    return other if other != path and other.is_file() else None


@dataclass(frozen=True)
class ClassificationMetrics:
    """Metrics of a classification; precision, recall and F1 are of the true triples."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    auc: float | None  # None if all triples are true, or all false
    num_true: int
    num_false: int

    @classmethod
    def of(cls, log_probability: Floats, true: Flags, predicted: Flags) -> Self:
        num_true = int(true.sum())
        num_predicted = int(predicted.sum())
        correct = int((true & predicted).sum())
        accuracy = float((true == predicted).mean())
        auc = area_under_curve(log_probability, true)
        precision = correct / max(num_predicted, 1)
        recall = correct / max(num_true, 1)
        f1 = 2 * correct / max(num_predicted + num_true, 1)
        return cls(accuracy, precision, recall, f1, auc, num_true, len(true) - num_true)


@dataclass(frozen=True)
class ClassificationReport:
    """Triple classification on one split with thresholds of the valid split; negatives are "given"
    or "sampled".
    """

    graph: str
    split: str
    negatives: str
    valid_negatives: str
    metrics: ClassificationMetrics
    by_relation: dict[str, ClassificationMetrics]
    thresholds: dict[str, float] = field(
        repr=False
    )  # of relations that have their own; "" is the shared one

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
    """Classify the triples of a split and negatives, given as `(n, 3)` or one sampled for each
    triple.
    """
    if split == "valid":
        raise RequestError(
            "Thresholds are chosen on valid, so valid cannot be evaluated. Choose the test split."
        )
    for name in ("valid", split):
        if not len(graph.split(name)):
            raise RequestError(
                f"Triple classification needs {name} triples, and {graph.name} has none."
            )
    thresholds, shared = choose_thresholds(
        *_with_negatives(model, graph, "valid", valid_negatives, seed)
    )
    log_probability, true, relations = _with_negatives(model, graph, split, negatives, seed + 1)
    limits = np.array(
        [thresholds.get(relation, shared) for relation in range(graph.shape.num_relations)]
    )
    predicted = log_probability >= limits[relations]
    by_relation = {}
    for id in np.unique(relations).tolist():
        parts = (values[relations == id] for values in (log_probability, true, predicted))
        by_relation[graph.relations[id]] = ClassificationMetrics.of(*parts)
    return ClassificationReport(
        graph=graph.name,
        split=split,
        negatives="sampled" if negatives is None else "given",
        valid_negatives="sampled" if valid_negatives is None else "given",
        metrics=ClassificationMetrics.of(log_probability, true, predicted),
        by_relation=by_relation,
        thresholds={"": shared, **{graph.relations[id]: limit for id, limit in thresholds.items()}},
    )


def _with_negatives(
    model: Model, graph: Graph, split: Split, negatives: Ids | None, seed: int
) -> tuple[Floats, Flags, Ids]:
    """Log-probabilities of the triples of a split and of negatives, which are true, and their
    relations.
    """
    true = graph.split(split).astype(np.int64)
    if negatives is None:
        negatives = corrupt_triples(graph, true, seed=seed)
    negatives = np.asarray(negatives, dtype=np.int64).reshape(-1, 3)
    known = negatives[is_known(graph, negatives)]
    if len(known):
        raise DataError(
            f"{len(known):,} of the {len(negatives):,} negatives of {split} are triples of "
            f"{graph.name}, such as {_named(graph, known[0])}. Remove them."
        )
    triples = np.concatenate([true, negatives])
    log_probability = triple_log_probabilities(model, triples).double().cpu().numpy()
    return log_probability, np.arange(len(triples)) < len(true), triples[:, 1]


def choose_thresholds(
    log_probability: Floats, true: Flags, relations: Ids
) -> tuple[dict[int, float], float]:
    """The most accurate threshold of each relation with enough true triples, and the one of all
    others.
    """
    found = {}
    for relation in np.unique(relations).tolist():
        its = relations == relation
        if true[its].sum() >= MIN_TRIPLES and not true[its].all():
            found[relation] = best_threshold(log_probability[its], true[its])
    return found, best_threshold(log_probability, true)


def best_threshold(log_probability: Floats, true: Flags) -> float:
    """The most accurate threshold, halfway between two triples; the middle one if several are
    equally accurate.
    """
    values, places = np.unique(log_probability, return_inverse=True)
    num_true = np.bincount(places, true, len(values))
    num_all = np.bincount(places, minlength=len(values))
    # Correct if the first i distinct values are classified as false: the false among them, the true
    # among the others.
    false_below = np.append(0, np.cumsum(num_all - num_true))
    true_above = num_true.sum() - np.append(0, np.cumsum(num_true))
    correct = false_below + true_above
    best = np.flatnonzero(correct == correct.max())
    cut = int(best[len(best) // 2])
    if cut == len(values):
        return float(np.nextafter(values[-1], np.inf))
    return float((values[cut - 1] + values[cut]) / 2 if cut else values[0])


def area_under_curve(log_probability: Floats, true: Flags) -> float | None:
    """The area under the ROC curve, from ranks; scikit-learn would need an extra."""
    num_true = int(true.sum())
    num_false = int((~true).sum())
    if not num_true or not num_false:
        return None
    _, places, counts = np.unique(log_probability, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
