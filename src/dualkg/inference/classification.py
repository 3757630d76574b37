"""Triple classification: a triple is true if its log-probability reaches the threshold of its
relation.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from dualkg.data.encoding import read_triples
from dualkg.data.filters import occur
from dualkg.data.graph import SPLITS, Graph, Split
from dualkg.data.readers import one_source
from dualkg.errors import DataError, InvalidValue, RequestError
from dualkg.inference.logistic import MIN_TRIPLES
from dualkg.inference.probability import triple_log_probabilities
from dualkg.inference.scoring import Flags, Floats, Ids, MissingTriples
from dualkg.models.base import Model

# Attempts to draw an entity from the domain or range of a relation, and as many again to draw any
# entity.
MAX_DRAWS = 20


# -- negatives ---------------------------------------------------------------


def corrupt_triples(graph: Graph, triples: Ids, *, seed: int = 0) -> Ids:
    """Make a negative triple of each triple by replacing its head or its tail, chosen at random.

    The new entity is drawn from the domain or range of the relation in train, or from all entities
    if those give only known triples. A triple that some split contains is never returned.
    """
    random = np.random.default_rng(seed)
    triples = np.asarray(triples, dtype=np.int64)
    num_entities = graph.shape.num_entities
    # The heads and the tails of each relation, as sorted keys: relation · num_entities + entity.
    train = graph.train.astype(np.int64)
    keys_by_column = {
        column: np.unique(train[:, 1] * num_entities + train[:, column]) for column in (0, 2)
    }

    negatives = triples.copy()
    columns = np.where(random.random(len(triples)) < 0.5, 0, 2)
    remaining = np.arange(len(triples))
    for attempt in range(2 * MAX_DRAWS):
        if not len(remaining):
            return negatives
        replaced = columns[remaining]
        entities = random.integers(0, num_entities, len(remaining))
        if attempt < MAX_DRAWS:
            relations = negatives[remaining, 1]
            for column, keys in keys_by_column.items():
                first = np.searchsorted(keys, relations * num_entities)
                last = np.searchsorted(keys, (relations + 1) * num_entities)
                chosen = (replaced == column) & (last > first)
                places = first[chosen] + random.integers(0, (last - first)[chosen])
                entities[chosen] = keys[places] % num_entities

        negatives[remaining, replaced] = entities
        remaining = remaining[is_known(graph, negatives[remaining])]

    for row in remaining:
        negatives[row] = _any_negative(graph, triples[row], random)
    return negatives


def _any_negative(graph: Graph, triple: Ids, random: np.random.Generator) -> Ids:
    """A negative by trying all tails and then all heads, for relations that are nearly complete."""
    num_entities = graph.shape.num_entities
    for column in (2, 0):
        corrupted = np.tile(triple, (num_entities, 1))
        corrupted[:, column] = np.arange(num_entities)
        negatives = corrupted[~is_known(graph, corrupted)]
        if len(negatives):
            return np.asarray(random.choice(negatives), dtype=np.int64)
    raise DataError(
        f"No negative can be made of {_named(graph, triple)}: it is a triple of the graph with "
        "every other entity too. Pass your own triples as `negatives`."
    )


def _named(graph: Graph, triple: Ids) -> str:
    head, relation, tail = triple.tolist()
    return f"({graph.entities[head]}, {graph.relations[relation]}, {graph.entities[tail]})"


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
    file_heads, file_relations, file_tails = read.triples["negatives"].T
    return np.stack([entities[file_heads], relations[file_relations], entities[file_tails]], axis=1)


def matching_valid_file(path: str | Path, split: str) -> Path | None:
    """The file of valid negatives beside the file of the negatives of a split.

    It is valid_negatives.txt for test_negatives.txt.
    """
    path = Path(path)
    valid_path = path.with_name(path.name.replace(split, "valid"))
    if valid_path == path or not valid_path.is_file():
        return None
    return valid_path


# -- metrics -----------------------------------------------------------------


@dataclass(frozen=True)
class ClassificationMetrics:
    """Metrics of a classification; precision, recall and F1 are of the true triples.

    `auc` is None if all triples are true, or all false.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    auc: float | None
    num_true: int
    num_false: int

    @classmethod
    def of(cls, log_probability: Floats, true: Flags, predicted: Flags) -> Self:
        num_true = int(true.sum())
        num_predicted = int(predicted.sum())
        num_correct = int((true & predicted).sum())
        return cls(
            accuracy=float((true == predicted).mean()),
            precision=num_correct / max(num_predicted, 1),
            recall=num_correct / max(num_true, 1),
            f1=2 * num_correct / max(num_predicted + num_true, 1),
            auc=area_under_curve(log_probability, true),
            num_true=num_true,
            num_false=len(true) - num_true,
        )


@dataclass(frozen=True)
class ClassificationReport:
    """Triple classification on one split with thresholds of the valid split.

    `negatives` and `valid_negatives` are "given" or "sampled". `thresholds` has the relations with
    their own threshold, and the shared threshold under "".
    """

    graph: str
    split: str
    negatives: str
    valid_negatives: str
    metrics: ClassificationMetrics
    by_relation: dict[str, ClassificationMetrics]
    thresholds: dict[str, float] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LabelledTriples(NamedTuple):
    """The triples of a split and their negatives, as columns `(n,)`."""

    log_probability: Floats
    true: Flags
    relations: Ids


