"""Ensembles of models: weighted sums of scores, whatever the members are."""

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.models import EnsembleModel

SHAPE = kg.GraphShape(7, 3)


def model_of(name: str, *, reciprocal: bool, seed: int) -> kg.Model:
    if name == "Dual":
        return kg.Dual(kg.ComplEx(SHAPE, dim=3, reciprocal=reciprocal, init_scale=1.0, seed=seed))
    return getattr(kg, name)(SHAPE, dim=3, reciprocal=reciprocal, init_scale=1.0, seed=seed)


def test_a_score_by_hand():
    """⟨h ∘ r, t⟩ = 2 · 3 · 5 = 30 and −|h + r − t| = −|1 + 2 − 7| = −4, so 2 · 30 + 0.5 · −4 =
    58.
    """
    shape = kg.GraphShape(2, 1)
    product, distance = (kind(shape, dim=1, reciprocal=False) for kind in (kg.DistMult, kg.TransE))
    with torch.no_grad():
        product.entities[:], product.relations[:] = torch.tensor([[2.0], [5.0]]), 3.0
        distance.entities[:], distance.relations[:] = torch.tensor([[1.0], [7.0]]), 2.0
    model = EnsembleModel([product, distance], weights=[2.0, 0.5])
    head, relation, tail = (torch.tensor([id]) for id in (0, 0, 1))
    assert model.score(head, relation, tail).item() == 58.0
    assert model.score_tails(head, relation).tolist() == [[2 * 12 - 0.5 * 2, 58.0]]
    assert model.score_heads(relation, tail).tolist() == [[58.0, 2 * 75 - 0.5 * 2]]


