"""Runs from arrays, from models of PyKEEN and from checkpoints of LibKGE.

The score functions of both libraries are written out here in their own layouts, so that neither
needs to be installed.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkg as kg

IMPORTABLE = (
    "These can be imported: ComplEx, CP, DistMult, QuatE, RESCAL, RotatE, SE, SimplE, TransE, "
    "TuckER."
)


@pytest.mark.parametrize("name", ["CP", "DistMult", "ComplEx", "RESCAL"])
def test_imported_embeddings_have_the_ranks_and_predictions_of_their_source(
    small_graph, tmp_path, name
):
    from dualkg.models import MODELS

    source = MODELS[name](small_graph.shape, dim=3, init_scale=1.0)
    order = np.random.default_rng(0).permutation(30)
    tables = {key: value.numpy() for key, value in source.state_dict().items()}
    given = {key: tables[key][order] for key in ("entities", "tails") if key in tables}
    run = kg.from_arrays(
        name,
        **given,
        relations=tables["relations"],
        graph=small_graph,
        entity_names=[f"e{id}" for id in order],
    )
    assert kg.evaluate(run.model, small_graph).mrr == kg.evaluate(source, small_graph).mrr
    run.save(tmp_path / "imported")
    again = kg.load_run(tmp_path / "imported")
    answers = [
        kg.Predictor(model, small_graph).tails("e3", "r1", k=3) for model in (source, again.model)
    ]
    assert answers[0] == answers[1]


def test_complex_arrays_with_names_and_without_a_graph(tmp_path):
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 2)) + 1j * random.normal(size=(3, 2))
    run = kg.from_arrays(
        "ComplEx",
        entities=table,
        relations=table[:1],
        entity_names=["a", "b", "c"],
        relation_names=["is"],
    )
    expected = (table[0] * table[0] * table[1].conj()).sum().real
    assert kg.Predictor(run.model, run.graph).score("a", "is", "b") == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("more", "what", "reason"),
    [
        (
            {"relations": np.zeros((3, 4))},
            "The relation table",
            "should have 4 rows, or 8 with reciprocals; it has 3",
        ),
        ({"entity_names": ["e0"] * 30}, "29 of the 30 names of rows", "are repeated"),
        (
            {"entity_names": [f"x{i}" for i in range(30)]},
            "The arrays",
            "have no row for 30 names of the graph, such as 'e0'",
        ),
        ({"entity_names": [f"e{i}" for i in range(29)]}, "There", "are 29 names for 30 rows"),
        (
            {"entities": np.zeros((30, 4)) + 1j},
            "entities",
            "are complex numbers; DistMult has real ones",
        ),
        (
            {"relations": np.zeros(4)},
            "relations",
            "should be a table with a row for each name; its shape is (4,)",
        ),
    ],
)
def test_arrays_of_wrong_shapes_or_names_are_refused(small_graph, more, what, reason):
    given = {"entities": np.zeros((30, 4)), "relations": np.zeros((4, 4)), **more}
    with pytest.raises(kg.RequestError, match=re.escape(f"{what} {reason}")):
        kg.from_arrays("DistMult", graph=small_graph, **given)


def test_arrays_with_too_few_entities_are_refused(small_graph):
    relations = (4, 4)
    with pytest.raises(kg.RequestError, match=r"The set of arrays .*29, 4"):
        kg.from_arrays(
            "DistMult",
            graph=small_graph,
            entities=np.zeros((29, 4)),
            relations=np.zeros(relations),
        )


def test_arrays_need_names():
    with pytest.raises(kg.RequestError, match="from_arrays needs a graph, or entity_names"):
        kg.from_arrays("DistMult", entities=np.zeros((2, 2)), relations=np.zeros((1, 2)))


def test_exported_parameters_and_options_can_be_imported(small_graph):
    source = kg.MuRP(small_graph.shape, dim=3, init_scale=0.5, signs=True)
    tables = {key: value.numpy() for key, value in source.state_dict().items()}
    own = {key: tables.pop(key) for key in ("entities", "relations")}
    run = kg.from_arrays(
        "MuRP", **own, parameters=tables, options={"signs": True}, graph=small_graph
    )
    assert kg.evaluate(run.model, small_graph).mrr == kg.evaluate(source, small_graph).mrr


def test_relations_of_rotate_have_modulus_one():
    names = {"entity_names": ["a", "b"], "relation_names": ["r"]}
    with pytest.raises(kg.RequestError, match="a modulus that differs from 1 by 1"):
        kg.from_arrays(
            "RotatE", entities=np.ones((2, 2)) + 0j, relations=np.full((1, 2), 2j), **names
        )


# -- scores by a formula -----------------------------------------------------

NUM_ENTITIES = 4
NUM_RELATIONS = 3
DIM = 2
NAMES = {
    "entity": [f"e{id}" for id in range(NUM_ENTITIES)],
    "relation": [f"r{id}" for id in range(NUM_RELATIONS)],
}
TRIPLES = {"train": [[0, 0, 1], [3, 1, 2]], "valid": [[1, 2, 0]], "test": [[2, 0, 2], [0, 1, 3]]}
MATRIX = (DIM, DIM)
QUATERNIONS = (DIM, 4)
Rows = Sequence[np.ndarray]
Score = Callable[[Rows, Rows, Rows], float]


def draw(random: np.random.Generator, rows: int, shape: Any) -> np.ndarray:
    """A table whose rows have a shape, are complex, or are complex with modulus 1."""
    if shape == "unit":
        return np.exp(1j * random.uniform(-4, 4, (rows, DIM)))
    if shape == "complex":
        return random.normal(size=(rows, DIM)) + 1j * random.normal(size=(rows, DIM))
    return random.normal(size=(rows, *np.atleast_1d(shape)))


def assert_scores(
    run: kg.Run,
    entities: Rows,
    relations: Rows,
    score: Score,
    *,
    row: Callable[[int], int],
    inverse: Any = None,
) -> None:
    """Scores of all triples and of all heads follow a formula of rows, where `row` and `inverse`
    are of relations.
    """
    ids = np.indices((NUM_ENTITIES, NUM_RELATIONS, NUM_ENTITIES)).reshape(3, -1)

    def by_formula(head: int, relation: int, tail: int) -> float:
        found = ((entities, head), (relations, relation), (entities, tail))
        return float(score(*([table[id] for table in tables] for tables, id in found)))

    heads, queried, tails = (torch.from_numpy(found) for found in ids)
    expected = [by_formula(h, row(r), t) for h, r, t in ids.T]
    by_head = [by_formula(t, inverse(r), h) for h, r, t in ids.T] if inverse else expected
    predicted = run.model.predict_heads(queried, tails)[torch.arange(len(heads)), heads]
    for found, wanted in ((run.model.score(heads, queried, tails), expected), (predicted, by_head)):
        np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-3, atol=1e-4)


def norm(x: np.ndarray, p: int = 1, *, power: bool = False) -> float:
    return -((np.abs(x) ** p).sum() ** (1 if power else 1 / p))


def hamilton(h: np.ndarray, r: np.ndarray) -> np.ndarray:
    """The product of quaternions, `(dim, 4)` each."""
    (a, b, c, d), (w, x, y, z) = h.T, r.T
    parts = (
        a * w - b * x - c * y - d * z,
        a * x + b * w + c * z - d * y,
        a * y - b * z + c * w + d * x,
        a * z + b * y - c * x + d * w,
    )
    return np.stack(parts, axis=1)


# -- PyKEEN ------------------------------------------------------------------

# Shapes of the rows of entities and relations, attributes of the interaction, and its score.
PYKEEN: dict[str, tuple[Any, Any, dict[str, Any], Score]] = {
    "TransE": (
        [DIM],
        [DIM],
        {"p": 1, "power_norm": False},
        lambda h, r, t: norm(h[0] + r[0] - t[0]),
    ),
    "TransE p=2": (
        [DIM],
        [DIM],
        {"p": 2, "power_norm": False},
        lambda h, r, t: norm(h[0] + r[0] - t[0], 2),
    ),
    "TransE p=2 squared": (
        *([DIM], [DIM], {"p": 2, "power_norm": True}),
        lambda h, r, t: norm(h[0] + r[0] - t[0], 2, power=True),
    ),
    "RotatE": (["complex"], ["unit"], {"p": 1}, lambda h, r, t: norm(h[0] * r[0] - t[0], 2)),
    "DistMult": ([DIM], [DIM], {}, lambda h, r, t: (h[0] * r[0] * t[0]).sum()),
    "ComplEx": (
        ["complex"],
        ["complex"],
        {},
        lambda h, r, t: (h[0] * r[0] * t[0].conj()).sum().real,
    ),
    "SimplE as published": (
        *([DIM, DIM], [DIM, DIM], {"same_half": 0.0}),
        lambda h, r, t: ((h[0] * r[0] * t[1]).sum() + (t[0] * r[1] * h[1]).sum()) / 2,
    ),
    "SimplE of PyKEEN 1.11": (
        *([DIM, DIM], [DIM, DIM], {"same_half": 0.5}),
        lambda h, r, t: ((h[0] * r[0] * t[0]).sum() + (t[1] * r[1] * h[1]).sum()) / 2,
    ),
    "RESCAL": ([DIM], [MATRIX], {}, lambda h, r, t: h[0] @ r[0] @ t[0]),
    "CP": ([(3, DIM), (3, DIM)], [(3, DIM)], {}, lambda h, r, t: (h[0] * r[0] * t[1]).sum()),
    "SE": (
        [DIM],
        [MATRIX, MATRIX],
        {"p": 1, "power_norm": True},
        lambda h, r, t: norm(r[0] @ h[0] - r[1] @ t[0]),
    ),
    "QuatE": (
        [QUATERNIONS],
        [QUATERNIONS],
        {},
        lambda h, r, t: -(hamilton(h[0], r[0]) * t[0]).sum(),
    ),
}


class AlternatingIds:
    """PyKEEN's relation ids with inverses: r is 2r, and its inverse is 2r + 1."""

    def map(self, batch: torch.Tensor, *, invert: bool) -> torch.Tensor:
        return batch * torch.tensor([1, 2, 1]) + torch.tensor([0, int(invert), 0])


