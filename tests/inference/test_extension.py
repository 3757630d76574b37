"""Extending a model by new entities: names, graphs, refusals, and files that extend a run."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import UnknownName
from dualkg.inference.extension import (
    add_entity,
    extend,
    extension_context,
)
from dualkg.inference.inductive import FrozenContext
from dualkg.workflows.extend import CALIBRATION_NOT_KEPT, extend_run
from tests.conftest import graph_of
from tests.raising import refused

DURA = kg.DURA(0.05, plain=0.5, mapped=1.5)


@pytest.fixture
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    return graph_of(
        np.unique(np.stack([random.integers(0, n, 40) for n in (12, 2, 12)], axis=1), axis=0)
    )


@pytest.fixture(scope="module")
def beads() -> kg.Run:
    return train_beads()


def train_beads() -> kg.Run:
    """A model of the beads; trained in seconds."""
    graph = bead_graph()
    choice = kg.Optimizer(learning_rate=0.3)
    return kg.train(
        kg.ComplEx(graph.shape, dim=8),
        graph,
        regularizer=DURA,
        optimizer=choice,
        epochs=20,
        batch_size=50,
    )


def bead_graph() -> kg.Graph:
    """Beads whose colour tells their shape and their maker."""
    kinds = ("colour", "shape", "maker")
    named = [(f"bead {n}", kind, f"{kind} {n % 4}") for n in range(40) for kind in kinds]
    entities = list(dict.fromkeys(name for head, _, tail in named for name in (head, tail)))
    ids = np.array(
        [(entities.index(h), kinds.index(r), entities.index(t)) for h, r, t in named],
        dtype=np.int32,
    )
    held = np.arange(len(ids)) % 29 == 0
    return kg.Graph(
        "beads",
        kg.Vocabulary(entities),
        kg.Vocabulary(kinds, kind="relation"),
        ids[~held],
        ids[:0],
        ids[held],
    )


def test_a_new_entity_is_predicted_what_its_triples_imply(beads):
    found = add_entity(
        FrozenContext.of(beads.model, beads.graph), "bead 99", [("bead 99", "colour", "colour 3")]
    )
    predictor = kg.Predictor(found.model, found.graph)
    assert predictor.tails("bead 99", "shape", k=1)[0].entity == "shape 3"
    assert predictor.tails("bead 99", "maker", k=1)[0].entity == "maker 3"
    assert predictor.tails("bead 99", "colour", k=1)[0].split == "train"
    assert "bead 99" in {answer.entity for answer in predictor.heads("shape", "shape 3", k=11)}


def test_predictor_add_gives_another_predictor(beads):
    predictor = kg.Predictor(beads.model, beads.graph, recipe=beads.recipe)
    more = predictor.add("bead 99", triples=[("bead 99", "colour", "colour 1")])
    more = more.add(
        "bead 100", triples=[("bead 100", "maker", "maker 2"), ("bead 100", "colour", "colour 2")]
    )
    assert more.tails("bead 99", "maker", k=1)[0].entity == "maker 1"
    assert more.tails("bead 100", "shape", k=1)[0].entity == "shape 2"
    assert len(predictor.graph.entities) == len(more.graph.entities) - 2


def test_the_given_model_and_graph_do_not_change(beads):
    before = {name: table.clone() for name, table in beads.model.state_dict().items()}
    triples = [("a", "colour", "colour 1"), ("b", "maker", "a"), ("a", "colour", "colour 1")]
    found = extend(FrozenContext.of(beads.model, beads.graph, recipe=beads.recipe), triples)
    assert found.new_entities == {"a": 2, "b": 1}
    assert found.graph.entities.names.to_pylist()[-2:] == ["a", "b"]
    assert len(found.graph.train) == len(beads.graph.train) + 2
    assert found.graph.fingerprint != beads.graph.fingerprint
    for name, table in beads.model.state_dict().items():
        torch.testing.assert_close(table, before[name])
        torch.testing.assert_close(found.model.state_dict()[name][: len(table)], table)


def test_labels_stay_and_names_are_looked_up_as_in_queries(graph):
    labelled = replace(graph, entities=kg.Vocabulary(graph.entities.names, {"e3": "three"}))
    found = extend(
        FrozenContext.of(kg.CP(labelled.shape, dim=3, init_scale=0.7), labelled),
        [("new", "r0", "three"), (5, "R1", "new")],
    )
    assert found.graph.train[-2:].tolist() == [[5, 1, 12], [12, 0, 3]]
    assert [found.graph.entities.label(id) for id in (3, 12)] == ["three", "new"]


@pytest.fixture(scope="module")
def context(beads) -> FrozenContext:
    return FrozenContext.of(beads.model, beads.graph)


@pytest.mark.parametrize(
    ("name", "triples", "message"),
    [
        (
            "Bead 3",
            [("Bead 3", "colour", "colour 1")],
            "'Bead 3' is an entity of the graph already",
        ),
        ("x", [], "`triples` should be at least one triple of 'x'"),
        ("x", [("bead 1", "colour", "colour 1")], "does not contain 'x'"),
        ("x", [("x", "colour", "colour 11")], "'colour 11'.*'colour 1'"),
        ("x", [("x", "color", "colour 1")], "'color'.*'colour'"),
        ("x", [("x", "colour", "x")], "'x' has no triple that connects"),
        (None, [("bead 1", "colour", "colour 2")], "has no new entity: both are in the graph"),
        (None, [("x", "colour", "y")], "'x', 'y' have no triple that connects"),
    ],
)
def test_bad_triples(context, name, triples, message):
    add = extend if name is None else partial(add_entity, name=name)
    with pytest.raises(kg.RequestError, match=message):
        add(context, triples=triples)


def test_models_without_an_adjoint_are_refused(graph):
    for model in (kg.TransE(graph.shape, dim=2), kg.Dual(kg.CP(graph.shape, dim=2)), tucker(graph)):
        with pytest.raises(kg.RequestError, match=f"{type(model).__name__} is none of them"):
            FrozenContext.of(model, graph)


def tucker(graph):
    return kg.TuckER(graph.shape, dim=2, batch_norm=True)


class Biased(kg.DistMult):
    """A model with a bias per entity."""

    def __init__(self, shape, **choices):
        super().__init__(shape, **choices)
        self.biases = torch.nn.Parameter(torch.zeros(shape.num_entities))


def test_a_model_with_other_entity_tables_is_refused(graph):
    with pytest.raises(kg.RequestError, match="Biased has parameters of entities in other tables"):
        extend(FrozenContext.of(Biased(graph.shape, dim=2), graph), [("x", "r0", "e1")])


# -- files -------------------------------------------------------------------

LINES = """bead 70\tcolour\tcolour 2
bead 70\tmaker\tmaker 2
bead 70\tgrown in\tEgypt
bead 71\tmaker\tmaker 0
bead 71\tcolour\tcolour 9
bead 3\tcolour\tcolour 2
lost\tcolour\talone
"""


@pytest.fixture
def folder(beads, tmp_path):
    replace(beads, graph=beads.graph).save(tmp_path / "beads")
    (tmp_path / "new.tsv").write_text(LINES, encoding="utf-8")
    return tmp_path


def test_a_file_extends_a_run(run_cli, folder):
    told = run_cli(
        "extend",
        folder / "beads",
        folder / "new.tsv",
        "--out",
        folder / "more",
        "--device",
        "cpu",
        "--json",
    )
    assert told.code == 0, told.err
    note = json.loads((folder / "more" / "extension.json").read_text(encoding="utf-8"))
    assert note == told.json["extension"]
    assert note["entities"] == {"bead 70": 2, "bead 71": 2, "colour 9": 1}
    assert (note["num_entities"], note["num_triples"]) == (3, 4)
    assert note["remarks"] == [
        "1 triple is left out: the run has no relation 'grown in'.",
        "1 triple is left out: both entities are in the run, which is not trained again.",
        "No triple connects 'Egypt', 'lost', 'alone' to an entity of the run: left out.",
    ]
    asked = run_cli(
        "predict", folder / "more", "--head", "bead 70", "--relation", "shape", "--top", 1, "--json"
    )
    assert asked.json["predictions"][0]["name"] == "shape 2"
    run = kg.load_run(folder / "more")
    assert run.report.metrics.num_queries == 2 * len(run.graph.test)
    assert kg.evaluate(run.model, run.graph).mrr == pytest.approx(run.report.mrr)


def test_the_command_prints_a_table_and_the_next_command(run_cli, folder):
    told = run_cli(
        "extend", folder / "beads", folder / "new.tsv", "--out", folder / "more", "--device", "cpu"
    )
    assert [" ".join(line.split()) for line in told.out.splitlines()[:3]] == [
        "new entity triples",
        "bead 70 2",
        "bead 71 2",
    ]
    assert "Saved to" in told.err
    assert "dualkg predict" in told.err
    again = run_cli("extend", folder / "beads", folder / "new.tsv", "--out", folder / "more")
    assert (again.code, "exists already" in again.err) == (2, True)
    kg.training.RunFolder(folder / "more").check_free(overwrite=True)


def test_a_calibration_is_not_kept_and_the_command_says_so(run_cli, folder):
    words = ("extend", folder / "beads", folder / "new.tsv", "--device", "cpu", "--out")
    told = run_cli(*words, folder / "plain")
    assert "dualkg calibrate" not in told.err
    assert CALIBRATION_NOT_KEPT not in told.err
    run_folder = kg.training.RunFolder(folder / "beads")
    run_folder.calibration.write_text("{}", encoding="utf-8")
    told = run_cli(*words, folder / "more")
    assert told.code == 0, told.err
    assert CALIBRATION_NOT_KEPT in told.err
    assert f"dualkg calibrate {folder / 'more'}" in told.err
    assert not kg.training.RunFolder(folder / "more").calibration.exists()
    _, note = extend_run(
        folder / "beads", folder / "new.tsv", out=folder / "by-python", device="cpu"
    )
    assert note["was_calibrated"]
    assert note["remarks"][-1] == CALIBRATION_NOT_KEPT


def test_an_extended_run_can_be_extended_again(folder):
    extend_run(folder / "beads", folder / "new.tsv", out=folder / "more", device="cpu")
    (folder / "again.csv").write_text(
        "tail|relation|head\nbead 70|maker|bead 80\n", encoding="utf-8"
    )
    _, note = extend_run(
        folder / "more", folder / "again.csv", out=folder / "most", delimiter="pipe", device="cpu"
    )
    assert note["entities"] == {"bead 80": 1}
    assert list(note["previous"]["entities"]) == ["bead 70", "bead 71", "colour 9"]


def test_a_file_without_new_entities_is_refused(run_cli, folder):
    (folder / "old.tsv").write_text("bead 3\tcolour\tcolour 2\n", encoding="utf-8")
    told = run_cli("extend", folder / "beads", folder / "old.tsv", "--out", folder / "more")
    assert told.code == 2
    assert (
        "connects no new entity to the 52 of the run. 1 triple is left out: both entities are in "
        "the run" in told.err
    )
    assert not (folder / "more").exists()
    (folder / "odd.tsv").write_text("x\tcolor\tcolour 2\n", encoding="utf-8")
    assert (
        "Did you mean 'colour'?"
        in run_cli("extend", folder / "beads", folder / "odd.tsv", "--out", folder / "more").err
    )


# -- path networks -----------------------------------------------------------


@pytest.fixture(scope="module")
def path_run() -> kg.Run:
    graph = bead_graph()
    model = kg.PathNetwork(graph, dim=16, steps=3)
    return kg.train(model, graph, epochs=3)


def test_a_path_network_takes_new_entities_without_training(path_run):
    model = path_run.model
    triples = [("bead 99", "colour", "colour 3"), ("bead 98", "maker", "maker 1")]
    found = extend(extension_context(model, path_run.graph), triples)
    assert found.new_entities == {"bead 99": 1, "bead 98": 1}
    assert len(found.graph.train) == len(path_run.graph.train) + 2
    assert found.graph.fingerprint != path_run.graph.fingerprint
    for name, table in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], table)
    predictor = kg.Predictor(found.model, found.graph)
    assert predictor.tails("bead 99", "shape", k=1)[0].entity == "shape 3"
    assert predictor.tails("bead 98", "shape", k=1)[0].entity == "shape 1"
    assert model.shape == path_run.graph.shape


def test_the_predictor_of_a_path_network_takes_new_entities(path_run):
    predictor = path_run.predictor()
    more = predictor.add("bead 99", triples=[("bead 99", "colour", "colour 1")])
    more = more.add("bead 100", triples=[("bead 100", "maker", "maker 2")])
    assert more.tails("bead 99", "shape", k=1)[0].entity == "shape 1"
    assert more.tails("bead 100", "shape", k=1)[0].entity == "shape 2"
    with refused(UnknownName, kind="relation", name="weight"):
        predictor.add("bead 99", triples=[("bead 99", "weight", "colour 1")])


def test_a_file_extends_the_run_of_a_path_network(run_cli, path_run, tmp_path):
    replace(path_run, graph=path_run.graph).save(tmp_path / "beads")
    (tmp_path / "new.tsv").write_text(LINES, encoding="utf-8")
    told = run_cli(
        "extend", tmp_path / "beads", tmp_path / "new.tsv", "--out", tmp_path / "more", "--json"
    )
    assert told.code == 0, told.err
    assert told.json["extension"]["entities"] == {"bead 70": 2, "bead 71": 2, "colour 9": 1}
    assert len(told.json["extension"]["remarks"]) == 3
    run = kg.load_run(tmp_path / "more")
    assert run.predictor().tails("bead 70", "shape", k=1)[0].entity == "shape 2"
    assert kg.evaluate(run.model, run.graph).mrr == pytest.approx(run.report.mrr)
    (tmp_path / "again.tsv").write_text("bead 80\tmaker\tmaker 3\n", encoding="utf-8")
    again, note = extend_run(tmp_path / "more", tmp_path / "again.tsv", out=tmp_path / "most")
    assert note["entities"] == {"bead 80": 1}
    assert again.predictor().tails("bead 80", "shape", k=1)[0].entity == "shape 3"
