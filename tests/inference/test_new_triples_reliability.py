"""How often new triples of some probability are in test."""

import numpy as np
import pytest

import dualkg as kg
from dualkg.inference.api import calibrate
from dualkg.inference.completion import check, complete, completion_reliability


@pytest.fixture(scope="module")
def calibrated():
    graph = kg.load_graph("world")
    run = kg.train(kg.ComplEx(graph.shape, dim=8), graph, regularizer=kg.DURA(0.05), epochs=4)
    return run, calibrate(run)


@pytest.mark.slow
def test_bins_count_the_triples_of_a_completion(calibrated):
    run, calibration = calibrated
    graph = run.graph
    found = complete(
        run.model,
        graph,
        top=100_000,
        calibration=calibration,
        min_probability=0.01,
        known=("train", "valid"),
    )
    in_test = set(map(tuple, graph.test.tolist()))
    ratio = len(graph.test) / len(graph.valid)
    bins = completion_reliability(run.model, graph, calibration)
    assert sum(bin.num_candidates for bin in bins) == len(found)
    assert sum(bin.num_true for bin in bins) == len(
        in_test & set(map(tuple, found.triples.tolist()))
    )
    for bin in bins:
        chosen = (found.probability >= bin.lower) & (found.probability < bin.upper)
        hits = [tuple(triple) in in_test for triple in found.triples[chosen].tolist()]
        assert bin.observed == pytest.approx(np.mean(hits))
        assert bin.predicted == pytest.approx(ratio * found.probability[chosen].mean(), rel=1e-4)
    assert calibration.checks["new_triples"][0]["num_candidates"] == bins[0].num_candidates


def test_a_long_search_is_left_out(calibrated, monkeypatch):
    run, calibration = calibrated
    monkeypatch.setattr(check, "MAX_SCORES", 1000)
    assert completion_reliability(run.model, run.graph, calibration) is None