class Interaction(SimpleNamespace):
    def __call__(self, *rows: Any) -> torch.Tensor:
        return torch.tensor([self.same_half])


def pykeen_model(
    name: str, entities: Rows, relations: Rows, *, inverse: bool = False, **attributes: Any
) -> Any:
    def representation(table: np.ndarray) -> Callable[..., torch.Tensor]:
        return lambda indices: torch.from_numpy(table)

    return SimpleNamespace(
        interaction=type(f"{name.split()[0]}Interaction", (Interaction,), {})(**attributes),
        entity_representations=[representation(table) for table in entities],
        relation_representations=[representation(table) for table in relations],
        use_inverse_triples=inverse,
        relation_inverter=AlternatingIds(),
        training=True,
        eval=lambda: None,
        train=lambda mode: None,
    )


def factory(split: str = "train", *, names: dict[str, list[str]] | None = NAMES) -> SimpleNamespace:
    """What the import reads of a triples factory; one without names is a CoreTriplesFactory."""
    found = names or {}
    return SimpleNamespace(
        mapped_triples=torch.tensor(TRIPLES[split]),
        num_entities=len(found.get("entity", NAMES["entity"])),
        real_num_relations=NUM_RELATIONS,
        **{f"{kind}_id_to_label": dict(enumerate(own)) for kind, own in found.items()},
        **{
            f"{kind}_to_id": {name: id for id, name in enumerate(own)}
            for kind, own in found.items()
        },
    )


