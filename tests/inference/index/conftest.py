"""Fixtures of the index tests: a clustered table, and few queries."""

import pytest
import torch
from torch import Tensor

from dualkg.inference import index_build


@pytest.fixture(autouse=True)
def _few_queries(monkeypatch):
    """No test needs a thousand queries."""
    monkeypatch.setattr(index_build, "NUM_QUERIES", 100)


@pytest.fixture
def clusters() -> tuple[Tensor, Tensor]:
    """1,000 rows around 20 centres, of unequal lengths, and 40 queries near the centres."""
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(20, 12, generator=random)
    near = centres.repeat(50, 1) + 0.5 * torch.randn(1000, 12, generator=random)
    lengths = torch.exp(0.3 * torch.randn(1000, 1, generator=random))
    return near * lengths, centres.repeat(2, 1) + 0.3 * torch.randn(40, 12, generator=random)
