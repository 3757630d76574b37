"""The new triples, compared with a brute-force search."""

import dataclasses

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.entity_types import EntityTypes
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS
from dualkg.errors import InvalidValue
from dualkg.inference.completion import CompletionSettings, complete, search
from dualkg.serve.entity_facts import Remarker
from tests.conftest import graph_of
from tests.inference.calibrations import calibration_on
from tests.inference.completion.brute_force import (
    MODELS,
    complete_brute_force,
    every_new_triple,
    graph_with_a_symmetric_relation,
    random_calibration,
    random_graph,
)
from tests.pairwise import every_nth

DEFAULT = CompletionSettings()
FILTERS = {
    "whole": {},
    "types": {"types": True},
    "relations": {"relations": [2, 0]},
    "heads": {"heads": [3, 5]},
    "loops": {"loops": True},
    "all of them": {"relations": [1, 2], "heads": [0, 3, 5, 8], "types": True},
}


# Blocks of one query, of some, and of all.
BLOCKS = [CompletionSettings(max_scores=max_scores) for max_scores in (1, 30, 10_000)]


def assert_same(completion, expected):
    triples, log_probability, probability = expected
    np.testing.assert_allclose(completion.log_probability, log_probability, atol=2e-5)
    if completion.probability is not None:
        np.testing.assert_allclose(completion.probability, probability, atol=1e-5)
        assert (np.diff(completion.probability) <= 0).all()
    # Numbers that rounding may exchange do not occur in these graphs.
    assert completion.triples.tolist() == triples.tolist()


def assert_brute_force(model, graph, *, settings=DEFAULT, **options):
    """Search, and compare with the list of every triple."""
    completion = complete(model, graph, settings=settings, **options)
    assert_same(completion, complete_brute_force(model, graph, **options))
    return completion


@pytest.mark.parametrize(("name", "filters"), every_nth(3, MODELS, FILTERS))
def test_the_triples_are_those_of_a_brute_force_search(name, filters):
    graph = random_graph(0)
    model = MODELS[name](graph.shape)
    for top in (1, 7, 10_000):
        assert_brute_force(
            model, graph, top=top, calibration=random_calibration(0), **FILTERS[filters]
        )


@pytest.mark.parametrize("typed", [False, True])
def test_types_leave_out_what_is_remarked_as_unusual(typed):
    """By the types of the calibration, if it has some, as on the pages."""
    graph = random_graph(0, num_entities=25)
    calibration = random_calibration(0)
    if typed:
        entities = np.arange(25)
        types = EntityTypes.of_pairs("a file", list("abcdefgh"), entities, entities % 8)
        calibration = dataclasses.replace(calibration, types=types)
    model = MODELS["CP"](graph.shape)
    every = complete(model, graph, calibration=calibration).triples
    classes = calibration.on(graph).query_classes
    remarks = Remarker.of(graph, KnownAnswers.of(graph), classes).of_triples(every)
    usual = ["unusual" not in (remark.head_type, remark.tail_type) for remark in remarks]
    assert 0 < sum(usual) < len(every)
    of_usual_types = complete(model, graph, calibration=calibration, types=True).triples
    assert of_usual_types.tolist() == every[usual].tolist()


@pytest.mark.parametrize("filters", ["whole", "types", "heads"])
@pytest.mark.parametrize("name", ["CP", "ComplEx, one way", "RESCAL"])
def test_both_directions_of_a_symmetric_fact_have_one_number(name, filters):
    graph = graph_with_a_symmetric_relation(1)
    assert graph.symmetric_relations.tolist() == [True, False, False]
    model = MODELS[name](graph.shape)
    options = {"calibration": random_calibration(1), **FILTERS[filters]}
    every = complete(model, graph, top=10_000, **options)
    triples, log_probability, probability = complete_brute_force(
        model, graph, top=10_000, **options
    )
    assert {*map(tuple, every.triples.tolist())} == {*map(tuple, triples.tolist())}
    np.testing.assert_allclose(every.log_probability, log_probability, atol=2e-5)
    np.testing.assert_allclose(every.probability, probability, atol=1e-5)
    best = complete(model, graph, top=7, **options)
    np.testing.assert_allclose(best.probability, probability[:7], atol=1e-5)

    numbers = dict(zip(map(tuple, every.triples.tolist()), every.probability, strict=True))
    symmetric = {triple: number for triple, number in numbers.items() if triple[1] == 0}
    pairs = [(symmetric[triple], symmetric.get(triple[::-1])) for triple in symmetric]
    pairs = [pair for pair in pairs if pair[1] is not None]
    assert len(pairs) >= 2
    assert all(number == pytest.approx(other, rel=1e-5) for number, other in pairs)
    others = [(n, numbers.get(triple[::-1])) for triple, n in numbers.items() if triple[1] == 1]
    assert any(other is not None and abs(n - other) > 1e-3 for n, other in others)

    heads, relations, tails = torch.from_numpy(every.triples).T
    scores = model.score(heads, relations, tails).detach()
    np.testing.assert_allclose(every.score, scores, atol=2e-5)


