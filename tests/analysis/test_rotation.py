"""RESCAL in other axes: the same scores, and fewer entries that matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.analysis.sparsity import (
    entity_tables,
    find_axes,
    find_thresholds,
    rotated,
    sparsified,
    sparsify,
    without_smallest,
)
from dualkg.errors import InvalidValue, RequestError

SHAPE = kg.GraphShape(40, 3)


def error(table: torch.Tensor, share: float) -> float:
    return float((table - without_smallest(table, share)).norm())


@given(st.integers(0, 9), st.sampled_from((0.0, 0.3, 0.8)))
def test_rotation_keeps_scores_and_norms(seed, share):
    model = kg.RESCAL(SHAPE, dim=6, seed=seed).double()
    other = rotated(model, share=share)
    triples = torch.cartesian_prod(torch.arange(5), torch.arange(6), torch.arange(5, 9)).T
    before = model.factors(*triples)
    after = other.factors(*triples)
    torch.testing.assert_close(other.tail_scores(after), model.tail_scores(before))
    for name in ("head", "tail", "mapped_head", "mapped_tail"):
        torch.testing.assert_close(
            getattr(after, name).norm(dim=-1), getattr(before, name).norm(dim=-1)
        )
    assert not other.entities.equal(model.entities)


@given(st.integers(0, 9), st.sampled_from((0.2, 0.5, 0.8, 0.95)))
def test_axes_are_orthogonal_and_no_worse_than_the_principal_ones(seed, share):
    table = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed)).double()
    axes = find_axes(table, share)
    torch.testing.assert_close(axes.T @ axes, torch.eye(8).double())
    principal = torch.linalg.eigh(table.T @ table).eigenvectors
    assert error(table @ axes, share) <= error(table @ principal, share) * (1 + 1e-9)


def test_vectors_along_hidden_axes_are_found_again():
    """One entry in eight is not zero, seen in axes at random: rotated back, seven in eight cost
    nothing.
    """
    random = torch.Generator().manual_seed(0)
    hidden = torch.eye(8).double().repeat(20, 1) * (1 + torch.rand(160, 1, generator=random))
    axes = torch.linalg.qr(torch.randn(8, 8, generator=random).double()).Q
    table = hidden @ axes
    assert error(table, 0.875) > 0.1
    assert error(table @ find_axes(table, 0.875), 0.875) < 1e-9


def test_a_rotated_run_loses_less(small_graph, tmp_path):
    model = kg.RESCAL(small_graph.shape, dim=8, seed=0)
    run = kg.train(
        model, small_graph, regularizer=kg.DURA(0.01), epochs=3, batch_size=50, out=tmp_path / "run"
    )
    as_is = sparsify(run.folder, share=0.7, out=tmp_path / "as-is")
    made = sparsify(run.folder, share=0.7, rotate=True, out=tmp_path / "rotated")
    assert [as_is.sparsity["rotated"], made.sparsity["rotated"]] == [False, True]
    lengths = [float(one.model.entities.detach().norm()) for one in (as_is, made)]
    assert lengths[0] < lengths[1] < float(run.model.entities.detach().norm())
    again = kg.load_run(made.folder)
    torch.testing.assert_close(again.model.relations, made.model.relations, rtol=0, atol=0)
    [threshold] = find_thresholds(entity_tables(rotated(run.model, share=0.7)).values(), [0.7])
    expected = sparsified(rotated(run.model, share=0.7), threshold)
    torch.testing.assert_close(again.model.entities, expected.entities)


def test_other_models_are_refused():
    reason = "cannot be rotated without changing its scores: its axes are tied to its relations"
    with pytest.raises(RequestError, match=f"ComplEx {reason}"):
        rotated(kg.ComplEx(SHAPE, dim=2), share=0.5)
    with pytest.raises(InvalidValue, match="share"):
        rotated(kg.RESCAL(SHAPE, dim=2), share=70)
