"""The commands, as users type them: what they print, and how they refuse wrong requests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dualkg as kg


@pytest.fixture
def dualkg(run_cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return run_cli


QUICK = ("--dim", 8, "--epochs", 1, "--threads", 1, "--no-tune")


@pytest.fixture(scope="module")
def world_run(tmp_path_factory) -> Path:
    """A run on world, trained once for all tests that only read it."""
    folder = tmp_path_factory.mktemp("cli") / "world"
    recipe = kg.Recipe().with_changes(
        {"data.graph": "world", "model.dim": 16, "training.epochs": 3}
    )
    kg.train_recipe(recipe, out=folder)
    return folder


def test_help_fits_a_screen_and_names_every_command(dualkg):
    result = dualkg("--help")
    assert result.code == 0
    assert len(result.out.splitlines()) <= 40
    for command in (
        "demo",
        "datasets",
        "inspect",
        "train",
        "resume",
        "tune",
        "evaluate",
        "predict",
        "export",
    ):
        assert f" {command} " in result.out


def test_a_header_and_a_delimiter_on_the_command_line(dualkg):
    rows = [
        ("von", "kante", "nach"),
        *((f"e{h}", f"r{(h + t) % 2}", f"e{t}") for h in range(9) for t in range(h)),
    ]
    Path("mine.dat").write_text("".join("|".join(row) + "\n" for row in rows))
    result = dualkg("train", "mine.dat", "--delimiter", "|", "--no-tune", *QUICK)
    assert result.code == 0
    assert (
        "(von, kante, nach) was read as a header: its names occur nowhere else in their columns."
        in result.err
    )
    assert "If it is a triple, use --columns 1,2,3." in result.err
    assert 'delimiter = "|"' in Path("runs/mine.dat/recipe.toml").read_text()


def test_version(dualkg):
    assert dualkg("--version").out.strip() == kg.__version__


@pytest.mark.slow
def test_the_garbage_collector_rarely_runs():
    """What a command imports stays as long as the process; collecting it takes most of a second."""
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\n"
        "searched = []; gc.callbacks.append(lambda phase, about: searched.append(phase))\n"
        "atexit.register(lambda: print(gc.isenabled(), len(searched)))\nfrom dualkg.cli.main "
        "import main; searched.clear(); sys.argv = ['dualkg', 'evaluate', 'nowhere']; main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "nowhere" in found.stderr
    enabled, times, frozen = found.stdout.split()
    assert (enabled, frozen) == ("True", "True")
    assert int(times) < 20


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
@pytest.mark.parametrize(
    "program",
    ["sys.argv[1:] = ['--version']; from dualkg.cli import main; main()", "import dualkg"],
)
def test_idle_threads_of_openmp_sleep_soon_unless_the_environment_says_otherwise(
    given, found, program
):
    code = (
        "import atexit, os, sys; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
        f"{program}"
    )
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == found


@pytest.mark.parametrize(("given", "found"), [({}, "16"), ({"OPENBLAS_THREAD_TIMEOUT": "9"}, "9")])
def test_idle_threads_of_numpy_sleep_soon_unless_the_environment_says_otherwise(given, found):
    plain = dict(os.environ)
    plain.pop("OPENBLAS_THREAD_TIMEOUT", None)
    code = "import os, dualkg; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "count"),
    [("import dualkg, torch", "10000"), ("import torch, dualkg", "300000")],
)
def test_openmp_reads_how_long_to_wait_when_torch_is_loaded(program, count):
    """The page on training says so."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}
    environment.pop("GOMP_SPINCOUNT", None)
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    counts = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if not counts:
        pytest.skip("this torch has another OpenMP than that of GCC")
    assert counts == [count]


def test_datasets(dualkg):
    result = dualkg("datasets")
    assert result.code == 0
    for name in ("world", "WN18RR", "FB15k-237", "YAGO3-10", "Countries-S3", "CoDEx-L"):
        assert name in result.out
    rows = {row["name"]: row for row in dualkg("datasets", "--json").json["datasets"]}
    assert rows["WN18RR"]["test"] == 3134
    assert rows["world"]["from"] == "bundled"
    assert all(row["licence"] for row in rows.values())


def test_datasets_lists_the_graphs_of_the_data_folder(dualkg, data_folder):
    rows = {row["name"]: row for row in dualkg("datasets", "--json").json["datasets"]}
    assert rows["WN18RR"]["from"] == str(data_folder)
    assert rows["YAGO3-10-quarter"]["about"] == "not in the catalogue"


