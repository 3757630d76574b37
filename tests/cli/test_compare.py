"""`compare`, as people type it."""

import json
import shutil

import pytest

import dualkg as kg
from dualkg.evaluation.comparison import compare_ranks
from dualkg.evaluation.report import load_ranks
from dualkg.workflows import train_seeds
from paper.records import record_runs
from tests.conftest import graph_of

TINY = {
    "training.epochs": 1,
    "model.dim": 4,
    "training.batch_size": 50,
    "optimizer.learning_rate": 0.3,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """CP after one epoch, ComplEx with DURA after many, ComplEx with two seeds; and runs of other
    graphs.
    """
    folder = tmp_path_factory.mktemp("compare")
    triples = [(i, r, 40 + i % 5) for i in range(40) for r in range(3)]
    valid = triples[2::10]
    test = triples[1::5]
    train = [triple for triple in triples if triple not in valid + test]
    graph = graph_of(train, valid, test)
    kg.train(kg.CP(graph.shape, dim=4), graph, epochs=1, batch_size=50, out=folder / "cp")
    kg.train(
        kg.ComplEx(graph.shape, dim=9),
        graph,
        regularizer=kg.DURA(0.01),
        epochs=40,
        batch_size=20,
        out=folder / "dura",
    )
    train_seeds(kg.Recipe().with_changes(TINY), 2, graph=graph, out=folder / "seeds")
    other = graph_of(train, valid, test[::-1])
    kg.train(kg.CP(graph.shape, dim=4), other, epochs=1, batch_size=50, out=folder / "reordered")
    world = kg.load_graph("world")
    kg.train(kg.CP(world.shape, dim=2), world, epochs=1, out=folder / "world")
    environment = json.loads((folder / "world" / "environment.json").read_text())
    (folder / "world" / "environment.json").write_text(
        json.dumps({**environment, "commit": "0" * 12})
    )  # not -dirty
    untested = graph_of(train, valid)
    kg.train(kg.CP(untested.shape, dim=2), untested, epochs=1, out=folder / "untested")
    return folder


@pytest.fixture
def dualkg(run_cli, monkeypatch, runs):
    """Types a command in the folder of the runs."""
    monkeypatch.chdir(runs)
    return run_cli


def test_the_better_run_is_named(dualkg):
    code, out, _ = dualkg("compare", "dura", "cp", "--samples", 500)
    assert code == 0
    assert "ComplEx-DURA is better by ." in out
    assert "of the 24 triples." in out
    for metric in ("MRR", "H@1", "H@3", "H@10"):
        assert f"{metric} " in out
    assert "ComplEx-DURA is better by ." in dualkg("compare", "cp", "dura", "--samples", 500)[1]


def test_a_run_compared_to_itself(dualkg):
    code, out, _ = dualkg("compare", "dura", "dura", "--differences", 5)
    assert code == 0
    assert "The difference of .0000 is within noise (95 %: .0000 to .0000)." in out
    assert "dura is better on 0%, worse on 0% and equal on 100% of the 24 triples." in out


def test_json_equals_compare_ranks(dualkg, runs):
    found = json.loads(dualkg("compare", "dura", "cp", "--seed", 3, "--samples", 500, "--json")[1])
    one, other = (
        load_ranks(runs / name / "ranks-test.parquet").mean[None] for name in ("dura", "cp")
    )
    expected = compare_ranks(one, other, samples=500, seed=3)
    assert found["mrr"] == expected.mrr.as_dict()
    assert found["within_noise"] is False
    assert found["a"] == {"run": "dura", "name": "ComplEx-DURA", "seeds": [0]}
    assert found["sentence"] == expected.sentence("ComplEx-DURA", "CP")
    assert (
        found["mrr"]["a"]
        == json.loads((runs / "dura" / "report.json").read_text())["test"]["metrics"]["mrr"]
    )


def test_a_folder_of_seeds_is_compared_by_its_mean(dualkg, runs):
    found = json.loads(
        dualkg("compare", "seeds", "dura", "--split", "valid", "--samples", 500, "--json")[1]
    )
    reports = [
        json.loads((runs / "seeds" / f"seed-{i}" / "report.json").read_text()) for i in range(2)
    ]
    assert found["mrr"]["a"] == pytest.approx(
        sum(report["valid"]["metrics"]["mrr"] for report in reports) / 2
    )
    assert found["a"]["seeds"] == [0, 1]
    assert (
        "ComplEx is the mean of 2 seeds." in dualkg("compare", "seeds", "dura", "--samples", 500)[1]
    )


def test_unfinished_seeds_are_left_out_with_a_note(dualkg, runs, tmp_path):
    shutil.copytree(runs / "seeds", tmp_path / "some")
    (tmp_path / "some" / "seed-1" / "report.json").unlink()
    code, _, err = dualkg("compare", tmp_path / "some", "dura", "--samples", 500)
    assert code == 0
    assert "1 of the 2 runs in" in err
    (tmp_path / "some" / "seed-0" / "report.json").unlink()
    code, _, err = dualkg("compare", tmp_path / "some", "dura")
    assert code == 2
    assert "is not finished. Resume it with: dualkg resume" in err


def test_by_and_differences(dualkg):
    code, out, _ = dualkg(
        "compare", "dura", "cp", "--by", "direction", "--differences", 3, "--samples", 500
    )
    assert code == 0
    assert "p is corrected for 2 tests (Holm)" in out
    assert out.count("(e") + out.count("(?, r") == 3
    found = json.loads(
        dualkg(
            "compare",
            "dura",
            "cp",
            "--by",
            "relation",
            "--differences",
            3,
            "--samples",
            500,
            "--json",
        )[1]
    )
    assert found["by_relation"].keys() == {"r0", "r1", "r2"}
    assert found["by_relation"]["r0"]["p_corrected"] is None  # too few triples
    gaps = [abs(query["difference"]) for query in found["differences"]]
    assert gaps == sorted(gaps, reverse=True)
    assert found["differences"][0]["head"].startswith("e")


def test_ranks_that_are_not_saved_are_computed(dualkg):
    found = json.loads(
        dualkg("compare", "dura", "cp", "--split", "train", "--samples", 500, "--json")[1]
    )
    assert found["num_triples"] == 84


def test_runs_of_different_recipes_have_no_mean(dualkg, runs, tmp_path):
    for number, name in enumerate(("cp", "dura")):
        shutil.copytree(runs / name, tmp_path / "mixed" / f"seed-{number}")
    code, _, err = dualkg("compare", tmp_path / "mixed", "dura")
    assert code == 2
    assert "have different recipes; runs that differ only in the seed were expected." in err


def test_a_record_equals_its_runs(dualkg, runs, tmp_path):
    record = record_runs([runs / "world"], tmp_path / "records" / "cp").folder
    found = json.loads(
        dualkg("compare", record, "world", "--samples", 100, "--differences", 1, "--json")[1]
    )
    assert found["a"]["seeds"] == found["b"]["seeds"] == [0]
    assert found["differences"] == []  # no query differs
    assert found["equal"] == 1
    code, _, err = dualkg("compare", record, "world", "--split", "valid")
    assert code == 2
    assert "has the ranks of the test split only, not of valid. Compare the runs instead." in err
    (record / "ranks.parquet").unlink()
    code, _, err = dualkg("compare", record, "world")
    assert (code, err.startswith("dualkg: This record has no ranks:")) == (2, True)


def test_a_record_of_other_data_is_refused(dualkg, runs, tmp_path):
    record = record_runs([runs / "world"], tmp_path / "records" / "cp").folder
    found = json.loads((record / "record.json").read_text())
    found["data"] = "other"
    (record / "record.json").write_text(json.dumps(found))
    assert (
        "was recorded with different data than world has here"
        in dualkg("compare", record, "world")[2]
    )
