"""Queries and their answers, silhouettes, projections, and Figure 1."""

import json

import numpy as np
import pytest
import torch

import dualkg as kg
from paper.figures import (
    SHARED,
    NamedQuery,
    compute_plane,
    find_queries,
    group_answers,
    pick_query,
    project,
    silhouette,
)
from paper.registry import published
from tests.conftest import graph_of

LABELS = {"e0": "organ", "e1": "organ", "e2": "Germany", "e3": "funk", "e4": "funk"}


@pytest.fixture
def labelled() -> kg.Graph:
    """Two organs, of which e1 plays r0 and neither r2; two funks, with one answer each to r1."""
    graph = graph_of(
        [(1, 0, 5), (1, 0, 6), (3, 1, 5), (4, 1, 6)], [(2, 0, 7)], [(1, 0, 8), (2, 2, 8)]
    )
    relations = kg.Vocabulary(
        ["/music/role", "/music/genre/artists", "/a/b./c/is_in"], kind="relation"
    )
    return kg.Graph(
        "made",
        kg.Vocabulary(graph.entities.names, LABELS),
        relations,
        graph.train,
        graph.valid,
        graph.test,
    )


def query(*answers: int, name: str = "") -> NamedQuery:
    return NamedQuery(0, 0, name, np.array(answers))


# -- the queries -------------------------------------------------------------


def test_a_shared_label_means_the_entity_with_answers(labelled):
    organ, germany = find_queries(
        labelled, [("organ", "/music/role"), ["Germany", "/a/b./c/is_in"]]
    )
    assert (organ.head, organ.relation, organ.name) == (1, 0, "organ · role")
    assert organ.answers.tolist() == [5, 6, 8]  # of train and of test
    assert (germany.head, germany.name, germany.answers.tolist()) == (2, "Germany · is in", [8])


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (("Germani", "/music/role"), "No entity is named 'Germani'"),
        (("Germany", "/music/rol"), "No relation is named '/music/rol'"),
        (
            ("Germany", "/music/genre/artists"),
            "'Germany' has no answer to '/music/genre/artists' in made.",
        ),
        (
            ("organ", "/a/b./c/is_in"),
            "None of the 2 entities called 'organ' has an answer to '/a/b./c/is_in' in made.",
        ),
        (
            ("funk", "/music/genre/artists"),
            "'funk' matches 2 entities of made with 1 answers each to '/music/genre/artists': "
            "'e3', 'e4'. Use one of these names.",
        ),
    ],
)
def test_unknown_and_ambiguous_queries_are_refused(labelled, pair, sentence):
    with pytest.raises(kg.RequestError) as refused:
        find_queries(labelled, [pair])
    assert str(refused.value).startswith(sentence)


def test_a_graph_without_labels_gets_a_hint(small_graph):
    with pytest.raises(kg.RequestError, match="made was read without labels; load_graph"):
        find_queries(small_graph, [("Germany", "r0")])


def test_the_ten_queries_of_the_paper_are_in_the_graph(data_folder):
    graph = kg.load_graph("FB15k-237")
    queries = find_queries(graph, published()["tsne_queries"])
    assert len(queries) == 10
    assert min(len(query.answers) for query in queries) > 50  # as Section 5.4 says
    assert queries[2].name == "Germany · contains"
    assert graph.entities.label(queries[8].head) == "organ"


# -- their answers -----------------------------------------------------------


def test_an_answer_of_two_queries_appears_once_in_the_shared_group():
    entities, groups = group_answers([query(3, 5), query(1, 5, 7), query(5)])
    assert entities.tolist() == [1, 3, 5, 7]
    assert groups.tolist() == [1, 0, SHARED, 1]


def test_the_silhouette_by_hand():
    """The example of docs/analysis.md."""
    line = np.array([[0.0, 0.0], [1, 0], [4, 0], [6, 0]])
    found = silhouette(np.insert(line, 2, [100, 7], axis=0), np.array([0, 0, SHARED, 1, 1]))
    assert found.by_group == pytest.approx({0: (0.8 + 0.75) / 2, 1: (3 / 7 + 7 / 11) / 2})
    assert found.mean == pytest.approx((0.8 + 0.75 + 3 / 7 + 7 / 11) / 4)


