"""`python -m paper sparsify`, as people type it."""

import pytest

import dualkg as kg
from dualkg.training.run_folder import RunFolder


@pytest.fixture
def paper(run_paper, small_graph):
    """Type a command in a folder that holds a run of CP."""
    kg.train(kg.CP(small_graph.shape, dim=5), small_graph, epochs=1, batch_size=50, out="run")
    return run_paper


def test_a_sparse_run_can_be_used_like_any_other(paper, run_cli, tmp_path):
    result = paper("sparsify", "run", "--share", 0.7)
    assert result.code == 0
    assert "made test" in result.out
    assert "entity tables, CSR" in result.out
    assert "run-sparse-0.7" in result.err
    assert run_cli("evaluate", "run-sparse-0.7", "--json").code == 0
    assert run_cli("predict", "run-sparse-0.7", "--head", "e1", "--relation", "r1").code == 0
    assert run_cli("export", "run-sparse-0.7", "--out", "tables").code == 0
    facts = paper("sparsify", "run", "--share", 0.7, "--out", "other", "--json").json
    assert facts["sparsity"]["share"] == facts["storage"]["share"] == 0.7
    storage = facts["storage"]
    assert storage["on_disk"]["entity_tables"] == storage["entity_tables"]["CSR"]["bytes"]
    assert facts["reports"] == RunFolder(tmp_path / "run-sparse-0.7").saved_reports()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sparsify", "run", "--share", 1], "should be a share of zeros, at least 0 and below 1"),
        (["sparsify", "run", "--share", 0.5, "--out", "run"], "run exists already"),
        (["sparsify", "nowhere", "--share", 0.5], "nowhere does not exist"),
    ],
)
def test_wrong_requests_exit_with_2_and_a_sentence(paper, words, sentence):
    result = paper(*words)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err
