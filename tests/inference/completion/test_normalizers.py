from __future__ import annotations

import pytest
import torch

from dualkg.inference import completion_search


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 3000), (0, 4)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_kernel_is_log_sum_exp(monkeypatch, shape, scale):
    monkeypatch.setattr(completion_search, "WORTH_NUMBA", 0)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    torch.testing.assert_close(completion_search.log_sums(scores), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(monkeypatch, bad):
    monkeypatch.setattr(completion_search, "WORTH_NUMBA", 0)
    scores = torch.zeros(2, 5)
    scores[1, 2] = bad
    assert completion_search.log_sums(scores).isfinite().tolist() == [True, False]


def test_without_numba_and_for_other_types_there_is_pytorch(monkeypatch):
    monkeypatch.setattr(completion_search, "WORTH_NUMBA", 0)
    monkeypatch.setattr(completion_search, "_kernel", lambda: None)
    scores = torch.randn(4, 9)
    assert torch.equal(completion_search.log_sums(scores), scores.logsumexp(-1))
    assert completion_search.log_sums(scores.double()).dtype == torch.float64
