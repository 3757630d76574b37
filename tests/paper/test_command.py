"""`python -m paper`, from the command line."""

import pytest

import dualkg as kg
from paper import registry
from paper.__main__ import app, table_command
from tests.paper.conftest import TINY


def test_data_sets_are_counted_and_saved(run_paper, tmp_path, monkeypatch):
    monkeypatch.setattr("paper.__main__.GRAPHS", ("world", "nowhere"))
    shown = run_paper("datasets", "--records", tmp_path / "records")
    assert shown.code == 0
    num_entities = kg.load_graph("world").shape.num_entities
    assert f" {num_entities} " in shown.out
    assert "nowhere is not available" in shown.err
    assert f"| world | {num_entities} |" in (tmp_path / "records" / "RESULTS.md").read_text(
        encoding="utf-8"
    )


def test_a_results_table_is_trained_recorded_and_shown(run_paper, recipes, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "GRAPHS", ("world",))
    app.command("tiny")(table_command(TINY))
    words = (
        "tiny",
        "--dataset",
        "world",
        "--seeds",
        "1",
        "--device",
        "cpu",
        "--records",
        tmp_path / "records",
    )
    shown = run_paper(*words)
    assert shown.code == 0
    assert "ComplEx-DURA against ComplEx" in shown.out.replace("\n", " ")
    assert (tmp_path / "records" / "world" / "complex-dura" / "ranks.parquet").exists()
    assert (
        tmp_path / "runs" / "paper" / "world" / "complex-dura" / "seed-0" / "weights.safetensors"
    ).exists()
    [table] = run_paper(*words, "--json").json
    assert table["rows"][1]["measured"]["mrr"]["sd"] == 0

    record = tmp_path / "records" / "world" / "complex-dura" / "record.json"
    record.write_text("[]")
    refused = run_paper(*words)
    assert refused.code == 2
    assert "is not a record in the current format" in refused.err.replace("\n", " ")


def test_a_tree_with_uncommitted_changes_trains_nothing(run_paper, recipes, tmp_path, monkeypatch):
    monkeypatch.setenv("DUALKG_COMMIT", "0123456789ab-dirty")
    app.command("tiny")(table_command(TINY))
    for words in (("tiny", "--dataset", "world"), ("duality", "--dataset", "world")):
        refused = run_paper(*words, "--records", tmp_path / "records")
        assert refused.code == 2
        assert "uncommitted changes (0123456789ab-dirty)" in refused.err
    assert not (tmp_path / "runs").exists()


def test_a_run_is_recorded_and_its_sparsity_and_nuclear_norm_are_shown(
    run_paper, recipes, tmp_path
):
    kg.train_recipe(
        kg.load_recipe(recipes / "world" / "complex-dura.toml"), out=tmp_path / "run", device="cpu"
    )
    words = ("record", tmp_path / "run", "--name", "world/mine", "--records", tmp_path / "records")
    assert run_paper(*words).code == 0
    page = (tmp_path / "records" / "RESULTS.md").read_text(encoding="utf-8")
    assert "[world/mine](world/mine/recipe.toml)" in page

    points = run_paper("sparsity-curve", "run", "--shares", "0, 0.5", "--json").json
    assert [point["share"] for point in points] == [0, 0.5]
    assert "95.0%" in run_paper("sparsity-curve", "run").out
    bounds = run_paper("nuclear-norm", "run", "--plain", 0.5, "--mapped", 1.5, "--json").json
    assert bounds["trained"]["bound"] > bounds["rebalanced"]["bound"]
    assert bounds["rebalanced"]["bound"] == pytest.approx(bounds["trained"]["components"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (
            ("main", "--dataset", "FB15"),
            "No graph of these tables is named 'FB15'. Did you mean 'FB15k-237'?",
        ),
        (("main", "--seeds", "0"), "--seeds"),
        (("figure1", "--seeds", "2"), "the study figure1 uses one seed; 2 was given."),
        (("record", "nowhere", "--name", "x"), "nowhere does not exist"),
        (("nuclear-norm", "nowhere"), "nowhere does not exist"),
    ],
)
def test_wrong_requests_are_answered_with_a_sentence(run_paper, words, sentence):
    shown = run_paper(*words)
    assert shown.code == 2
    assert sentence in shown.err
