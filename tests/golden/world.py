"""A run on the bundled graph, and what is computed from it, as plain data."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import dualkg as kg
from dualkg.analysis import sparsity_curve
from dualkg.evaluation import Metrics, evaluate_relations
from dualkg.inference import Prediction, Predictor
from dualkg.inference.calibration import calibration_for
from dualkg.inference.classification import evaluate_classification
from dualkg.inference.completion import check_completion, complete
from dualkg.inference.export import export
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.inference.scoring import triple_log_probabilities
from dualkg.serve.entity_facts import predicted_facts
from dualkg.training import load_run
from paper.nuclear import bound_before_and_after

from . import adapter

SETTINGS: Mapping[str, Any] = {
    "data.graph": "world",
    "model.name": "ComplEx",
    "model.dim": 20,
    "regularizer.name": "DURA",
    "regularizer.weight": 0.05,
    "regularizer.plain": 0.5,
    "regularizer.mapped": 1.5,
    "optimizer.learning_rate": 0.3,
    "optimizer.schedule": "linear",
    "training.epochs": 3,
    "training.batch_size": 100,
    "training.seed": 0,
    "training.precision": "float32",
}

Triple = tuple[str, str, str]  # head, relation and tail by name
Query = tuple[str | None, str | None, str | None]  # the same, with None for the missing part

TRUE_TRIPLES: tuple[Triple, ...] = (
    ("10th of Ramadan", "located_in", "Egypt"),
    ("Bhutan", "continent", "Asia"),
    ("Curaçao", "official_language", "Dutch"),
    ("Gabon", "celebrates", "Pentecost"),
    ("Isle of Man", "capital", "Douglas"),
    ("Liechtenstein", "official_language", "German"),
    ("New Zealand", "capital", "Wellington"),
    ("Saint Kitts and Nevis", "celebrates", "Pentecost Monday"),
    ("Tajikistan", "capital", "Dushanbe"),
    ("Åland Islands", "first_day_of_week", "Monday"),
)
FALSE_TRIPLES: tuple[Triple, ...] = (
    ("10th of Ramadan", "located_in", "Namibian Dollar"),
    ("Bhutan", "continent", "Harare"),
    ("Curaçao", "official_language", "Somali"),
    ("Gabon", "celebrates", "Puerto Cortez"),
    ("Isle of Man", "capital", "Bogotá"),
    ("Liechtenstein", "official_language", "Uzbek"),
    ("New Zealand", "capital", "Arabic"),
    ("Saint Kitts and Nevis", "celebrates", "Jos"),
    ("Tajikistan", "capital", "Italian"),
    ("Åland Islands", "first_day_of_week", "Mauritius Time"),
)
TRIPLES = TRUE_TRIPLES + FALSE_TRIPLES
QUERIES: tuple[Query, ...] = (
    ("France", "borders", None),
    ("Japan", "time_zone", None),
    (None, "located_in", "Egypt"),
    ("Switzerland", "official_language", None),
    (None, "celebrates", "Christmas Day"),
)
RELATION_QUERIES: tuple[Query, ...] = (("France", None, "Germany"), ("Cairo", None, "Egypt"))
EXPLAINED: tuple[Triple, ...] = (TRUE_TRIPLES[0], TRUE_TRIPLES[5])
ENTITIES = ("France", "Cairo", "Egypt")

NEW_ENTITY = "Atlantis"
NEW_TRIPLES: tuple[Triple, ...] = (
    (NEW_ENTITY, "continent", "Europe"),
    (NEW_ENTITY, "borders", "France"),
    (NEW_ENTITY, "official_language", "French"),
)
NEW_QUERIES: tuple[Query, ...] = ((NEW_ENTITY, "currency", None), (None, "borders", NEW_ENTITY))

COVERAGE = 0.9
ZERO_SHARES = (0.5, 0.9)
EXPORT_FORMATS = ("numpy", "tsv", "safetensors")
DURA_WEIGHTS = {"plain": 0.5, "mapped": 1.5}


def train(folder: Path) -> kg.Run:
    return adapter.train(SETTINGS, folder=folder)


def results(folder: Path) -> dict[str, Any]:
    """All parts of a run that is trained in a new folder, and read again from it."""
    train(folder)
    run = load_run(folder)
    calibration_for(run)  # saved in the folder, so that all parts read the same
    return {name: part(run) for name, part in PARTS.items()}


# -- weights and ranks -------------------------------------------------------


def _weights(run: kg.Run) -> Any:
    tables = adapter.weight_tables(run)
    return {
        "tables": {name: sha256(table.tobytes()).hexdigest() for name, table in tables.items()},
        "losses": adapter.losses_by_epoch(run),
    }


def evaluation(run: kg.Run) -> dict[str, Any]:
    """Metrics on the test split, and hashes of all ranks."""
    report = run.report_on("test")
    hashes = {}
    for split in ("valid", "test"):
        for name, ranks in adapter.ranks(run, split).items():
            hashes[f"{split} {name}"] = sha256(ranks.astype(np.int64).tobytes()).hexdigest()
    return {
        "ranks": hashes,
        "realistic": _metrics(report.metrics),
        "optimistic": _metrics(report.optimistic),
        "pessimistic": _metrics(report.pessimistic),
        "without_unseen": _metrics(report.without_unseen),
        "by_direction": _mrr_of_groups(report.by_direction),
        "by_relation": _mrr_of_groups(report.by_relation),
        "by_cardinality": _mrr_of_groups(report.by_cardinality),
        "relation_prediction": _metrics(evaluate_relations(run.model, run.graph, split="test")),
    }


def _metrics(metrics: Metrics) -> dict[str, float]:
    names = ("mrr", "mr", "hits_at_1", "hits_at_3", "hits_at_10", "num_queries")
    return {name: getattr(metrics, name) for name in names}


def _mrr_of_groups(groups: Mapping[str, Metrics]) -> dict[str, float]:
    return {name: metrics.mrr for name, metrics in groups.items()}


# -- probabilities -----------------------------------------------------------


def _calibration(run: kg.Run) -> Any:
    calibration = calibration_for(run).calibration
    quality = evaluate_calibration(calibration, run.model, run.graph)
    parameters = {
        "slopes": calibration.slopes.tolist(),
        "offsets": calibration.offsets.tolist(),
        "relation_specific": calibration.relation_specific.tolist(),
        "max_probability": calibration.max_probability,
    }
    fields = ("ece", "noise", "brier", "num_candidates", "num_true")
    return {
        "parameters": parameters,
        "overall": {field: getattr(quality.overall, field) for field in fields},
        "likely": {field: getattr(quality.likely, field) for field in fields},
    }


def _predictor(run: kg.Run) -> Predictor:
    """A predictor with calibrated probabilities and prediction sets."""
    return Predictor.of(run, calibrated=True, loops=True)


def _probabilities(run: kg.Run) -> Any:
    predictor = _predictor(run)
    return {
        "triples": [_row(predictor.triple(*triple)) for triple in TRIPLES],
        "queries": [_answers(predictor, query, 10) for query in QUERIES],
        "new": [_answers(predictor, query, 5, known="omit") for query in QUERIES[:2]],
        "relations": [_answers(predictor, query, 5) for query in RELATION_QUERIES],
    }


def _answers(
    predictor: Predictor, query: Query, k: int, *, known: str = "mark"
) -> list[dict[str, Any]]:
    head, relation, tail = query
    if tail is None:
        predictions = predictor.tails(head, relation, k=k, known=known)
    elif head is None:
        predictions = predictor.heads(relation, tail, k=k, known=known)
    else:
        predictions = predictor.relations(head, tail, k=k, known=known)
    return [_row(prediction) for prediction in predictions]


def _row(prediction: Prediction) -> dict[str, Any]:
    fields = ("name", "score", "probability", "split")
    return {field: getattr(prediction, field) for field in fields}


def _prediction_sets(run: kg.Run) -> Any:
    predictor = _predictor(run)
    sets = [predictor.prediction_set(*query, coverage=COVERAGE) for query in QUERIES]
    prediction_sets = calibration_for(run).prediction_sets
    quality = evaluate_coverage(prediction_sets, run.model, run.graph, coverage=COVERAGE).overall
    fields = ("coverage", "mean_size", "median_size")
    return {
        "sets": [[_row(prediction) for prediction in predictions] for predictions in sets],
        "quality": {field: getattr(quality, field) for field in fields},
    }


def _classification(run: kg.Run) -> Any:
    """Thresholds of the validation split, metrics of the test split, and scores of triples."""
    report = evaluate_classification(run.model, run.graph, split="test")
    ids = np.array([_ids(run, triple) for triple in TRIPLES])
    fields = ("accuracy", "precision", "recall", "f1", "auc", "num_true", "num_false")
    return {
        "metrics": {field: getattr(report.metrics, field) for field in fields},
        "thresholds": dict(sorted(report.thresholds.items())),
        "log_probabilities": triple_log_probabilities(run.model, ids).double().tolist(),
    }


def _ids(run: kg.Run, triple: Triple) -> list[int]:
    head, relation, tail = triple
    entities = run.graph.entities
    return [entities.id(head), run.graph.relations.id(relation), entities.id(tail)]


# -- new facts, new entities, explanations -----------------------------------


def _new_facts(run: kg.Run) -> Any:
    calibration = calibration_for(run).calibration
    completed = complete(run.model, run.graph, top=100, calibration=calibration).table()
    columns = ["head", "relation", "tail", "probability", "score", "log_probability"]
    quality = check_completion(run.model, run.graph, sizes=(100, 1000), calibration=calibration)
    entity = run.graph.entities.id(ENTITIES[0])
    facts = predicted_facts(_predictor(run), entity, k=10)
    return {
        "triples": completed.select(columns).to_pylist(),
        "found": list(quality.found),
        "expected": list(quality.expected or ()),
        "by_degree": [float(number) for number in quality.by_degree],
        "at_random": [float(number) for number in quality.at_random],
        "of_entity": [
            [fact.head, fact.relation, fact.tail, fact.probability, fact.log_probability]
            for fact in facts
        ],
    }


def _new_entity(run: kg.Run) -> Any:
    """The vector of an entity that was not trained, and predictions for queries about it."""
    extended = _predictor(run).add(NEW_ENTITY, triples=list(NEW_TRIPLES))
    row = extended.graph.entities.id(NEW_ENTITY)
    return {
        "vector": extended.model.entity_vectors()[row].tolist(),
        "answers": [_answers(extended, query, 5) for query in NEW_QUERIES],
    }


def _explanations(run: kg.Run) -> Any:
    return [_explanation(_predictor(run), triple) for triple in EXPLAINED]


def _explanation(predictor: Predictor, triple: Triple) -> dict[str, Any]:
    explained = predictor.explain(*triple, k=5)
    supporting = [
        {
            "triple": [support.triple.head, support.triple.relation, support.triple.tail],
            "score_drop": support.score_drop,
            "by_head": support.by_head,
            "by_tail": support.by_tail,
            "same_triple": support.same_triple,
        }
        for support in explained.supporting_triples
    ]
    similar = [
        [entity.entity, entity.side, entity.cosine, entity.triple.relation]
        for entity in explained.similar_entities
    ]
    return {"score": explained.score, "supporting_triples": supporting, "similar_entities": similar}


def _similar_entities(run: kg.Run) -> Any:
    predictor = _predictor(run)
    return {
        entity: [[similar.name, similar.score] for similar in predictor.similar(entity, k=10)]
        for entity in ENTITIES
    }


# -- export and analysis ---------------------------------------------------------


def _export(run: kg.Run) -> Any:
    hashes = {}
    for file_format in EXPORT_FORMATS:
        folder = Path(str(run.folder) + f"-{file_format}")
        for path in export(run, folder, format=file_format):
            if path.name != "manifest.json":  # it has a date
                hashes[f"{file_format} {path.name}"] = sha256(path.read_bytes()).hexdigest()
    return hashes


def _analysis(run: kg.Run) -> Any:
    bounds = bound_before_and_after(run.model, **DURA_WEIGHTS)
    fields = ("dura", "bound", "components")
    return {
        "nuclear_norm": {
            name: {field: getattr(bounds[name], field) for field in fields}
            for name in ("trained", "rebalanced")
        },
        "sparsity": _sparsity(run, ZERO_SHARES),
    }


def _sparsity(run: kg.Run, shares: Sequence[float]) -> list[dict[str, Any]]:
    rows = []
    for point in sparsity_curve(run.model, run.graph, shares=shares):
        row = {"share": point.share, "threshold": point.threshold}
        for name, size in point.storage.entity_tables.items():
            row[f"{name} bytes"] = size.bytes
        for name, size in point.storage.whole_model.items():
            row[f"{name} numbers"] = size.numbers
        rows.append(row | _metrics(point.metrics))
    return rows


PARTS: Mapping[str, Callable[[kg.Run], Any]] = {
    "weights": _weights,
    "evaluation": evaluation,
    "calibration": _calibration,
    "probabilities": _probabilities,
    "prediction_sets": _prediction_sets,
    "classification": _classification,
    "new_facts": _new_facts,
    "new_entity": _new_entity,
    "explanations": _explanations,
    "similar_entities": _similar_entities,
    "export": _export,
    "analysis": _analysis,
}