@pytest.mark.parametrize("name", PYKEEN)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), inverse=st.booleans())
def test_pykeen_scores(name, seed, inverse):
    random, (entity_shapes, relation_shapes, attributes, score) = (
        np.random.default_rng(seed),
        PYKEEN[name],
    )
    entities = [draw(random, NUM_ENTITIES, shape) for shape in entity_shapes]
    relations = [draw(random, NUM_RELATIONS * (1 + inverse), shape) for shape in relation_shapes]
    run = kg.from_pykeen(
        pykeen_model(name, entities, relations, inverse=inverse, **attributes), factory()
    )
    step = 1 + inverse
    inverse_row = (lambda id: 2 * id + 1) if inverse else None
    assert_scores(run, entities, relations, score, row=lambda id: step * id, inverse=inverse_row)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_pykeen_tucker(inverse, batch_norm):
    random = np.random.default_rng(0)
    entities = draw(random, NUM_ENTITIES, 3)
    relations = draw(random, NUM_RELATIONS * (1 + inverse), 2)
    core = torch.from_numpy(random.normal(size=(3, 2, 3)))
    norms = [torch.nn.BatchNorm1d(3).eval().double() if batch_norm else None for _ in range(2)]
    for one in filter(None, norms):
        for part in (one.weight.data, one.bias.data, one.running_mean, one.running_var):
            part.copy_(torch.from_numpy(random.uniform(0.5, 2, 3)))
    own = {"core_tensor": core, "head_batch_norm": norms[0], "head_relation_batch_norm": norms[1]}
    run = kg.from_pykeen(
        pykeen_model("TuckER", [entities], [relations], inverse=inverse, **own), factory()
    )

    def normalized(x: np.ndarray, one: Any) -> np.ndarray:
        return one(torch.from_numpy(x)[None])[0].detach().numpy() if one else x

    def score(h: Rows, r: Rows, t: Rows) -> float:
        mapped = np.einsum("i,ijk,j->k", normalized(h[0], norms[0]), core.numpy(), r[0])
        return float(normalized(mapped, norms[1]) @ t[0])

    assert isinstance(run.model, kg.TuckER)
    inverse_row = (lambda id: 2 * id + 1) if inverse else None
    assert_scores(
        run, [entities], [relations], score, row=lambda id: (1 + inverse) * id, inverse=inverse_row
    )


