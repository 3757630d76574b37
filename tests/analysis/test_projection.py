"""t-SNE of vectors, and the map of all entities of a run."""

import shutil
import sys
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.analysis import projection
from dualkg.analysis.projection import (
    compute_map,
    default_perplexity,
    entity_map,
    load_map,
    principal_components,
    save_map,
    tail_embeddings,
    tsne,
)
from dualkg.errors import DamagedFile, InvalidValue, MissingExtra, RequestError
from dualkg.training.run_folder import RunFolder

# Importing it takes seconds, which every process that collects tests would spend.
pytestmark = pytest.mark.skipif(find_spec("openTSNE") is None, reason="needs openTSNE")


def clusters(
    num_points: int, *, width: int = 50, num_clusters: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Points of Gaussian clusters `(num_points, width)`, and the cluster of each."""
    random = np.random.default_rng(0)
    groups = random.integers(0, num_clusters, num_points)
    centres = random.standard_normal((num_clusters, width))
    offsets = random.standard_normal((num_points, width))
    return centres[groups] + offsets, groups


def test_neighbours_in_the_plane_are_of_the_same_cluster():
    vectors, groups = clusters(500)
    positions = tsne(vectors)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (groups[distances.argmin(1)] == groups).mean() > 0.99


# The neighbours of 40 points are found in one block, those of 1,100 in several.
@pytest.mark.parametrize("num_points", [40, pytest.param(1100, marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_positions(num_points):
    vectors, _ = clusters(num_points, width=8)
    np.testing.assert_array_equal(tsne(vectors, seed=3), tsne(vectors.copy(), seed=3))


def test_seed_and_perplexity_change_the_positions():
    vectors, _ = clusters(40, width=8)
    first = tsne(vectors, seed=3)
    assert first.shape == (40, 2)
    assert not np.allclose(first, tsne(vectors, seed=4))
    assert not np.allclose(first, tsne(vectors, seed=3, perplexity=5))


@pytest.mark.parametrize("num_points", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 7])
def test_few_points(num_points, width):
    positions = tsne(np.random.default_rng(0).standard_normal((num_points, width)))
    assert positions.shape == (num_points, 2)
    assert np.isfinite(positions).all()
    assert len(np.unique(positions, axis=0)) == num_points


@pytest.mark.parametrize("num_points", [5, 150])
def test_constant_points(num_points):
    assert np.isfinite(tsne(np.full((num_points, 3), 7.0))).all()


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_scale_does_not_matter(factor):
    vectors, _ = clusters(60)
    assert np.isfinite(tsne(vectors * factor)).all()


def test_equal_points_are_close():
    vectors, _ = clusters(100)
    positions = tsne(np.concatenate([vectors, vectors]), perplexity=20)
    apart = np.linalg.norm(positions[:100] - positions[100:], axis=1)
    assert np.median(apart) < 0.1 * positions.std()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(wrong):
    vectors = np.zeros((5, 3))
    vectors[2, 1] = vectors[4, 0] = wrong
    sentence = "finite numbers, and 2 of 5 vectors have NaN or infinity; the first is number 2."
    with pytest.raises(RequestError, match=sentence):
        tsne(vectors)


@pytest.mark.parametrize("perplexity", [0, -1, 5, 30, np.nan])
def test_an_invalid_perplexity_is_refused(perplexity):
    with pytest.raises(InvalidValue, match="above 0 and below the number of points, 5"):
        tsne(np.eye(5), perplexity=perplexity)


def test_the_default_perplexity_is_small_for_few_points():
    assert (default_perplexity(764), default_perplexity(31)) == (30, 10)


@pytest.mark.parametrize("shape", [(4,), (4, 0)])
def test_an_array_that_is_not_a_matrix_is_refused(shape):
    with pytest.raises(InvalidValue, match="a matrix"):
        tsne(np.zeros(shape))


def test_without_opentsne_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    with pytest.raises(MissingExtra, match=r"pip install 'dualkg\[analysis\]'"):
        tsne(np.eye(4))


def test_tails_are_looked_up_where_the_model_does():
    shape = kg.GraphShape(6, 2)
    cp = kg.CP(shape, dim=3)
    distmult = kg.DistMult(shape, dim=3)
    np.testing.assert_array_equal(
        tail_embeddings(cp, [4, 1]), cp.tail_table.detach().double()[[4, 1]].numpy()
    )
    np.testing.assert_array_equal(
        tail_embeddings(distmult, [2]), distmult.head_table.detach().double()[[2]].numpy()
    )
    np.testing.assert_array_equal(tail_embeddings(kg.Dual(cp), [0]), tail_embeddings(cp, [0]))


# -- the map of a run --------------------------------------------------------


def test_a_map_is_computed_once_and_saved_with_the_run(small_graph, tmp_path, monkeypatch):
    run = kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1)
    run.save(tmp_path / "run")
    positions = entity_map(run)
    assert positions.shape == (30, 2)
    assert np.abs(positions).max() == pytest.approx(1.0)
    assert np.allclose(positions.max(0), -positions.min(0), atol=1e-4)
    monkeypatch.setattr(projection, "compute_map", None)
    np.testing.assert_allclose(entity_map(kg.load_run(tmp_path / "run")), positions, atol=1e-6)
    RunFolder(tmp_path / "run").check_free(overwrite=True)  # a run with a map may be overwritten


def test_a_map_of_another_run_is_computed_again(small_graph, tmp_path, caplog):
    paths = [tmp_path / "run", tmp_path / "other"]
    for seed, path in enumerate(paths):
        kg.train(kg.CP(small_graph.shape, dim=4, seed=seed), small_graph, epochs=1, out=path)
    run = kg.load_run(paths[0])
    positions = entity_map(run)
    entity_map(kg.load_run(paths[1]))
    shutil.copyfile(paths[1] / "map.parquet", paths[0] / "map.parquet")
    with pytest.raises(RequestError, match="was made from another run"):
        load_map(paths[0] / "map.parquet", 30, identity=run.identity)
    np.testing.assert_array_equal(entity_map(run), positions)
    assert "was made from another run" in caplog.text
    load_map(paths[0] / "map.parquet", 30, identity=run.identity)


def test_the_same_model_has_the_same_map(small_graph):
    model = kg.CP(small_graph.shape, dim=80, init_scale=1.0)
    np.testing.assert_array_equal(compute_map(model), compute_map(model))


@pytest.mark.parametrize("num_entities", [1, 2, 3])
def test_few_entities_have_a_map(num_entities):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        positions = compute_map(kg.CP(kg.GraphShape(num_entities, 1), dim=4))
    assert positions.shape == (num_entities, 2)
    assert np.isfinite(positions).all()


def test_a_diverged_model_has_no_map(small_graph):
    model = kg.CP(small_graph.shape, dim=80)
    with torch.no_grad():
        model.embedding.tail_table[3] = torch.nan
    with pytest.raises(RequestError, match="1 of 30 vectors have NaN or infinity"):
        compute_map(model)


def test_principal_components_keep_distances():
    random = np.random.default_rng(0)
    flat = random.standard_normal((40, 3)) @ random.standard_normal((3, 20))
    few = principal_components(flat, 3)
    distances = [np.linalg.norm(one[:, None] - one[None], axis=-1) for one in (flat, few)]
    np.testing.assert_allclose(*distances, atol=1e-8)
    assert principal_components(flat[:, :2], 3).shape == (40, 2)


def test_a_damaged_map_is_reported(tmp_path):
    path = tmp_path / "map.parquet"
    path.write_text("no table")
    with pytest.raises(DamagedFile, match="Remove it, and the map is computed again."):
        load_map(path, 30)
    save_map(np.zeros((29, 2)), path)
    with pytest.raises(DamagedFile, match="it has 29 positions and the graph 30 entities"):
        load_map(path, 30)


def test_a_map_reports_its_positions():
    """Principal components first, which are spread over the square, and then those of t-SNE."""
    model = kg.CP(kg.GraphShape(60, 1), dim=4)
    reported = []
    final = compute_map(model, on_positions=reported.append)
    assert len(reported) > 100
    for positions in (reported[0], *reported[::20], reported[-1]):
        assert positions.shape == (60, 2)
        assert np.abs(positions).max() == pytest.approx(1)
    assert np.abs(reported[0]).mean() > 0.2
    np.testing.assert_allclose(reported[-1], final, atol=0.2)
    components = principal_components(tail_embeddings(model, np.arange(60)), 2)
    by_first = np.argsort(components[:, 0] - np.median(components[:, 0]))
    assert reported[0][by_first[0], 0] < 0 < reported[0][by_first[-1], 0]


def test_a_map_reports_its_progress_and_can_be_ended():
    model = kg.CP(kg.GraphShape(60, 1), dim=4)
    shares = []
    compute_map(model, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len(shares) > 100

    class Ended(Exception):
        pass

    def end(share):
        if share > 0.5:
            raise Ended

    with pytest.raises(Ended):
        compute_map(model, on_progress=end)