@pytest.mark.parametrize("names", [("ComplEx", "HAKE"), ("CP", "TransE", "Dual")])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_all_ways_to_score_agree(names, mixed, reciprocal):
    """As in the contract of models, for relation ids of both directions in one batch."""
    members = [
        model_of(name, reciprocal=reciprocal != (mixed and seed == 1), seed=seed)
        for seed, name in enumerate(names)
    ]
    model = EnsembleModel(members, weights=[0.5, 2.0, 0.25][: len(names)]).eval()
    assert model.reciprocal == (mixed or reciprocal)
    num_ids = model.num_relation_ids
    relations = torch.arange(num_ids).repeat(2)
    heads = torch.arange(2 * num_ids) % 7
    tails = (torch.arange(2 * num_ids) * 3 + 1) % 7
    rows = torch.arange(2 * num_ids)
    close = {"rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        scores = model.score(heads, relations, tails)
        torch.testing.assert_close(
            model.score_tails(heads, relations)[rows, tails], scores, **close
        )
        torch.testing.assert_close(
            model.score_heads(relations, tails)[rows, heads], scores, **close
        )
        torch.testing.assert_close(
            model.score_relations(heads, tails)[rows, relations], scores, **close
        )
        shared = torch.tensor([5, 0])
        for candidates in (shared, torch.stack([tails, heads], dim=1)):
            ids = candidates.expand(len(rows), 2)
            found = model.candidate_scores(model.factors(heads, relations, None), candidates)
            torch.testing.assert_close(
                found, model.score_tails(heads, relations).gather(1, ids), **close
            )
            found = model.candidate_scores(
                model.factors(None, relations, tails), candidates, "head"
            )
            torch.testing.assert_close(
                found, model.score_heads(relations, tails).gather(1, ids), **close
            )
        forward = relations % 3
        naive = sum(
            weight * one.predict_heads(forward, tails)
            for one, weight in zip(members, model.weights, strict=True)
        )
        torch.testing.assert_close(model.predict_heads(forward, tails), naive, **close)
        if model.reciprocal:
            torch.testing.assert_close(model.score_tails(tails, forward + 3), naive, **close)


def test_ranks_are_those_of_the_sum_of_log_softmax(small_graph):
    shape = small_graph.shape
    members = [
        kg.ComplEx(shape, dim=4, init_scale=1.0),
        kg.RotatE(shape, dim=4, reciprocal=False, init_scale=1.0, seed=1),
        kg.RESCAL(shape, dim=3, init_scale=1.0, seed=2),
    ]
    weights = [0.3, 1.0, 2.0]
    ranks = kg.rank(EnsembleModel(members, weights=weights), small_graph)
    facts = {
        tuple(triple)
        for split in ("train", "valid", "test")
        for triple in small_graph.split(split).tolist()
    }
    for column, (head, relation, tail) in enumerate(small_graph.test.tolist()):
        h, r, t = (torch.tensor([id]) for id in (head, relation, tail))
        for row, answer in enumerate((tail, head)):
            with torch.no_grad():
                scores = [
                    one.predict_heads(r, t) if row else one.predict_tails(h, r) for one in members
                ]
            naive = sum(
                w * one[0].double().log_softmax(-1) for w, one in zip(weights, scores, strict=True)
            )
            filled = {
                e: (e, relation, tail) if row else (head, relation, e)
                for e in range(shape.num_entities)
            }
            others = [e for e, triple in filled.items() if triple not in facts]
            assert ranks.optimistic[row, column] == 1 + int((naive[others] > naive[answer]).sum())


def test_one_member_is_the_model_itself(small_graph):
    model = kg.HAKE(small_graph.shape, dim=4)
    alone = kg.rank(EnsembleModel([model]), small_graph)
    ranks = kg.rank(model, small_graph)
    assert np.array_equal(alone.optimistic, ranks.optimistic)
    assert np.array_equal(alone.pessimistic, ranks.pessimistic)


def test_a_member_with_weight_0_is_not_computed():
    class Broken(kg.ComplEx):
        def tail_scores(self, f):
            raise AssertionError

    model = EnsembleModel([kg.ComplEx(SHAPE, dim=2), Broken(SHAPE, dim=2)], weights=[1, 0])
    assert model.score_tails(torch.tensor([0]), torch.tensor([0])).shape == (1, 7)


def test_similar_entities_have_the_mean_cosine_of_the_members():
    one = kg.ComplEx(SHAPE, dim=2)
    other = kg.CP(SHAPE, dim=5, seed=1)
    normalize = torch.nn.functional.normalize
    vectors = normalize(EnsembleModel([one, other]).entity_vectors())
    cosines = [
        normalize(model.entity_vectors()) @ normalize(model.entity_vectors()).T
        for model in (one, other)
    ]
    torch.testing.assert_close(vectors @ vectors.T, (cosines[0] + cosines[1]) / 2)


@pytest.mark.parametrize(
    ("weights", "given"),
    [
        ([1.0], "1 numbers"),
        ([1.0, -1.0], "1, -1"),
        ([0.0, 0.0], "0, 0"),
        ([1.0, float("nan")], "1, nan"),
    ],
)
def test_wrong_weights(weights, given):
    with pytest.raises(InvalidValue) as refused:
        EnsembleModel([kg.CP(SHAPE, dim=2), kg.HAKE(SHAPE, dim=2)], weights=weights)
    assert (refused.value.setting, refused.value.found) == ("weights", given)


def test_what_is_no_ensemble_or_has_no_embeddings(small_graph):
    with pytest.raises(InvalidValue) as refused:
        EnsembleModel([])
    assert refused.value.setting == "members"
    with pytest.raises(kg.RequestError):
        EnsembleModel([kg.CP(small_graph.shape, dim=2), kg.CP(SHAPE, dim=2)])
    members = [
        kg.CP(small_graph.shape, dim=2),
        kg.CP(small_graph.shape, dim=2),
        kg.HAKE(small_graph.shape, dim=2),
    ]
    with pytest.raises(kg.RequestError, match=r"An ensemble \(2 × CP \+ HAKE\)"):
        kg.train(EnsembleModel(members), small_graph, epochs=1)
