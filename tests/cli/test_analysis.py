"""`sparsify`, `sparsity` and `nuclear-norm`, as people type them."""

from __future__ import annotations

import json

import pytest

import dualkg as kg


@pytest.fixture
def dualkg(run_cli, monkeypatch, tmp_path, small_graph):
    """Types a command in a folder that holds a run of CP."""
    monkeypatch.chdir(tmp_path)
    kg.train(kg.CP(small_graph.shape, dim=5), small_graph, epochs=1, batch_size=50, out="run")
    return run_cli


def test_a_sparse_run_can_be_used_like_any_other(dualkg, tmp_path):
    code, out, err = dualkg("sparsify", "run", "--share", 0.7)
    assert code == 0
    assert "made test" in out
    assert "entity tables, CSR" in out
    assert "run-sparse-0.7" in err
    assert dualkg("evaluate", "run-sparse-0.7", "--json")[0] == 0
    assert dualkg("predict", "run-sparse-0.7", "--head", "e1", "--relation", "r1")[0] == 0
    assert dualkg("export", "run-sparse-0.7", "--out", "tables")[0] == 0
    result = json.loads(dualkg("sparsify", "run", "--share", 0.7, "--out", "other", "--json")[1])
    assert result["sparsity"]["share"] == result["storage"]["share"] == 0.7
    assert result["storage"]["on_disk"]["entity_tables"] == result["storage"]["entity_tables"]["CSR"]["bytes"]
    assert result["reports"] == json.loads((tmp_path / "run-sparse-0.7" / "report.json").read_text())


def test_sparsity(dualkg):
    code, out, _ = dualkg("sparsity", "run")
    assert code == 0
    assert len(out.splitlines()) == 12
    assert "95.0%" in out
    result = json.loads(dualkg("sparsity", "run", "--shares", "0, 0.5", "--split", "valid", "--json")[1])
    assert [point["share"] for point in result] == [0, 0.5]
    assert result[0]["metrics"]["num_queries"] == 40


def test_nuclear_norm(dualkg):
    code, out, _ = dualkg("nuclear-norm", "run")
    assert code == 0
    assert "bound on the nuclear 2-norm" in out
    result = json.loads(dualkg("nuclear-norm", "run", "--plain", 0.5, "--mapped", 1.5, "--json")[1])
    assert result["trained"]["bound"] > result["rebalanced"]["bound"]
    assert result["rebalanced"]["bound"] == pytest.approx(result["trained"]["components"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sparsify", "run", "--share", 1], "A share of zeros must be at least 0 and below 1; it is 1."),
        (["sparsify", "run", "--share", 0.5, "--out", "run"], "run exists already"),
        (["sparsify", "nowhere", "--share", 0.5], "nowhere does not exist"),
        (
            ["sparsity", "run", "--shares", "half"],
            "--shares should be a list of numbers such as 0,0.5,0.9",
        ),
        (["sparsity", "run", "--split", "tset"], "'tset' is not one of 'train', 'valid', 'test'"),
        (["nuclear-norm", "run", "--plain", 0], "λ1 and λ2 must be above 0 and finite; plain is 0.0, mapped is 1.0"),
    ],
)
def test_wrong_requests_exit_with_2_and_a_sentence(dualkg, words, sentence):
    code, out, err = dualkg(*words)
    assert (code, out) == (2, "")
    assert sentence in err
