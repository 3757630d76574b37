"""Which models can be indexed, by which vectors, and how others are refused."""

from typing import Any

import pytest
import torch

import dualkg as kg
from dualkg.errors import Unsupported
from dualkg.inference.index import ExactIndex, metric_of, query_vectors, tables_of
from dualkg.inference.index_build import check_agreement, fingerprint, sample_queries
from dualkg.models.partial import PartialModel
from dualkg.tables.base import DeviceTables, local_tables
from dualkg.tables.shard import Shard
from tests.raising import refused

SHAPE = kg.GraphShape(12, 3)
GIVEN = torch.arange(12)


def made(kind: str, **config: Any) -> kg.Model:
    dual = config.pop("dual", None)
    tables = config.pop("tables", None) or local_tables(SHAPE.num_entities)
    config = {"dim": 4, "init_scale": 1.0, "seed": 1, **config}
    model = getattr(kg, kind).with_tables(tables, SHAPE, **config)
    return (kg.Dual(model, dual) if dual else model).eval()


BILINEAR = ("CP", "DistMult", "ComplEx", "SimplE", "QuatE", "RESCAL", "TuckER")
ISOMETRIC = [(kind, {"norm": norm}) for kind in ("TransE", "RotatE") for norm in (2, "squared")]
SEARCHABLE: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in BILINEAR),
    *((kind, {"reciprocal": False}) for kind in BILINEAR),
    ("TuckER", {"batch_norm": True}),
    ("ComplEx", {"dual": "tail"}),
    ("RESCAL", {"dual": "tail"}),
    *ISOMETRIC,
    *((kind, {**config, "reciprocal": False}) for kind, config in ISOMETRIC),
    ("ModE", {"norm": 2}),
]


@pytest.mark.parametrize(("kind", "config"), SEARCHABLE, ids=str)
@torch.no_grad()
def test_an_index_finds_what_the_model_scores_best(kind, config):
    model = made(kind, **config)
    given = torch.arange(12)
    relations = torch.arange(12) % 3
    tables = tables_of(model)
    for side, scores in (
        ("tail", model.predict_tails(given, relations)),
        ("head", model.predict_heads(relations, given)),
    ):
        vectors = query_vectors(model, given, relations, side)
        found = ExactIndex.build(tables.get(side, tables["tail"]), metric_of(model)).search(
            vectors, 12
        )
        assert torch.equal(found.ids, scores.argsort(dim=1, descending=True))
        rescored = model.predict_candidates(given, relations, found.ids, side)
        torch.testing.assert_close(rescored, scores.gather(1, found.ids), rtol=1e-3, atol=1e-3)
        check_agreement(model, given, relations, side=side, best=found.ids[:, :1])


@pytest.mark.parametrize("kind", ["CP", "ComplEx", "TransE"])
@torch.no_grad()
def test_a_model_of_mapped_rows_scores_as_the_whole(kind):
    """The first of several processes builds an index of it; here that one has all rows."""
    model = made(kind, reciprocal=False)
    tables = DeviceTables(Shard(12))
    built = made(kind, reciprocal=False, tables=tables)
    tables.block_rows = 5
    mapped = PartialModel(built).mapped()
    assert mapped is not None
    assert mapped.tables.has_all_entities
    for name, table in model.state_dict().items():
        assert torch.equal(mapped.state_dict()[name], table), name
    expected = model.predict_heads(GIVEN % 3, GIVEN)
    torch.testing.assert_close(mapped.predict_heads(GIVEN % 3, GIVEN), expected)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("TransE", {"norm": 1}, "TransE with norm 1 adds absolute differences"),
        ("RotatE", {"norm": 1}, "RotatE with norm 1 adds absolute differences"),
        ("SE", {"norm": 2}, "SE scores in another way"),
        ("HAKE", {}, "HAKE scores in another way"),
        ("MuRP", {}, "MuRP scores in another way"),
        (
            "ModE",
            {"norm": 2, "reciprocal": False},
            "ModE without reciprocal relations compares with heads",
        ),
        (
            "CP",
            {"dual": "tail", "reciprocal": False},
            "the dual of CP without reciprocal relations compares with heads",
        ),
        (
            "CP",
            {"dual": "head"},
            "the dual of CP on the side of the head compares with tails that each relation maps",
        ),
    ],
)
def test_models_without_a_metric_are_refused(kind, config, why):
    with pytest.raises(Unsupported) as error:
        metric_of(made(kind, **config))
    assert why in error.value.reason
    assert error.value.advice == "Predict without an index."


class Shifted(kg.DistMult):
    """A model of one's own, which does not score by its maps alone."""

    def tail_scores(self, f):
        return super().tail_scores(f) + torch.arange(12) * 100


def test_a_model_that_does_not_score_by_its_maps_is_refused():
    model = Shifted(SHAPE, dim=4, init_scale=1.0)
    assert metric_of(model) == "inner product"
    reason = (
        "does not score by its maps alone, so an index would not find the entities that it scores "
        "best"
    )
    with refused(Unsupported, what="Shifted", reason=reason):
        check_agreement(
            model, torch.tensor([0]), torch.tensor([0]), side="tail", best=torch.tensor([[3]])
        )


def test_only_cp_without_reciprocal_relations_has_two_tables():
    assert list(tables_of(made("CP", reciprocal=False))) == ["tail", "head"]
    assert list(tables_of(made("CP"))) == ["tail"]
    assert list(tables_of(made("ComplEx", reciprocal=False))) == ["tail"]


def test_sampled_queries_are_of_training_triples(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4)
    heads, relations = sample_queries(model, small_graph, "tail", num=20, seed=0)
    pairs = set(zip(heads.tolist(), relations.tolist(), strict=True))
    assert len(pairs) == 20
    assert pairs <= {(h, r) for h, r, _ in small_graph.train.tolist()}
    tails, relations = sample_queries(model, small_graph, "head", num=20, seed=0)
    pairs = set(zip(relations.tolist(), tails.tolist(), strict=True))
    assert pairs <= {(r, t) for _, r, t in small_graph.train.tolist()}


def test_fingerprints_differ():
    table = torch.randn(5000, 3)
    assert fingerprint(table) == fingerprint(table.clone())
    assert fingerprint(table) != fingerprint(table + 1)
    assert fingerprint(table) != fingerprint(table[:-1])
