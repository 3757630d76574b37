"""Run folders: what they hold, what they refuse, and embeddings from elsewhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.evaluation import load_ranks
from dualkg.training import RunFolder, load_recipe, train_seeds
from dualkg.training.recipe import Recipe


class Shifted(kg.BilinearModel):
    """A model of one's own: a relation turns the coordinates by one place and scales them."""

    def __init__(self, shape, *, places=1, **choices):
        super().__init__(shape, **choices)
        self.places = places

    @property
    def choices(self):
        return {**super().choices, "places": self.places}

    def map_head(self, head, relations):
        return head.roll(self.places, -1) * self.relations[relations]

    def map_tail(self, tail, relations):
        return (tail * self.relations[relations]).roll(-self.places, -1)


@pytest.fixture
def run(small_graph, tmp_path) -> kg.Run:
    model = kg.ComplEx(small_graph.shape, dim=4)
    return kg.train(
        model, small_graph, regularizer=kg.DURA(0.05, plain=0.5), epochs=2, batch_size=50, out=tmp_path / "run"
    )


def test_a_run_leaves_everything_behind(run, small_graph):
    folder = RunFolder(run.folder)
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "environment.json",
        "graph",
        "history.json",
        "ranks-test.parquet",
        "ranks-valid.parquet",
        "recipe.toml",
        "report.json",
        "weights.safetensors",
    ]
    environment = json.loads(folder.environment.read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["device"] == "cpu"
    assert environment["threads"] == torch.get_num_threads()
    assert [entry["epoch"] for entry in json.loads(folder.history.read_text())] == [1, 2]
    ranks = load_ranks(folder.ranks("test"))
    assert (1 / ranks.mean).mean() == pytest.approx(folder.saved_reports()["test"]["metrics"]["mrr"])
    recipe = load_recipe(folder.recipe)
    assert (recipe.regularizer.plain, recipe.regularizer.mapped, recipe.model.dim) == (0.5, 1.0, 4)


def test_a_loaded_run_ranks_as_it_did(run):
    again = kg.load_run(run.folder)
    assert kg.evaluate(again.model, again.graph).mrr == run.report.mrr
    assert again.graph.entities == run.graph.entities


def test_a_folder_that_holds_something_is_not_written_over(run, small_graph, tmp_path):
    def train_into(folder, **more):
        return kg.train_recipe(Recipe(), graph=small_graph, out=folder, **more)

    with pytest.raises(kg.RequestError, match="holds a finished run. Use --overwrite"):
        train_into(run.folder)
    RunFolder(run.folder).report.unlink()
    with pytest.raises(kg.RequestError, match="was not finished. Go on with: dualkg resume"):
        train_into(run.folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(kg.RequestError, match="exists and is not a run"):
        train_into(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "letter.txt").read_text() == "dear"


def test_what_is_no_run_is_told(tmp_path, run):
    with pytest.raises(kg.RequestError, match=f"runn does not exist. Runs nearby: {run.folder}"):
        kg.load_run(tmp_path / "runn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(kg.RequestError, match="holds no run"):
        kg.load_run(tmp_path / "empty")
    with pytest.raises(kg.RequestError, match="is a file; the folder of a run was expected"):
        kg.load_run(run.folder / "recipe.toml")
    with pytest.raises(kg.RequestError, match="is finished: all 2 epochs are done"):
        kg.resume(run.folder)


@pytest.mark.parametrize("content", [b"", b"not weights at all, really"])
def test_damaged_weights_are_told(run, content):
    RunFolder(run.folder).weights.write_bytes(content)
    with pytest.raises(kg.RequestError, match="cannot be read as a file of weights"):
        kg.load_run(run.folder)


def test_weights_of_another_model_are_told(run):
    folder = RunFolder(run.folder)
    folder.recipe.write_text(folder.recipe.read_text().replace("dim = 4", "dim = 5"))
    with pytest.raises(kg.RequestError, match="does not fit the recipe"):
        kg.load_run(run.folder)


def test_a_model_of_one_s_own_trains_saves_and_loads(small_graph, tmp_path):
    run = kg.train(
        Shifted(small_graph.shape, dim=6, places=2),
        small_graph,
        regularizer=kg.DURA(0.01),
        epochs=3,
        batch_size=32,
        out=tmp_path / "run",
    )
    assert run.recipe.model.name.endswith("test_run:Shifted")
    assert run.recipe.model.options == {"places": 2}
    again = kg.load_run(tmp_path / "run")
    assert again.model.places == 2
    assert kg.evaluate(again.model, again.graph).mrr == run.report.mrr


def test_seeds_are_repeated_once_and_no_more(tmp_path):
    recipe = Recipe().with_changes({"training.epochs": 1, "model.dim": 2, "data.graph": "world", "training.seed": 4})
    told = []
    reports = train_seeds(recipe, 2, out=tmp_path / "runs", watch=told.append)
    assert list(reports) == [4, 5]
    assert reports[4]["test"]["metrics"] != reports[5]["test"]["metrics"]
    told.clear()
    again = train_seeds(recipe, 2, out=tmp_path / "runs", watch=told.append)
    assert not told
    assert again == reports


@pytest.mark.parametrize("name", ["CP", "DistMult", "ComplEx", "RESCAL"])
def test_embeddings_from_elsewhere_rank_and_answer_as_their_source(small_graph, tmp_path, name):
    from dualkg.models import MODELS

    source = MODELS[name](small_graph.shape, dim=3, init_scale=1.0)
    order = np.random.default_rng(0).permutation(30)
    tables = {key: value.numpy() for key, value in source.state_dict().items()}
    given = {key: tables[key][order] for key in ("entities", "tails") if key in tables}
    run = kg.from_arrays(
        name, **given, relations=tables["relations"], graph=small_graph, entity_names=[f"e{id}" for id in order]
    )
    assert kg.evaluate(run.model, small_graph).mrr == kg.evaluate(source, small_graph).mrr
    run.save(tmp_path / "imported")
    again = kg.load_run(tmp_path / "imported")
    answers = [kg.Predictor(model, small_graph).tails("e3", "r1", k=3) for model in (source, again.model)]
    assert answers[0] == answers[1]


def test_complex_arrays_and_bare_names(tmp_path):
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 2)) + 1j * random.normal(size=(3, 2))
    run = kg.from_arrays(
        "ComplEx", entities=table, relations=table[:1], entity_names=["a", "b", "c"], relation_names=["is"]
    )
    expected = (table[0] * table[0] * table[1].conj()).sum().real
    assert kg.Predictor(run.model, run.graph).score("a", "is", "b") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"relations": np.zeros((3, 4))}, "relation table should have 4 rows, or 8 with reciprocals; it has 3"),
        ({"entities": np.zeros((29, 4))}, "has tables .*; .* came"),
        ({"entity_names": ["e0"] * 30}, "no row for 29 names of the graph, such as 'e1'"),
    ],
)
def test_arrays_that_do_not_fit_are_told(small_graph, more, sentence):
    given = {"entities": np.zeros((30, 4)), "relations": np.zeros((4, 4)), **more}
    with pytest.raises(kg.RequestError, match=sentence):
        kg.from_arrays("DistMult", graph=small_graph, **given)