def write_triples(path: Path, *, separator: str = "\t", n: int = 60) -> None:
    rows = [(f"thing{i}", kind, f"{kind}{i % 4}") for kind in ("colour", "shape") for i in range(n)]
    path.write_text("\n".join(separator.join(row) for row in rows), encoding="utf-8")


def test_a_file_of_triples_without_options(dualkg, tmp_path):
    write_triples(tmp_path / "mine.tsv")
    result = dualkg("train", "mine.tsv")
    assert result.code == 0
    assert "mine test" in result.out
    assert "Saved to runs/mine" in result.err
    result = dualkg("predict", "runs/mine", "--head", "thing7", "--relation", "shape", "--top", 2)
    assert result.code == 0
    assert "shape3" in result.out


def test_columns_by_number_from_a_csv(dualkg, tmp_path):
    rows = [(f"shape{(i + j) % 4}", "x", f"thing{i}", "has") for i in range(30) for j in range(3)]
    (tmp_path / "mine.csv").write_text("\n".join(",".join(row) for row in rows))
    result = dualkg(
        "train", "mine.csv", "--columns", "3,4,1", "--split", "70/15/15", *QUICK, "--json"
    )
    assert result.code == 0
    assert result.json["reports"]["test"]["by_relation"].keys() == {"has"}


def test_options_of_the_usual_choices_in_any_case(dualkg, tmp_path):
    write_triples(tmp_path / "mine.tsv")
    options = (
        "--model",
        "distmult",
        "--loss",
        "1-vs-all",
        "--regularizer",
        "frobenius",
        "--optimizer",
        "adam",
    )
    more = ("--lr", 0.02, "--batch-size", 32, "--patience", 2, "--dim", 4, "--epochs", 2)
    assert dualkg("train", "mine.tsv", "--no-tune", *options, *more).code == 0
    recipe = kg.load_recipe(tmp_path / "runs" / "mine" / "recipe.toml")
    assert (recipe.model.name, recipe.loss, recipe.regularizer.name) == (
        "DistMult",
        kg.OneVsAll(),
        "Frobenius",
    )
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate, recipe.training.batch_size) == (
        "Adam",
        0.02,
        32,
    )
    assert recipe.validation == kg.Validation(every=1, patience=2, keep="best")
    assert (
        dualkg("train", "mine.tsv", "--no-tune", "--loss", "KvsAll", *QUICK, "--out", "runs/k").code
        == 0
    )


def test_a_recipe_with_changes_and_seeds(dualkg, tmp_path):
    (tmp_path / "quick.toml").write_text('[model]\nname = "CP"\ndim = 4\n[training]\nepochs = 9\n')
    result = dualkg(
        "train", "quick.toml", "--set", "training.epochs=1", "--seeds", 2, "--seed", 3, "--json"
    )
    assert result.code == 0
    assert result.json["seeds"] == [3, 4]
    assert result.json["mrr"]["sd"] > 0
    assert (tmp_path / "runs/quick/seed-4/report.json").exists()
    shown = dualkg("train", "quick.toml", "--set", "training.epochs=1", "--seeds", 2, "--seed", 3)
    assert "mean ± sd" in shown.out
    assert "Evaluate the ensemble of the seeds:\n  dualkg evaluate runs/quick" in shown.err
    left_out = (
        "regularizer.name (none), optimizer.learning_rate (0.1), optimizer.schedule (constant)"
    )
    assert f"quick.toml leaves out {left_out}" in shown.err
    assert "Without a recipe the default is DURA, 0.3, linear" in shown.err
    refused = dualkg("resume", "runs/quick")
    assert (refused.code, "finished seeds are not repeated" in refused.err) == (2, True)
    whole = dualkg("train", "runs/quick/seed-3/recipe.toml", "--out", "runs/again")
    assert "leaves out" not in whole.err


def test_a_shipped_recipe_by_its_name(dualkg, tmp_path, monkeypatch):
    names = [row["name"] for row in dualkg("datasets", "--json").json["recipes"]]
    assert {"fb15k-237/complex-dura", "umls/complex-dura"} <= set(names)
    assert "umls/complex-dura" in dualkg("datasets").out
    write_triples(tmp_path / "mine.tsv")
    changes = (
        "--set",
        "data.graph=mine.tsv",
        "--set",
        "training.epochs=1",
        "--set",
        "training.batch_size=10",
    )
    assert dualkg("train", "UMLS/Complex-DURA", *changes, "--dim", 2).code == 0
    assert (tmp_path / "runs" / "umls-complex-dura" / "report.json").exists()
    typo = dualkg("train", "umls/complex-dra")
    assert typo.code == 2
    assert (
        "No file, folder or recipe is named 'umls/complex-dra'. Did you mean 'umls/complex-dura'"
        in typo.err
    )


