"""All entities in the plane, made once."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.analysis import projection as mapping
from dualkg.analysis.projection import entity_map, lay_out, load_map, principal, save_map
from dualkg.errors import RequestError


def test_it_is_made_once_and_kept_with_the_run(small_graph, tmp_path, monkeypatch):
    run = kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1)
    run.save(tmp_path / "run")
    places = entity_map(run)
    assert places.shape == (30, 2)
    assert np.abs(places).max() == pytest.approx(1.0)
    assert np.allclose(places.max(0), -places.min(0), atol=1e-4)
    monkeypatch.setattr(mapping, "lay_out", None)
    np.testing.assert_allclose(entity_map(kg.load_run(tmp_path / "run")), places, atol=1e-6)


def test_a_run_with_a_map_may_be_overwritten(small_graph, tmp_path):
    run = kg.train(kg.CP(small_graph.shape, dim=4), small_graph, epochs=1)
    run.save(tmp_path / "run")
    entity_map(run)
    from dualkg.training.run import RunFolder

    RunFolder(tmp_path / "run").check_free(overwrite=True)


def test_the_same_model_has_the_same_map(small_graph):
    model = kg.CP(small_graph.shape, dim=80, init_scale=1.0)
    np.testing.assert_array_equal(lay_out(model), lay_out(model))


@pytest.mark.parametrize("num_entities", [1, 2, 3])
def test_few_entities_have_a_map_without_any_extra(num_entities, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    places = lay_out(kg.CP(kg.GraphShape(num_entities, 1), dim=4))
    assert places.shape == (num_entities, 2)
    assert np.isfinite(places).all()


def test_a_model_that_diverged_is_told(small_graph):
    model = kg.CP(small_graph.shape, dim=80)
    with torch.no_grad():
        model.embedding.tail_table[3] = torch.nan
    with pytest.raises(RequestError, match="1 of 30 vectors have NaN or infinity; the first is number 3"):
        lay_out(model)


def test_principal_axes_keep_the_distances_that_matter():
    random = np.random.default_rng(0)
    flat = random.standard_normal((40, 3)) @ random.standard_normal((3, 20))
    few = principal(flat, axes=3)
    distances = [np.linalg.norm(one[:, None] - one[None], axis=-1) for one in (flat, few)]
    np.testing.assert_allclose(*distances, atol=1e-8)
    assert principal(flat, axes=20) is flat


def test_a_damaged_map_is_told(tmp_path):
    path = tmp_path / "map.parquet"
    path.write_text("no table")
    with pytest.raises(RequestError, match="is damaged .* Remove it, and the map is made again."):
        load_map(path, 30)
    save_map(np.zeros((29, 2)), path)
    with pytest.raises(RequestError, match="has 29 places and the graph 30 entities. Remove it"):
        load_map(path, 30)
