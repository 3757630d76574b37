"""Ensembles of runs: fitted weights, saved folders, folders of several seeds."""

import json
import shutil

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, RequestError
from dualkg.inference.probability import calibration_for
from dualkg.training.ensemble import BetterMember
from dualkg.training.errors import DamagedRun, RunNotFinished
from dualkg.workflows import train_seeds
from tests.conftest import graph_of
from tests.raising import refused as raises_error


@pytest.fixture(scope="module")
def graph() -> kg.Graph:
    """Heads and tails agree modulo 5, in three relations."""
    triples = [(i, r, 30 + (i + r) % 5) for i in range(30) for r in range(3)]
    order = np.random.default_rng(0).permutation(len(triples))
    shuffled = [triples[i] for i in order]
    return graph_of(shuffled[30:], shuffled[:15], shuffled[15:30])


@pytest.fixture(scope="module")
def folder(graph, tmp_path_factory):
    """Runs `complex` and `transe`, and `seeds` with two seeds."""
    folder = tmp_path_factory.mktemp("ensemble")
    kg.train(
        kg.ComplEx(graph.shape, dim=6),
        graph,
        regularizer=kg.DURA(0.01),
        epochs=8,
        batch_size=20,
        out=folder / "complex",
    )
    model = kg.TransE(graph.shape, dim=6, reciprocal=False)
    kg.train(model, graph, epochs=4, batch_size=20, out=folder / "transe")
    recipe = kg.Recipe().with_changes(
        {"training.epochs": 2, "model.dim": 4, "training.batch_size": 20}
    )
    train_seeds(recipe, 2, graph=graph, out=folder / "seeds")
    return folder


@pytest.fixture
def saved(folder, tmp_path):
    """A copy of the folder, with the ensemble `both`."""
    copy = shutil.copytree(folder, tmp_path / "runs")
    kg.Ensemble([copy / "complex", copy / "transe"], weights=[1.0, 0.25]).save(copy / "both")
    return copy


@pytest.fixture
def noise(graph) -> kg.Run:
    """A run of random embeddings, whose scores are large."""
    return kg.from_arrays(
        "ComplEx",
        entities=10 * np.random.default_rng(0).normal(size=(35, 8)),
        relations=np.random.default_rng(1).normal(size=(6, 8)),
        graph=graph,
    )


def test_the_test_split_has_no_part_in_the_weights(graph, folder):
    runs = [kg.load_run(folder / name) for name in ("complex", "transe")]
    other = graph_of(graph.train, graph.valid, graph.test[:1], num_entities=35)
    without = [kg.TrainedRun(run.model, other, run.recipe) for run in runs]
    assert kg.Ensemble(runs).model.weights == kg.Ensemble(without).model.weights


def test_one_run_has_the_ranks_of_the_run(folder):
    run = kg.load_run(folder / "complex")
    ensemble = kg.Ensemble([run])
    assert np.array_equal(ensemble.report.ranks.mean, run.report.ranks.mean)
    assert ensemble.model_name == "ComplEx"


def test_an_ensemble_is_a_run(graph, folder):
    ensemble = kg.Ensemble([folder / "complex", folder / "transe"], weights="equal")
    assert isinstance(ensemble, kg.Run)
    assert kg.evaluate(ensemble.model, graph).mrr == ensemble.report.mrr
    predictor = ensemble.predictor(calibrated=True, loops=True)
    predictions = predictor.tails("e1", "r1", k=35)
    probabilities = [one.probability for one in predictions if one.probability is not None]
    assert sum(probabilities) > 0
    assert probabilities == sorted(probabilities, reverse=True)
    predictions = ensemble.predictor(loops=True).tails("e1", "r1", k=35)
    by_model = ensemble.model.predict_tails(torch.tensor([1]), torch.tensor([1]))[0]
    assert [one.id for one in predictions] == by_model.argsort(descending=True).tolist()
    assert calibration_for(ensemble).slopes.shape == (3,)
    with pytest.raises(kg.RequestError):
        predictor.add("new", triples=[("new", "r0", "e31")])
    with pytest.raises(kg.RequestError):
        predictor.explain("e1", "r1", "e32")


