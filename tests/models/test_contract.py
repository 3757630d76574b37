"""The contract of every model: maps, scores of single triples and of batches, saving, an easy
graph.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

import dualkg as kg
from dualkg.errors import InvalidValue
from tests.conftest import graph_of
from tests.families import BILINEAR, EMBEDDINGS

SHAPE = kg.GraphShape(7, 3)
FORMS = [(name, None) for name in EMBEDDINGS] + [
    (name, side) for name in BILINEAR for side in ("tail", "head")
]


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name: str, *, dual: str | None = None, reciprocal: bool = True, dim: int = 4) -> kg.Model:
    model = EMBEDDINGS[name](SHAPE, dim=dim, reciprocal=reciprocal, init_scale=1.0, seed=3)
    return kg.Dual(model, dual) if dual else model


def all_triples(model: kg.Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ranges = (torch.arange(7), torch.arange(model.num_relation_ids), torch.arange(7))
    return tuple(torch.cartesian_prod(*ranges).T)  # type: ignore[return-value]


@pytest.mark.parametrize("name", BILINEAR)
def test_the_maps_are_transposes(name):
    model = build(name)
    heads, relations, tails = all_triples(model)
    h = model.head_table[heads]
    t = model.tail_table[tails]
    one = (model.map_head(h, relations) * t).sum(-1)
    other = (h * model.map_tail(t, relations)).sum(-1)
    torch.testing.assert_close(one, other)
    assert one.std() > 0.1


@pytest.mark.parametrize("name", BILINEAR)
def test_the_maps_are_linear(name):
    model = build(name)
    relations = torch.tensor([0, 4, 4, 2])
    a, b = torch.randn(2, 4, model.head_table.shape[1], generator=torch.Generator().manual_seed(0))
    for apply in (model.map_head, model.map_tail):
        torch.testing.assert_close(
            apply(2 * a - b, relations), 2 * apply(a, relations) - apply(b, relations)
        )


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize(("name", "dual"), FORMS)
def test_single_scores_equal_batched_scores(name, dual, reciprocal):
    model = build(name, dual=dual, reciprocal=reciprocal)
    heads, relations, tails = all_triples(model)
    cube = model.score(heads, relations, tails).view(7, model.num_relation_ids, 7)
    some_h = torch.tensor([0, 3, 3, 6])
    some_r = torch.tensor([2, 0, 1, model.num_relation_ids - 1])
    some_t = torch.tensor([5, 1, 0, 2])
    torch.testing.assert_close(model.score_tails(some_h, some_r), cube[some_h, some_r])
    torch.testing.assert_close(model.score_heads(some_r, some_t), cube[:, some_r, some_t].T)
    torch.testing.assert_close(model.score_relations(some_h, some_t), cube[some_h, :, some_t])


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_heads_are_predicted_by_the_inverse_relation_if_reciprocal(name):
    r = torch.tensor([1, 2])
    t = torch.tensor([4, 0])
    with_inverse = build(name)
    without = build(name, reciprocal=False)
    torch.testing.assert_close(with_inverse.predict_heads(r, t), with_inverse.score_tails(t, r + 3))
    torch.testing.assert_close(without.predict_heads(r, t), without.score_heads(r, t))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_saved_and_loaded_scores_are_the_same(name, tmp_path):
    model = build(name)
    other = EMBEDDINGS[name](SHAPE, dim=4, seed=9)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    ids = all_triples(model)
    assert not torch.allclose(model.score(*ids), other.score(*ids))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(model.score(*ids), other.score(*ids), rtol=0, atol=0)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_same_seed_gives_the_same_weights(name):
    one, same, other = (EMBEDDINGS[name](SHAPE, dim=4, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.entities, other.entities)
    assert not torch.equal(one.relations, other.relations)


def test_initial_weights_have_the_scale_of_the_authors_code():
    shape = kg.GraphShape(400, 5)
    for kind in (kg.CP, kg.DistMult, kg.ComplEx):
        table = kind(shape, dim=100).entities
        assert table.std().item() == pytest.approx(1e-3, rel=0.05)
    rescal = kg.RESCAL(shape, dim=20)
    bound = (6 / (400 + 20)) ** 0.5
    assert 0.98 * bound < rescal.entities.abs().max().item() <= bound
    bound = (6 / (10 + 400)) ** 0.5
    assert 0.98 * bound < rescal.relations.abs().max().item() <= bound


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_empty_batch_has_empty_scores(name):
    none = torch.zeros(0, dtype=torch.long)
    assert build(name).score_tails(none, none).shape == (0, 7)


def test_a_dim_of_zero_is_refused():
    with pytest.raises(InvalidValue) as refused:
        kg.ComplEx(SHAPE, dim=0)
    assert str(refused.value) == "`dim` should be at least 1; 0 was given."
    with pytest.raises(InvalidValue) as refused:
        kg.ComplEx(SHAPE, dim="8")
    assert (refused.value.setting, refused.value.expected) == ("dim", "a whole number")
    assert repr(kg.ComplEx(SHAPE, dim=8)) == "ComplEx(dim=8, 7 entities, 3 relations)"


class StopWhenFound(kg.Callback):
    """Ends a training once all tails are found, which saves most of the epochs."""

    def on_validation(self, epoch: int, report: kg.Report) -> None:
        if report.by_direction["tail"].hits_at_1 == 1:
            raise kg.StopTraining


@pytest.mark.parametrize("reciprocal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_held_out_triples_of_an_easy_graph_are_found(name, reciprocal):
    """Items of one colour have one shape: the shape of a third of them is withheld and must be
    found.
    """
    torch.set_default_dtype(torch.float32)
    colours = range(40, 44)
    shapes = range(44, 48)
    seen = [(item, 0, colours[item % 4]) for item in range(40)]
    shaped = [(item, 1, shapes[item % 4]) for item in range(40)]
    withheld = [triple for triple in shaped if triple[0] % 3 == 0]
    graph = graph_of(
        seen + [triple for triple in shaped if triple not in withheld], withheld, withheld
    )
    scale = (
        None if name in BILINEAR or name == "MuRP" else 0.1
    )  # entries as large as the steps of 0.1
    model = EMBEDDINGS[name](graph.shape, dim=32, reciprocal=reciprocal, init_scale=scale)
    regularizer = (
        kg.DURA(0.05)
        if model.has_adjoint
        else kg.Frobenius(0.02)
        if model.euclidean
        else kg.NoRegularizer()
    )
    epochs = 60 if name in ("ModE", "RotatE") else 40
    run = kg.train(
        model,
        graph,
        regularizer=regularizer,
        optimizer=kg.Optimizer(),
        validation=kg.Validation(every=5, keep="last"),
        callbacks=[StopWhenFound()],
        epochs=epochs,
        batch_size=50,
    )
    # Models that map both sides find fewer triples if both directions share a relation.
    least = 0.6 if name in ("SE", "HAKE") and not reciprocal else 0.9
    assert run.report.by_direction["tail"].hits_at_1 >= least


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("name", BILINEAR)
def test_squared_norms_of_all_mapped_entities(name, transposed):
    model = build(name)
    relations = torch.tensor([4, 0])
    apply, table = (
        (model.map_tail, model.tail_table) if transposed else (model.map_head, model.head_table)
    )
    expected = [apply(table, torch.full((7,), id)).square().sum(-1) for id in (4, 0)]
    torch.testing.assert_close(
        model.mapped_squared_norms(relations, transposed=transposed), torch.stack(expected)
    )
