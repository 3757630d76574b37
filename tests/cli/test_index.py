"""`index`, as users type it."""

import pytest

import dualkg as kg

pytest.importorskip("faiss")


@pytest.fixture
def run(small_graph, tmp_path) -> str:
    made = kg.TrainedRun(
        kg.ComplEx(small_graph.shape, dim=6, init_scale=1.0), small_graph, kg.Recipe()
    )
    made.recipe = made.recipe.with_changes({"model.name": "ComplEx", "model.dim": 6})
    made.report_on("test")
    return str(made.save(tmp_path / "run"))


def test_an_index_is_saved_beside_its_run(run_cli, run):
    result = run_cli("index", run)
    assert result.code == 0
    assert "recall@10" in result.out
    query = ["predict", run, "--head", "e1", "--relation", "r1", "--json"]
    exact, indexed = (
        run_cli(*query, *more).json["predictions"] for more in ([], ["--index", f"{run}-index"])
    )
    assert [one["name"] for one in indexed] == [one["name"] for one in exact]
    again = run_cli("index", run)
    assert again.code == 2
    assert "run-index exists already" in again.err


def test_json(run_cli, run, tmp_path):
    facts = run_cli("index", run, "--out", tmp_path / "other", "--json").json
    assert facts["index"] == str(tmp_path / "other")
    assert facts["stats"]["recall"] == {"1": 1.0, "10": 1.0, "100": 1.0}
    assert facts["stats"]["bytes"] > 0


def test_a_full_disk_is_a_sentence_with_the_name_of_the_file(run_cli, run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Error in faiss at x.cpp:3: Error: write error in /tmp/.x.tmp/f")

    monkeypatch.setattr("faiss.write_index", fail)
    result = run_cli("index", run, "--out", tmp_path / "new")
    assert result.code == 1
    assert f"{tmp_path}/new/index.faiss cannot be written" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