def test_cached_probabilities_agree(graph, folder):
    """With members of both kinds, reciprocal and not: the score of a triple is that of its
    query.
    """
    ensemble = kg.Ensemble([folder / "complex", folder / "transe"], weights="equal")
    for kind, given in (("tails", ("e1", "r1")), ("heads", ("r1", "e32"))):
        plain, cached = (
            getattr(ensemble.predictor(calibrated=True, cache=cache), kind)(*given)
            for cache in (False, True)
        )
        assert [one.id for one in plain] == [one.id for one in cached]
        for one, other in zip(plain, cached, strict=True):
            assert (one.probability or 0) == pytest.approx(other.probability or 0, rel=1e-4)
        assert any(one.probability for one in plain)


def test_saved_and_loaded(saved):
    loaded = kg.load_run(saved / "both")
    assert isinstance(loaded, kg.Ensemble)
    assert loaded.model.weights == (1.0, 0.25)
    assert loaded.names == ["complex", "transe"]
    again = kg.evaluate(loaded.model, loaded.graph)
    assert np.array_equal(loaded.report.ranks.mean, again.ranks.mean)
    assert (
        json.loads((saved / "both" / "report.json").read_text())["test"]["metrics"]["mrr"]
        == again.mrr
    )


def test_a_moved_folder_finds_its_members(saved, tmp_path):
    moved = saved.rename(tmp_path / "elsewhere")
    assert kg.load_run(moved / "both").model.weights == (1.0, 0.25)


def test_fitted_weights_are_saved(saved):
    made = kg.Ensemble([saved / "complex", saved / "transe"])
    made.save(saved / "fitted")
    loaded = kg.load_run(saved / "fitted")
    assert (loaded.model.weights, loaded.fit) == (made.model.weights, made.fit)


def test_a_folder_of_several_seeds_is_an_ensemble(saved):
    loaded = kg.load_run(saved / "seeds")
    assert isinstance(loaded, kg.Ensemble)
    assert loaded.model.weights == (1.0, 1.0)
    calibration_for(loaded)
    assert (saved / "seeds" / "calibration.json").exists()
    recipe = kg.Recipe().with_changes(
        {"training.epochs": 2, "model.dim": 4, "training.batch_size": 20}
    )
    train_seeds(recipe, 2, graph=loaded.graph, out=saved / "seeds")
    assert (saved / "seeds" / "calibration.json").exists()
    train_seeds(
        recipe, 3, graph=loaded.graph, out=saved / "seeds"
    )  # another ensemble, and not yet calibrated
    assert not (saved / "seeds" / "calibration.json").exists()
    assert len(kg.load_run(saved / "seeds").members) == 3


def test_the_file_of_another_ensemble_is_refused(saved):
    kg.Ensemble([saved / "complex", saved / "transe"], weights=[1, 3]).save(saved / "other")
    for name in ("ensemble.json", "report.json"):
        shutil.copyfile(saved / "other" / name, saved / "both" / name)
        if name == "ensemble.json":
            with raises_error(DamagedRun, run=saved / "both", file=name):
                kg.load_run(saved / "both")
    assert kg.load_run(saved / "both").identity == kg.load_run(saved / "other").identity


def test_a_member_that_diverged(graph, folder):
    run = kg.load_run(folder / "complex")
    with torch.no_grad():
        run.model.entities[3] = torch.nan
    with pytest.raises(kg.DivergedError, match="scores NaN or infinity"):
        kg.Ensemble([run, folder / "transe"])


def test_scores_are_scaled_alike(graph, folder):
    """One model twice, whose scores are 100 times as large: both have half of the say."""
    run = kg.load_run(folder / "complex")
    tables = {name: table.detach() for name, table in run.model.named_parameters()}
    tables["relations"] = 100 * tables["relations"]
    ensemble = kg.Ensemble([run, kg.from_arrays("ComplEx", **tables, graph=graph)])
    assert ensemble.model.weights[0] == pytest.approx(100 * ensemble.model.weights[1], rel=0.01)
    assert ensemble.fit == {"split": "valid", "num_queries": 2 * len(graph.valid)}


