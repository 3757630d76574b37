"""`index`, as users type it."""

import pytest
from safetensors import SafetensorError

import dualkg as kg
from dualkg.analysis.sparsity import sparsify
from dualkg.inference.index_build import load_index


@pytest.fixture
def run(small_graph, tmp_path) -> str:
    made = kg.TrainedRun(
        kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0), small_graph, kg.Recipe()
    )
    made.recipe = made.recipe.with_changes({"model.name": "ComplEx", "model.dim": 6})
    made.report_on("test")
    return str(made.save(tmp_path / "run"))


def test_an_index_is_saved_beside_its_run(run_cli, run):
    result = run_cli("index", run, "--kind", "exact", "--storage", "bf16")
    assert result.code == 0
    for words in ("exact, inner", "recall@10", "tails and"):  # names may fold
        assert words in result.out
    assert load_index(f"{run}-index").indexes["tail"].storage == "bf16"
    kg.load_run(run)
    again = run_cli("index", run, "--kind", "exact")
    assert again.code == 2
    assert "run-index exists already" in again.err


def test_a_sparse_run_has_a_sparse_index(run_cli, run):
    sparsify(run, share=0.5)
    assert run_cli("index", f"{run}-sparse-0.5", "--kind", "exact").code == 0
    assert load_index(f"{run}-sparse-0.5-index").indexes["tail"].storage == "sparse"


def test_json(run_cli, run, tmp_path):
    facts = run_cli(
        "index", run, "--kind", "exact", "--out", str(tmp_path / "other"), "--json"
    ).json
    assert facts["index"] == str(tmp_path / "other")
    stats = facts["tables"]["tail"]["stats"]
    assert stats["recall"] == {"1": 1.0, "10": 1.0, "100": 1.0}
    assert set(stats) >= {
        "queries_per_second",
        "exact_queries_per_second",
        "bytes",
        "build_seconds",
    }


def test_an_unknown_kind_is_refused(run_cli, run):
    result = run_cli("index", run, "--kind", "tree")
    assert result.code == 2
    assert "'exact', 'ivf', 'hnsw', 'sq8'" in result.err


def test_predict_with_an_index(run_cli, run):
    run_cli("index", run, "--kind", "exact")
    query = ["predict", run, "--head", "e1", "--relation", "r1", "--json"]
    exact, indexed = (
        run_cli(*query, *more).json["predictions"] for more in ([], ["--index", f"{run}-index"])
    )
    assert [one["name"] for one in indexed] == [one["name"] for one in exact]


@pytest.mark.parametrize(
    ("kind", "writer", "error"),
    [
        (
            "exact",
            "dualkg.inference.index.save_file",
            SafetensorError("I/O error: No space left on device"),
        ),
        (
            "ivf",
            "faiss.write_index",
            RuntimeError("Error in faiss at x.cpp:3: Error: write error in /tmp/.x.tmp/f"),
        ),
    ],
)
def test_a_full_disk_is_a_sentence_with_the_name_of_the_file(
    run_cli, run, tmp_path, monkeypatch, kind, writer, error
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(writer, fail)
    result = run_cli("index", run, "--kind", kind, "--recall", "0.1", "--out", tmp_path / "new")
    assert result.code == 1
    line = result.err.splitlines()[-1]
    assert line.startswith(f"dualkg: {tmp_path}/new/tail/")
    assert "it could not be written (" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