def test_pykeen_names_and_splits(tmp_path, small_graph):
    random = np.random.default_rng(0)
    tables = draw(random, NUM_ENTITIES, DIM), draw(random, NUM_RELATIONS, DIM)
    model = pykeen_model("DistMult", *([table] for table in tables))
    dataset = SimpleNamespace(
        training=factory(), validation=factory("valid"), testing=factory("test")
    )
    run = kg.from_pykeen(model, dataset)
    assert {name: run.graph.split(name).tolist() for name in TRIPLES} == TRIPLES
    assert kg.load_run(run.save(tmp_path / "run")).report.mrr == run.report.mrr
    assert run.predictor().score("e1", "r2", "e3") == pytest.approx(
        (tables[0][1] * tables[1][2] * tables[0][3]).sum()
    )
    numbered = kg.from_pykeen(model, factory(names=None), test=factory("test", names=None))
    assert numbered.graph.entities[3] == "3"
    # Another order of ids: the rows follow the names.
    order = [2, 0, 3, 1]
    names = [NAMES["entity"][id] for id in order]
    graph = kg.Graph(
        "own",
        kg.Vocabulary(names),
        run.graph.relations,
        *(np.array(t, np.int32) for t in TRIPLES.values()),
    )
    again = kg.from_pykeen(model, factory(), graph=graph)
    np.testing.assert_allclose(again.model.entities.detach(), tables[0][order], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "what", "reason", "advice"),
    [
        (
            {"name": "MuRE"},
            "SimpleNamespace of PyKEEN",
            "scores by MuRE",
            IMPORTABLE,
        ),
        (
            {"name": "TransE", "p": 3, "power_norm": False},
            "Its distance",
            "is the 3-norm; distances of norm 1, norm 2 and its square are known",
            "",
        ),
        (
            {"name": "Clamped", "clamp_score": (-1, 1)},
            "Its scores",
            "are clamped, which makes ties; a model without clamp_score can be imported",
            "",
        ),
        (
            {"inverse": True},
            "The model",
            "has 3 relation rows and the factory needs 6",
            "Give the factory that the model was trained with.",
        ),
        (
            {"entities": np.zeros((7, DIM))},
            "The model",
            "has 7 entities and the factory 4",
            "Give the factory that the model was trained with.",
        ),
        (
            {"factory": SimpleNamespace()},
            "A triples factory or a dataset of PyKEEN",
            "was expected; it is SimpleNamespace",
            "",
        ),
        (
            {"valid": factory("valid", names={**NAMES, "entity": list("abcd")})},
            "The valid factory",
            "has other ids than that of training: its entity_to_id differs",
            "Create it with entity_to_id=training.entity_to_id and "
            "relation_to_id=training.relation_to_id.",
        ),
        (
            {"model": kg.ComplEx((3, 2), dim=2)},
            "A model of PyKEEN",
            "was expected; it is ComplEx",
            IMPORTABLE,
        ),
    ],
)
def test_pykeen_models_that_are_refused(change, what, reason, advice):
    given = {
        "name": "DistMult",
        "entities": np.zeros((NUM_ENTITIES, DIM)),
        "factory": factory(),
        "valid": None,
        **change,
    }
    given_factory, valid, entities, model = (
        given.pop(key, None) for key in ("factory", "valid", "entities", "model")
    )
    model = model or pykeen_model(
        entities=[entities], relations=[np.zeros((NUM_RELATIONS, DIM))], **given
    )
    with pytest.raises(kg.RequestError, match=re.escape(f"{what} {reason}")):
        kg.from_pykeen(model, given_factory, valid=valid)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyKEEN
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            (name, {})
            for name in (
                "ComplEx",
                "CP",
                "DistMult",
                "QuatE",
                "RESCAL",
                "RotatE",
                "SE",
                "SimplE",
                "TransE",
            )
        ),
        ("TransE", {"scoring_fct_norm": 2}),
        ("TransE", {"scoring_fct_norm": 2, "power_norm": True}),
        ("TuckER", {}),
        ("TuckER", {"apply_batch_normalization": False}),
    ],
)
def test_pykeen_ranks(name, options, inverse):
    """A model that PyKEEN has trained is ranked as PyKEEN ranks it; `make test-pykeen` has both
    libraries.
    """
    reason = "PyKEEN is not installed here; make test-pykeen has an environment with it"
    models = pytest.importorskip("pykeen.models", reason=reason)
    from pykeen.datasets import Nations
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.training import SLCWATrainingLoop

    dataset = Nations(create_inverse_triples=inverse)
    model = getattr(models, name)(
        triples_factory=dataset.training, embedding_dim=16, random_seed=0, **options
    )
    loop = SLCWATrainingLoop(model=model, triples_factory=dataset.training, optimizer="adam")
    loop.train(dataset.training, num_epochs=3, batch_size=128, use_tqdm=False)
    seen = [dataset.training.mapped_triples, dataset.validation.mapped_triples]
    ranked = RankBasedEvaluator().evaluate(
        model, dataset.testing.mapped_triples, additional_filter_triples=seen, use_tqdm=False
    )
    run = kg.from_pykeen(model, dataset)
    assert run.report.mrr == pytest.approx(
        ranked.get_metric("both.realistic.inverse_harmonic_mean_rank"), abs=1e-4
    )
    assert kg.from_pykeen(model.train(), dataset).report.mrr == run.report.mrr
    assert model.training
    triples = dataset.testing.mapped_triples
    expected = model.predict_hrt(triples).squeeze(1).detach()
    torch.testing.assert_close(run.model.score(*triples.T).detach(), expected, rtol=1e-3, atol=1e-4)


