"""Attraction and repulsion, against plain sums over all pairs."""

from __future__ import annotations

import pytest
import torch

from dualkg.analysis import tsne as attracting
from dualkg.analysis import tsne as repelling
from dualkg.analysis.tsne import (
    COARSE,
    FINE,
    MOST,
    Grid,
    Repeller,
    affinities_of,
    attraction,
    attraction_in_torch,
    divergence,
    exact_repulsion,
    fitting,
    repulsion_on,
)


def places(num: int, extent: float, seed: int = 0):
    return extent * torch.randn(2, num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("extent", [1e-4, 0.3, 1.0, 5.0, 20.0])
@pytest.mark.parametrize(("cell", "error"), [(FINE, 1e-2), (COARSE, 4e-2)])
def test_the_grid_repels_like_all_pairs(extent, cell, error):
    given = places(500, extent)
    exact = exact_repulsion(given)
    found = repulsion_on(Grid(*fitting(given, cell=cell)), given.float())
    assert (found.pushes - exact.pushes).norm() < error * exact.pushes.norm()
    assert found.total == pytest.approx(float(exact.total), rel=error)


def test_a_place_does_not_push_itself():
    """Far from all others, nor by where it is between nodes."""
    given = torch.tensor([[0.0, 100.0, 37.3], [0.0, 100.0, 61.9]])
    found = repulsion_on(Grid(*fitting(given)), given)
    torch.testing.assert_close(found.pushes, exact_repulsion(given).pushes, atol=1e-6, rtol=0.05)


def test_many_or_far_places_take_no_larger_grid():
    cell, side = fitting(places(100, 1e5))
    assert side <= MOST + 32
    assert cell > FINE


def test_places_at_one_place_are_not_moved():
    given = torch.full((2, 500), 3.0)
    pushes, total = Repeller()(given)
    assert pushes.abs().max() < 1e-3
    assert total == pytest.approx(500 * 499, rel=1e-5)


def test_few_are_repelled_by_all_pairs_and_many_by_a_grid(monkeypatch):
    few, many = places(repelling.FEW, 1.0), places(repelling.FEW + 1, 1.0)
    torch.testing.assert_close(Repeller()(few), exact_repulsion(few))
    monkeypatch.setattr(repelling, "exact_repulsion", None)
    Repeller()(many.float())


def test_attraction_and_repulsion_are_the_gradient_of_the_divergence(points):
    affinities = affinities_of(points[:60], perplexity=10.0)
    given = places(60, 2.0).requires_grad_()
    across, up = (axis[:, None] - axis for axis in given)
    near = (1 + across**2 + up**2).reciprocal() * (1 - torch.eye(60))
    rows, columns, weights = affinities.rows.long(), affinities.columns.long(), affinities.weights.double()
    loss = (weights * (weights / (near / near.sum())[rows, columns]).log()).sum()
    loss.backward()
    plain = given.detach()
    pushes, total = exact_repulsion(plain)
    slope = attraction_in_torch(affinities, plain.float()) - pushes / total
    torch.testing.assert_close(4 * slope, given.grad, atol=1e-6, rtol=1e-4)
    assert divergence(affinities, plain.float()) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_the_kernel_attracts_like_pytorch(points, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(attracting, "WORTH_NUMBA", 0)
    affinities = affinities_of(points, perplexity=30.0)
    given = places(len(points), 10.0).float()
    torch.testing.assert_close(
        attraction(affinities, given), attraction_in_torch(affinities, given), atol=1e-8, rtol=1e-4
    )