def test_a_file_takes_precedence_over_a_recipe_of_the_same_name(dualkg, tmp_path):
    (tmp_path / "umls").mkdir()
    write_triples(tmp_path / "umls" / "complex-dura")
    result = dualkg("train", "umls/complex-dura", *QUICK)
    assert result.code == 0
    assert "triples of complex-dura" in result.err


def test_tables_keep_names_and_numbers_on_a_narrow_terminal(dualkg, world_run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = dualkg("evaluate", world_run).out.splitlines()
    assert lines[0].split() == ["MRR", "H@1", "H@3", "H@10", "MR", "AMR", "AMRI", "queries"]
    assert lines[1].startswith("world test")
    assert lines[1].endswith("1,354")


def test_evaluate_equals_the_report_of_the_training(dualkg, world_run):
    result = dualkg("evaluate", world_run, "--json").json
    assert (
        result["metrics"] == json.loads((world_run / "report.json").read_text())["test"]["metrics"]
    )


@pytest.mark.parametrize(
    ("by", "row"), [("relation", "celebrates"), ("direction", "head"), ("cardinality", "N-N")]
)
def test_evaluate_by(dualkg, world_run, by, row):
    assert row in dualkg("evaluate", world_run, "--split", "valid", "--by", by).out


def test_predict_in_all_directions(dualkg, world_run):
    tails = dualkg(
        "predict", world_run, "--head", "France", "--relation", "borders", "--top", 5, "--json"
    ).json
    assert len(tails["predictions"]) == 5
    assert all(answer["known"] == (answer["split"] is not None) for answer in tails["predictions"])
    new = dualkg(
        "predict", world_run, "--head", "France", "--relation", "borders", "--new", "--json"
    ).json
    assert not any(answer["known"] for answer in new["predictions"])
    heads = dualkg("predict", world_run, "--relation", "currency", "--tail", "Euro")
    assert "(?, currency, Euro)" in heads.out
    between = dualkg(
        "predict", world_run, "--head", "France", "--tail", "Paris", "--top", 15, "--json"
    ).json
    assert {answer["name"]: answer["split"] for answer in between["predictions"]}[
        "capital"
    ] == "train"
    one = dualkg(
        "predict",
        world_run,
        "--head",
        "France",
        "--relation",
        "capital",
        "--tail",
        "Paris",
        "--json",
    ).json
    assert one["predictions"][0]["split"] == "train"


@pytest.mark.parametrize("given", ["--head", "--tail"])
def test_the_entity_of_a_query_is_not_predicted(dualkg, world_run, given):
    """Although models score it highest for a relation that is nearly symmetric."""
    predictor = kg.load_run(world_run).predictor(loops=True)
    command = ["predict", world_run, given, "France", "--relation", "borders"]
    if given == "--head":
        scored = predictor.tails("France", "borders", k=6)
    else:
        scored = predictor.heads("borders", "France", k=6)
    result = dualkg(*command, "--top", 5, "--json").json["predictions"]
    names = [answer.name for answer in scored]
    assert "France" in names
    assert [answer["name"] for answer in result] == [name for name in names if name != "France"]


def test_similar(dualkg, world_run):
    result = dualkg("predict", world_run, "--similar", "France", "--top", 3, "--json").json
    assert len(result) == 3
    assert "France" not in {answer["name"] for answer in result}


@pytest.mark.parametrize("format", ["numpy", "tsv", "safetensors"])
def test_export(dualkg, world_run, tmp_path, format):
    result = dualkg("export", world_run, "--out", tmp_path / "out", "--format", format)
    assert result.code == 0
    assert all(Path(line).exists() for line in result.out.split())
    if format == "numpy":
        assert np.load(tmp_path / "out" / "entities.npy").shape[1] == 32


def test_special_characters_are_printed_unchanged(dualkg, tmp_path):
    rows = [f"back\\{i}\t[red]\tb[/]{j}\n" for i in range(6) for j in range(6)]
    (tmp_path / "mine.tsv").write_text("".join(rows))
    result = dualkg("train", "mine.tsv", *QUICK, "--out", "runs/my [odd] one")
    assert result.code == 0
    assert "Saved to runs/my [odd] one." in result.err
    assert "'runs/my [odd] one'" in result.err
    result = dualkg("predict", "runs/my [odd] one", "--head", "back\\1", "--relation", "[red]")
    assert "(back\\1, [red], ?)" in result.out
    assert "b[/]" in result.out