def test_scales_have_the_best_likelihood(graph, folder):
    ensemble = kg.Ensemble([folder / "complex"])
    [scale] = ensemble.model.weights
    heads, relations, tails = torch.from_numpy(graph.valid).long().unbind(1)
    known = kg.data.filters.KnownAnswers.of(graph, ("train", "valid"))

    def loss(factor: float) -> float:
        model = ensemble.members[0].model
        total = 0.0
        sides = (
            (model.predict_tails(heads, relations), heads, relations, tails),
            (model.predict_heads(relations, tails), tails, relations + 3, heads),
        )
        for scores, given, ids, answers in sides:
            rows, columns = known(given.numpy(), ids.numpy())
            scores = factor * scores.detach()
            of_answers = scores.gather(1, answers[:, None])
            scores[rows, columns] = -torch.inf
            scores.scatter_(1, answers[:, None], of_answers)
            total -= float((of_answers[:, 0] - scores.logsumexp(1)).sum())
        return total

    assert loss(scale) < min(loss(1.05 * scale), loss(scale / 1.05))


def test_weights_are_equal_or_given_or_fitted_later(graph, folder):
    runs = [kg.load_run(folder / name) for name in ("complex", "transe")]
    ensemble = kg.Ensemble(runs, weights="equal")
    assert (ensemble.model.weights, ensemble.fit) == ((1.0, 1.0), {})
    before = ensemble.report_on("valid")
    assert kg.Ensemble(runs, weights=(1, 3)).model.weights == (1.0, 3.0)
    assert ensemble.fit_weights() == ensemble.model.weights == kg.Ensemble(runs).model.weights
    assert ensemble.report_on("valid") is not before
    unvalidated = graph_of(graph.train, test=graph.test, num_entities=35)
    blind = kg.Ensemble([kg.TrainedRun(run.model, unvalidated, run.recipe) for run in runs])
    assert blind.model.weights == (1.0, 1.0)
    assert blind.better_member is None
    with pytest.raises(RequestError, match="no validation triples to fit weights on"):
        blind.fit_weights()


def test_a_member_that_is_better_than_the_ensemble_is_named(graph, folder, noise):
    good = kg.load_run(folder / "complex")
    ensemble = kg.Ensemble([noise, good], weights="equal")
    better = ensemble.better_member
    assert better == BetterMember(
        "complex", good.report_on("valid").mrr, ensemble.report_on("valid").mrr
    )
    assert better.mrr > better.ensemble_mrr + 0.05
    assert "The run complex alone has a better validation MRR" in str(better)
    assert kg.Ensemble([folder / "complex"]).better_member is None


def test_a_member_that_is_missing_or_changed_or_unfinished(saved):
    shutil.move(saved / "transe", saved / "away")
    with pytest.raises(RequestError, match="needs the run .*/transe, which is not there"):
        kg.load_run(saved / "both")
    shutil.copytree(saved / "complex", saved / "transe")
    with pytest.raises(RequestError, match="The weights of .*/transe are not those"):
        kg.load_run(saved / "both")
    (saved / "seeds" / "seed-1" / "report.json").unlink()
    with pytest.raises(RunNotFinished):
        kg.load_run(saved / "seeds")


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: 3,
        lambda saved: {"members": saved["members"]},
        lambda saved: {**saved, "members": []},
        lambda saved: {**saved, "members": [{**saved["members"][0], "weight": -1}]},
        lambda saved: {**saved, "members": [{**saved["members"][0], "weight": 0}]},
    ],
)
def test_a_damaged_file(saved, change):
    path = saved / "both" / "ensemble.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DamagedFile, match="Make the ensemble again"):
        kg.load_run(saved / "both")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda run: kg.Ensemble("runs/complex"), "takes a list of runs"),
        (lambda run: kg.Ensemble([]), "at least one run"),
        (lambda run: kg.Ensemble([run.model]), "made of runs or of their folders"),
        (lambda run: kg.Ensemble([run], weights="best"), "`?weights`? should be"),
        (
            lambda run: kg.Ensemble([kg.TrainedRun(run.model, run.graph, run.recipe)]).save("x"),
            "has no folder",
        ),
        (lambda run: kg.Ensemble([run]).save(run.folder, overwrite=True), "one of the runs"),
        (lambda run: kg.Ensemble([run, other_run()]), "trained on one graph"),
    ],
)
def test_wrong_requests(folder, make, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = kg.load_run(folder / "complex")
    with pytest.raises(RequestError, match=sentence):
        make(run)
    assert not (tmp_path / "x").exists()


def other_run() -> kg.Run:
    world = kg.load_graph("world")
    return kg.TrainedRun(kg.CP(world.shape, dim=2), world, kg.Recipe())
