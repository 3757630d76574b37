"""`dualkg complete`, run_cli."""

import pyarrow.parquet
import pytest

import dualkg as kg
from tests.inference.completion.brute_force import random_graph


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    graph = random_graph(0, num_entities=20, num_triples=120)
    kg.train(kg.ComplEx(graph.shape, dim=4), graph, epochs=2, out=folder)
    return folder


def test_the_triples_are_written_and_the_best_are_printed(run_cli, run, tmp_path):
    out = tmp_path / "new.tsv"
    result = run_cli("complete", run, "--top", 50, "--out", out)
    assert result.code == 0, result.err
    lines = out.read_text().splitlines()
    assert lines[0].startswith("rank\thead\trelation\ttail\tprobability")
    assert len(lines) == 51
    assert "50 new triples are saved in" in result.err
    assert lines[1].split("\t")[1] in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["new.tsv"]


def test_without_a_file_the_triples_are_printed(run_cli, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_cli("complete", run, "--top", 20)
    assert result.code == 0, result.err
    assert [line.split()[0] for line in result.out.splitlines()] == [
        "rank",
        *map(str, range(1, 21)),
    ]
    facts = run_cli("complete", run, "--top", 20, "--json").json
    assert (facts["out"], facts["triples"]) == (None, 20)
    wanted = kg.complete(run, top=20).table().to_pylist()
    assert facts["best"] == wanted
    assert [row["head"] for row in wanted] == [
        line.split()[1] for line in result.out.splitlines()[1:]
    ]
    assert run_cli("complete", run, "--json").json["triples"] == 20
    assert not list(tmp_path.iterdir())


def test_without_a_triple_above_the_minimum_the_best_probability_is_named(run_cli, run, tmp_path):
    best = kg.complete(run, top=1).table()["probability"][0].as_py()
    out = tmp_path / "new.tsv"
    result = run_cli("complete", run, "--min-probability", 0.999, "--out", out)
    assert result.code == 0, result.err
    assert f"0.999 or more; the best has {best:.4g}." in result.out
    assert len(out.read_text().splitlines()) == 1
    printed = run_cli("complete", run, "--min-probability", 0.999, "--json").json
    assert printed.pop("missing")["per_valid"] == 1
    assert printed == {"out": None, "triples": 0, "best": [], "highest_probability": best}


def test_the_best_probability_is_that_of_the_filtered_triples(run_cli, run):
    words = ("--relation", "r1", "--head", "e3")
    best = kg.complete(run, top=1, relations=["r1"], heads=["e3"]).table()["probability"][0].as_py()
    assert best < kg.complete(run, top=1).table()["probability"][0].as_py()
    printed = run_cli("complete", run, *words, "--min-probability", 0.999, "--json").json
    assert printed["highest_probability"] == best


def test_options_restrict_the_candidates(run_cli, run, tmp_path):
    out = tmp_path / "new.parquet"
    words = (
        "--relation",
        "r1",
        "--head",
        "e3",
        "--head",
        "e4",
        "--types",
        "--min-probability",
        0.0001,
        "--json",
    )
    result = run_cli("complete", run, "--out", out, *words)
    assert result.code == 0, result.err
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert result.json["triples"] == len(rows) > 0
    assert result.json["best"] == rows[:10]
    assert {row["relation"] for row in rows} == {"r1"}
    assert {row["head"] for row in rows} <= {"e3", "e4"}


def test_check_prints_a_table_or_json(run_cli, run):
    result = run_cli("complete", run, "--check", "--top", 500)
    assert result.code == 0, result.err
    assert "test triples found" in result.out
    found = run_cli("complete", run, "--check", "--top", 500, "--json").json
    assert found["sizes"] == [100, 500]
    assert len(found["found"]) == len(found["by_degree"]) == len(found["at_random"]) == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--top", "0"), "should be a whole number of at least 1; 0 was given"),
        (("--out", "new.doc"), "a file that ends with .tsv or .parquet; 'new.doc' was given"),
        (("--out", "new.tsv", "--relation", "r7"), "No relation is named 'r7'."),
        (
            ("--out", "new.tsv", "--head", "e33"),
            "No entity is named 'e33'. Did you mean",
        ),
        (
            ("--out", "new.tsv", "--min-probability", "2"),
            "should be between 0 and 1; 2.0 was given",
        ),
        (("--out", "new.tsv", "--top", "0"), "should be a whole number of at least 1; 0 was given"),
        (("--check", "--out", "new.tsv"), "--check writes no file"),
    ],
)
def test_refusals(run_cli, run, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    result = run_cli("complete", run, *words)
    assert result.code == 2
    assert sentence in " ".join(result.err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_replaced(run_cli, run, tmp_path):
    (tmp_path / "new.tsv").write_text("mine")
    result = run_cli("complete", run, "--out", tmp_path / "new.tsv")
    assert (result.code, (tmp_path / "new.tsv").read_text()) == (2, "mine")
    assert "new.tsv exists already" in result.err


def test_a_run_that_is_not_finished_is_refused(run_cli, run, tmp_path):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.toml").write_text((run / "recipe.toml").read_text())
    result = run_cli("complete", unfinished, "--out", tmp_path / "new.tsv")
    assert result.code == 2
    assert f"The run {unfinished} is not finished" in result.err


def test_ctrl_c_ends_the_search_without_a_file(run_cli, run, tmp_path, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kg, "complete", stopped)
    result = run_cli("complete", run, "--out", tmp_path / "new.tsv")
    assert (result.code, "stopped" in result.err) == (130, True)
    assert not list(tmp_path.iterdir())
