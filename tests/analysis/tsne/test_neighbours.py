"""The nearest others, against all distances."""

from __future__ import annotations

import pytest
import torch

from dualkg.analysis import tsne
from dualkg.analysis.tsne import nearest


@pytest.mark.parametrize(("num", "k"), [(2, 1), (5, 4), (50, 7), (601, 30), (601, 600)])
def test_they_are_the_nearest(num, k, monkeypatch):
    monkeypatch.setattr(tsne, "NUMBERS", 100 * num)
    points = torch.randn(num, 8, generator=torch.Generator().manual_seed(num))
    found = nearest(points, k)
    distances = torch.cdist(points.double(), points.double()).square().fill_diagonal_(torch.inf)
    torch.testing.assert_close(found.squares, distances.gather(1, found.ids).float())
    torch.testing.assert_close(found.squares.sort(1).values, distances.sort(1).values[:, :k].float())


def test_a_copy_is_at_distance_zero():
    points = torch.randn(100, 20, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    found = nearest(points, 1)
    assert (found.squares == 0).all()
    assert (found.ids[:, 0] % 100 == torch.arange(200) % 100).all()
    assert (found.ids[:, 0] != torch.arange(200)).all()
