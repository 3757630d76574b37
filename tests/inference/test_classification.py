"""Triple classification: AUC, thresholds, negatives, and invalid arguments."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.classification import (
    ClassificationMetrics,
    area_under_curve,
    best_threshold,
    choose_thresholds,
    corrupt_triples,
    evaluate_classification,
    is_known,
    matching_valid_file,
    read_negatives,
)
from dualkg.inference.probability import triple_log_probabilities
from tests.conftest import graph_of

LABELLED = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=40)


def columns(labelled: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    log_probability = np.array([value for value, _ in labelled], dtype=float)
    true = np.array([label for _, label in labelled])
    return log_probability, true


@given(LABELLED)
def test_auc_is_the_share_of_ordered_pairs(labelled):
    log_probability, true = columns(labelled)
    positives = log_probability[true][:, None]
    negatives = log_probability[~true]
    is_ordered = (positives > negatives) + (positives == negatives) / 2
    area = area_under_curve(log_probability, true)
    if is_ordered.size:
        assert area == pytest.approx(is_ordered.mean())
    else:
        assert area is None


@given(LABELLED)
def test_the_threshold_is_the_most_accurate_one(labelled):
    log_probability, true = columns(labelled)

    def num_correct(threshold: float) -> int:
        return ((log_probability >= threshold) == true).sum()

    best = max(num_correct(threshold) for threshold in [*log_probability, 99.0])
    assert num_correct(best_threshold(log_probability, true)) == best


def test_the_threshold_is_halfway_between_two_triples():
    log_probability = np.array([-4.0, -3.0, -1.0, 0.0])
    true = np.array([False, False, True, True])
    assert best_threshold(log_probability, true) == -2.0


def test_relations_with_few_triples_share_a_threshold():
    relations = np.repeat([0, 1], [12, 4])
    log_probability = np.concatenate([np.arange(12.0), np.arange(100.0, 104.0)])
    true = np.concatenate([np.arange(12) >= 6, [False, False, True, True]])
    own, shared = choose_thresholds(log_probability, true, relations)
    assert own == {0: 5.5}
    assert shared == best_threshold(log_probability, true)


def test_metrics_by_hand():
    true = np.array([True, True, True, False, False])
    predicted = np.array([True, True, False, True, False])
    metrics = ClassificationMetrics.of(np.array([5.0, 4.0, 1.0, 3.0, 0.0]), true, predicted)
    assert metrics.accuracy == pytest.approx(3 / 5)
    assert metrics.precision == pytest.approx(2 / 3)
    assert metrics.recall == pytest.approx(2 / 3)
    assert metrics.f1 == pytest.approx(2 / 3)
    assert metrics.auc == pytest.approx(5 / 6)
    assert (metrics.num_true, metrics.num_false) == (3, 2)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_negatives_are_unknown_and_differ_in_one_end(seed):
    random = np.random.default_rng(seed)
    triples = np.unique(np.stack([random.integers(0, n, 60) for n in (12, 2, 12)], axis=1), axis=0)
    graph = graph_of(triples[10:], triples[:5], triples[5:10], num_entities=12, num_relations=2)
    negatives = corrupt_triples(graph, triples, seed=seed)
    assert not is_known(graph, negatives).any()
    assert (negatives[:, 1] == triples[:, 1]).all()
    assert ((negatives != triples).sum(1) == 1).all()
    assert is_known(graph, triples).all()


def test_the_new_entity_is_of_the_domain_or_range():
    """For (2, r0, ?) only e5 is in the range and false; for (?, r0, 3) none in the domain is, so
    any other entity is drawn.
    """
    pairs = [(head, tail) for head in (0, 1, 2) for tail in (3, 4, 5)]
    train = [(head, 0, tail) for head, tail in pairs if (head, tail) != (2, 5)]
    graph = graph_of([*train, (6, 1, 7)], num_entities=40)
    negatives = corrupt_triples(graph, np.array([(2, 0, 3)] * 100), seed=0)
    other_tail = negatives[negatives[:, 0] == 2]
    other_head = negatives[negatives[:, 0] != 2]
    assert {tuple(triple) for triple in other_tail.tolist()} == {(2, 0, 5)}
    assert (other_head[:, 2] == 3).all()
    assert len(set(other_head[:, 0].tolist())) > 10
    assert not is_known(graph, negatives).any()


def test_known_triples_are_not_drawn_as_negatives():
    graph = graph_of([(0, 0, 1), (2, 0, 3)], num_entities=30)
    negatives = corrupt_triples(graph, np.array([(0, 0, 1)] * 50), seed=1)
    assert {tuple(triple) for triple in negatives.tolist()} == {(0, 0, 3), (2, 0, 1)}


def test_a_complete_graph_is_refused():
    graph = graph_of([(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)])
    with pytest.raises(kg.DataError, match=r"No negative can be made of \(e0, r0, e0\)"):
        corrupt_triples(graph, np.array([(0, 0, 0)]))


def test_the_only_possible_negative_is_found():
    triples = [(head, 0, tail) for head in range(12) for tail in range(12)]
    triples.remove((3, 0, 4))
    graph = graph_of(triples)
    negatives = corrupt_triples(graph, np.array([(3, 0, 5)] * 4 + [(2, 0, 4)] * 4), seed=0)
    assert {tuple(triple) for triple in negatives.tolist()} == {(3, 0, 4)}


def test_the_report(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    report = evaluate_classification(model, small_graph)
    assert (report.metrics.num_true, report.metrics.num_false) == (20, 20)
    assert (report.negatives, report.valid_negatives) == ("sampled", "sampled")
    assert sum(part.num_true for part in report.by_relation.values()) == 20
    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert content["metrics"]["accuracy"] == report.metrics.accuracy
    assert "" in content["thresholds"]
    assert evaluate_classification(model, small_graph) == report


def test_given_negatives_are_classified_by_log_probability(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.7)
    negatives = corrupt_triples(small_graph, small_graph.test, seed=5)[:7]
    report = evaluate_classification(model, small_graph, negatives=negatives)
    assert (report.metrics.num_true, report.metrics.num_false) == (20, 7)
    assert (report.negatives, report.valid_negatives) == ("given", "sampled")

    shared = report.thresholds[""]
    thresholds = np.array(
        [report.thresholds.get(name, shared) for name in ("r0", "r1", "r2", "r3")]
    )

    def num_predicted(triples):
        log_probability = triple_log_probabilities(model, triples).numpy()
        return (log_probability >= thresholds[triples[:, 1]]).sum()

    num_correct = num_predicted(small_graph.test) + 7 - num_predicted(negatives)
    assert report.metrics.accuracy == pytest.approx(num_correct / 27)


def test_negatives_from_a_file(tmp_path, small_graph):
    wanted = corrupt_triples(small_graph, small_graph.test, seed=5)
    lines = [f"e{head}\tr{relation}\te{tail}\n" for head, relation, tail in wanted.tolist()]
    path = tmp_path / "test_negatives.txt"
    path.write_text("".join(lines))
    assert (read_negatives(path, small_graph) == wanted).all()
    assert matching_valid_file(path, "test") is None
    (tmp_path / "valid_negatives.txt").write_text(lines[0])
    assert matching_valid_file(path, "test") == tmp_path / "valid_negatives.txt"
    assert matching_valid_file(tmp_path / "mine.tsv", "test") is None


def test_negatives_of_another_graph_are_refused(tmp_path, small_graph):
    path = tmp_path / "negatives.tsv"
    path.write_text("e1\tr0\te99\n")
    with pytest.raises(kg.DataError, match=r"does not fit the graph made: .*'e99'"):
        read_negatives(path, small_graph)


def test_negatives_that_are_known_triples_are_refused(small_graph):
    model = kg.CP(small_graph.shape, dim=2)
    unknown = corrupt_triples(small_graph, small_graph.test)
    negatives = np.concatenate([small_graph.test, unknown])
    with pytest.raises(kg.DataError, match="20 of the 40 negatives of test are triples of made"):
        evaluate_classification(model, small_graph, negatives=negatives)


def test_a_split_that_cannot_be_evaluated_is_refused(small_graph):
    """The thresholds are chosen on valid, which is needed."""
    model = kg.CP(small_graph.shape, dim=2)
    with pytest.raises(InvalidValue, match="another split than valid"):
        evaluate_classification(model, small_graph, split="valid")
    without = graph_of(small_graph.train, (), small_graph.test, num_entities=30, num_relations=4)
    with pytest.raises(kg.DataError, match="Triple classification needs valid triples"):
        evaluate_classification(model, without)
