"""TuckER: its core, its matrices and batch normalization."""

import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.export import export
from dualkg.losses.softmax import BoundOneVsAll
from dualkg.models.matrix import through_core
from dualkg.training.fused import OneVsAllFusedStep
from dualkg.training.optimizers import Optimizer, build_optimizer
from dualkg.training.recipe import Validation
from dualkg.training.steps import ReferenceStep
from tests.training.test_trainer import stop_after

SHAPE = kg.GraphShape(30, 4)
BATCH = torch.tensor([[0, 1, 2], [3, 1, 4], [5, 6, 0], [0, 6, 1], [7, 1, 7]])


def test_the_score_is_the_product_of_the_core_with_three_vectors():
    model = kg.TuckER(SHAPE, dim=3, relation_dim=2, init_scale=1.0).double()
    f = model.factors(*BATCH.T)
    expected = torch.einsum("kij,bk,bi,bj->b", model.core, f.relation, f.head, f.tail)
    torch.testing.assert_close(model.score(*BATCH.T), expected)


@pytest.mark.parametrize("use", ["mapped_head", "mapped_tail", "relation_norm"])
def test_a_matrix_is_formed_once_for_all_triples_of_its_relation(monkeypatch, use):
    model = kg.TuckER(SHAPE, dim=3)
    formed = []
    real = kg.TuckER.matrices
    monkeypatch.setattr(
        kg.TuckER, "matrices", lambda self, ids: formed.append(ids.tolist()) or real(self, ids)
    )
    assert len(getattr(model.factors(*BATCH.T), use)) == 5
    assert formed == [[1, 6]]


def test_the_norm_of_a_relation_is_its_matrix_s():
    model = kg.TuckER(SHAPE, dim=3, relation_dim=5, init_scale=1.0).double()
    relations = BATCH[:, 1]
    expected = torch.stack([matrix.square().sum() for matrix in model.matrices(relations)])
    torch.testing.assert_close(model.relation_norms(relations), expected)


def test_relation_dim_defaults_to_dim():
    assert kg.TuckER(SHAPE, dim=3).config["relation_dim"] == 3
    model = kg.TuckER(SHAPE, dim=3, relation_dim=5)
    assert (model.relations.shape, model.core.shape) == ((8, 5), (5, 3, 3))
    with pytest.raises(InvalidValue) as refused:
        kg.TuckER(SHAPE, dim=3, relation_dim=0)
    assert (refused.value.setting, refused.value.found) == ("relation_dim", 0)


# -- batch normalisation -----------------------------------------------------


def normalised(**choices) -> kg.TuckER:
    return kg.TuckER(SHAPE, dim=4, batch_norm=True, init_scale=0.5, **choices)


def test_mapped_heads_have_mean_0_and_variance_1_in_training():
    model = normalised()
    images = model.factors(*BATCH.T).mapped_head
    torch.testing.assert_close(images.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(images.var(0, correction=0), torch.ones(4), rtol=0, atol=0.05)


def test_scores_in_evaluation_do_not_depend_on_the_batch():
    model = normalised().eval()
    whole = model.score_tails(BATCH[:, 0], BATCH[:, 1])
    torch.testing.assert_close(whole[:1], model.score_tails(BATCH[:1, 0], BATCH[:1, 1]))
    cube = model.score(
        *torch.cartesian_prod(torch.arange(30), torch.arange(8), torch.arange(30)).T
    ).view(30, 8, 30)
    torch.testing.assert_close(whole, cube[BATCH[:, 0], BATCH[:, 1]])
    torch.testing.assert_close(
        model.score_relations(BATCH[:, 0], BATCH[:, 2]), cube[BATCH[:, 0], :, BATCH[:, 2]]
    )


def test_operations_that_need_the_transpose_are_refused(small_graph):
    model = normalised()
    with pytest.raises(kg.RequestError):
        model.score_heads(BATCH[:, 1], BATCH[:, 2])
    with pytest.raises(kg.RequestError):
        normalised(reciprocal=False)
    with pytest.raises(kg.RequestError):
        kg.Dual(model)
    with pytest.raises(kg.RequestError):
        kg.train(model, small_graph, loss=kg.OneVsAll(relation_weight=1.0), epochs=1)


def test_fused_steps_equal_reference_steps():
    """Scores are products of images, however those came about; a batch of one is normalised as in
    evaluation.
    """
    found = []
    for kind in (ReferenceStep, OneVsAllFusedStep):
        model = normalised().double()
        optimizer = build_optimizer(
            Optimizer(), model.parameters(), one_pass=kind is OneVsAllFusedStep
        )
        step = kind(model, BoundOneVsAll(), kg.Frobenius(0.1), optimizer)
        for batch in [BATCH, BATCH[:1], BATCH[2:]] * 4:
            step(batch, 0.1)
        found.append(model.state_dict())
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-9, atol=1e-12)


def test_ranking_restores_the_training_mode(small_graph):
    model = normalised()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = kg.evaluate(model, small_graph).mrr
    other = kg.evaluate(model.eval(), small_graph).mrr
    kg.evaluate_relations(model.train(), small_graph)
    assert one == other
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_resumed_run_ends_like_an_uninterrupted_one(small_graph, tmp_path):
    """Running statistics are in checkpoints and in what is kept."""
    choices = {"epochs": 3, "batch_size": 32, "validation": Validation(every=1, keep="best")}
    whole = kg.train(normalised(), small_graph, **choices)
    with pytest.raises(kg.DualkgError):
        kg.train(
            normalised(), small_graph, out=tmp_path / "run", on_progress=stop_after(9), **choices
        )
    resumed = kg.resume(tmp_path / "run")
    loaded = kg.load_run(tmp_path / "run")
    assert whole.model.before.mean.any()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])
        assert torch.equal(value, loaded.model.state_dict()[name])
    assert loaded.model.config == whole.model.config


def test_a_trained_model_can_be_trained_again(small_graph):
    run = kg.train(normalised(), small_graph, epochs=1)
    before = run.model.before.mean.clone()
    again = kg.train(run.model, small_graph, epochs=1)
    assert not torch.equal(again.model.before.mean, before)
    assert not again.model.training


def test_every_table_is_exported(small_graph, tmp_path):
    run = kg.TrainedRun(normalised(relation_dim=2), small_graph, kg.Recipe())
    export(run, tmp_path / "out", format="tsv")
    lines = {
        path.stem: path.read_text(encoding="utf-8").splitlines()
        for path in (tmp_path / "out").glob("*.tsv")
    }
    assert lines.keys() == run.model.state_dict().keys()
    assert [len(line.split("\t")) for line in lines["core"]] == [17, 17]
    assert [line.split("\t")[0] for line in lines["relations"][:2]] == ["r0", "r1"]


def test_mapping_through_the_core_equals_mapping_by_matrices():
    model = kg.TuckER(SHAPE, dim=3, relation_dim=2, init_scale=1.0).double()
    f = model.factors(*BATCH.T)
    torch.testing.assert_close(through_core(f.head, f.relation, model.core), f.mapped_head)
