"""The new triples, compared with a brute-force search."""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference import completion
from dualkg.inference.calibration import Calibration
from dualkg.inference.completion import complete
from tests.inference.completion.brute_force import (
    MODELS,
    complete_brute_force,
    every_new_triple,
    random_calibration,
    random_graph,
)
from tests.pairwise import every_nth

FILTERS = {
    "whole": {},
    "types": {"types": True},
    "relations": {"relations": [2, 0]},
    "heads": {"heads": [3, 5]},
    "loops": {"loops": True},
    "all of them": {"relations": [1, 2], "heads": [0, 3, 5, 8], "types": True},
}


@pytest.fixture(params=[1, 30, 10_000])
def block_size(request, monkeypatch):
    """Blocks of one query, of some, and of all."""
    monkeypatch.setitem(completion.MAX_SCORES, "cpu", request.param)
    return request.param


def assert_same(found, expected):
    triples, log_probability, rank_score = expected
    np.testing.assert_allclose(found.log_probability, log_probability, atol=2e-5)
    if found.probability is not None:
        np.testing.assert_allclose(found.probability, rank_score, atol=1e-5)
        assert (np.diff(found.probability) <= 0).all()
    # Numbers that rounding may exchange do not occur in these graphs.
    assert found.triples.tolist() == triples.tolist()


@pytest.mark.parametrize(("name", "filters"), every_nth(3, MODELS, FILTERS))
def test_the_triples_are_those_of_a_brute_force_search(name, filters):
    graph = random_graph(0)
    calibration = random_calibration(0)
    model = MODELS[name](graph.shape)
    for top in (1, 7, 10_000):
        choices = {"top": top, "calibration": calibration, **FILTERS[filters]}
        assert_same(
            complete(model, graph, **choices), complete_brute_force(model, graph, **choices)
        )


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["CP", "RESCAL, one way", "SE, one way"])
def test_the_size_of_blocks_does_not_matter(name, seed):
    graph = random_graph(seed)
    calibration = random_calibration(seed)
    model = MODELS[name](graph.shape)
    for filters in (FILTERS["whole"], FILTERS["all of them"]):
        choices = {"top": 15, "calibration": calibration, **filters}
        assert_same(
            complete(model, graph, **choices), complete_brute_force(model, graph, **choices)
        )


@pytest.mark.parametrize("minimum", [0.0, 0.3, 0.9, 1.0])
def test_no_triple_is_less_probable_than_the_minimum(minimum):
    graph = random_graph(1)
    calibration = random_calibration(1)
    model = MODELS["ComplEx"](graph.shape)
    choices = {"top": 50, "calibration": calibration, "min_probability": minimum}
    found = complete(model, graph, **choices)
    assert_same(found, complete_brute_force(model, graph, **choices))
    assert (found.probability >= np.float32(minimum)).all()


def test_without_a_calibration_triples_are_ordered_by_log_probability():
    graph = random_graph(2)
    model = MODELS["ComplEx"](graph.shape)
    found = complete(model, graph, top=20)
    assert_same(found, complete_brute_force(model, graph, top=20))
    assert found.probability is None
    assert "probability" not in found.table().column_names


def test_scores_are_those_of_the_model():
    graph = random_graph(3)
    for model in (make(graph.shape) for make in MODELS.values()):
        found = complete(model, graph, top=30)
        expected = model.score(*torch.from_numpy(found.triples).unbind(1)).detach()
        np.testing.assert_allclose(found.score, expected, rtol=1e-4, atol=1e-5)


def test_no_known_triple_is_returned():
    for seed in range(5):
        graph = random_graph(seed)
        found = complete(MODELS["CP"](graph.shape), graph, top=10_000)
        listed = {tuple(triple) for triple in found.triples.tolist()}
        known = {
            tuple(triple)
            for split in kg.data.graph.SPLITS
            for triple in graph.split(split).tolist()
        }
        assert not listed & known
        assert len(listed) == len(found) == len(every_new_triple(graph))


def test_the_known_splits_can_be_chosen():
    graph = random_graph(4)
    model = MODELS["CP"](graph.shape)
    choices = {"top": 40, "known": ["train", "valid"]}
    assert_same(complete(model, graph, **choices), complete_brute_force(model, graph, **choices))


@pytest.mark.usefixtures("block_size")
def test_ties_are_in_the_order_of_ids():
    """Where a model knows nothing, all triples have the same log_probability."""
    graph = random_graph(5)
    model = kg.CP(graph.shape, dim=2, init_scale=0.0)
    for filters in FILTERS.values():
        expected = every_new_triple(graph, **filters)
        for top in (3, 20):
            assert (
                complete(model, graph, top=top, **filters).triples.tolist()
                == expected[:top].tolist()
            )


