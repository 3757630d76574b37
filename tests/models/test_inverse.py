"""A model asked by the tail and the inverse relation."""

import pytest
import torch

import dualkg as kg

SHAPE = kg.GraphShape(7, 3)


def test_a_score_by_hand():
    """⟨e ∘ r, e′⟩ with r = 2 and r⁻¹ = 10: (h, r, t) is 2 · 3 · 5 = 30, its inverse 150."""
    shape = kg.GraphShape(2, 1)
    model = kg.DistMult(shape, dim=1)
    with torch.no_grad():
        model.entities[:] = torch.tensor([[3.0], [5.0]])
        model.relations[:] = torch.tensor([[2.0], [10.0]])
    head, relation, tail = (torch.tensor([id]) for id in (0, 0, 1))
    inverse = kg.InverseModel(model)
    assert model.score(head, relation, tail).item() == 30.0
    assert inverse.score(head, relation, tail).item() == 150.0
    assert inverse.score_tails(head, relation).tolist() == [[90.0, 150.0]]
    assert inverse.predict_heads(relation, tail).tolist() == [[30.0, 50.0]]


@pytest.fixture(params=["ComplEx", "PathNetwork"])
def model(request, small_graph):
    if request.param == "PathNetwork":
        return kg.PathNetwork(small_graph, dim=16, steps=2).eval()
    return kg.ComplEx(small_graph, dim=4, init_scale=1.0).eval()


@torch.no_grad()
@pytest.mark.parametrize("normalized", [False, True])
def test_all_ways_to_score_agree(model, normalized, small_graph, monkeypatch):
    monkeypatch.setattr("dualkg.models.ensemble.MAX_SCORES", 3 * small_graph.shape.num_entities)
    inverse = kg.InverseModel(model, normalized=normalized).eval()
    num_entities, num_relations = small_graph.shape
    relations = torch.arange(2 * num_relations).repeat(2)
    heads = torch.arange(len(relations)) % num_entities
    tails = (torch.arange(len(relations)) * 3 + 1) % num_entities
    rows = torch.arange(len(relations))
    scores = inverse.score(heads, relations, tails)
    opposite = (relations + num_relations) % (2 * num_relations)
    expected = model.score_tails(tails, opposite)
    if normalized:
        expected = expected.log_softmax(1)
    torch.testing.assert_close(scores, expected[rows, heads])
    torch.testing.assert_close(inverse.score_tails(heads, relations)[rows, tails], scores)
    torch.testing.assert_close(inverse.score_heads(relations, tails)[rows, heads], scores)
    torch.testing.assert_close(inverse.score_relations(heads, tails)[rows, relations], scores)
    candidates = torch.stack([tails, heads], 1)
    of_candidates = inverse.predict_candidates(heads, relations, candidates, "tail")
    torch.testing.assert_close(of_candidates[:, 0], scores)
    assert inverse.score_tails(heads[:0], relations[:0]).shape == (0, num_entities)


@torch.no_grad()
@pytest.mark.parametrize("normalized", [False, True])
def test_kept_scores_are_those_of_the_model(model, normalized, small_graph, monkeypatch):
    inverse = kg.InverseModel(model, normalized=normalized).eval()
    heads = torch.tensor([3, 0, 3, 1])
    relations = torch.tensor([1, 0, 0, 1])
    expected = inverse.score_tails(heads, relations)
    others = inverse.score_tails(heads + 1, relations)
    inverse.keep(heads, relations)
    torch.testing.assert_close(inverse.score_tails(heads + 1, relations), others)

    monkeypatch.setattr(type(model), "tail_scores", lambda *_: pytest.fail("the model was asked"))
    torch.testing.assert_close(inverse.score_tails(heads, relations), expected)


def test_both_directions_are_ranked_as_an_ensemble(model, small_graph):
    both = kg.EnsembleModel([model, kg.InverseModel(model)], weights=[1.0, 0.0]).eval()
    alone = kg.rank(model, small_graph)
    assert kg.rank(both, small_graph).mean.tolist() == alone.mean.tolist()
    both.weights = [0.0, 1.0]
    inverse = kg.rank(kg.InverseModel(model), small_graph)
    assert kg.rank(both, small_graph).mean.tolist() == inverse.mean.tolist()


def test_a_model_without_inverse_relations_is_refused():
    with pytest.raises(kg.RequestError, match="have no inverses"):
        kg.InverseModel(kg.ComplEx(SHAPE, dim=2, reciprocal=False))
