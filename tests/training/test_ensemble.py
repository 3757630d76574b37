"""Ensembles of runs: fitted weights, saved folders, folders of several seeds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import DamagedFile, InvalidValue, PathExists, Unsupported
from dualkg.inference.calibration import calibration_for
from dualkg.inference.integrity import check_run
from dualkg.models import EnsembleModel
from dualkg.training.ensemble import (
    MAKE_AGAIN,
    BetterMember,
    ChangedMember,
    InvalidMembers,
    fit_weights,
)
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


def half_blind(graph, *, scale: float, tails: bool, seed: int) -> kg.Model:
    """A model of random scores, of which those of valid answers are higher for one side, tails or
    heads.
    """
    random = np.random.default_rng(seed)
    shape = (graph.shape.num_relations, len(graph.entities), len(graph.entities))
    forward, backward = (torch.from_numpy(random.normal(size=shape)).float() for _ in range(2))
    heads, relations, tails_ = torch.from_numpy(graph.valid).long().unbind(1)
    if tails:
        forward[relations, heads, tails_] += 3
    else:
        backward[relations, tails_, heads] += 3
    model = kg.DistMult(graph.shape, dim=1)
    model.predict_tails = lambda heads, relations: scale * forward[relations, heads]
    model.predict_heads = lambda relations, tails: scale * backward[relations, tails]
    return model


def test_fitted_weights_use_what_each_member_knows():
    """One predicts tails and the other heads, by scores that are 100 times as large."""
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 300) for n in (40, 2, 40)], axis=1), axis=0)
    random.shuffle(triples)
    graph = graph_of(triples[:100], triples[100:], num_entities=40)
    models = [
        half_blind(graph, scale=1.0, tails=True, seed=1),
        half_blind(graph, scale=100.0, tails=False, seed=2),
    ]
    weights, about = fit_weights(EnsembleModel(models), graph)
    assert 30 < weights[0] / weights[1] < 300
    assert about["mrr"] > max(about["mrr_of_members"]) + 0.1
    assert about["num_queries"] == 2 * len(graph.valid)


def test_shares_that_held_out_queries_do_not_confirm_are_equal():
    """Members that score at random: any share that fits the queries follows noise."""
    random = np.random.default_rng(0)
    triples = np.unique(np.stack([random.integers(0, n, 300) for n in (40, 2, 40)], axis=1), axis=0)
    random.shuffle(triples)
    graph = graph_of(triples[:270], triples[270:], num_entities=40)
    models = [half_blind(graph, scale=1.0, tails=True, seed=seed) for seed in range(3)]
    weights, about = fit_weights(EnsembleModel(models), graph)
    assert about["equal_shares"]
    assert max(weights) / min(weights) < 1.5  # they differ by their temperatures
    models[0] = half_blind(graph, scale=1.0, tails=False, seed=0)
    models[1] = half_blind(graph, scale=1.0, tails=False, seed=0)
    assert fit_weights(EnsembleModel(models), graph)[1]["mrr"] > about["mrr"] - 0.05


def test_a_useless_member_gets_little_weight_and_does_not_hurt(graph, folder):
    good = kg.load_run(folder / "complex")
    noise = kg.from_arrays(
        "ComplEx",
        entities=np.random.default_rng(0).normal(size=(35, 8)),
        relations=np.random.default_rng(1).normal(size=(6, 8)),
        graph=graph,
    )
    ensemble = kg.Ensemble([good, noise])
    assert ensemble.fit["mrr"] >= max(ensemble.fit["mrr_of_members"])
    assert ensemble.fit["mrr_of_members"][0] > ensemble.fit["mrr_of_members"][1]
    assert ensemble.report_on("valid").mrr >= good.report_on("valid").mrr - 0.05


@pytest.fixture
def noise(graph) -> kg.Run:
    """A run of random embeddings, whose scores are large."""
    return kg.from_arrays(
        "ComplEx",
        entities=10 * np.random.default_rng(0).normal(size=(35, 8)),
        relations=np.random.default_rng(1).normal(size=(6, 8)),
        graph=graph,
    )


def test_a_member_that_is_better_than_the_ensemble_is_named(graph, folder, noise):
    good = kg.load_run(folder / "complex")
    ensemble = kg.Ensemble([noise, good], weights="equal")
    assert "below" not in repr(ensemble)  # nothing is evaluated for it
    better = ensemble.better_member
    assert better == BetterMember(
        "complex", good.report_on("valid").mrr, ensemble.report_on("valid").mrr
    )
    assert better.mrr > better.ensemble_mrr + 0.05
    # Both are filtered by all splits.
    assert better.mrr == kg.evaluate(good.model, graph, split="valid").mrr
    assert better.ensemble_mrr == kg.evaluate(ensemble.model, graph, split="valid").mrr
    assert "valid MRR below that of complex alone: " in repr(ensemble)
    ensemble.model.weights = (0.0, 1.0)
    ensemble.reports = {}
    assert ensemble.better_member is None
    assert "below" not in repr(ensemble)


def test_a_member_is_no_better_than_an_ensemble_of_it(folder):
    assert kg.Ensemble([folder / "complex"]).better_member is None


def test_before_an_evaluation_the_fit_tells_of_a_better_member(folder):
    """Shares that held-out queries do not confirm are equal, and may be worse than a member."""
    runs = [kg.load_run(folder / name) for name in ("complex", "transe")]
    for run in runs:
        run.reports = {}
    ensemble = kg.Ensemble(runs)
    ensemble.fit = {"mrr": 0.508, "mrr_of_members": [0.4, 0.5123]}
    assert repr(ensemble).endswith(", valid MRR below that of transe alone: 0.5080 against 0.5123)")
    ensemble.fit = {"mrr": 0.5123, "mrr_of_members": [0.4, 0.51235]}
    assert "below" not in repr(ensemble)


def test_words_of_a_better_member():
    assert str(BetterMember("rescal", 0.51234, 0.508)) == (
        "The run rescal alone has a better validation MRR, 0.5123 against 0.5080: use it instead."
    )


def test_an_ensemble_without_validation_triples_has_no_better_member(graph, folder):
    run = kg.load_run(folder / "complex")
    unvalidated = graph_of(graph.train, test=graph.test, num_entities=35)
    members = [kg.TrainedRun(run.model, unvalidated, run.recipe) for _ in range(2)]
    ensemble = kg.Ensemble(members)
    assert ensemble.better_member is None
    assert "below" not in repr(ensemble)


def test_the_test_split_has_no_part_in_the_weights(graph, folder):
    runs = [kg.load_run(folder / name) for name in ("complex", "transe")]
    other = graph_of(graph.train, graph.valid, graph.test[:1], num_entities=35)
    without = [kg.TrainedRun(run.model, other, run.recipe) for run in runs]
    assert kg.Ensemble(runs).model.weights == kg.Ensemble(without).model.weights


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
    with pytest.raises(Unsupported) as refused:
        blind.fit_weights()
    assert str(refused.value) == (
        "made has no validation triples to fit weights on. Give weights instead."
    )


def test_fits_on_a_sample_where_scores_do_not_fit_in_memory(graph, folder, monkeypatch):
    monkeypatch.setattr("dualkg.training.ensemble_weights.MAX_SCORES", {"cpu": 2 * 20 * 10})
    monkeypatch.setattr("dualkg.training.ensemble_weights.MAX_CANDIDATES", 20)
    ensemble = kg.Ensemble([folder / "complex", folder / "transe"])
    assert ensemble.fit["num_queries"] == 10
    assert 0 < ensemble.fit["mrr"] <= 1


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
    assert calibration_for(ensemble).calibration.slopes.shape == (3,)
    with pytest.raises(Unsupported) as refused:
        predictor.add("new", triples=[("new", "r0", "e31")])
    assert refused.value.what == "An ensemble (ComplEx + TransE)"
    with pytest.raises(Unsupported) as refused:
        predictor.explain("e1", "r1", "e32")
    assert refused.value.what == "An ensemble (ComplEx + TransE)"


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


def test_members_of_ensembles_are_members(saved):
    made = kg.Ensemble([saved / "both", saved / "seeds"], weights="equal")
    assert made.names == ["complex", "transe", "seed-0", "seed-1"]
    assert made.model_name == "3 × ComplEx + TransE"


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


def test_a_member_that_is_missing_or_changed_or_unfinished(saved):
    shutil.move(saved / "transe", saved / "away")
    with pytest.raises(ChangedMember) as refused:
        kg.load_run(saved / "both")
    assert (refused.value.ensemble, refused.value.member) == (saved / "both", saved / "transe")
    assert refused.value.missing
    shutil.copytree(saved / "complex", saved / "transe")
    with pytest.raises(ChangedMember) as refused:
        kg.load_run(saved / "both")
    assert (refused.value.ensemble, refused.value.member) == (saved / "both", saved / "transe")
    assert not refused.value.missing
    (saved / "seeds" / "seed-1" / "report.json").unlink()
    with pytest.raises(RunNotFinished) as unfinished:
        kg.load_run(saved / "seeds")
    assert unfinished.value.path == saved / "seeds" / "seed-1"


def test_words_of_a_changed_member():
    missing = ChangedMember(Path("runs/both"), Path("runs/a"), missing=True)
    assert str(missing) == (
        "The ensemble runs/both needs the run runs/a, which is not there. Move it back. "
        "Make the ensemble again from its runs, and save it."
    )
    changed = ChangedMember(Path("runs/both"), Path("runs/a"), missing=False)
    assert str(changed) == (
        "The weights of runs/a are not those that the ensemble runs/both was made of. "
        "Make the ensemble again from its runs, and save it."
    )


MEMBER = {"run": "../complex", "model": "ComplEx", "sha256": "0", "weight": 1.0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "Input should be a dictionary or an instance of SavedEnsemble"),
        (3, "Input should be a dictionary or an instance of SavedEnsemble"),
        ([MEMBER], "Input should be a dictionary or an instance of SavedEnsemble"),
        ({}, "members: Field required"),
        ({"members": [MEMBER]}, "fit: Field required"),
        ({"members": 3, "fit": {}}, "members: Input should be a valid list"),
        ({"members": None, "fit": {}}, "members: Input should be a valid list"),
        ({"members": [], "fit": {}}, "members: one of them should have a weight above 0"),
        ({"members": [7], "fit": {}}, "members.0: Input should be a dictionary or an instance of "),
        ({"members": [{"run": "../complex"}], "fit": {}}, "members.0.model: Field required"),
        ({"members": [{**MEMBER, "run": 3}], "fit": {}}, "members.0.run: Input should be a valid "),
        (
            {"members": [{**MEMBER, "weight": [1]}], "fit": {}},
            "members.0.weight: Input should be a valid number",
        ),
        (
            {"members": [{**MEMBER, "weight": -1}], "fit": {}},
            "members.0.weight: Input should be greater than or equal to 0",
        ),
        (
            {"members": [{**MEMBER, "weight": 0}], "fit": {}},
            "members: one of them should have a weight above 0",
        ),
        ({"members": [MEMBER], "fit": 5}, "fit: Input should be a valid dictionary"),
        ({"members": [MEMBER], "fit": {"mrr": 0.5}}, "mrr_of_members: Field required"),
        (
            {"members": [MEMBER], "fit": {"mrr": 0.5, "mrr_of_members": [0.1, 0.2]}},
            "fit: mrr_of_members is not of all members",
        ),
    ],
)
def test_a_damaged_file(saved, content, reason):
    path = saved / "both" / "ensemble.json"
    path.write_text(json.dumps(content))
    with raises_error(DamagedFile, path=path, advice=MAKE_AGAIN) as damaged:
        kg.load_run(saved / "both")
    assert damaged.value.reason.startswith(reason)
    # Without its report, the file has no checksum.
    (saved / "both" / "report.json").unlink()
    [check] = check_run(saved / "both")
    [file] = [file for file in check.files if file.file == path.name]
    assert file.damaged
    assert reason in file.reason


def test_a_file_that_is_no_json(saved):
    path = saved / "both" / "ensemble.json"
    path.write_text("no JSON")
    with raises_error(DamagedFile, path=path):
        kg.load_run(saved / "both")


def test_an_ensemble_is_no_member_of_a_saved_one(saved):
    path = saved / "both" / "ensemble.json"
    path.write_text(json.dumps({"members": [{**MEMBER, "run": ""}], "fit": {}}))
    with raises_error(ChangedMember, ensemble=saved / "both", missing=True):
        kg.load_run(saved / "both")


def test_the_file_of_another_ensemble_is_refused(saved):
    kg.Ensemble([saved / "complex", saved / "transe"], weights=[1, 3]).save(saved / "other")
    for name in ("ensemble.json", "report.json"):
        shutil.copyfile(saved / "other" / name, saved / "both" / name)
        if name == "ensemble.json":
            with raises_error(DamagedRun, run=saved / "both", file=name):
                kg.load_run(saved / "both")
    assert kg.load_run(saved / "both").identity == kg.load_run(saved / "other").identity


def test_wrong_requests(graph, folder, tmp_path):
    run = kg.load_run(folder / "complex")
    other = graph_of(graph.train, graph.test, graph.valid, num_entities=35)
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble([run, kg.TrainedRun(run.model, other, run.recipe)])
    assert refused.value.reason == (
        "The runs of an ensemble are trained on one graph; these were trained complex and ComplEx "
        "on different triples or splits of made."
    )
    world = kg.load_graph("world")
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble([run, kg.TrainedRun(kg.CP(world.shape, dim=2), world, run.recipe)])
    assert refused.value.reason.endswith("these were trained complex on made and CP on world.")
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble(folder / "complex")
    assert refused.value.reason.startswith("kg.Ensemble takes a list of runs.")
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble([])
    assert refused.value.reason == "An ensemble has at least one run; none was given."
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble([run.model])
    assert refused.value.reason == (
        "An ensemble is made of runs or of their folders; got ComplEx. kg.train returns a run."
    )
    with pytest.raises(InvalidValue) as invalid:
        kg.Ensemble([run], weights="best")
    assert (invalid.value.setting, invalid.value.found) == ("weights", "best")
    assert invalid.value.expected == 'numbers, "equal", or None to fit them on validation'
    unsaved = kg.TrainedRun(run.model, graph, run.recipe)
    with pytest.raises(InvalidMembers) as refused:
        kg.Ensemble([run, unsaved], weights="equal").save(tmp_path / "made")
    assert refused.value.reason.startswith("The run ComplEx of the ensemble has no folder.")
    with pytest.raises(PathExists) as exists:
        kg.Ensemble([run]).save(folder / "transe")
    assert exists.value.path == folder / "transe"
    assert exists.value.what == "a finished run"
    with pytest.raises(PathExists) as exists:
        kg.Ensemble([run]).save(folder / "complex", overwrite=True)
    assert exists.value.path == folder / "complex"
    assert not exists.value.overwritable
    assert not (tmp_path / "made").exists()


def test_a_member_that_diverged(graph, folder):
    run = kg.load_run(folder / "complex")
    with torch.no_grad():
        run.model.entities[3] = torch.nan
    with pytest.raises(kg.DivergedError, match="scores NaN or infinity"):
        kg.Ensemble([run, folder / "transe"])
