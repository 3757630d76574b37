"""`dualkg index` and `dualkg forms`, as users type them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import dualkg as kg
from dualkg.analysis.sparsity import sparsify
from dualkg.cli.complete import app
from dualkg.cli.main import app as whole
from dualkg.inference.index_build import load_index


@pytest.fixture
def run(small_graph, tmp_path) -> str:
    made = kg.Run(kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0), small_graph, kg.Recipe())
    made.recipe = made.recipe.with_changes({"model.name": "ComplEx", "model.dim": 6})
    made.report_on("test")
    return str(made.save(tmp_path / "run"))


def run_cli(*words: str) -> str:
    told = CliRunner().invoke(app, words, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert told.exit_code == 0
    return told.stdout


def test_an_index_stands_beside_its_run(run):
    out = run_cli("index", run, "--kind", "exact", "--form", "bf16")
    assert "exact, inner product" in out
    assert "recall@10" in out
    assert "tails and heads" in out
    assert load_index(f"{run}-index").indexes["tail"].table.storage == "bf16"
    kg.load_run(run)
    with pytest.raises(kg.RequestError, match="run-index exists already. Name a new folder with --out"):
        run_cli("index", run, "--kind", "exact")


def test_a_sparse_run_is_searched_as_it_is_stored(run):
    sparsify(run, share=0.5)
    run_cli("index", f"{run}-sparse-0.5", "--kind", "exact")
    assert load_index(f"{run}-sparse-0.5-index").indexes["tail"].table.storage == "sparse"


def test_facts_for_programs(run, tmp_path):
    told = json.loads(run_cli("index", run, "--kind", "exact", "--out", str(tmp_path / "other"), "--json"))
    assert told["index"] == str(tmp_path / "other")
    stats = told["tables"]["tail"]["stats"]
    assert stats["recall"] == {"1": 1.0, "10": 1.0, "100": 1.0}
    assert set(stats) >= {"queries_per_second", "exact_queries_per_second", "bytes", "build_seconds"}


def test_forms_in_a_table_and_for_programs(run, tmp_path):
    out = run_cli("forms", run, "--shares", "0.5")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["float32", "bf16", "int8", "sparse"]
    told = json.loads(run_cli("forms", run, "--shares", "0.5,0.9", "--split", "valid", "--json"))
    assert [point["name"] for point in told[3:]] == ["sparse 50%", "sparse 90%"]


def test_forms_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    run_cli("forms", run, "--shares", "0.5", "--picture", str(tmp_path / "forms.svg"))
    assert (tmp_path / "forms.svg").exists()


def test_refusals(run):
    with pytest.raises(kg.RequestError, match="An index is exact, ivf, hnsw, sq8; 'tree' was asked for"):
        run_cli("index", run, "--kind", "tree")
    with pytest.raises(kg.RequestError, match="--shares is a list of numbers"):
        run_cli("forms", run, "--shares", "half")
    with pytest.raises(kg.RequestError, match="--split is one of train, valid, test; 'all' came"):
        run_cli("forms", run, "--split", "all")


def test_a_question_is_answered_through_an_index(run):
    run_cli("index", run, "--kind", "exact")
    question = ["predict", run, "--head", "e1", "--relation", "r1", "--json"]
    there = [CliRunner().invoke(whole, [*question, *more]) for more in ([], ["--index", f"{run}-index"])]
    assert [told.exit_code for told in there] == [0, 0]
    plain, searched = (json.loads(told.stdout)["answers"] for told in there)
    assert [one["name"] for one in searched] == [one["name"] for one in plain]
