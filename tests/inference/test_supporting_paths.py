"""Supporting paths: a graph with one path, gradients against differences, sentences, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue, UnknownName
from dualkg.inference import explanation
from dualkg.inference.explanation import Rule
from dualkg.inference.rules import RuleCount
from dualkg.inference.supporting_paths import (
    EdgeGradients,
    FoundPath,
    PathSearch,
    edge_gradients,
    edges_without,
    find_paths,
)
from dualkg.kernels.paths import WeightedEdges
from tests.conftest import graph_of
from tests.raising import refused


@pytest.fixture(scope="module")
def cities() -> kg.Graph:
    """Cities in countries with currencies; a city's currency is that of its country."""
    cities = [f"city {number}" for number in range(16)]
    countries = [f"country {number}" for number in range(4)]
    currencies = [f"currency {number}" for number in range(4)]
    located = [(city, 0, 16 + city % 4) for city in range(16)]
    of_countries = [(16 + number, 1, 20 + number) for number in range(4)]
    of_cities = [(city, 2, 20 + city % 4) for city in range(16)]
    train = np.array([*located, *of_countries, *of_cities[4:]], dtype=np.int32)
    held_out = np.array(of_cities[:4], dtype=np.int32)
    return kg.Graph(
        "cities",
        kg.Vocabulary([*cities, *countries, *currencies]),
        kg.Vocabulary(["located_in", "has_currency", "pays_with"], kind="relation"),
        train,
        held_out[:2],
        held_out[2:],
    )


@pytest.fixture(scope="module")
def network(cities) -> kg.Run:
    """A network of two steps: a longer path leads through another city of the country."""
    model = kg.PathNetwork(cities, dim=16, steps=2)
    return kg.train(model, cities, epochs=12, batch_size=8)


def named(model: kg.PathNetwork, numbers) -> list[tuple[int, int, int]]:
    edges = model.edges
    columns = (edges.heads, edges.relations, edges.tails)
    return list(zip(*(column[list(numbers)].tolist() for column in columns), strict=True))


# -- gradients -------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences(small_graph):
    model = kg.PathNetwork(small_graph, dim=6, steps=3, seed=2).double()
    head, relation, tail = triple = tuple(small_graph.train[0].tolist())
    found = edge_gradients(triple, model)
    edges = found.edges
    num_edges = int(edges.kept.sum())
    assert num_edges == 2 * len(small_graph.train) - 2
    assert len(found.numbers[0]) < num_edges  # of edges that begin at the head

    def score(weights):
        weighted = [WeightedEdges(edges, of_step) for of_step in weights]
        ids = (torch.tensor([head]), torch.tensor([relation]))
        return float(model.scores_over(*ids, edges, weighted=weighted)[0, tail].detach())

    ones = torch.ones(3, num_edges, dtype=torch.float64)
    assert found.score == pytest.approx(score(ones))
    places = edges.kept.cumsum(0) - 1
    random = np.random.default_rng(0)
    for step in range(3):
        gradients = dict(zip(found.numbers[step].tolist(), found.gradients[step], strict=True))
        assert max(map(abs, gradients.values())) > 1e-4
        for number in random.permutation(edges.kept.nonzero().flatten().numpy())[:40].tolist():
            change = torch.zeros_like(ones)
            change[step, places[number]] = 1e-6
            difference = (score(ones + change) - score(ones - change)) / 2e-6
            assert gradients.get(number, 0.0) == pytest.approx(difference, abs=1e-7)


def test_the_triple_itself_is_no_edge(network):
    model = network.model
    # `pays_with` of city 4, which is in train, and its inverse.
    triple = (4, 2, 20)
    edges = edges_without(triple, model)
    removed = (~edges.kept).nonzero().flatten().tolist()
    assert named(model, removed) == [(4, 2, 20), (20, 5, 4)]
    # Only its country leads there, although the city pays with the currency in train.
    score, [path] = find_paths(triple, model)
    assert named(model, path.edges) == [(4, 0, 16), (16, 1, 20)]
    with torch.no_grad():
        score_with_it = model.score(*(torch.tensor([id]) for id in triple))
    assert score != pytest.approx(float(score_with_it))


# -- the search --------------------------------------------------------------------


def gradients_of(model: kg.PathNetwork, steps: list[dict[tuple[int, int, int], float]]):
    """Gradients of named edges in each step."""
    edges = model.edges
    columns = (edges.heads.tolist(), edges.relations.tolist(), edges.tails.tolist())
    numbers = {edge: number for number, edge in enumerate(zip(*columns, strict=True))}
    by_step = [sorted(step.items()) for step in steps]
    return EdgeGradients(
        edges,
        1.0,
        [np.array([numbers[edge] for edge, _ in step], dtype=np.int64) for step in by_step],
        [np.array([value for _, value in step]) for step in by_step],
    )