# -- LibKGE ------------------------------------------------------------------

LIBKGE: dict[str, tuple[int, int, dict[str, Any], Score]] = {
    "complex": (
        *(2 * DIM, 2 * DIM, {}),
        lambda h, r, t: (halves(h[0]) * halves(r[0]) * halves(t[0]).conj()).sum().real,
    ),
    "distmult": (DIM, DIM, {}, lambda h, r, t: (h[0] * r[0] * t[0]).sum()),
    "rescal": (DIM, DIM**2, {}, lambda h, r, t: h[0] @ r[0].reshape(DIM, DIM) @ t[0]),
    "cp": (2 * DIM, DIM, {}, lambda h, r, t: (h[0][:DIM] * r[0] * t[0][DIM:]).sum()),
    "simple": (
        *(2 * DIM, 2 * DIM, {}),
        lambda h, r, t: (
            (h[0][:DIM] * r[0][:DIM] * t[0][DIM:] + h[0][DIM:] * r[0][DIM:] * t[0][:DIM]).sum() / 2
        ),
    ),
    "transe": (DIM, DIM, {"l_norm": 2.0}, lambda h, r, t: norm(h[0] + r[0] - t[0], 2)),
    "rotate": (
        *(2 * DIM, DIM, {"l_norm": 1.0}),
        lambda h, r, t: norm(halves(h[0]) * np.exp(1j * r[0]) - halves(t[0])),
    ),
}