def evaluate_classification(
    model: Model,
    graph: Graph,
    *,
    split: Split = "test",
    negatives: Ids | None = None,
    valid_negatives: Ids | None = None,
    seed: int = 0,
) -> ClassificationReport:
    """Classify the triples of a split and negatives.

    Negatives are given as `(n, 3)`, or one is sampled for each triple.
    """
    if split == "valid":
        raise InvalidValue(
            "split",
            expected="another split than valid, on which the thresholds are chosen",
            found=split,
            advice="Choose the test split.",
        )
    for needed_split in ("valid", split):
        if not len(graph.split(needed_split)):
            raise MissingTriples(graph.name, needed_split, purpose="Triple classification")

    valid = _with_negatives(model, graph, "valid", negatives=valid_negatives, seed=seed)
    own_thresholds, shared_threshold = choose_thresholds(
        valid.log_probability, valid.true, valid.relations
    )
    thresholds = np.full(graph.shape.num_relations, shared_threshold)
    for relation, threshold in own_thresholds.items():
        thresholds[relation] = threshold

    log_probability, true, relations = _with_negatives(
        model, graph, split, negatives=negatives, seed=seed + 1
    )
    predicted = log_probability >= thresholds[relations]

    by_relation = {}
    for relation in np.unique(relations).tolist():
        chosen = relations == relation
        by_relation[graph.relations[relation]] = ClassificationMetrics.of(
            log_probability[chosen], true[chosen], predicted[chosen]
        )
    named_thresholds = {"": shared_threshold}
    for relation, threshold in own_thresholds.items():
        named_thresholds[graph.relations[relation]] = threshold

    return ClassificationReport(
        graph=graph.name,
        split=split,
        negatives="sampled" if negatives is None else "given",
        valid_negatives="sampled" if valid_negatives is None else "given",
        metrics=ClassificationMetrics.of(log_probability, true, predicted),
        by_relation=by_relation,
        thresholds=named_thresholds,
    )


def _with_negatives(
    model: Model, graph: Graph, split: Split, *, negatives: Ids | None, seed: int
) -> LabelledTriples:
    """The triples of a split and their negatives, which are sampled if none are given."""
    positives = graph.split(split).astype(np.int64)
    if negatives is None:
        negatives = corrupt_triples(graph, positives, seed=seed)
    negatives = np.asarray(negatives, dtype=np.int64).reshape(-1, 3)

    known = negatives[is_known(graph, negatives)]
    if len(known):
        raise DataError(
            f"{len(known):,} of the {len(negatives):,} negatives of {split} are triples of "
            f"{graph.name}, such as {_named(graph, known[0])}. Remove them."
        )

    triples = np.concatenate([positives, negatives])
    log_probability = triple_log_probabilities(model, triples).double().cpu().numpy()
    is_true = np.arange(len(triples)) < len(positives)
    return LabelledTriples(log_probability, is_true, triples[:, 1])


# -- thresholds --------------------------------------------------------------


def choose_thresholds(
    log_probability: Floats, true: Flags, relations: Ids
) -> tuple[dict[int, float], float]:
    """The most accurate threshold of each relation with enough true triples, and of all triples."""
    thresholds = {}
    for relation in np.unique(relations).tolist():
        chosen = relations == relation
        labels = true[chosen]
        if labels.sum() >= MIN_TRIPLES and not labels.all():
            thresholds[relation] = best_threshold(log_probability[chosen], labels)
    return thresholds, best_threshold(log_probability, true)


def best_threshold(log_probability: Floats, true: Flags) -> float:
    """The most accurate threshold, halfway between two triples.

    It is the middle one if several are equally accurate.
    """
    values, places = np.unique(log_probability, return_inverse=True)
    num_true = np.bincount(places, true, len(values))
    num_all = np.bincount(places, minlength=len(values))

    # If the first i distinct values are classified as false, the false triples among them and the
    # true triples among the others are correct.
    false_below = np.append(0, np.cumsum(num_all - num_true))
    true_above = num_true.sum() - np.append(0, np.cumsum(num_true))
    num_correct = false_below + true_above

    best_cuts = np.flatnonzero(num_correct == num_correct.max())
    cut = int(best_cuts[len(best_cuts) // 2])
    if cut == 0:
        return float(values[0])
    if cut == len(values):
        return float(np.nextafter(values[-1], np.inf))
    return float((values[cut - 1] + values[cut]) / 2)


def area_under_curve(log_probability: Floats, true: Flags) -> float | None:
    """The area under the ROC curve, from ranks; scikit-learn would need an extra."""
    num_true = int(true.sum())
    num_false = int((~true).sum())
    if not num_true or not num_false:
        return None

    _, places, counts = np.unique(log_probability, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    ranks_of_true = mean_ranks[places][true]
    num_ordered_pairs = ranks_of_true.sum() - num_true * (num_true + 1) / 2
    return float(num_ordered_pairs / (num_true * num_false))