def test_triples_of_equal_probability_are_ordered_by_log_probability():
    """Where calibrated probabilities and priors are the same."""
    graph = random_graph(6)
    model = MODELS["ComplEx"](graph.shape)
    sure = Calibration(torch.ones(3), torch.full((3, 4), 80.0), torch.ones(3).bool())
    choices = {"top": 12, "calibration": sure, "relations": [1], "types": True}
    found = complete(model, graph, **choices)
    assert (found.answer_probability == 1).all()
    assert len(set(found.probability.tolist())) == 1
    assert (
        found.triples.tolist()
        == complete(model, graph, **(choices | {"calibration": None})).triples.tolist()
    )


def test_filters_do_not_change_a_probability():
    graph = random_graph(7)
    calibration = random_calibration(7)
    model = MODELS["ComplEx"](graph.shape)
    whole = complete(model, graph, calibration=calibration, loops=True)
    by_triple = dict(
        zip(map(tuple, whole.triples.tolist()), whole.probability.tolist(), strict=True)
    )
    for filters in FILTERS.values():
        found = complete(model, graph, calibration=calibration, **filters)
        expected = [by_triple[tuple(triple)] for triple in found.triples.tolist()]
        np.testing.assert_allclose(found.probability, expected, rtol=1e-4)


def test_once_enough_triples_are_found_most_second_queries_are_skipped(monkeypatch):
    """A relation of which the model knows nothing is then scored from one end only."""
    graph = random_graph(0, num_entities=50, num_relations=2, num_triples=60)
    model = kg.ComplEx(graph.shape, dim=8, init_scale=2.0)
    with torch.no_grad():
        model.relations[2] = model.relations[0] * torch.tensor([1.0, -1.0]).repeat_interleave(
            8
        )  # the same in both directions
        model.relations[[1, 3]] = 0
    monkeypatch.setitem(completion.MAX_SCORES, "cpu", 50 * 20)
    scored = []
    scores = completion.RelationQueries.scores
    monkeypatch.setattr(
        completion.RelationQueries,
        "scores",
        lambda self, given: scored.append((self.relation, len(given))) or scores(self, given),
    )
    found = complete(model, graph, top=10)
    assert sum(number for relation, number in scored if relation == 0) == 100
    assert sum(number for relation, number in scored if relation == 1) == 50
    assert_same(found, complete_brute_force(model, graph, top=10))


def test_memory_is_bounded_by_a_block(monkeypatch):
    graph = random_graph(0, num_entities=60, num_relations=2, num_triples=80)
    monkeypatch.setitem(completion.MAX_SCORES, "cpu", 60 * 7)
    sizes = []
    for name in ("scores", "scores_of"):
        whole = getattr(completion.RelationQueries, name)

        def counting(self, *ids, whole=whole):
            found = whole(self, *ids)
            sizes.append(found.numel())
            return found

        monkeypatch.setattr(completion.RelationQueries, name, counting)
    complete(MODELS["CP"](graph.shape), graph, top=5000)
    assert max(sizes) == 60 * 7


def test_a_relation_without_candidates_has_no_triples():
    graph = random_graph(0)
    unused = kg.Graph(
        "made",
        graph.entities,
        kg.Vocabulary([*"abcd"], kind="relation"),
        *(graph.train, graph.valid, graph.test),
    )
    found = complete(MODELS["CP"](unused.shape), unused, relations=["d"], types=True)
    assert len(found) == 0
    assert found.table().num_rows == 0


def test_progress_ends_at_the_total():
    graph = random_graph(0)
    calls = []
    complete(
        MODELS["CP"](graph.shape),
        graph,
        types=True,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"top": 0}, "At least one triple must be requested; top is 0"),
        ({"relations": ["r9"]}, "No relation is named 'r9' among the 3 known"),
        ({"heads": ["e77"]}, "No entity is named 'e77' among the 9 known. Did you mean 'e7'"),
        ({"min_probability": 1.5}, "A probability is between 0 and 1; min_probability is 1.5"),
        ({"min_probability": 0.5}, "min_probability needs a calibration"),
        (
            {"calibration": random_calibration(0, 5)},
            "The calibration is of 5 relations; the graph has 3",
        ),
    ],
)
def test_refusals(choices, sentence):
    graph = random_graph(0)
    with pytest.raises(kg.RequestError, match=sentence):
        complete(MODELS["CP"](graph.shape), graph, **choices)


def test_a_model_of_another_graph_is_refused():
    with pytest.raises(kg.RequestError, match="The model was made for"):
        complete(kg.CP(kg.GraphShape(2, 1), dim=1), random_graph(0))


def test_a_model_that_diverged_is_refused():
    graph = random_graph(0)
    model = MODELS["CP"](graph.shape)
    with torch.no_grad():
        model.entities[2, 0] = torch.nan
    with pytest.raises(kg.DivergedError, match="The model scores NaN or infinity"):
        complete(model, graph)