def test_a_projection_has_all_answers_and_its_numbers(labelled):
    model = kg.CP(labelled.shape, dim=4, init_scale=1.0)
    with torch.no_grad():
        model.tails[5:7] += 20
    queries = [query(5, 6, 8, name="one"), query(2, 3, 8, name="two"), query(8, name="three")]
    found = project(model, queries)
    assert found.entities.tolist() == [2, 3, 5, 6, 8]
    assert found.groups.tolist() == [1, 1, 0, 0, SHARED]
    assert found.positions.shape == (5, 2)
    assert found.as_dict()["num_shared"] == 1
    result = json.loads(json.dumps(found.as_dict()))
    assert [one["name"] for one in result["queries"]] == ["one", "two", "three"]
    assert result["queries"][0]["silhouettes"]["euclidean"] > 0.5
    assert result["queries"][2] == {
        **{"head": 0, "relation": 0, "name": "three", "num_answers": 1},
        "silhouettes": {"euclidean": None, "cosine": None},  # it has no answer of its own
    }


# -- the plane ---------------------------------------------------------------


@pytest.fixture
def two_kinds() -> kg.Graph:
    """Entities 1 to 5 answer three queries together; 6 to 10 share but one, though they have
    others.
    """
    alike = [(head, 0, tail) for head in (0, 11, 12) for tail in range(1, 6)]
    motley = [(0, 1, tail) for tail in range(6, 11)] + [
        (tail + 5, 1, tail) for tail in range(6, 11)
    ]
    return graph_of([*alike, *motley, (13, 0, 1)])


def test_the_picked_query_has_the_most_overlap_between_its_tails(two_kinds):
    found = pick_query(two_kinds)
    assert (found.head, found.relation, found.name) == (0, 0, "e0 · r0")
    assert found.answers.tolist() == [1, 2, 3, 4, 5]


def test_distances_in_the_plane_by_hand(two_kinds):
    """Tails at (0, 0) but for one at (0, 5), h R at (0, −2), others at (3, 0) and (−3, 0), by the
    spread.
    """
    model = kg.CP(two_kinds.shape, dim=2)
    num_entities = two_kinds.shape.num_entities
    with torch.no_grad():
        model.tails.zero_()
        model.tails[6:, 0] = torch.tensor([3.0, -3.0]).repeat(num_entities)[: num_entities - 6]
        model.tails[5] = torch.tensor([0.0, 5.0])
        model.entities[0] = torch.tensor([0.0, 4.0])
        model.relations[0] = torch.tensor([1.0, -0.5])
    tails = model.tails.detach().numpy()
    spread = np.linalg.norm(tails - tails.mean(0), axis=1).mean()
    found = compute_plane(model, two_kinds, pick_query(two_kinds))
    np.testing.assert_allclose(found.mapped_head * spread, [0, -2], atol=1e-6)
    distances = found.about["distances"]
    assert distances["centroid"] * spread == pytest.approx(
        (4 * 1 + 4) / 5
    )  # the centroid is (0, 1)
    assert distances["hR"] * spread == pytest.approx((4 * 2 + 7) / 5)
    assert len(found.tails) + len(found.others) == num_entities
    assert found.about["num_queries"] == 4  # three of r0, one of r1
    assert json.loads(json.dumps(found.about))["medians"]["centroid"] == pytest.approx(
        distances["centroid"]
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (kg.CP, "a CP or DistMult model with dim 2; this is CP with dim 3"),
        (kg.RESCAL, "a CP or DistMult model with dim 2; this is RESCAL with dim 3"),
    ],
)
def test_models_without_a_figure_are_refused(two_kinds, model, sentence):
    with pytest.raises(kg.RequestError, match=sentence):
        compute_plane(model(two_kinds.shape, dim=3), two_kinds, pick_query(two_kinds))


def test_graphs_without_a_figure_are_refused(two_kinds):
    with pytest.raises(kg.RequestError, match="a query with 5 to 20 tails, and made has none"):
        pick_query(graph_of([(0, 0, 1), (0, 0, 2)]))
    still = kg.DistMult(two_kinds.shape, dim=2, init_scale=0.0)
    with pytest.raises(kg.RequestError, match="needs distances, and all entities are at one"):
        compute_plane(still, two_kinds, pick_query(two_kinds))
    with pytest.raises(kg.RequestError, match="at least two groups"):
        silhouette(np.eye(3), np.array([0, SHARED, SHARED]))
