"""Places: neighbours kept, the same each time, and of whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualkg.analysis import tsne
from dualkg.analysis.tsne import affinities_of, divergence, place
from dualkg.errors import RequestError
from tests.analysis.tsne.conftest import clusters


def shorten(monkeypatch: pytest.MonkeyPatch, *num_steps: int) -> None:
    phases = [phase._replace(num_steps=num) for phase, num in zip(tsne.PHASES, num_steps, strict=True)]
    monkeypatch.setattr(tsne, "PHASES", phases)


@pytest.fixture
def hasty(monkeypatch):
    """Few steps."""
    shorten(monkeypatch, 25, 15, 10)


def check_quality(vectors, groups, *, num_steps: int, trust: float) -> None:
    """Against scikit-learn's: divergence from the same affinities, and neighbours kept."""
    manifold = pytest.importorskip("sklearn.manifold")
    places = place(vectors, perplexity=30)
    with pytest.importorskip("threadpoolctl").threadpool_limits(1):
        theirs = manifold.TSNE(init="pca", perplexity=30, random_state=0, max_iter=num_steps).fit_transform(vectors)
    affinities = affinities_of(torch.from_numpy(vectors).float(), perplexity=30.0)
    found, expected = (divergence(affinities, torch.from_numpy(one.T).float().contiguous()) for one in (places, theirs))
    assert found < 1.05 * expected
    assert manifold.trustworthiness(vectors, places, n_neighbors=10) > trust
    nearest = torch.cdist(*[torch.from_numpy(places)] * 2).fill_diagonal_(torch.inf).argmin(1).numpy()
    assert (groups[nearest] == groups).mean() > 0.99


def test_it_is_as_good_as_scikit_learn(monkeypatch):
    shorten(monkeypatch, 250, 100, 50)
    monkeypatch.setattr(tsne, "FEW", 0)
    check_quality(*clusters(500), num_steps=400, trust=0.93)


@pytest.mark.slow
def test_it_is_as_good_as_scikit_learn_for_more_points():
    check_quality(*clusters(2000), num_steps=1000, trust=0.96)


@pytest.mark.parametrize("num", [50, 700])
def test_the_same_seed_gives_the_same_places(num, hasty):
    vectors, _ = clusters(num)
    first, again, other = place(vectors, seed=3), place(vectors.copy(), seed=3), place(vectors, seed=4)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 7])
def test_few_points(num, width, hasty):
    vectors = np.random.default_rng(0).standard_normal((num, width))
    places = place(vectors)
    assert places.shape == (num, 2)
    assert np.isfinite(places).all()
    assert len(np.unique(places, axis=0)) == num


@pytest.mark.parametrize("num", [5, 650])
def test_constant_points(num, hasty):
    places = place(np.full((num, 3), 7.0))
    assert np.isfinite(places).all()


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_size_does_not_matter(factor, hasty):
    vectors, _ = clusters(60)
    assert np.isfinite(place(vectors * factor)).all()


def test_copies_lie_together(hasty):
    vectors, _ = clusters(250)
    places = place(np.concatenate([vectors, vectors]), perplexity=20)
    apart = np.linalg.norm(places[:250] - places[250:], axis=1)
    assert np.median(apart) < 0.1 * places.std()


def test_a_point_with_many_copies(hasty):
    vectors, _ = clusters(500)
    vectors[:200] = vectors[0]
    assert np.isfinite(place(vectors)).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_told(wrong):
    vectors = np.zeros((5, 3))
    vectors[2, 1] = vectors[4, 0] = wrong
    with pytest.raises(RequestError, match=r"2 of 5 vectors have NaN or infinity; the first is number 2\."):
        place(vectors)


@pytest.mark.parametrize("perplexity", [0, -1, 5, 30, np.nan])
def test_a_wrong_perplexity_is_told(perplexity):
    with pytest.raises(RequestError, match="A perplexity is above 0 and below the number of points, 5"):
        place(np.eye(5), perplexity=perplexity)


def test_what_is_no_table_is_told():
    with pytest.raises(RequestError, match=r"an array \(4,\) came"):
        place(np.zeros(4))
    with pytest.raises(RequestError, match=r"an array \(4, 0\) came"):
        place(np.zeros((4, 0)))