def halves(row: np.ndarray) -> np.ndarray:
    """LibKGE's complex numbers: the first half of a row is real, the second imaginary."""
    return row[: len(row) // 2] + 1j * row[len(row) // 2 :]


def save_checkpoint(
    path: Path,
    kind: str,
    state: dict[str, np.ndarray],
    options: dict[str, Any],
    *,
    inverse: bool,
    packaged: bool = True,
) -> Path:
    """A file as LibKGE writes it: its configuration is an object of a class that is not here when
    it is read.
    """
    module = ModuleType("kge.config")
    config = type("Config", (), {"__module__": "kge.config"})
    module.Config = config  # type: ignore[attr-defined]
    prefix = "_base_model." if inverse else ""
    tables = {f"{prefix}{name}": torch.from_numpy(value).float() for name, value in state.items()}
    if inverse:  # the embedders belong to both models, and are saved under both names
        tables |= {name.removeprefix(prefix): value for name, value in tables.items()}
    own = config()
    own.folder = "local/experiments/x"
    own.log_folder = None
    reciprocal = {"base_model": {"type": kind}, "class_name": "ReciprocalRelationsModel"}
    own.options = {
        "model": "reciprocal_relations_model" if inverse else kind,
        "dataset": {"name": "toy"},
        kind: options,
    }
    own.options |= {"reciprocal_relations_model": reciprocal} if inverse else {}
    meta = {f"{name}_ids": names for name, names in NAMES.items()}
    checkpoint = {
        "type": "package" if packaged else "train",
        "epoch": 3,
        "model": (tables, {"train_config": own, "train_epoch": 3}),
        "valid_trace": [{"mean_reciprocal_rank_filtered": np.float64(0.5), "epoch": 3}],
        "config": own,
    }
    if packaged:
        checkpoint["dataset"] = {
            "num_entities": NUM_ENTITIES,
            "num_relations": NUM_RELATIONS,
            "meta": meta,
        }
    modules = {"kge": ModuleType("kge"), "kge.config": module}
    sys.modules.update(modules)
    try:
        torch.save(checkpoint, path)
    finally:
        for name in modules:
            del sys.modules[name]
    return path


def save_dataset(folder: Path) -> Path:
    folder.mkdir()
    for kind, names in NAMES.items():
        (folder / f"{kind}_ids.del").write_text(
            "".join(f"{id}\t{name}\n" for id, name in enumerate(names))
        )
    for split, triples in TRIPLES.items():
        (folder / f"{split}.del").write_text(
            "".join("\t".join(map(str, triple)) + "\n" for triple in triples)
        )
    return folder


EMBEDDERS = "_entity_embedder._embeddings.weight", "_relation_embedder._embeddings.weight"


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", LIBKGE)
def test_libkge_scores(tmp_path, kind, inverse):
    random, (entity_width, relation_width, options, score) = np.random.default_rng(0), LIBKGE[kind]
    tables = (
        draw(random, NUM_ENTITIES, entity_width),
        draw(random, NUM_RELATIONS * (1 + inverse), relation_width),
    )
    path = save_checkpoint(
        tmp_path / "a.pt", kind, dict(zip(EMBEDDERS, tables, strict=True)), options, inverse=inverse
    )
    run = kg.from_libkge(path)
    inverse_row = (lambda id: id + NUM_RELATIONS) if inverse else None
    assert_scores(run, [tables[0]], [tables[1]], score, row=lambda id: id, inverse=inverse_row)
    assert run.graph.entities[2] == "e2"


def test_libkge_relational_tucker(tmp_path):
    random = np.random.default_rng(0)
    inner = "_relation_embedder.base_embedder._embeddings.weight"
    entities = draw(random, NUM_ENTITIES, DIM)
    relations = draw(random, NUM_RELATIONS, 3)
    projection = random.normal(size=(DIM**2, 3))
    state = {
        EMBEDDERS[0]: entities,
        inner: relations,
        "_relation_embedder.projection.weight": projection,
    }
    run = kg.from_libkge(
        save_checkpoint(tmp_path / "a.pt", "relational_tucker3", state, {}, inverse=False)
    )

    def score(h: Rows, r: Rows, t: Rows) -> float:
        return float(h[0] @ (projection @ r[0]).reshape(DIM, DIM) @ t[0])

    assert_scores(run, [entities], [relations], score, row=lambda id: id)


def test_libkge_dataset_gives_names_and_triples(tmp_path):
    tables = np.ones((NUM_ENTITIES, DIM)), np.ones((NUM_RELATIONS, DIM))
    state = dict(zip(EMBEDDERS, tables, strict=True))
    path = save_checkpoint(
        tmp_path / "checkpoint_best.pt", "distmult", state, {}, inverse=False, packaged=False
    )
    with pytest.raises(kg.RequestError, match="has no names of entities and relations"):
        kg.from_libkge(path)
    run = kg.from_libkge(path, data=save_dataset(tmp_path / "toy"))
    assert {name: run.graph.split(name).tolist() for name in TRIPLES} == TRIPLES
    assert (run.graph.name, run.report.mrr > 0) == ("toy", True)
    (tmp_path / "toy" / "test.del").unlink()
    with pytest.raises(kg.RequestError, match=r"test\.del cannot be read"):
        kg.from_libkge(path, data=tmp_path / "toy")


def test_libkge_files_that_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(kg.RequestError, match="cannot be read: No such file or directory"):
        kg.from_libkge(path)
    path.write_text("text")
    with pytest.raises(kg.RequestError, match="cannot be read as a checkpoint of LibKGE"):
        kg.from_libkge(path)
    torch.save({"model": torch.zeros(2)}, path)
    with pytest.raises(kg.RequestError, match="'config' was not found in it"):
        kg.from_libkge(path)
    torch.save({"config": Path("x")}, path)  # an object of a class that is not read
    with pytest.raises(kg.RequestError, match="checkpoint of LibKGE: .*pathlib"):
        kg.from_libkge(path)
    save_checkpoint(path, "conve", {}, {}, inverse=True)
    with pytest.raises(kg.RequestError, match="It is a model of the type conve"):
        kg.from_libkge(path)
