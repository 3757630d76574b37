"""Points to place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor


def clusters(num_points: int, *, width: int = 50, num_clusters: int = 10, seed: int = 0) -> tuple:
    """Points of Gaussian clusters, `(num_points, width)`, and the number of each one's cluster."""
    random = np.random.default_rng(seed)
    groups = random.integers(0, num_clusters, num_points)
    return random.standard_normal((num_clusters, width))[groups] + random.standard_normal((num_points, width)), groups


@pytest.fixture(autouse=True)
def _one_thread():
    """Arrays of so few points are handed to threads in longer than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def points() -> Tensor:
    return torch.from_numpy(clusters(600)[0]).float()
