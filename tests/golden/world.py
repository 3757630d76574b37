"""Results of the run on the bundled graph as plain data, under the keys of golden.json; see
adapter.py.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualkg.analysis import bound_before_and_after, sparsity_curve
from dualkg.inference import Prediction, Predictor
from dualkg.inference.calibration import calibration_for
from dualkg.inference.classification import evaluate_classification
from dualkg.inference.completion import check_completion, complete
from dualkg.inference.export import export
from dualkg.inference.index import measure_storage_formats
from dualkg.inference.index_build import build_index
from dualkg.inference.predictor import predicted_facts
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.inference.scoring import triple_log_probabilities
from dualkg.training import Run

from . import adapter
from .adapter import _metrics
from .checks import ranks_summary, sha256, summary

Query = Mapping[str, str | None]  # head, relation and tail by name; None is the missing one
Triple = Sequence[str]  # head, relation and tail by name


# -- probabilities -----------------------------------------------------------


def calibration_parameters(run: Run) -> dict[str, Any]:
    """Fitted again, or read from the run folder."""
    found = calibration_for(run).calibration
    return {
        "slopes": found.slopes.tolist(),
        "offsets": found.offsets.tolist(),
        "own_parameters": found.relation_specific.tolist(),
        "maximum": found.max_probability,
    }


def calibration_quality(run: Run) -> dict[str, Any]:
    found = evaluate_calibration(calibration_for(run).calibration, run.model, run.graph)
    parts = {"all": found.overall, "likely": found.likely}
    fields = ("ece", "noise", "brier", "num_candidates", "num_true")
    recorded = {"noise": "chance"}
    return {
        name: {recorded.get(field, field): getattr(part, field) for field in fields}
        for name, part in parts.items()
    }


def prediction_set_quality(run: Run, coverage: float) -> dict[str, float]:
    found = evaluate_coverage(
        calibration_for(run).prediction_sets, run.model, run.graph, coverage=coverage
    ).overall
    return {
        "coverage": found.coverage,
        "mean_size": found.mean_size,
        "median_size": found.median_size,
    }


def predictor_of(run: Run) -> Predictor:
    """A predictor with calibrated probabilities and prediction sets, of all entities."""
    return Predictor.of(run, calibrated=True, loops=True)


def _answer(found: Prediction) -> dict[str, Any]:
    return {
        "name": found.name,
        "score": found.score,
        "probability": found.probability,
        "split": found.split,
    }


def triple_probabilities(run: Run, triples: Sequence[Triple]) -> list[dict[str, Any]]:
    predictor = predictor_of(run)
    return [_answer(predictor.triple(*triple)) for triple in triples]


def top_answers(
    run: Run, queries: Sequence[Query], k: int, *, only_new: bool = False
) -> list[list[dict[str, Any]]]:
    return [_answers(predictor_of(run), query, k, only_new=only_new) for query in queries]


def _answers(
    predictor: Any, query: Query, k: int, *, only_new: bool = False
) -> list[dict[str, Any]]:
    head = query["head"]
    relation = query["relation"]
    tail = query["tail"]
    known = "omit" if only_new else "mark"
    if tail is None:
        found = predictor.tails(head, relation, k=k, known=known)
    elif head is None:
        found = predictor.heads(relation, tail, k=k, known=known)
    else:
        found = predictor.relations(head, tail, k=k, known=known)
    return [_answer(one) for one in found]


def prediction_sets(
    run: Run, queries: Sequence[Query], coverage: float
) -> list[list[dict[str, Any]]]:
    predictor = predictor_of(run)
    found = (
        predictor.prediction_set(query["head"], query["relation"], query["tail"], coverage=coverage)
        for query in queries
    )
    return [[_answer(one) for one in answers] for answers in found]


def triple_classification(run: Run, triples: Sequence[Triple]) -> dict[str, Any]:
    """Thresholds from the validation split, metrics on the test split, and the labels of some
    triples.
    """
    report = evaluate_classification(run.model, run.graph, split="test")
    ids = np.array([_ids(run, triple) for triple in triples])
    evidence = triple_log_probabilities(run.model, ids).double().tolist()
    limits = [report.thresholds.get(relation, report.thresholds[""]) for _, relation, _ in triples]
    metrics = report.metrics
    fields = ("accuracy", "precision", "recall", "f1", "auc", "num_true", "num_false")
    return {
        "metrics": {field: getattr(metrics, field) for field in fields},
        "thresholds": dict(sorted(report.thresholds.items())),
        "evidence": evidence,
        "labels": [value >= limit for value, limit in zip(evidence, limits, strict=True)],
    }


def _ids(run: Run, triple: Triple) -> list[int]:
    head, relation, tail = triple
    return [
        run.graph.entities.id(head),
        run.graph.relations.id(relation),
        run.graph.entities.id(tail),
    ]


# -- new facts, new entities, explanations -----------------------------------


def new_facts(run: Run, top: int) -> list[list[Any]]:
    """Rows of head, relation, tail, probability, score and log-probability, the most probable
    first.
    """
    found = complete(
        run.model, run.graph, top=top, calibration=calibration_for(run).calibration
    ).table()
    columns = ("head", "relation", "tail", "probability", "score", "log_probability")
    return [[row[name] for name in columns] for row in found.to_pylist()]


def new_facts_quality(run: Run, sizes: Sequence[int]) -> dict[str, Any]:
    found = check_completion(
        run.model, run.graph, sizes=sizes, calibration=calibration_for(run).calibration
    )
    return {
        "found": list(found.found),
        "expected": list(found.expected or ()),
        "by_degree": [float(one) for one in found.by_degree],
        "at_random": [float(one) for one in found.at_random],
    }


def new_facts_of_entity(run: Run, entity: str, k: int) -> list[list[Any]]:
    found = predicted_facts(predictor_of(run), run.graph.entities.id(entity), k=k)
    names = run.graph.entities
    return [
        [
            names[one.head],
            run.graph.relations[one.relation],
            names[one.tail],
            one.probability,
            one.log_probability,
        ]
        for one in found
    ]


def embed_new_entity(
    run: Run, name: str, triples: Sequence[Triple], queries: Sequence[Query], k: int
) -> tuple[np.ndarray, list[list[dict[str, Any]]]]:
    """The vector of an entity that was not trained, and predictions for queries about it."""
    extended = predictor_of(run).add(name, triples=[tuple(triple) for triple in triples])
    vector = extended.model.entity_vectors()[extended.graph.entities.id(name)].detach().numpy()
    return vector, [_answers(extended, query, k) for query in queries]


def explanation(run: Run, triple: Triple, k: int) -> dict[str, Any]:
    found = predictor_of(run).explain(*triple, k=k)
    return {
        "score": found.score,
        "split": found.split,
        "training_triples": [
            {
                "triple": [one.triple.head, one.triple.relation, one.triple.tail],
                "score_drop": one.score_drop,
                "by_head": one.by_head,
                "by_tail": one.by_tail,
                "same_triple": one.same_triple,
            }
            for one in found.supporting_triples
        ],
        "similar_entities": [
            {
                "entity": one.entity,
                "side": one.side,
                "cosine": one.cosine,
                "triple": [one.triple.head, one.triple.relation, one.triple.tail],
            }
            for one in found.similar_entities
        ],
    }


def similar_entities(run: Run, entity: str, k: int) -> list[list[Any]]:
    return [[one.name, one.score] for one in predictor_of(run).similar(entity, k=k)]


# -- search index ------------------------------------------------------------


def index_search(
    run: Run, queries: Sequence[Query], k: int, *, kind: str, storage: str
) -> dict[str, Any]:
    index = build_index(run.model, run.graph, kind=kind, storage=storage, seconds=0.0)
    searching = Predictor.of(run, calibrated=True, index=index, loops=True)
    return {
        "recall": {
            side: {str(k): share for k, share in facts.recall.items()}
            for side, facts in index.stats.items()
        },
        "answers": [_answers(searching, query, k) for query in queries],
    }


def storage_quality(run: Run, zero_shares: Sequence[float]) -> list[dict[str, Any]]:
    found = measure_storage_formats(run.model, run.graph, shares=zero_shares)
    return [
        {
            "storage": one.storage,
            "zero_share": one.share,
            "bytes": one.bytes,
            "metrics": _metrics(one.metrics),
        }
        for one in found
    ]


# -- export and analysis -----------------------------------------------------


def exported_files(run: Run, folder: Path, file_format: str) -> dict[str, bytes]:
    paths = export(run, folder, format=file_format)
    return {
        path.name: path.read_bytes() for path in paths if path.name != "manifest.json"
    }  # which has a date


def nuclear_norm_bounds(run: Run, weight_unmapped: float, weight_mapped: float) -> dict[str, Any]:
    found = bound_before_and_after(run.model, plain=weight_unmapped, mapped=weight_mapped)
    parts = {"trained": found["trained"], "rebalanced": found["rebalanced"]}
    fields = ("dura", "bound", "components")
    return {name: {field: getattr(one, field) for field in fields} for name, one in parts.items()}


def sparsity(run: Run, zero_shares: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "zero_share": one.share,
            "threshold": one.threshold,
            "bytes": {name: size.bytes for name, size in one.storage.entity_tables.items()},
            "numbers": {name: size.numbers for name, size in one.storage.whole_model.items()},
            "metrics": _metrics(one.metrics),
        }
        for one in sparsity_curve(run.model, run.graph, shares=zero_shares)
    ]


# -- recorded parts ----------------------------------------------------------


def _weights(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        "tables": {name: summary(table) for name, table in adapter.weight_tables(run).items()},
        "losses": adapter.training_losses(run),
    }


def _evaluation(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        "valid": ranks_summary(adapter.filtered_ranks(run, "valid")),
        "test": ranks_summary(adapter.filtered_ranks(run, "test")),
        "report": adapter.evaluation(run, "test"),
        "relation_prediction": adapter.relation_prediction(run),
    }


def _calibration(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {"parameters": calibration_parameters(run), "quality": calibration_quality(run)}


def _probabilities(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        "triples": triple_probabilities(run, inputs["triples"]),
        "top_answers": top_answers(run, inputs["queries"], 10),
        "top_new_answers": top_answers(run, inputs["queries"][:2], 5, only_new=True),
        "top_relations": top_answers(run, inputs["relation_queries"], 5),
    }


def _prediction_sets(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    coverage = inputs["coverage"]
    found = prediction_sets(run, inputs["queries"], coverage)
    return {
        "sets": [
            {
                "size": len(answers),
                "names_sha256": sha256("\n".join(one["name"] for one in answers).encode()),
                "first": answers[:5],
                "last": answers[-2:],
            }
            for answers in found
        ],
        "quality": prediction_set_quality(run, coverage),
    }


def _classification(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return triple_classification(run, inputs["triples"])


def _new_facts(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        "facts": new_facts(run, inputs["num_new_facts"]),
        "quality": new_facts_quality(run, inputs["new_facts_sizes"]),
        "of_entity": new_facts_of_entity(run, inputs["entities"][0], 10),
    }


def _new_entity(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    new = inputs["new_entity"]
    vector, answers = embed_new_entity(run, new["name"], new["triples"], new["queries"], 5)
    return {"vector": summary(vector), "answers": answers}


def _explanations(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return [explanation(run, triple, 5) for triple in inputs["explained"]]


def _similar_entities(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {entity: similar_entities(run, entity, 10) for entity in inputs["entities"]}


def _index(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    found = {
        f"{kind} {storage}": index_search(run, inputs["queries"][:2], 5, kind=kind, storage=storage)
        for kind, storage in inputs["indexes"]
    }
    return {"indexes": found, "storage": storage_quality(run, inputs["zero_shares"])}


def _export(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        name: {
            file: sha256(data) for file, data in exported_files(run, folder / name, name).items()
        }
        for name in inputs["export_formats"]
    }


def _analysis(run: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    return {
        "nuclear_norm": nuclear_norm_bounds(run, *inputs["dura_weights"]),
        "sparsity": sparsity(run, inputs["zero_shares"]),
    }


PARTS: dict[str, Callable[[Any, Mapping[str, Any], Path], Any]] = {
    "weights": _weights,
    "evaluation": _evaluation,
    "calibration": _calibration,
    "probabilities": _probabilities,
    "prediction_sets": _prediction_sets,
    "classification": _classification,
    "new_facts": _new_facts,
    "new_entity": _new_entity,
    "explanations": _explanations,
    "similar_entities": _similar_entities,
    "index": _index,
    "export": _export,
    "analysis": _analysis,
}
