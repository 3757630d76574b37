import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import dualkg as kg
from dualkg.analysis.sparsity import sparsify
from dualkg.errors import DamagedFile
from dualkg.workflows import train_seeds
from paper.records import (
    RECORDS,
    check_committed,
    is_uncommitted,
    load_record,
    load_records,
    recipe_without_seed,
    record_runs,
)
from paper.registry import FOLDER, Row, recipe_of
from paper.studies import STUDIES
from paper.tables import results_page


@pytest.fixture
def runs(tmp_path) -> Path:
    recipe = kg.Recipe().with_changes({"training.epochs": 1, "model.dim": 2})
    train_seeds(recipe, 2, out=tmp_path / "runs")
    return tmp_path / "runs"


def test_a_record_has_the_metrics_and_costs_of_the_runs(runs, tmp_path):
    record_runs([runs], tmp_path / "records" / "world" / "tiny")
    record = load_records(tmp_path / "records")["world/tiny"]
    assert record.seeds == [0, 1]
    mrr = [kg.load_run(runs / f"seed-{seed}").report.mrr for seed in (0, 1)]
    page = results_page(tmp_path / "records", STUDIES.values())
    assert f"{sum(mrr) / 2:.4f} ± " in page
    assert "world/tiny" in page
    assert record.cost("training_seconds") > 0
    assert record.cost("peak_mib") > 0
    assert not any(is_uncommitted(run["environment"]) for run in record.runs)


def test_a_record_has_the_rank_of_every_query(runs, tmp_path):
    record = record_runs([runs], tmp_path / "records" / "world" / "tiny")
    for number, seed in enumerate(record.seeds):
        report = kg.load_run(runs / f"seed-{seed}").report
        np.testing.assert_array_equal(record.ranks[number], report.ranks.mean)
        # A record has no numbers of candidates, which the adjusted metrics need.
        unadjusted = dataclasses.replace(report.metrics, amr=None, amri=None)
        assert record.test_metrics[number] == unadjusted


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_that_is_named_is_the_one_that_is_checked_out(monkeypatch, tmp_path):
    def git(*words):
        call = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(call, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.delenv("GIT_DIR")
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    git("init")
    git("add", source.name)
    git("commit", "--message", "a")
    commit = git("rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    for name in (commit, commit[:7], ""):
        monkeypatch.setenv("DUALKG_COMMIT", name)
        check_committed()
    monkeypatch.setenv("DUALKG_COMMIT", "0123456789ab")
    with pytest.raises(kg.RequestError, match="DUALKG_COMMIT is 0123456789ab, and the source"):
        check_committed()
    source.write_text("a = 2\n")
    monkeypatch.setenv("DUALKG_COMMIT", commit)
    with pytest.raises(kg.RequestError, match=f"uncommitted changes .{commit[:12]}-dirty"):
        check_committed()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))
    monkeypatch.delenv("DUALKG_COMMIT")
    with pytest.raises(kg.RequestError, match="Set the variable DUALKG_COMMIT"):
        check_committed()


def test_runs_that_cannot_be_recorded_are_refused(runs, tmp_path, monkeypatch):
    recipe = kg.Recipe().with_changes({"training.epochs": 2, "model.dim": 2})
    kg.train_recipe(recipe, out=tmp_path / "other")
    sparsify(runs / "seed-0", share=0.5, out=tmp_path / "sparse")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.toml").write_text("")
    monkeypatch.setenv("DUALKG_COMMIT", "0123456789ab-dirty")
    kg.train_recipe(recipe, out=tmp_path / "dirty")
    cases = {
        "was sparsified after training": [tmp_path / "sparse"],
        r"uncommitted changes \(0123456789ab-dirty\)": [tmp_path / "dirty"],
        "have different recipes; runs that differ only in the seed": [runs, tmp_path / "other"],
        "has each seed once; the seeds of the runs are 0, 1, 0": [runs, runs / "seed-0"],
        "needs at least one finished run": [tmp_path / "empty"],
        "nowhere": [tmp_path / "nowhere"],
    }
    for sentence, paths in cases.items():
        with pytest.raises(kg.RequestError, match=sentence):
            record_runs(paths, tmp_path / "records" / "x")
    path = runs / "seed-1" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "something else"}))
    with pytest.raises(kg.RequestError, match="were trained on different data"):
        record_runs([runs], tmp_path / "records" / "x")
    assert not (tmp_path / "records" / "x").exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"graph": "world", "runs": [{"seed": 0}]}'])
def test_another_file_of_that_name_is_refused(tmp_path, text):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "record.json").write_text(text)
    with pytest.raises(kg.RequestError, match="is not a record in the current format"):
        load_records(tmp_path)


def test_damaged_ranks_are_reported(runs, tmp_path):
    record = record_runs([runs], tmp_path / "records" / "x")
    (record.folder / "ranks.parquet").write_bytes(b"no parquet")
    with pytest.raises(DamagedFile, match="Move it away and record the runs again."):
        _ = load_record(record.folder).ranks


# -- the committed records ---------------------------------------------------


@pytest.fixture(scope="module")
def committed():
    return load_records(RECORDS)


def test_committed_records_have_a_recipe(committed):
    """A number is published only for a recipe that anyone can run."""
    for name, record in committed.items():
        folder, recipe = name.split("/")
        graph = next(graph for graph in (record.graph,) if graph.lower() == folder)
        assert recipe_without_seed(recipe_of(Row(name, recipe), graph)) == recipe_without_seed(
            record.recipe
        ), name


def test_recipes_are_in_one_of_the_two_folders(committed):
    shipped, own = (
        {p.relative_to(f) for p in f.rglob("*.toml")}
        for f in (FOLDER.parent / "src/dualkg/recipes", FOLDER / "recipes")
    )
    assert shipped
    assert own
    assert not shipped & own


def test_promised_numbers_are_recorded(committed):
    """ComplEx-DURA: UMLS, Kinship, and FB15k-237 at dim 100 with and without DURA."""
    mrr = {name: fmean(record.values("mrr")) for name, record in committed.items()}
    assert mrr["umls/complex-dura"] >= 0.955
    assert mrr["kinship/complex-dura"] >= 0.89
    assert mrr["fb15k-237/complex-dura-dim-100"] >= 0.345
    assert mrr["fb15k-237/complex-dura-dim-100"] - mrr["fb15k-237/complex-dim-100"] >= 0.01
