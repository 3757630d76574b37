"""Commands in two processes, each of which has half of the model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import dualkg as kg
from tests.processes import COMMAND, Finished, Started, group_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def in_two_processes(*words: object, cwd: Path) -> tuple[Finished, Finished]:
    group = group_environment(2)
    with (
        Started(COMMAND, *words, cwd=cwd, environment=group | {"RANK": "0"}) as first,
        Started(COMMAND, *words, cwd=cwd, environment=group | {"RANK": "1"}) as second,
    ):
        return first.finish(), second.finish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, and the same of two."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"model.dim": 8, "training.epochs": 2, "training.seed": 1}
    recipe = kg.training.Recipe().with_changes({"data.graph": "world", **changes})
    kg.train_recipe(recipe, device="cpu", out=folder / "one")
    (folder / "recipe.toml").write_text(recipe.as_toml())
    first, second = in_two_processes("train", "recipe.toml", "--out", "two", cwd=folder)
    assert (first.code, second.code) == (0, 0), first.err
    return folder


def data_of(folder: Path, *words: object, both: bool) -> Any:
    if both:
        first, second = in_two_processes(*words, cwd=folder)
        assert (first.code, second.code) == (0, 0), first.err + second.err
        assert (second.out, second.err) == ("", "")
    else:
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with Started(COMMAND, *words, cwd=folder, environment=environment) as alone:
            first = alone.finish()
        assert first.code == 0, first.err
    return json.loads(first.out)


@pytest.mark.parametrize("run", ["one", "two"])
def test_evaluate_has_the_ranks_of_one_process(folder: Path, run: str) -> None:
    for words in (("evaluate", run, "--split", "valid"), ("evaluate", run, "--task", "relation")):
        expected = data_of(folder, *words, "--json", both=False)
        assert data_of(folder, *words, "--json", both=True) == expected


@pytest.mark.parametrize("run", ["one", "two"])
def test_predict_has_the_predictions_of_one_process(folder: Path, run: str) -> None:
    words = ("predict", run, "--head", "France", "--relation", "capital", "--top", 5, "--json")
    expected = data_of(folder, *words, both=False)
    found = data_of(folder, *words, both=True)
    names = [prediction["tail"]["name"] for prediction in expected["predictions"]]
    assert [prediction["tail"]["name"] for prediction in found["predictions"]] == names
    for one, other in zip(expected["predictions"], found["predictions"], strict=True):
        assert other["score"] == pytest.approx(one["score"], rel=1e-5)

    (folder / "queries.tsv").write_text("France\tcapital\t?\n?\tcapital\tParis\n")
    out = ("--queries", "queries.tsv", "--top", 3, "--out")
    first, second = in_two_processes("predict", run, *out, f"{run}-both.tsv", cwd=folder)
    assert (first.code, second.code) == (0, 0), first.err
    with Started(COMMAND, "predict", run, *out, f"{run}-alone.tsv", cwd=folder) as alone:
        assert alone.finish().code == 0
    both, one = (
        [line.split("\t")[:5] for line in (folder / f"{run}-{name}.tsv").read_text().splitlines()]
        for name in ("both", "alone")
    )
    assert both == one
    assert len(both) == 7


@pytest.mark.parametrize("format", ["numpy", "safetensors"])
def test_export_has_the_files_of_one_process(folder: Path, format: str) -> None:
    """Of the run of two processes, whose files one process reads whole."""
    words = ("export", "two", "--format", format, "--json", "--out")
    alone = data_of(folder, *words, f"alone-{format}", both=False)
    both = data_of(folder, *words, f"both-{format}", both=True)
    names = [Path(path).name for path in alone]
    assert [Path(path).name for path in both] == names
    for name in names:
        if name != "manifest.json":
            content = (folder / f"both-{format}" / name).read_bytes()
            assert content == (folder / f"alone-{format}" / name).read_bytes(), name
    manifests = [
        json.loads((folder / f"{prefix}-{format}" / "manifest.json").read_text())
        for prefix in ("alone", "both")
    ]
    for manifest in manifests:
        manifest["exported_with"].pop("date")
    assert manifests[0] == manifests[1]

    first, second = in_two_processes(*words, f"both-{format}", cwd=folder)
    assert (first.code, second.code) == (2, 1), first.err
    assert "exists already" in first.err
    assert not second.err


def test_complete_has_the_triples_of_one_process(folder: Path) -> None:
    """After a calibration by two processes, which one process reads; and in the check."""
    words = ("complete", "two", "--top", 20, "--types")
    found = data_of(folder, *words, "--json", both=True)
    expected = data_of(folder, *words, "--json", both=False)
    assert [triple_of(row) for row in found["best"]] == [triple_of(row) for row in expected["best"]]
    for one, other in zip(expected["best"], found["best"], strict=True):
        assert other["probability"] == pytest.approx(one["probability"], rel=1e-3)

    first, second = in_two_processes(*words, "--out", "both.tsv", cwd=folder)
    assert (first.code, second.code) == (0, 0), first.err
    lines = (folder / "both.tsv").read_text().splitlines()
    assert [line.split("\t")[1:4] for line in lines[1:]] == [
        list(triple_of(row)) for row in expected["best"]
    ]

    words = ("complete", "two", "--check", "--top", 1000, "--json")
    found = data_of(folder, *words, both=True)
    expected = data_of(folder, *words, both=False)
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        assert found[key] == pytest.approx(numbers, rel=1e-3), key

    first, second = in_two_processes("complete", "two", "--out", "both.tsv", cwd=folder)
    assert (first.code, second.code) == (2, 1), first.err
    assert "both.tsv exists already" in first.err
    assert not second.err


@pytest.mark.parametrize("kind", ["exact", "ivf"])
def test_index_has_the_rows_of_one_process(folder: Path, kind: str) -> None:
    words = ("index", "two", "--kind", kind, "--recall", 0.8, "--json", "--out")
    alone = data_of(folder, *words, f"{kind}-alone", both=False)
    both = data_of(folder, *words, f"{kind}-both", both=True)
    table, expected = both["tables"]["tail"], alone["tables"]["tail"]
    for key in ("shape", "config", "fingerprint", "sha256"):
        assert table[key] == expected[key]
    assert table["stats"]["recall"] == expected["stats"]["recall"]
    names = [path.name for path in (folder / f"{kind}-alone" / "tail").iterdir()]
    for name in names:
        content = (folder / f"{kind}-both" / "tail" / name).read_bytes()
        assert content == (folder / f"{kind}-alone" / "tail" / name).read_bytes(), name


def triple_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["head"], row["relation"], row["tail"]


def test_what_several_processes_do_not_do_is_refused(folder: Path) -> None:
    for words, what in (
        (("calibrate", "one"), "calibrate"),
        (("evaluate", "one", "--task", "classification"), "evaluate with --task classification"),
        (("predict", "one", "--queries", "-"), "predict with --queries -"),
    ):
        first, second = in_two_processes(*words, cwd=folder)
        assert (first.code, second.code) == (2, 2), first.err
        assert f"dualkg {what}" in first.err
        assert "works in one process" in first.err
    assert not os.path.lexists(folder / "new")