def test_a_search_by_hand():
    """0 → 1 → 2, 0 → 2, and 0 → 3, from which nothing leads to 2."""
    graph = graph_of([(0, 0, 1), (1, 0, 2), (0, 1, 2), (0, 0, 3)])
    model = kg.PathNetwork(graph, dim=16, steps=2)
    direct = (0, 1, 2)
    gradients = gradients_of(
        model,
        [{(0, 0, 1): 3.0, direct: 0.5, (0, 0, 3): 9.0}, {(1, 0, 2): 1.0, direct: 1.5}],
    )
    paths = PathSearch(gradients, 0, 2).run()
    # The direct edge is best in the second step, after staying in the first.
    assert [named(model, path.edges) for path in paths] == [[(0, 0, 1), (1, 0, 2)], [direct]]
    assert [path.weight for path in paths] == [2.0, 1.5]
    assert [path.share for path in paths] == pytest.approx([2 / 3.5, 1.5 / 3.5])

    # What lowers the score is not listed, and has no share.
    gradients = gradients_of(model, [{(0, 0, 1): -3.0, direct: 0.5}, {(1, 0, 2): 1.0}])
    [path] = PathSearch(gradients, 0, 2).run()
    assert (named(model, path.edges), path.share) == ([direct], 1.0)


def test_a_path_visits_no_entity_twice():
    graph = graph_of([(0, 0, 1), (1, 0, 2)], num_relations=1)
    model = kg.PathNetwork(graph, dim=16, steps=4)
    all_edges = {(0, 0, 1): 1.0, (1, 1, 0): 1.0, (1, 0, 2): 1.0, (2, 1, 1): 1.0}
    [path] = PathSearch(gradients_of(model, [all_edges] * 4), 0, 2).run()
    assert named(model, path.edges) == [(0, 0, 1), (1, 0, 2)]
    # A path from an entity to itself returns to it once.
    paths = PathSearch(gradients_of(model, [all_edges] * 4), 0, 0).run()
    assert [named(model, path.edges) for path in paths] == [[(0, 0, 1), (1, 1, 0)]]


def test_sums_of_a_search_are_those_of_all_paths(small_graph):
    model = kg.PathNetwork(small_graph, dim=16, steps=3, seed=1)
    gradients = edge_gradients((3, 1, 8), model)
    found = PathSearch(gradients, 3, 8).run()
    values = [
        dict(zip(numbers.tolist(), of_step.tolist(), strict=True))
        for numbers, of_step in zip(gradients.numbers, gradients.gradients, strict=True)
    ]
    # All paths of two edges, in steps 1 and 2, 1 and 3, or 2 and 3.
    best = -np.inf
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for a, value_a in values[first].items():
            for b, value_b in values[second].items():
                (begin, _, middle), (again, _, end) = named(model, (a, b))
                if (begin, middle, end) == (3, again, 8) and middle not in (3, 8):
                    best = max(best, (value_a + value_b) / 2)
    assert max(path.weight for path in found if len(path.edges) == 2) == pytest.approx(best)


def test_no_path_and_no_share():
    graph = graph_of([(0, 0, 1), (2, 0, 3)])
    _, found = find_paths((0, 0, 3), kg.PathNetwork(graph, dim=16, steps=3))
    assert found == []


# -- explanations ------------------------------------------------------------------


def test_the_only_path_has_the_whole_prediction(network):
    explained = network.predictor().explain("city 0", "pays_with", "currency 0")
    [path] = explained.supporting_paths
    assert path.text == "city 0 — located in → country 0 — has currency → currency 0"
    assert path.share == 1.0
    assert path.weight > 0
    assert [edge.triple.text for edge in path.edges] == [
        "(city 0, located_in, country 0)",
        "(country 0, has_currency, currency 0)",
    ]
    assert [edge.inverse for edge in path.edges] == [False, False]
    # The 15 other cities have a country with a currency, and 12 of them pay with it in train.
    text = "x — located in → · — has currency → y: x — pays with → y"
    sentence = "The rule holds in 80 % of 15 cases."
    assert path.rule == Rule(text, 15, 12, 0.8, None, sentence)

    assert explained.split == "valid"
    assert explained.network_score == pytest.approx(explained.score, abs=1e-4)
    assert explained.sentences() == [
        f"(city 0, pays_with, currency 0) has score {explained.score:.3f}; it is known (valid).",
        "city 0 — located in → country 0 — has currency → currency 0: 100 % of the prediction. "
        "The rule holds in 80 % of 15 cases.",
    ]
    content = explained.as_dict()
    assert content["supporting_triples"] is None
    assert content["supporting_paths"][0]["rule"]["num_true"] == 12


def test_inverse_relations_point_to_the_left(network, monkeypatch):
    # The inverse of the first triple, and this triple as it is.
    inverse = len(network.graph.train)
    assert named(network.model, [inverse, 0]) == [(16, 3, 0), (0, 0, 16)]
    path = FoundPath((inverse, 0), 0.5, 0.0001)
    monkeypatch.setattr(explanation, "find_paths", lambda triple, network: (1.5, [path]))
    explained = network.predictor().explain("country 0", "pays_with", "country 0")
    [supporting] = explained.supporting_paths
    assert supporting.text == "country 0 ← located in — city 0 — located in → country 0"
    assert [edge.inverse for edge in supporting.edges] == [True, False]
    assert supporting.edges[0].triple.text == "(city 0, located_in, country 0)"
    assert supporting.sentence.endswith(
        ": <1 % of the prediction. The rule is not counted because head and tail are the same "
        "entity."
    )
    assert explained.network_score == 1.5


