"""Path networks: what they read, what is removed in training, and what they do not have."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.kernels import paths
from dualkg.models.ensemble import EnsembleModel
from dualkg.training.api import default_recipe
from dualkg.training.recipe import Data
from tests.raising import refused


def chain(num_entities=12, *, order=None):
    """e0 → e1 → … with relation `next`, and `second` two steps further, half of it held out."""
    order = np.arange(num_entities) if order is None else order
    next_triples = [(i, 0, i + 1) for i in range(num_entities - 1)]
    second = [(i, 1, i + 2) for i in range(num_entities - 2)]
    train = np.array(next_triples + second[::2], dtype=np.int32)
    held_out = np.array(second[1::2], dtype=np.int32)
    for triples in (train, held_out):
        triples[:, 0] = order[triples[:, 0]]
        triples[:, 2] = order[triples[:, 2]]
    names = kg.Vocabulary([f"e{number}" for number in range(num_entities)])
    return kg.Graph("chain", names, kg.Vocabulary(["next", "second"]), train, held_out, held_out)


def ids(*numbers):
    return torch.tensor(numbers)


def test_a_rule_of_two_steps_is_learned():
    graph = chain(16)
    model = kg.PathNetwork(graph, dim=16, steps=2)
    run = kg.train(model, graph, epochs=40, batch_size=8)
    assert run.report.mrr > 0.9


def test_scores_follow_the_entities_when_they_are_renumbered():
    order = np.random.default_rng(0).permutation(12)
    model = kg.PathNetwork(chain(), dim=16, steps=3, seed=4)
    renumbered = kg.PathNetwork(chain(order=order), dim=16, steps=3, seed=4)
    scores = model.score_tails(ids(0, 5), ids(1, 2))
    others = renumbered.score_tails(torch.as_tensor(order[[0, 5]]), ids(1, 2))
    torch.testing.assert_close(others[:, order], scores)


def test_the_three_ways_of_scoring_agree():
    model = kg.PathNetwork(chain(), dim=16, steps=3)
    heads, relations, tails = ids(0, 3, 7), ids(0, 1, 1), ids(1, 6, 2)
    by_tails = model.score_tails(heads, relations)
    torch.testing.assert_close(model.score(heads, relations, tails), by_tails[[0, 1, 2], tails])
    torch.testing.assert_close(
        model.predict_candidates(heads, relations, ids(4, 2), "tail"), by_tails[:, [4, 2]]
    )
    by_relations = model.score_relations(heads, tails)
    assert by_relations.shape == (3, 4)
    torch.testing.assert_close(by_relations[[0, 1, 2], relations], by_tails[[0, 1, 2], tails])
    by_heads = model.score_heads(relations, tails)
    torch.testing.assert_close(by_heads, model.score_tails(tails, relations + 2))


def test_entities_that_no_path_reaches_have_one_score():
    model = kg.PathNetwork(chain(), dim=16, steps=2)
    scores = model.score_tails(ids(0), ids(1))[0]
    # Two steps along `next` and `second` reach e4.
    assert len(set(scores[5:].tolist())) == 1
    assert len(set(scores[:5].tolist())) == 5


def test_the_triples_of_a_batch_are_removed_and_a_share_of_the_others():
    graph = chain(200)
    model = kg.PathNetwork(graph, dim=16, edge_dropout=0.25)
    batch = torch.as_tensor(graph.train[[3, 150]].astype(np.int64))
    # The inverse of a triple is the same triple.
    batch[1] = ids(batch[1, 2], batch[1, 1] + 2, batch[1, 0])
    edges = model.training_edges(*batch.unbind(1))
    kept, kept_inverses = edges.kept.chunk(2)
    assert torch.equal(kept, kept_inverses)
    assert not kept[[3, 150]].any()
    assert 0.65 < kept.float().mean() < 0.85
    same = model.training_edges(*batch.unbind(1))
    assert torch.equal(same.kept, edges.kept)
    other = model.training_edges(*batch[:1].unbind(1))
    assert not torch.equal(other.kept, edges.kept)


def test_a_query_with_several_answers_in_a_batch_is_computed_once(monkeypatch):
    graph = parallel(valid=[])
    model = kg.PathNetwork(graph, dim=16, steps=2, edge_dropout=0.0).double()
    model.compiled = False
    batch = torch.tensor([(0, 0, 1), (1, 2, 0), (0, 0, 2), (0, 1, 1), (0, 0, 3)])
    heads, relations, tails = batch.unbind(1)
    edges = model.training_edges(heads, relations, tails)
    expected = model.scores_over(heads, relations, edges)
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad(expected.square().sum(), parameters)

    computed = []
    reach = paths.reach

    def counting_reach(heads, *others):
        computed.append(len(heads))
        return reach(heads, *others)

    monkeypatch.setattr(paths, "reach", counting_reach)
    scores = model.tail_scores(model.factors(heads, relations, tails))
    assert computed == [3]
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(scores.square().sum(), parameters)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


def test_without_dropout_only_the_batch_is_removed():
    graph = chain()
    model = kg.PathNetwork(graph, dim=16, edge_dropout=0.0)
    triple = torch.as_tensor(graph.train[4].astype(np.int64))
    # One sorts right before the triple, and the other after all.
    unknown = (triple - ids(0, 0, 1), ids(11, 1, 11))
    batch = torch.stack([triple, *unknown])
    kept = model.training_edges(*batch.unbind(1)).kept[: len(graph.train)]
    assert (~kept).nonzero().flatten().tolist() == [4]


def parallel(*, valid):
    """a → b by two relations and b → a by another one; c and d are joined once, to a and to b."""
    names = kg.Vocabulary(["a", "b", "c", "d"])
    relations = kg.Vocabulary(["r", "s", "t"], kind="relation")
    train = [(0, 0, 1), (0, 1, 1), (1, 2, 0), (0, 0, 2), (1, 0, 3), (2, 1, 3)]
    held_out = np.array(valid, dtype=np.int32).reshape(-1, 3)
    return kg.Graph("parallel", names, relations, np.array(train, np.int32), held_out, held_out)


def removed(model, *triples):
    """The training triples that are not among the edges when some are to be predicted."""
    batch = torch.tensor(triples)
    kept, kept_inverses = model.training_edges(*batch.unbind(1)).kept.chunk(2)
    assert torch.equal(kept, kept_inverses)
    return (~kept).nonzero().flatten().tolist()


# The pairs of validation triples: none of the first is joined in train, and each of the second is.
NEW_PAIRS = [(2, 0, 1), (3, 1, 0)]
JOINED_PAIRS = [(1, 0, 0), (0, 2, 2)]


def test_with_pairs_all_edges_between_the_two_entities_are_removed():
    graph = parallel(valid=JOINED_PAIRS)
    model = kg.PathNetwork(graph, dim=16, edge_dropout=0.0, remove_pairs=True)
    assert removed(model, (0, 0, 1)) == [0, 1, 2]
    # The inverse of a triple, and a triple in the other direction, have the same two entities.
    assert removed(model, (1, 3, 0)) == [0, 1, 2]
    assert removed(model, (1, 2, 0)) == [0, 1, 2]
    assert removed(model, (0, 0, 2)) == [3]
    assert removed(model, (0, 0, 2), (1, 0, 3)) == [3, 4]


def test_without_pairs_only_the_triple_is_removed():
    model = kg.PathNetwork(parallel(valid=NEW_PAIRS), dim=16, edge_dropout=0.0, remove_pairs=False)
    assert removed(model, (0, 0, 1)) == [0]
    assert removed(model, (1, 3, 0)) == [0]
    assert removed(model, (1, 2, 0)) == [2]


@pytest.mark.parametrize(
    ("valid", "expected"),
    [
        pytest.param(NEW_PAIRS, [0, 1, 2], id="validation joins new pairs"),
        pytest.param(JOINED_PAIRS, [0], id="validation joins pairs of train"),
        pytest.param(NEW_PAIRS + JOINED_PAIRS[:1], [0], id="some of validation do"),
        pytest.param([], [0], id="no validation"),
    ],
)
def test_whether_pairs_are_removed_follows_from_validation(valid, expected):
    model = kg.PathNetwork(parallel(valid=valid), dim=16, edge_dropout=0.0)
    assert removed(model, (0, 0, 1)) == expected
    # The choice belongs to the graph, and another graph may need another one.
    model.read_graph(parallel(valid=NEW_PAIRS))
    assert removed(model, (0, 0, 1)) == [0, 1, 2]
    model.read_graph(parallel(valid=JOINED_PAIRS))
    assert removed(model, (0, 0, 1)) == [0]


def test_fewer_than_a_fifth_of_the_pairs_are_few():
    """Half of the training triples join a pair that another one joins, too."""
    one_in_eleven = JOINED_PAIRS[:1] + 10 * NEW_PAIRS[:1]
    one_in_nine = JOINED_PAIRS[:1] + 8 * NEW_PAIRS[:1]
    few = kg.PathNetwork(parallel(valid=one_in_eleven), dim=16, edge_dropout=0.0)
    assert removed(few, (0, 0, 1)) == [0, 1, 2]
    enough = kg.PathNetwork(parallel(valid=one_in_nine), dim=16, edge_dropout=0.0)
    assert removed(enough, (0, 0, 1)) == [0]


@pytest.mark.parametrize("remove_pairs", [None, True, False])
def test_the_choice_of_pairs_is_kept_in_a_run(remove_pairs, tmp_path):
    graph = parallel(valid=NEW_PAIRS)
    model = kg.PathNetwork(graph, dim=16, steps=2, edge_dropout=0.0, remove_pairs=remove_pairs)
    options = {"steps": 2, "edge_dropout": 0.0}
    if remove_pairs is not None:
        options["remove_pairs"] = remove_pairs
    config = {"dim": 16, **options}
    assert model.config == config
    assert kg.PathNetwork(graph, **config).config == config

    run = kg.train(model, graph, epochs=1, out=tmp_path / "run")
    assert run.recipe.model.options == options
    loaded = kg.load_run(tmp_path / "run").model
    assert loaded.config == config
    assert loaded.remove_pairs is remove_pairs
    assert removed(loaded, (0, 0, 1)) == removed(run.model, (0, 0, 1))


def test_what_it_does_not_have():
    graph = chain()
    model = kg.PathNetwork(graph, dim=16)
    with pytest.raises(kg.RequestError, match="PathNetwork"):
        _ = model.embedding
    with pytest.raises(kg.RequestError, match="PathNetwork"):
        model.entity_vectors()
    with pytest.raises(kg.RequestError, match="DURA"):
        kg.train(model, graph, regularizer=kg.DURA(0.1))
    for loss in (kg.KvsAll(), kg.SampledSoftmax(num_negatives=2), kg.NegativeSampling()):
        with pytest.raises(kg.RequestError):
            kg.train(model, graph, loss=loss)
    with pytest.raises(kg.RequestError, match=r"loss\.relation_weight"):
        kg.train(model, graph, loss=kg.OneVsAll(relation_weight=1.0))
    with pytest.raises(kg.RequestError, match="PathNetwork"):
        kg.PathNetwork(graph, reciprocal=False)
    with pytest.raises(kg.RequestError):
        kg.PathNetwork(graph.shape).score_tails(ids(0), ids(0))
    with pytest.raises(kg.RequestError):
        model.read_graph(chain(13))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dim": 0}, "dim"), ({"steps": 0}, "steps"), ({"edge_dropout": 1.0}, "edge_dropout")],
)
def test_settings_that_make_no_sense_are_refused(options, name):
    with refused(InvalidValue, setting=name):
        kg.PathNetwork(chain().shape, **options)


def test_the_default_recipe_has_the_values_of_the_model():
    recipe = default_recipe(Data(graph="chain"), chain(), {"model.name": "PathNetwork"})
    assert recipe.model.dim == 32
    assert recipe.regularizer.name == "none"
    assert recipe.optimizer.name == "Adam"
    assert recipe.loss.exclude_known
    given = {"model.name": "PathNetwork", "loss.name": "KvsAll", "model.dim": 16}
    chosen = default_recipe(Data(graph="chain"), chain(), given)
    assert isinstance(chosen.loss, kg.KvsAll)
    assert chosen.model.dim == 16


def test_a_run_is_saved_and_read_again(tmp_path):
    graph = chain()
    run = kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=1, out=tmp_path / "run")
    loaded = kg.load_run(tmp_path / "run")
    assert loaded.model.config == {"dim": 16, "steps": 2, "edge_dropout": 0.1}
    assert loaded.report.mrr == run.report.mrr
    scores = run.model.score_tails(ids(0), ids(1))
    torch.testing.assert_close(loaded.model.score_tails(ids(0), ids(1)), scores)
    answers = loaded.predictor().tails("e0", "second", k=2)
    assert len(list(answers)) == 2


def test_an_ensemble_with_embeddings_has_their_similar_entities():
    graph = chain()
    network = kg.PathNetwork(graph, dim=16)
    embeddings = kg.ComplEx(graph, dim=4)
    both = EnsembleModel([network, embeddings], weights=[1.0, 0.5])
    vectors = embeddings.entity_vectors()
    torch.testing.assert_close(both.entity_vectors(), torch.nn.functional.normalize(vectors))
    with pytest.raises(kg.RequestError, match=r"An ensemble \(PathNetwork\)"):
        EnsembleModel([network]).entity_vectors()
    scores = both.score_tails(ids(0, 5), ids(1, 2))
    expected = network.score_tails(ids(0, 5), ids(1, 2))
    expected = expected + 0.5 * embeddings.score_tails(ids(0, 5), ids(1, 2))
    torch.testing.assert_close(scores, expected)


def test_commands_for_embeddings_say_that_there_are_none(run_cli, tmp_path):
    graph = chain()
    kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=1, out=tmp_path / "run")
    for command in (
        ("index", tmp_path / "run"),
        ("export", tmp_path / "run", "--out", tmp_path / "exported"),
        ("predict", tmp_path / "run", "--similar", "e0"),
    ):
        told = run_cli(*command)
        assert told.code == 2, command
        assert "PathNetwork has no embeddings of its own" in told.err


def test_a_run_is_compared_combined_calibrated_and_completed(tmp_path):
    graph = chain(30)
    graph = replace(graph, valid=graph.valid[::2], test=graph.test[1::2])
    run = kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=3, out=tmp_path / "paths")
    other = kg.train(kg.ComplEx(graph, dim=8), graph, epochs=3, out=tmp_path / "embeddings")
    assert kg.compare_ranks(run.report.ranks.mean[None], other.report.ranks.mean[None]).num_triples
    ensemble = kg.Ensemble([run, other])
    assert len(ensemble.model.weights) == 2
    ensemble.save(tmp_path / "both")
    loaded = kg.load_run(tmp_path / "both")
    assert loaded.report.mrr == pytest.approx(ensemble.report.mrr)
    kg.calibrate(tmp_path / "paths")
    predictions = kg.load_run(tmp_path / "paths").predictor().tails("e0", "second", k=3)
    assert all(prediction.probability is not None for prediction in predictions)
    assert len(kg.complete(tmp_path / "paths", top=5)) == 5
