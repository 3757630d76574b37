"""The first look at a large graph, which must not change what a search finds."""

from math import inf

import numpy as np
import pytest
import torch

from dualkg.inference.calibration import PriorCorrection
from dualkg.inference.completion import CompletionSettings, complete
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.first_look import best_of, first_look, is_worth_it
from dualkg.inference.completion.search import SearchState
from tests.inference.completion.brute_force import (
    MODELS,
    complete_brute_force,
    graph_with_a_symmetric_relation,
    random_calibration,
    random_graph,
)
from tests.pairwise import every_nth

SMALL = 40  # entities
LOOK = CompletionSettings(look_scores=50, best_after=0.0)
FILTERS = {"whole": {}, "types": {"types": True}, "relations": {"relations": [2, 0]}}


def keys(triples) -> list[tuple[int, ...]]:
    return [tuple(triple) for triple in np.asarray(triples).tolist()]


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("name", "filters"), every_nth(3, MODELS, FILTERS))
def test_a_search_after_a_look_finds_the_same(name, filters, calibrated):
    graph = random_graph(4, num_entities=SMALL, num_triples=200)
    model = MODELS[name](graph.shape)
    options = {"top": 7, **FILTERS[filters]}
    if calibrated:
        options["calibration"] = random_calibration(4)
    progress = []
    found = complete(
        model, graph, settings=LOOK, on_progress=lambda *of: progress.append(of), **options
    )
    without = complete(model, graph, settings=CompletionSettings(look_scores=0), **options)
    assert progress[0] == (0, 0)
    assert progress[-1][0] == progress[-1][1] > 0
    assert found.triples.tolist() == without.triples.tolist()
    np.testing.assert_array_equal(found.log_probability, without.log_probability)


@torch.no_grad()
def test_what_is_looked_at_are_new_triples_with_exact_figures():
    graph = graph_with_a_symmetric_relation(1)
    model = MODELS["ComplEx"](graph.shape)
    calibration = random_calibration(1)
    every, log_probability, _ = complete_brute_force(
        model, graph, top=10_000, calibration=calibration
    )
    expected = dict(zip(keys(every), log_probability.tolist(), strict=True))
    correction = PriorCorrection.of(calibration, graph)
    candidates = CandidateFilter(graph, query_classes=correction.query_classes)
    start = SearchState(5, correction, 0.0)
    *_, look = first_look(model, candidates, start=start, max_scores=1000)
    assert len(look.triples) == 5
    for triple in look.triples:
        key = tuple(int(triple[part]) for part in ("head", "relation", "tail"))
        assert float(triple["log_probability"]) == pytest.approx(expected[key], abs=2e-5)
    # A bound that at least as many triples reach as are sought.
    best = complete(model, graph, top=5, calibration=calibration)
    assert -inf < look.last_sort_key
    assert {
        tuple(int(triple[part]) for part in ("head", "relation", "tail"))
        for triple in best_of(look, look).triples
    } <= set(expected)
    assert len(best_of(look, look).triples) == len(best) == 5


def test_the_first_report_comes_before_the_search():
    graph = random_graph(4, num_entities=SMALL, num_triples=200)
    model = MODELS["CP"](graph.shape)
    reports = []
    complete(
        model,
        graph,
        top=20,
        settings=LOOK,
        on_progress=lambda done, total: reports.append((done, total)),
        on_best=lambda best: reports.append(keys(best.triples)),
    )
    first = next(number for number, report in enumerate(reports) if isinstance(report, list))
    assert reports[first - 1] == (0, 0)
    lists = [report for report in reports if isinstance(report, list)]
    assert all(len(set(triples)) == len(triples) for triples in lists)


def test_small_searches_have_no_look():
    graph = random_graph(4)
    candidates = CandidateFilter(graph)
    assert not is_worth_it(candidates, CompletionSettings().look_scores)
    assert not is_worth_it(candidates, 0)
    assert is_worth_it(candidates, 1)