@pytest.mark.parametrize("settings", BLOCKS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["CP", "RESCAL, one way", "SE, one way"])
def test_the_size_of_blocks_does_not_matter(name, seed, settings):
    graph = random_graph(seed)
    model = MODELS[name](graph.shape)
    options = {"top": 15, "calibration": random_calibration(seed), "settings": settings}
    assert_brute_force(model, graph, **options)
    assert_brute_force(model, graph, **options, **FILTERS["all of them"])


@pytest.mark.parametrize("minimum", [0.0, 0.3, 0.9, 1.0])
def test_no_triple_is_less_probable_than_the_minimum(minimum):
    graph = random_graph(1)
    completion = assert_brute_force(
        MODELS["ComplEx"](graph.shape),
        graph,
        top=50,
        calibration=random_calibration(1),
        min_probability=minimum,
    )
    assert (completion.probability >= np.float32(minimum)).all()


def test_without_a_calibration_triples_are_ordered_by_log_probability():
    graph = random_graph(2)
    model = MODELS["ComplEx"](graph.shape)
    completion = assert_brute_force(model, graph, top=20)
    assert completion.probability is None
    assert "probability" not in completion.table().column_names


def test_scores_are_those_of_the_model():
    graph = random_graph(3)
    for build in MODELS.values():
        model = build(graph.shape)
        completion = complete(model, graph, top=30)
        heads, relations, tails = torch.from_numpy(completion.triples).unbind(1)
        expected = model.score(heads, relations, tails).detach()
        np.testing.assert_allclose(completion.score, expected, rtol=1e-4, atol=1e-5)


def test_no_known_triple_is_returned():
    for seed in range(5):
        graph = random_graph(seed)
        completion = complete(MODELS["CP"](graph.shape), graph, top=10_000)
        new = {tuple(triple) for triple in completion.triples.tolist()}
        known = np.concatenate([graph.split(split) for split in SPLITS]).tolist()
        assert not new & {tuple(triple) for triple in known}
        assert len(new) == len(completion) == len(every_new_triple(graph))


def test_the_known_splits_can_be_chosen():
    graph = random_graph(4)
    model = MODELS["CP"](graph.shape)
    assert_brute_force(model, graph, top=40, known=["train", "valid"])


@pytest.mark.parametrize("settings", BLOCKS)
def test_ties_are_in_the_order_of_ids(settings):
    """Where a model knows nothing, all triples have the same log-probability."""
    graph = random_graph(5)
    model = kg.CP(graph.shape, dim=2, init_scale=0.0)
    for filters in FILTERS.values():
        expected = every_new_triple(graph, **filters)
        for top in (3, 20):
            completion = complete(model, graph, top=top, settings=settings, **filters)
            assert completion.triples.tolist() == expected[:top].tolist()


def test_triples_of_equal_probability_are_ordered_by_log_probability():
    """Where probabilities and priors are the same: each entity has one triple as head and
    one as tail.
    """
    graph = graph_of([(id, 0, (id + 1) % 9) for id in range(9)])
    model = MODELS["ComplEx"](graph.shape)
    certain = calibration_on(graph, offsets=80.0)
    options = {"top": 12, "types": True}
    completion = complete(model, graph, calibration=certain, **options)
    assert (completion.answer_probability == 1).all()
    assert len(set(completion.probability.tolist())) == 1
    by_log_probability = complete(model, graph, **options)
    assert completion.triples.tolist() == by_log_probability.triples.tolist()


def test_filters_do_not_change_a_probability():
    graph = random_graph(7)
    calibration = random_calibration(7)
    model = MODELS["ComplEx"](graph.shape)
    unfiltered = complete(model, graph, calibration=calibration, loops=True)
    triples = [tuple(triple) for triple in unfiltered.triples.tolist()]
    by_triple = dict(zip(triples, unfiltered.probability.tolist(), strict=True))
    for filters in FILTERS.values():
        completion = complete(model, graph, calibration=calibration, **filters)
        expected = [by_triple[tuple(triple)] for triple in completion.triples.tolist()]
        np.testing.assert_allclose(completion.probability, expected, rtol=1e-4)


def test_once_enough_triples_are_found_most_second_queries_are_skipped(monkeypatch):
    """A relation of which the model knows nothing is then scored from one end only."""
    graph = random_graph(0, num_entities=50, num_relations=2, num_triples=60)
    model = kg.ComplEx(graph.shape, dim=8, init_scale=2.0)
    with torch.no_grad():
        # Relation 0 scores the same in both directions, and relation 1 scores 0.
        conjugation = torch.tensor([1.0, -1.0]).repeat_interleave(8)
        model.relations[2] = model.relations[0] * conjugation
        model.relations[[1, 3]] = 0

    scored_relations = []
    predict_tails = model.predict_tails
    predict_heads = model.predict_heads

    def counting_tails(heads, relations):
        scored_relations.extend(relations.tolist())
        return predict_tails(heads, relations)

    def counting_heads(relations, tails):
        scored_relations.extend(relations.tolist())
        return predict_heads(relations, tails)

    monkeypatch.setattr(model, "predict_tails", counting_tails)
    monkeypatch.setattr(model, "predict_heads", counting_heads)
    completion = complete(model, graph, top=10, settings=CompletionSettings(max_scores=50 * 20))
    assert scored_relations.count(0) == 100
    assert scored_relations.count(1) == 50
    assert_same(completion, complete_brute_force(model, graph, top=10))


