import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import dualkg as kg
from dualkg.analysis.records import UnrelatedRuns
from dualkg.analysis.sparsity import sparsify
from dualkg.errors import DamagedFile, Unsupported
from dualkg.files import lock_holder
from dualkg.training.errors import NotARun
from dualkg.workflows import train_seeds
from paper.records import (
    RECORDS,
    OtherCommit,
    RepeatedSeeds,
    UncommittedChanges,
    UnknownCommit,
    check_committed,
    is_uncommitted,
    load_record,
    load_records,
    recipe_without_seed,
    record_runs,
)
from paper.registry import FOLDER, MAIN, Row, published_metrics, recipe_of
from paper.studies import STUDIES
from paper.tables import BEGIN, END, results_page, write_pages
from tests.raising import refused


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


def test_a_record_takes_about_forty_lines_per_run(runs, tmp_path):
    record = record_runs([runs], tmp_path / "records" / "x")
    assert len((record.folder / "record.json").read_text().splitlines()) < 2 * 50
    committed = sorted(RECORDS.glob("*/*/record.json"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in committed)
    assert lines / sum(len(load_record(path.parent).runs) for path in committed) < 45


def test_a_record_has_the_rank_of_every_query(runs, tmp_path):
    record = record_runs([runs], tmp_path / "records" / "world" / "tiny")
    for number, seed in enumerate(record.seeds):
        report = kg.load_run(runs / f"seed-{seed}").report
        np.testing.assert_array_equal(record.ranks[number], report.ranks.mean)
        # A record has no numbers of candidates, which the adjusted metrics need.
        unadjusted = dataclasses.replace(report.metrics, amr=None, amri=None)
        assert record.test_metrics[number] == unadjusted


def test_a_sparsified_run_is_not_recorded(runs, tmp_path):
    sparse = sparsify(runs / "seed-0", share=0.5, out=tmp_path / "sparse")
    with refused(
        Unsupported,
        what=str(sparse.folder),
        reason="was sparsified after training; only runs as they were trained are recorded",
    ):
        record_runs([sparse.folder], tmp_path / "records" / "x")
    assert not (tmp_path / "records").exists()


def test_a_run_from_a_tree_with_uncommitted_changes_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALKG_COMMIT", "0123456789ab-dirty")
    recipe = kg.Recipe().with_changes({"training.epochs": 1, "model.dim": 2})
    kg.train_recipe(recipe, out=tmp_path / "run")
    with refused(UncommittedChanges, commit="0123456789ab-dirty", run=tmp_path / "run"):
        record_runs([tmp_path / "run"], tmp_path / "records" / "x")
    assert not (tmp_path / "records").exists()


def test_a_copy_of_the_source_tree_needs_the_name_of_its_commit(monkeypatch):
    check_committed()
    monkeypatch.delenv("DUALKG_COMMIT")
    with refused(UnknownCommit):
        check_committed()


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
    with refused(OtherCommit, commit="0123456789ab", checkout=commit[:12]):
        check_committed()
    source.write_text("a = 2\n")
    monkeypatch.setenv("DUALKG_COMMIT", commit)
    with refused(UncommittedChanges, commit=f"{commit[:12]}-dirty", run=None):
        check_committed()


def test_runs_of_different_recipes_are_not_one_record(runs, tmp_path):
    other = kg.Recipe().with_changes({"training.epochs": 2, "model.dim": 2})
    kg.train_recipe(other, out=tmp_path / "other")
    paths = [runs / "seed-0", runs / "seed-1", tmp_path / "other"]
    with refused(UnrelatedRuns, paths=paths, difference="have different recipes"):
        record_runs([runs, tmp_path / "other"], tmp_path / "records" / "x")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            UncommittedChanges("0123-dirty", Path("runs/a")),
            "runs/a was trained from a source tree with uncommitted changes (0123-dirty), so "
            "nobody could train it again. Commit the changes, train again, and record that run.",
        ),
        (
            UncommittedChanges("0123-dirty"),
            "The source tree has uncommitted changes (0123-dirty), so its numbers could not be "
            "reproduced. Commit or stash them first.",
        ),
        (
            UnrelatedRuns([Path("runs/a"), Path("runs/b")], "have different recipes"),
            "The runs runs/a, runs/b have different recipes; runs that differ only in the seed "
            "were expected.",
        ),
        (
            RepeatedSeeds([0, 1, 0]),
            "A record has each seed once; the seeds of the runs are 0, 1, 0.",
        ),
    ],
)
def test_words_of_messages(error, sentence):
    assert str(error) == sentence


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"runs": []}',
        '{"graph": "world", "runs": [1]}',
        '{"graph": "world", "runs": [{"seed": 0}]}',
    ],
)
def test_another_file_of_that_name_is_refused(tmp_path, text):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "record.json").write_text(text)
    with refused(
        Unsupported,
        what=str(tmp_path / "x" / "record.json"),
        reason="is not a record in the current format",
    ):
        load_records(tmp_path)