def test_arrays_need_names():
    with pytest.raises(kg.RequestError, match="needs a graph, or entity_names and relation_names"):
        kg.from_arrays("DistMult", entities=np.zeros((2, 2)), relations=np.zeros((1, 2)))


@pytest.mark.parametrize("choices", [{"epochs": 0}, {"batch_size": 0}, {"seed": -1}])
def test_choices_that_make_no_sense_are_told_in_python_too(small_graph, choices):
    with pytest.raises(kg.RequestError, match=f"train: training.{next(iter(choices))} should be greater than"):
        kg.train(kg.CP(small_graph.shape, dim=2), small_graph, **choices)


def test_a_loaded_run_still_has_its_reports(run):
    again = kg.load_run(run.folder)
    assert again.report.as_dict() == run.report.as_dict()
    assert again.report_on("train").metrics.num_queries == 2 * len(run.graph.train)


def test_a_model_of_another_seed_resumes_from_its_own_weights(small_graph, tmp_path):
    """Training may be killed before the first step; the weights it was given must not be lost."""

    def kill(moment):
        raise RuntimeError("killed")

    def start(seed, out=None, watch=None):
        model = kg.CP(small_graph.shape, dim=4, seed=seed)
        return kg.train(model, small_graph, epochs=1, batch_size=50, out=out, watch=watch)

    with pytest.raises(RuntimeError, match="killed"):
        start(7, tmp_path / "run", kill)
    resumed = kg.resume(tmp_path / "run")
    assert torch.equal(resumed.model.entities, start(7).model.entities)
