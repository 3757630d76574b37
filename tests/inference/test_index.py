"""The index of a model: what it finds, its recall, its file, and predictions with it."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, InvalidValue, PathExists
from dualkg.files import write_json
from dualkg.inference.index import ModelIndex, build_index, load_index, metric_of, save_index
from tests.conftest import graph_of

pytest.importorskip("faiss")
quick_index = partial(build_index, num_queries=100, seconds=0.0)
ISOMETRIC = [(kind, {"norm": norm}) for kind in ("TransE", "RotatE") for norm in (2, "squared")]
SEARCHABLE: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("CP", "DistMult", "ComplEx", "SimplE", "QuatE", "RESCAL", "TuckER")),
    *((kind, {"reciprocal": False}) for kind in ("DistMult", "ComplEx", "RESCAL", "TuckER")),
    ("TuckER", {"batch_norm": True}),
    *ISOMETRIC,
    *((kind, {**config, "reciprocal": False}) for kind, config in ISOMETRIC),
    ("ModE", {"norm": 2}),
]


def made(graph: kg.Graph, kind: str, **config: Any) -> kg.Model:
    return getattr(kg, kind)(
        graph.shape, **{"dim": 4, "init_scale": 1.0, "seed": 1, **config}
    ).eval()


@pytest.fixture
def model(small_graph: kg.Graph) -> kg.Model:
    return made(small_graph, "ComplEx", dim=6)


def assert_same(ours: list[kg.Prediction], theirs: list[kg.Prediction]) -> None:
    assert [(a.id, a.name, a.split) for a in ours] == [(a.id, a.name, a.split) for a in theirs]
    assert [a.score for a in ours] == pytest.approx([a.score for a in theirs], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("kind", "config"), SEARCHABLE, ids=str)
@torch.no_grad()
def test_an_index_finds_what_the_model_scores_best(small_graph, kind, config):
    """With fewer entities than the effort, all of them."""
    model = made(small_graph, kind, **config)
    index = quick_index(model, small_graph)
    assert index.stats is not None
    assert index.stats.recall == {1: 1.0, 10: 1.0, 100: 1.0}
    given = torch.arange(12)
    relations = given % 3
    for side, scores in (
        ("tail", model.predict_tails(given, relations)),
        ("head", model.predict_heads(relations, given)),
    ):
        ids = index.search(model, given, relations, side, k=5)
        expected = scores.topk(5).values
        torch.testing.assert_close(
            scores.gather(1, torch.from_numpy(ids)), expected, rtol=1e-3, atol=1e-3
        )


def test_the_dual_is_searched_by_distances(small_graph):
    model = kg.Dual(made(small_graph, "RESCAL"))
    assert metric_of(model) == "euclidean"
    assert quick_index(model, small_graph).stats.recall[10] == 1.0


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("TransE", {"norm": 1}, "TransE with norm 1 adds absolute differences"),
        ("SE", {"norm": 2}, "SE scores in another way"),
        ("HAKE", {}, "HAKE scores in another way"),
        ("CP", {"reciprocal": False}, "CP without reciprocal relations has two tables"),
        ("ModE", {"norm": 2, "reciprocal": False}, "ModE without reciprocal relations maps"),
    ],
)
def test_models_without_an_index(small_graph, kind, config, why):
    with pytest.raises(kg.RequestError, match=f"{why}.*Predict without an index"):
        quick_index(made(small_graph, kind, **config), small_graph)


def test_duals_without_an_index(small_graph):
    for dual in (
        kg.Dual(made(small_graph, "CP"), "head"),
        kg.Dual(made(small_graph, "CP", reciprocal=False)),
    ):
        with pytest.raises(kg.RequestError, match="Predict without an index"):
            metric_of(dual)


def clustered(num_entities: int = 2000) -> tuple[kg.Model, kg.Graph]:
    """Rows around 20 centres, of unequal lengths."""
    random = np.random.default_rng(0)
    sizes = (num_entities, 2, num_entities)
    triples = np.stack([random.integers(0, size, 500) for size in sizes], axis=1)
    graph = graph_of(triples, num_entities=num_entities, num_relations=2)
    model = kg.DistMult(graph.shape, dim=12, init_scale=1.0)
    with torch.no_grad():
        centres = torch.from_numpy(random.standard_normal((20, 12), np.float32))
        rows = centres.repeat(num_entities // 20, 1) + 0.5 * model.entities
        model.entities[:] = rows * torch.exp(0.3 * torch.randn(num_entities, 1))
    return model, graph


def test_the_effort_is_the_first_that_reaches_the_recall():
    model, graph = clustered()
    low, high = (quick_index(model, graph, recall=recall) for recall in (0.3, 0.99))
    assert 16 <= low.effort < high.effort
    assert high.stats.recall[100] > 0.97
    assert high.stats.queries_per_second > 0 < high.stats.exact_queries_per_second


class Shifted(kg.DistMult):
    """A model of one's own, which does not score by its maps alone."""

    def tail_scores(self, f):
        return super().tail_scores(f) + torch.arange(2000) * 100

    head_scores = tail_scores