def test_without_a_path_there_is_a_sentence(cities):
    run = kg.train(kg.PathNetwork(cities, dim=16, steps=1), cities, epochs=1)
    explained = run.predictor().explain("city 0", "pays_with", "currency 0")
    assert explained.supporting_paths == ()
    assert explained.sentences()[1:] == ["No path from its head to its tail supports it."]


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (RuleCount(1204, 1047), "The rule holds in 87 % of 1,204 cases."),
        (RuleCount(1, 1), "The rule holds in 100 % of 1 case."),
        (RuleCount(900, 2), "The rule holds in <1 % of 900 cases."),
        (RuleCount(900, 0), "The rule holds in 0 % of 900 cases."),
        (RuleCount(0, 0), "The rule has no other case."),
        (
            RuleCount(None, None, "it has more than 3 steps"),
            "The rule is not counted because it has more than 3 steps.",
        ),
    ],
)
def test_sentences_of_rules(network, monkeypatch, count, sentence):
    monkeypatch.setattr(explanation, "count_rule", lambda *rule: count)
    explained = network.predictor().explain("city 0", "pays_with", "currency 0")
    [path] = explained.supporting_paths
    assert path.sentence.endswith(f" of the prediction. {sentence}")


def test_a_network_explains_the_predictions_of_embeddings(cities, network):
    embeddings = kg.train(kg.ComplEx(cities.shape, dim=4), cities, epochs=2)
    triple = ("city 0", "pays_with", "currency 0")
    explained = embeddings.predictor().explain(*triple, k=2, network=network)
    alone = embeddings.predictor().explain(*triple, k=2)
    assert alone.supporting_paths is None
    of_network = network.predictor().explain(*triple)
    assert explained == replace(
        alone,
        supporting_paths=of_network.supporting_paths,
        network_score=of_network.network_score,
    )
    assert explained.sentences() == [*alone.sentences(), *of_network.sentences()[1:]]

    # A model without supporting triples has the paths alone.
    rotations = kg.train(kg.RotatE(cities.shape, dim=2), cities, epochs=1).predictor()
    with pytest.raises(kg.RequestError, match="RotatE is none of them"):
        rotations.explain(*triple)
    explained = rotations.explain(*triple, network=network)
    assert explained.supporting_paths == of_network.supporting_paths
    assert explained.supporting_triples is None


def test_networks_that_are_refused(cities, network, tmp_path):
    embeddings = kg.train(kg.ComplEx(cities.shape, dim=4), cities, epochs=1)
    predictor = embeddings.predictor()
    triple = ("city 0", "pays_with", "currency 0")
    other = replace(cities, train=cities.train[1:])
    renamed = replace(other, name="towns")
    for graph, model, message in (
        (cities, kg.ComplEx(cities.shape, dim=4), "of a PathNetwork; it has the model ComplEx"),
        (other, kg.PathNetwork(other, dim=16, steps=1), "other names, triples or splits of cities"),
        (renamed, kg.PathNetwork(renamed, dim=16, steps=1), "trained on towns, the predictions"),
    ):
        run = kg.train(model, graph, epochs=1)
        with pytest.raises(kg.RequestError, match=message):
            predictor.explain(*triple, network=run)

    with refused(InvalidValue, setting="k", found=0):
        network.predictor().explain(*triple, k=0)
    with refused(UnknownName, kind="entity", name="city 99"):
        network.predictor().explain("city 99", "pays_with", "currency 0")


def test_the_command(run_cli, cities, network, tmp_path):
    path = replace(network).save(tmp_path / "network")
    query = ("--head", "city 0", "--relation", "pays_with", "--tail", "currency 0")
    printed = run_cli("explain", path, *query, "--device", "cpu")
    assert printed.code == 0, printed.err
    _, line = printed.out.splitlines()
    assert line == network.predictor().explain("city 0", "pays_with", "currency 0").sentences()[1]

    embeddings = kg.train(kg.ComplEx(cities.shape, dim=4), cities, epochs=1)
    other = embeddings.save(tmp_path / "embeddings")
    asked = ("explain", other, *query, "--network", path, "--device", "cpu")
    assert run_cli(*asked).out.splitlines()[-1] == line
    content = run_cli(*asked, "--json").json
    assert content["supporting_paths"][0]["share"] == 1.0
    assert content["supporting_triples"] is not None

    asked = run_cli("explain", path, *query, "--network", other, "--device", "cpu")
    assert asked.code == 2
    assert "--network should be a run of a PathNetwork; it has the model ComplEx." in asked.err
