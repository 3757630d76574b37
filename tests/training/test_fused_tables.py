"""The cross entropy over a table, in blocks of a batch and at once, exact and in bfloat16."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.kernels.scores import Targets
from dualkg.tables import gradients
from dualkg.tables.gradients import DenseGradients, LossAndGradient, rows_at_once
from tests.training.test_fused import test_ten_steps_end_at_the_same_weights as ten_steps

WIDTH = 6


def found_by(
    bf16: bool,
    dtype: torch.dtype,
    rows: int,
    *,
    side: str,
    batch: int,
    entities: int,
    seed: int,
    before: float | None,
) -> tuple[LossAndGradient, torch.Tensor]:
    """The cross entropy, and the gradient of the table, computed in blocks of `rows` and added to
    `before`.
    """
    random = torch.Generator().manual_seed(seed)
    model = kg.CP(kg.GraphShape(entities, 1), dim=WIDTH, init_scale=1.0, seed=seed).to(dtype)
    parameters = {"head": model.entities, "tail": model.tails}
    found = DenseGradients(model.tables, parameters, squared=False, bf16=bf16)
    found.gradient(side).fill_(torch.nan if before is None else before)
    images = torch.randn(batch, WIDTH, generator=random).to(dtype)
    targets = torch.randint(
        0, min(entities, 3), (batch,), generator=random
    )  # so that they are repeated
    share = torch.rand(batch, generator=random).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "rows_at_once", lambda *_: rows)
        loss = found.cross_entropy(
            side, images, Targets.one_each(targets, share), accumulate=before is not None
        )
    return loss, found.gradient(side)


@given(
    st.sampled_from([(False, torch.float64), (False, torch.float32), (True, torch.float32)]),
    st.integers(1, 20),
    st.fixed_dictionaries(
        {
            "side": st.sampled_from(["head", "tail"]),
            "batch": st.integers(1, 20),
            "entities": st.integers(1, 40),
            "seed": st.integers(0, 2**31),
            "before": st.sampled_from([None, 0.5]),
        }
    ),
)
def test_blocks_equal_the_whole(precision, rows, case):
    (loss, images), gradient = found_by(*precision, rows, **case)
    (exact_loss, exact_images), exact_gradient = found_by(False, precision[1], sys.maxsize, **case)
    tolerance = 0.03 if precision[0] else 1e-12 if precision[1] == torch.float64 else 1e-5
    for one, other in [(loss, exact_loss), (images, exact_images), (gradient, exact_gradient)]:
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance * (other.abs().max() + 0.1)


@pytest.mark.parametrize("name", ["CP", "ComplEx"])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_steps_in_blocks_equal_the_reference_steps(small_graph, monkeypatch, name, reciprocal):
    monkeypatch.setattr(gradients, "rows_at_once", lambda *_: 3)
    ten_steps(small_graph, name, "DURA", "both", reciprocal)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_table_with_nan_or_infinity_makes_the_loss_not_finite(bf16, poison):
    model = kg.DistMult(kg.GraphShape(9, 1), dim=2)
    model.entities.data[4] = poison
    found = DenseGradients(model.tables, {"head": model.entities}, squared=False, bf16=bf16)
    targets = Targets.one_each(torch.tensor([0, 4, 8]), torch.ones(3))
    loss, _ = found.cross_entropy("tail", torch.ones(3, 2), targets, accumulate=False)
    assert not torch.isfinite(loss)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_memory_for_scores_is_bounded_for_any_number_of_entities(size):
    for num_entities in (1, 10**3, 10**6):
        rows = rows_at_once(num_entities, size, torch.device("cpu"))
        assert rows >= 500
        assert rows == 500 or rows * num_entities * size <= 32_000_000