@pytest.mark.parametrize("recall", [0, 1, 1.5])
def test_a_recall_that_is_none_is_refused(model, small_graph, recall):
    with pytest.raises(InvalidValue, match="`recall` should be above 0 and below 1"):
        quick_index(model, small_graph, recall=recall)


def test_a_recall_that_is_not_reached_is_told():
    _, graph = clustered()
    with pytest.raises(kg.RequestError, match="reaches a recall of .* Choose a lower `recall`"):
        quick_index(Shifted(graph.shape, dim=4, init_scale=1.0), graph)


def test_a_diverged_model_is_refused(model, small_graph):
    with torch.no_grad():
        model.entities[3, 0] = torch.nan
    with pytest.raises(kg.DivergedError, match="holds NaN"):
        quick_index(model, small_graph)


# -- files -------------------------------------------------------------------


def test_an_index_is_read_back(model, small_graph, tmp_path):
    saved = save_index(quick_index(model, small_graph, made_from="a run"), tmp_path / "index")
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "index.faiss",
        "index.json",
    ]
    loaded = load_index(tmp_path / "index")
    assert loaded.as_dict() == saved.as_dict()
    assert saved.stats.bytes == (tmp_path / "index" / "index.faiss").stat().st_size
    query = (model, torch.tensor([3]), torch.tensor([1]), "head")
    assert loaded.search(*query, k=7).tolist() == saved.search(*query, k=7).tolist()
    with pytest.raises(PathExists):
        save_index(saved, tmp_path / "index")


@pytest.mark.parametrize("damage", ["missing", "cut", "bit", "json", "other", "nothing"])
def test_a_damaged_index_is_refused(model, small_graph, tmp_path, damage):
    folder = tmp_path / "index"
    save_index(quick_index(model, small_graph), folder)
    path = folder / "index.faiss"
    about = folder / "index.json"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-10])
    elif damage == "bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "json":
        about.write_text("{")
    elif damage == "other":
        about.write_text(json.dumps({**json.loads(about.read_text()), "effort": 1}))
    else:
        about.unlink()
    error = kg.RequestError if damage == "nothing" else DamagedFile
    with pytest.raises(error, match=r"index\.(json|faiss)"):
        load_index(folder)


def test_an_index_of_an_earlier_version_is_built_again(tmp_path):
    write_json(tmp_path / "index.json", {"kind": "hnsw", "tables": {}})
    with pytest.raises(kg.RequestError, match=r"of an earlier version\. Build it again with"):
        load_index(tmp_path)


# -- predictions -------------------------------------------------------------


@pytest.mark.parametrize("known", ["mark", "omit"])
def test_predictions_are_those_without_an_index(small_graph, model, known):
    plain = kg.Predictor(model, small_graph)
    indexed = kg.Predictor(model, small_graph, index=quick_index(model, small_graph))
    for given, relation, k in ((0, 0, 1), (5, 1, 7), (12, 3, 29), (29, 2, 100)):
        options = {"k": k, "known": known}
        assert_same(
            indexed.tails(given, relation, **options), plain.tails(given, relation, **options)
        )
        assert_same(
            indexed.heads(relation, given, **options), plain.heads(relation, given, **options)
        )
    with pytest.raises(InvalidValue):
        indexed.tails(0, 0, k=0)


@pytest.mark.parametrize("num_known", [1, 60, 290])
def test_known_answers_do_not_displace_others(num_known):
    graph = graph_of(
        [*((0, 0, tail) for tail in range(num_known)), *((n, 0, 1) for n in range(1, 300))]
    )
    model = made(graph, "ComplEx")
    plain = kg.Predictor(model, graph)
    indexed = kg.Predictor(model, graph, index=quick_index(model, graph, recall=0.9))
    ours, theirs = (one.tails(0, 0, k=10, known="omit") for one in (indexed, plain))
    assert len(ours) == len(theirs) == 10
    assert not any(answer.known for answer in ours)
    assert len({a.id for a in ours} & {a.id for a in theirs}) >= 8


def test_all_entities_are_scored_if_an_index_finds_too_few(small_graph, model, monkeypatch):
    plain = kg.Predictor(model, small_graph)
    indexed = kg.Predictor(model, small_graph, index=quick_index(model, small_graph))
    monkeypatch.setattr(ModelIndex, "nearest", lambda self, queries, k: np.full((1, 5), -1))
    assert indexed.tails(0, 0, k=5) == plain.tails(0, 0, k=5)


def test_an_index_of_another_model_is_refused(small_graph, model):
    index = quick_index(model, small_graph, made_from="identity")
    for other in (made(small_graph, "ComplEx", dim=6, seed=9), kg.Dual(model)):
        with pytest.raises(kg.RequestError, match="another model, ComplEx by inner product"):
            kg.Predictor(other, small_graph, index=index)
    with torch.no_grad():
        model.entities[1] += 1
    for identity in (None, "of another"):
        with pytest.raises(kg.RequestError, match="another model"):
            index.check_model(model, identity=identity)
    index.check_model(model, identity="identity")  # which stands for all weights