def test_damaged_ranks_are_reported(runs, tmp_path):
    record = record_runs([runs], tmp_path / "records" / "x")
    (record.folder / "ranks.parquet").write_bytes(b"no parquet")
    with refused(
        DamagedFile,
        path=record.folder / "ranks.parquet",
        advice="Move it away and record the runs again.",
    ):
        _ = load_record(record.folder).ranks


def test_a_seed_is_recorded_once(runs, tmp_path):
    with refused(RepeatedSeeds, seeds=[0, 1, 0]):
        record_runs([runs, runs / "seed-0"], tmp_path / "records" / "x")


def test_an_interrupted_update_leaves_the_record_unchanged(runs, tmp_path, monkeypatch):
    before = record_runs([runs], tmp_path / "records" / "x")
    other = kg.Recipe().with_changes({"training.epochs": 2, "model.dim": 3})
    kg.train_recipe(other, out=tmp_path / "other")

    def stop(path, text):
        if path.name == "record.json":
            raise KeyboardInterrupt
        path.write_text(text)

    monkeypatch.setattr("paper.records.write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        record_runs([tmp_path / "other"], tmp_path / "records" / "x")
    after = load_records(tmp_path / "records")["x"]
    assert (after.recipe, after.runs) == (before.recipe, before.runs)


def test_the_table_of_the_readme_is_made_while_it_is_locked(runs, tmp_path):
    """Of two updates at once, the second reads the records of the first."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    record_runs([runs], tmp_path / "records" / "x")
    write_pages(
        tmp_path / "records", STUDIES.values(), {readme: lambda records: lock_holder(readme)}
    )
    assert f"before\n{BEGIN}\nprocess {os.getpid()} on " in readme.read_text()
    assert lock_holder(readme) is None


@pytest.mark.parametrize("data", ["something else", {}])
def test_runs_on_different_data_are_not_one_record(runs, tmp_path, data):
    path = runs / "seed-1" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": data}))
    paths = [runs / "seed-0", runs / "seed-1"]
    with refused(UnrelatedRuns, paths=paths, difference="were trained on different data"):
        record_runs([runs], tmp_path / "records" / "x")


def test_a_record_needs_a_finished_run(tmp_path):
    with refused(NotARun, path=tmp_path):
        record_runs([tmp_path], tmp_path / "records")
    (tmp_path / "recipe.toml").write_text("")
    with refused(
        Unsupported,
        what="A record",
        reason="needs at least one finished run, and there is none",
    ):
        record_runs([tmp_path], tmp_path / "records")


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


@pytest.mark.parametrize("name", ["fb15k-237/complex-dura-dim-500", "wn18rr/complex-dura-dim-500"])
def test_bfloat16_products_cost_no_accuracy(committed, name):
    bf16 = committed[name]
    exact = committed[f"{name}-float32"]
    assert bf16.seeds == exact.seeds == [0, 1, 2]
    assert {run["environment"]["engine"] for run in bf16.runs} == {
        "fused kernels, bfloat16 products, one NVIDIA H200"
    }
    assert {run["environment"]["engine"] for run in exact.runs} == {
        "fused kernels, float32, one NVIDIA H200"
    }
    assert abs(fmean(bf16.values("mrr")) - fmean(exact.values("mrr"))) <= 0.0015


def test_promised_numbers_are_recorded(committed):
    """ComplEx-DURA: UMLS, Kinship, and FB15k-237 at dim 100 with and without DURA."""
    mrr = {name: fmean(record.values("mrr")) for name, record in committed.items()}
    assert mrr["umls/complex-dura"] >= 0.955
    assert mrr["kinship/complex-dura"] >= 0.89
    assert mrr["fb15k-237/complex-dura-dim-100"] >= 0.345
    assert mrr["fb15k-237/complex-dura-dim-100"] - mrr["fb15k-237/complex-dim-100"] >= 0.01


@pytest.mark.parametrize("graph", ["WN18RR", "FB15k-237"])
@pytest.mark.parametrize("name", ["RotatE", "MuRP", "HAKE", "TuckER"])
def test_compared_models_reach_their_published_numbers(committed, name, graph):
    """Within .005 of the published MRR, or above, with three seeds of under two minutes each."""
    record = committed[MAIN.row(name).record_name(graph)]
    assert len(record.runs) == 3
    assert fmean(record.values("mrr")) >= published_metrics(name, graph)["mrr"] - 0.005
    assert not record.times_are_bounds
    assert record.cost("training_seconds") < 120
