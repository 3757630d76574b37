"""What the index tests share: a clustered table, and an index measured with few queries."""

from functools import partial

import pytest
import torch
from torch import Tensor

from dualkg.inference.index_build import build_index

NUM_QUERIES = 100
quick_index = partial(build_index, num_queries=NUM_QUERIES, seconds=0.0)


@pytest.fixture
def clusters() -> tuple[Tensor, Tensor]:
    """1,000 rows around 20 centres, of unequal lengths, and 40 queries near the centres."""
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(20, 12, generator=random)
    near = centres.repeat(50, 1) + 0.5 * torch.randn(1000, 12, generator=random)
    lengths = torch.exp(0.3 * torch.randn(1000, 1, generator=random))
    return near * lengths, centres.repeat(2, 1) + 0.3 * torch.randn(40, 12, generator=random)
