"""Affinities: calibrated, symmetric, and whole."""

from __future__ import annotations

import pytest
import torch

from dualkg.analysis.tsne import affinities_of, calibrated, nearest


def perplexities(given):
    return torch.special.entr(given.double()).sum(1).exp()


@pytest.mark.parametrize("perplexity", [2.0, 5.0, 30.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_perplexities_are_hit(points, perplexity, scale):
    given = calibrated(nearest(points * scale, 90).squares, perplexity=perplexity)
    torch.testing.assert_close(given.sum(1), torch.ones(len(points)))
    torch.testing.assert_close(perplexities(given), torch.full((len(points),), perplexity).double(), rtol=1e-4, atol=0)


def test_what_cannot_be_hit_is_neared():
    squares = torch.ones(1, 6)
    torch.testing.assert_close(calibrated(squares, perplexity=2.0), squares / 6)  # all at one distance
    copies = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0]])
    torch.testing.assert_close(perplexities(calibrated(copies, perplexity=1.5)), torch.tensor([3.0]).double())
    assert calibrated(torch.tensor([[4.0]]), perplexity=1 / 3).tolist() == [[1.0]]
    assert perplexities(calibrated(torch.rand(3, 4), perplexity=9.0)).min() > 3.99  # more than there are


def test_they_are_those_of_all_pairs(points):
    found = affinities_of(points[:80], perplexity=10.0)
    given = torch.zeros(80, 80)
    near = nearest(points[:80], 30)
    given.scatter_(1, near.ids, calibrated(near.squares, perplexity=10.0))
    wanted = (given + given.T) / 160
    dense = torch.zeros(80, 80)
    dense[found.rows.long(), found.columns.long()] = found.weights
    torch.testing.assert_close(dense, wanted)
    assert len(found.weights) == (wanted > 0).sum()
    assert found.weights.sum() == pytest.approx(1, abs=1e-5)
    assert (found.starts.diff() == torch.bincount(found.rows, minlength=80)).all()