def test_memory_is_bounded_by_a_block(monkeypatch):
    graph = random_graph(0, num_entities=60, num_relations=2, num_triples=80)
    model = MODELS["CP"](graph.shape)
    sizes = []

    def recording(predict):
        def wrapped(*arguments):
            scores = predict(*arguments)
            sizes.append(scores.numel())
            return scores

        return wrapped

    for name in ("predict_tails", "predict_heads", "predict_candidates"):
        monkeypatch.setattr(model, name, recording(getattr(model, name)))
    complete(model, graph, top=5000, settings=CompletionSettings(max_scores=60 * 7))
    assert max(sizes) == 60 * 7


def test_a_relation_without_candidates_has_no_triples():
    graph = random_graph(0)
    relations = kg.Vocabulary(["a", "b", "c", "unused"], kind="relation")
    graph = dataclasses.replace(graph, relations=relations)
    completion = complete(MODELS["CP"](graph.shape), graph, relations=["unused"], types=True)
    assert len(completion) == 0
    assert completion.table().num_rows == 0


def test_progress_ends_at_the_total():
    graph = random_graph(0)
    calls = []

    def on_progress(done, total):
        calls.append((done, total))

    complete(MODELS["CP"](graph.shape), graph, types=True, on_progress=on_progress)
    last_done, total = calls[-1]
    assert last_done == total
    assert calls == sorted(calls)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top": 0}, InvalidValue, "`top` should be a whole number of at least 1; 0 was given"),
        ({"top": 2.5}, InvalidValue, "2.5 was given"),
        ({"min_probability": -0.1}, InvalidValue, "`min_probability` should be between 0 and 1"),
        ({"min_probability": 0.5}, kg.RequestError, "needs a calibration"),
        (
            {"calibration": random_calibration(0, 5)},
            kg.RequestError,
            "The calibration of 5 relations does not fit the graph made, which has 3",
        ),
        ({"relations": ["r9"]}, kg.RequestError, "'r9'"),
        ({"heads": ["e77"]}, kg.RequestError, "'e77'"),
    ],
)
def test_bad_requests(options, error, message):
    graph = random_graph(0)
    with pytest.raises(error, match=message):
        complete(MODELS["CP"](graph.shape), graph, **options)


def test_a_model_of_another_graph_is_refused():
    with pytest.raises(kg.RequestError, match="2"):
        complete(kg.CP(kg.GraphShape(2, 1), dim=1), random_graph(0))


def test_a_model_that_diverged_is_refused():
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    with torch.no_grad():
        model.entities[2, 0] = torch.nan
    with pytest.raises(kg.DivergedError):
        complete(model, graph)


def test_the_best_so_far_are_reported():
    graph = random_graph(3, num_triples=60)
    model = kg.ComplEx(graph.shape, dim=4)
    reported = []
    settings = CompletionSettings(max_scores=1, best_after=0.0)
    found = complete(model, graph, top=5, on_best=reported.append, settings=settings)
    assert reported
    best = [float(completion.log_probability[0]) for completion in reported]
    assert best == sorted(best)
    assert best[-1] <= found.log_probability[0]
    assert all(len(completion) <= 5 for completion in reported)
    patient = CompletionSettings(max_scores=1, best_after=1e9)
    complete(model, graph, top=5, on_best=pytest.fail, settings=patient)


def path_model(kind, graph):
    torch.manual_seed(3)
    network = kg.PathNetwork(graph, dim=8, steps=2)
    if kind == "ensemble":
        embeddings = MODELS["ComplEx"](graph.shape)
        return kg.EnsembleModel([network, embeddings], weights=[1.0, 0.5]).eval()
    return network.eval()


@pytest.mark.parametrize("kind", ["network", "ensemble"])
def test_a_path_network_answers_each_query_of_a_relation_once_for_each_end(kind, monkeypatch):
    """Messages reach all entities, whatever the answers that are asked for."""
    graph = random_graph(1, num_triples=60)
    model = path_model(kind, graph)
    num_queries = 0
    answer = kg.PathNetwork._answer

    def count(self, given, relations):
        nonlocal num_queries
        num_queries += len(given)
        return answer(self, given, relations)

    monkeypatch.setattr(kg.PathNetwork, "_answer", count)
    kept = complete(model, graph, top=50)
    num_in_all = 2 * graph.shape.num_entities * graph.shape.num_relations
    assert 0 < num_queries <= num_in_all

    num_queries = 0
    monkeypatch.setattr(search, "MAX_KEPT_SCORES", 0)
    every_time = complete(model, graph, top=50)
    assert num_queries > num_in_all
    assert_same(kept, (every_time.triples, every_time.log_probability, every_time.probability))
