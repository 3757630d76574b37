"""`ensemble`, and the commands that take an ensemble as a run, with two tiny runs on `world`."""

import json
import shutil

import pytest

import dualkg as kg


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs `one` and `other`, their ensemble `both`, and `seeds/seed-0` and `seed-1`."""
    folder = tmp_path_factory.mktemp("runs")
    graph = kg.load_graph("world")
    for number, name in enumerate(("one", "other")):
        model = kg.ComplEx(graph.shape, dim=4 + number, reciprocal=not number, seed=number)
        kg.train(
            model,
            graph,
            epochs=1,
            batch_size=200,
            optimizer=kg.Optimizer(learning_rate=0.3),
            out=folder / name,
        )
    for number, name in enumerate(("one", "other")):
        shutil.copytree(folder / name, folder / "seeds" / f"seed-{number}")
    kg.Ensemble([folder / "one", folder / "other"], weights="equal").save(folder / "both")
    return folder


@pytest.fixture
def dualkg(run_cli, monkeypatch, runs):
    monkeypatch.chdir(runs)
    return run_cli


def test_made_evaluated_and_compared(dualkg, runs, tmp_path):
    made = dualkg("ensemble", "one", "other", "--out", tmp_path / "fitted", "--json")
    assert made.code == 0
    assert [one["run"] for one in made.json["members"]] == ["one", "other"]
    weights = [one["weight"] for one in made.json["members"]]
    assert made.json["fit"]["split"] == "valid"
    saved = json.loads((tmp_path / "fitted" / "ensemble.json").read_text())
    assert [one["weight"] for one in saved["members"]] == weights
    found = dualkg("evaluate", tmp_path / "fitted", "--json").json["metrics"]
    assert found == made.json["ensemble"]["test"]
    code, out, _ = dualkg("compare", tmp_path / "fitted", "one", "--samples", 100)
    assert code == 0
    assert "2 × ComplEx" in out


def test_the_table_and_the_options(dualkg, tmp_path):
    code, out, err = dualkg("ensemble", "seeds", "--out", tmp_path / "made", "--weights", "2,1")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["seed-0", "2"],
        ["seed-1", "1"],
    ]
    assert out.splitlines()[3].startswith("ensemble")
    assert "dualkg calibrate" in err
    assert dualkg("ensemble", "one", "--out", tmp_path / "made").code == 2
    assert (
        dualkg(
            "ensemble", "one", "--out", tmp_path / "made", "--overwrite", "--weights", "equal"
        ).code
        == 0
    )
    assert (
        "numbers such as"
        in dualkg("ensemble", "one", "--out", tmp_path / "x", "--weights", "best").err
    )
    assert dualkg("ensemble", "one", "missing", "--out", tmp_path / "x").code == 2


def test_a_member_that_is_better_than_the_ensemble_is_named(dualkg, tmp_path):
    """With nearly all of the weight on the worse one."""
    mrrs = {name: kg.load_run(name).report_on("valid").mrr for name in ("one", "other")}
    worse, better = sorted(mrrs, key=mrrs.get)
    words = ("ensemble", worse, better, "--weights", "1000,1e-6", "--out")
    made = dualkg(*words, tmp_path / "made", "--json")
    assert made.code == 0
    assert made.json["better_member"] == better
    told = dualkg(*words, tmp_path / "told")
    mrr = f"{mrrs[better]:.4f} against {mrrs[worse]:.4f}"
    sentence = f"The run {better} alone has a better validation MRR, {mrr}: use it instead."
    assert sentence in told.err
    alone = dualkg("ensemble", better, "--out", tmp_path / "alone")
    assert "use it instead" not in alone.err


def test_a_folder_of_seeds_is_evaluated_as_its_ensemble(dualkg):
    alike = [dualkg("evaluate", name, "--json").json["metrics"] for name in ("seeds", "both")]
    assert alike[0] == alike[1]
    queries = [
        dualkg("predict", name, "--head", "France", "--relation", "capital", "--json")
        for name in ("seeds", "both")
    ]
    assert queries[0].json == queries[1].json


def test_calibrated_predicted_completed_and_served(dualkg, runs, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "one")
    shutil.copytree(runs / "other", tmp_path / "other")
    both = shutil.copytree(runs / "both", tmp_path / "both")
    assert dualkg("calibrate", both, "--json").code == 0
    query = ("--head", "France", "--relation", "part_of")
    predicted = dualkg("predict", both, *query, "--top", 3, "--json").json["predictions"]
    assert len(predicted) == 3
    assert any(one["probability"] is not None for one in predicted)
    assert dualkg("predict", both, *query, "--coverage", 0.5, "--json").json["predictions"]
    out = tmp_path / "new.tsv"
    assert dualkg("complete", both, "--top", 5, "--relation", "part_of", "--out", out).code == 0
    assert len(out.read_text().splitlines()) == 6
    served = dualkg("serve", both, "--get", "/api/tails?head=France&relation=part_of&k=3").json[
        "predictions"
    ]
    for one, other in zip(served, predicted, strict=True):
        assert one["name"] == other["name"]
        assert one["score"] == pytest.approx(other["score"], rel=1e-4)
    page = dualkg("serve", both, "--get", "/run")
    assert page.code == 0
    assert "Ensemble of 2 runs (2 × ComplEx)" in page.out
    seeds = dualkg("serve", "seeds", "--get", "/api/run").json
    assert seeds["reports"]["test"]["metrics"]["num_queries"] == 1354
    assert list(seeds["recipe"]["ensemble"]) == ["seed-0", "seed-1"]
