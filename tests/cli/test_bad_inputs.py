"""Wrong requests and damaged files: an exit status and a short sentence, and never a traceback.

`run_cli` fails if a traceback is printed.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import dualkg as kg
from dualkg.errors import MAX_SENTENCE
from dualkg.files import write_json
from dualkg.training.checkpoint import load_tensors, save_tensors
from dualkg.training.run_folder import RunFolder
from tests.conftest import CommandResult, graph_of

Command = Callable[..., CommandResult]
DEEP = "[" * 100_000
NOT_TEXT = "o\udcffx"  # the byte 0xff, as Python reads it from a command line
QUICK = ["--no-tune", "--epochs", "1", "--dim", "2", "--threads", "1"]
QUERY = ["predict", "run", "--head", "e1", "--relation", "r1"]
NO_RUN = "nowhere does not exist. Runs nearby: both, other, run, stopped, untested."
SPLITS = "'train', 'valid', 'test'"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, one that was interrupted, an ensemble, and files that cannot be read."""
    home = tmp_path_factory.mktemp("made")
    triples = [(number % 20, number % 2, number * 7 % 19) for number in range(60)]
    graph = graph_of(triples, triples[:5], triples[5:15], num_entities=20)
    untested = graph_of(triples, triples[:5], num_entities=20)
    changes = {"training.epochs": 2, "training.checkpoint_seconds": 0.0, "model.dim": 2}
    recipe = kg.Recipe().with_changes(changes)

    def stop(event: Any) -> None:
        if event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kg.train_recipe(recipe, graph=graph, out=home / "stopped", on_progress=stop)
    run = kg.train_recipe(recipe, graph=graph, out=home / "run")
    kg.train_recipe(recipe, graph=untested, out=home / "untested")
    other = graph_of(triples[:50], triples[:5], triples[5:15], num_entities=20)
    kg.train_recipe(recipe, graph=other, out=home / "other")
    kg.Ensemble([run, home / "run"], weights="equal").save(home / "both")
    folder = RunFolder(home / "run")
    write_json(folder.report, folder.saved_reports())  # without checksums of the other files

    lines = [f"a{number % 11}\tr\tb{number % 7}\n" for number in range(77)]
    texts: dict[str, str | bytes] = {
        "good.tsv": "".join(lines),
        "columns.tsv": "a\tr\tb\nb\tr\n",
        "four.txt": "a\tr\tb\tc\n",
        "bars.txt": "a|r|b\n",
        "empty.tsv": "a\tr\tb\nb\t\tc\n",
        "utf8.tsv": b"a\tr\tb\nb\tr\t\xff\n",
        "nothing.tsv": "",
        "cut.tar.xz": b"\xfd7zXZ\x00\x00",
        "bad.toml": "[training]\nepoch = 3\n",
        "queries.tsv": "e1\tr0\t?\n",
    }
    for name, text in texts.items():
        (home / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (home / "half").mkdir()
    (home / "half" / "train.tsv").write_text("a\tr\tb\n")
    return home


@pytest.fixture
def refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Command) -> Any:
    """Run a command beside copies of all that was made; return the sentence that it ends in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int | None = 2) -> str:
        result = run_cli(*words)
        assert result.code == code or (code is None and result.code in (1, 2)), result.err
        assert result.out == ""
        assert len(result.err.strip().splitlines()[-1]) <= MAX_SENTENCE + 20
        return result.err

    return run


# -- requests ----------------------------------------------------------------

# The words of a command, and a part of the sentence that refuses it.
REQUESTS: list[tuple[list[object], str]] = [
    # triples
    (["train", "columns.tsv"], "columns.tsv, line 2: expected 3 columns separated by tabs, found"),
    (["train", "empty.tsv"], "empty.tsv, line 2: the relation is empty."),
    (["train", "utf8.tsv"], "utf8.tsv, line 2: the tail is not valid UTF-8 ('\\xff')."),
    (["train", "nothing.tsv"], "nothing.tsv holds no triples"),
    (["train", "cut.tar.xz"], "cut.tar.xz is damaged"),
    (["train", "half"], "half should hold train, valid and test"),
    (["train", "nowhere.tsv"], "There is no graph, file or folder 'nowhere.tsv'"),
    (["inspect", "nowhere"], "There is no graph, file or folder 'nowhere'"),
    (["train", "four.txt"], "choose three columns with --columns 1,2,3"),
    (["train", "bars.txt"], "If vertical bars separate the columns, use --delimiter pipe."),
    (["train", "bars.txt", "--delimiter", "||"], "--delimiter should be one character such as"),
    (["train", "good.tsv", "--columns", "1,1,2"], "--columns should be three columns, all diff"),
    (["train", "good.tsv", "--columns", "²,1,3"], "good.tsv has no column named '²'"),
    (["train", "good.tsv", "--split", "80/30"], "--split should be three percentages that add"),
    (["inspect", "good.tsv", "--picture", "graph.pdf"], "--picture should be a name without"),
    (["calibrate", "run", "--figure="], "--figure should be a name without a suffix"),
    # recipes and settings
    (["train", "bad.toml"], "bad.toml: training.epoch is not a setting of recipes. Did you mean"),
    (["train", "nowhere.toml"], "nowhere.toml cannot be read: No such file or directory."),
    (["train", "umls/complex-dra"], "Did you mean 'umls/complex-dura'"),
    (["train", "good.tsv", "--model", "Complx"], "No model is named 'Complx'. Did you mean 'Co"),
    (["train", "good.tsv", "--model", ":X"], "':X' cannot be imported: "),
    (["train", "good.tsv", "--regularizer", "N4"], "No regularizer is named 'N4'."),
    (["train", "good.tsv", "--model", "RESCAL", "--regularizer", "N3", *QUICK], "Use DURA or Fr"),
    (["train", "good.tsv", "--set", "training.epochs=-1"], "--epochs should be greater than or"),
    (["train", "good.tsv", "--epochs", "-3"], "--epochs should be greater than or equal to 1; -3"),
    (["train", "good.tsv", "--lr", "-1"], "--lr should be greater than 0; -1.0 was given."),
    (["train", "good.tsv", "--set", "optimizer.learning_rate=inf"], "--lr should be a finite"),
    (["train", "good.tsv", "--track", "mlfow"], "No tracker is named 'mlfow'. Did you mean"),
    (["train", "good.tsv", "--device", "mps"], "--device should be cpu, cuda or cuda:1; 'mps'"),
    (["train", "good.tsv", "--set", "data.graph=other.tsv"], "data.graph should be left out"),
    (["train", "good.tsv", "--set", "training.epoch=1"], "Did you mean 'epochs'?"),
    (["train", "good.tsv", "--set", "optimizer.lr=1"], "Did you mean 'learning_rate'?"),
    (["train", "good.tsv", "--set", "lr=1"], "Did you mean 'optimizer.learning_rate=1'?"),
    (["train", "good.tsv", "--learning-rate", "1"], "(Possible options: --lr)"),
    (["train", "good.tsv", "--dim", "2000000000"], "ComplEx with dim 2,000,000,000 needs "),
    (["train", "good.tsv", "--tune", "1m", "--no-tune"], "--tune and --no-tune exclude each other"),
    (["train", "world", "--set", f"training.batch_size={'9' * 5000}"], "--batch-size should be a"),
    (["train", "world", "--set", f"training.batch_size={2**63}"], "--batch-size should be less t"),
    (["train", "good.tsv", "--out", "run", *QUICK], "Use --overwrite, or name another with --out"),
    (["tune", "nowhere.toml"], "nowhere.toml"),
    # runs
    (["resume", "nowhere"], NO_RUN),
    (["resume", "run"], "run is finished"),
    (["evaluate", "nowhere"], NO_RUN),
    (["predict", "nowhere", "--head", "a", "--relation", "b"], NO_RUN),
    (["evaluate", "good.tsv"], "good.tsv is a file; the folder of a run was expected"),
    (["evaluate", "stopped"], "Resume it with: dualkg resume stopped"),
    (["export", "run"], "dualkg export needs either --out or --gather."),
    (["export", "run", "--gather"], "are in one file already"),
    # queries
    ([*QUERY[:2], "--head", "e99", "--relation", "r1"], "No entity is named 'e99'"),
    ([*QUERY[:2], "--head", "e1", "--relation", "r11"], "Did you mean 'r1'"),
    ([*QUERY[:2], "--head", "e1"], "A query needs at least two of --head, --relation and --tail"),
    ([*QUERY, "--top", "0"], "Invalid value for '--top': Input should be greater than or equal to"),
    ([*QUERY, "--out", "a.tsv"], "--out is for --queries"),
    ([*QUERY, "--similar", "e1"], "--similar takes an entity and --top."),
    ([*QUERY[:2], "--queries", "none.tsv"], "none.tsv is not a file; lines of head, relation and"),
    ([*QUERY, "--queries", "queries.tsv"], "--queries has the queries. Leave out --head"),
    (
        [*QUERY[:2], "--queries", "queries.tsv", "--out", "a.csv"],
        "--out should be a file that ends",
    ),
    # evaluation
    (
        ["evaluate", "run", "--by", "colour"],
        "'colour' is not one of 'relation', 'direction', 'card",
    ),
    (["evaluate", "run", "--split", "tset"], f"'tset' is not one of {SPLITS}"),
    (["evaluate", "run", "--task", "clustering"], "'clustering' is not one of 'link', 'relation'"),
    (
        ["evaluate", "run", "--task", "relation", "--by", "relation"],
        "--task relation does not take",
    ),
    (
        ["evaluate", "run", "--task", "relation", "--negatives", "x"],
        "--negatives is for --task clas",
    ),
    (["evaluate", "run", "--task", "classification", "--by", "direction"], "reported by relation"),
    (["evaluate", "run", "--task", "classification", "--hits", "3"], "--hits is for rankings"),
    (["evaluate", "run", "--task", "classification", "--negatives", "x"], "There is no file x"),
    (["evaluate", "run", "--hits", "1,x"], "--hits should be a list of whole numbers from 1"),
    (["evaluate", "run", "--hits", "0"], "--hits should be a list of whole numbers from 1"),
    (["evaluate", "run", "--candidates", "a.npz"], "a.npz is not a file; candidate lists were"),
    (["evaluate", "run", "--candidates", "a.npz", "--type-constrained"], "exclude each other"),
    (["evaluate", "run", "--candidates", "a.npz", "--queries", "5"], "exclude each other"),
    (["evaluate", "untested"], "The graph of untested has no test triples"),
    (["compare", "nowhere", "run"], "nowhere does not exist"),
    (["compare", "run"], "RUN_B"),
    (["compare", "run", "run/recipe.toml"], "run/recipe.toml is a file; the folder of a run was"),
    (["compare", "run", "other"], "run and other are both of made, but the data were not the same"),
    (["compare", "untested", "untested"], "The graph of untested has no test triples to compare."),
    (["compare", "run", "run", "--samples", 5], "should be at least 100; 5 was given."),
    (["compare", "run", "run", "--seed", -1], "should be at least 0; -1 was given."),
    (["compare", "run", "run", "--split", "tset"], f"'tset' is not one of {SPLITS}"),
    (["compare", "run", "run", "--differences", -1], "--differences"),
    # an ensemble
    (["explain", "both", "--head", "e1", "--relation", "r1", "--tail", "e2"], "no embeddings of"),
    (["index", "both", "--out", "new"], "An ensemble (2 × ComplEx) has no embeddings of its own"),
    (["export", "both", "--out", "new"], "An ensemble (2 × ComplEx) has no embeddings of its own"),
    (["extend", "both", "good.tsv", "--out", "new"], "no embeddings of its own"),
    (["resume", "both"], "both is finished"),
    # names that are no text
    (["train", "good.tsv", *QUICK, "--out", NOT_TEXT], "UTF-8"),
    (["train", NOT_TEXT, *QUICK], "dualkg: "),
    (["train", "good.tsv", *QUICK, "--set", f"model.name='{NOT_TEXT}'"], "dualkg: "),
    (["inspect", "good.tsv", "--labels", f"{NOT_TEXT}.tsv"], "dualkg: "),
    (["predict", "run", "--head", NOT_TEXT, "--relation", "r1"], "dualkg: "),
    (["complete", "run", "--top", "2", "--out", f"{NOT_TEXT}.tsv"], "UTF-8"),
    (["export", "run", "--out", NOT_TEXT], "UTF-8"),
    (["calibrate", NOT_TEXT], "dualkg: "),
]


@pytest.mark.parametrize(("words", "sentence"), REQUESTS, ids=lambda value: str(value)[:60])
def test_a_wrong_request_exits_with_2_and_writes_nothing(
    made: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Command, words: Any, sentence: str
) -> None:
    monkeypatch.chdir(made)
    before = {path.name for path in made.iterdir()}
    result = run_cli(*words)
    assert result.code == 2
    assert sentence in result.err
    assert result.out == ""
    assert {path.name for path in made.iterdir()} == before


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000, "x/" * 40 + "x"])
@pytest.mark.parametrize("suffix", ["", ".tsv", ".toml", ".zip"])
def test_impossible_paths(refused: Any, name: str, suffix: str) -> None:
    assert name.partition("\0")[0][:5] in refused("train", name + suffix, code=None)
    refused("inspect", name + suffix)
    refused("train", "world", "--labels", name + suffix)
    refused("evaluate", name + suffix, code=None)


# -- files -------------------------------------------------------------------


def parquet(**columns: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, store_schema=False)
    return bytes(sink.getvalue())


NAMES = pa.array(["a", "b"])
NOT_UTF8 = parquet(head=NAMES, relation=NAMES, tail=NAMES).replace(b"tail", b"tai\xe1")
IDS = pa.array([10**6] * 60, pa.int32())
OUTSIDE = parquet(head=IDS, relation=IDS, tail=IDS)
# A file, what it holds, a command that reads it, and a part of the sentence that refuses it.
FILES: list[tuple[str, str | bytes, list[str], str]] = [
    ("a.toml", "x = " + "[" * 2000, ["train", "a.toml"], "a.toml is not TOML"),
    ("a.toml", "[training]\nepochs = " + "9" * 5000, ["train", "a.toml"], "a.toml is not TOML"),
    (
        "a.toml",
        f"[training]\nepochs = {2**70}",
        ["train", "a.toml"],
        f"a.toml: training.epochs should be less than {2**31}; {2**70} was given.",
    ),
    ("a.toml", f'[model]\nname = "{"x" * 10**5}"', ["train", "a.toml"], "No model is named 'xxx"),
    ("a.toml", "[loss]\nname = 3.5", ["train", "a.toml"], "loss: name should be text; it is 3.5"),
    ("a.toml", '[regularizer]\nname = "DURA"', ["train", "a.toml"], "DURA needs a weight"),
    ("a.toml", "[model]\n" + "a" * 40_000 + " = 1\n", ["train", "a.toml"], "a.toml"),
    ("a.toml", ".".join(["a"] * 2000) + " = 1\n", ["train", "a.toml"], "a.toml"),
    ("a.toml", '"' * 40_000, ["train", "a.toml"], "a.toml"),
    ("a.toml", b"\xff\xfe", ["tune", "a.toml"], "a.toml"),
    ("a.parquet", NOT_UTF8, ["inspect", "a.parquet"], "a.parquet is damaged, cut short"),
    ("a.parquet", NOT_UTF8[:-100], ["inspect", "a.parquet"], "a.parquet"),
    ("a.json", DEEP, ["inspect", "a.json"], "a.json"),
    ("a.jsonl", '[{"head": ' + DEEP, ["inspect", "a.jsonl"], "a.jsonl"),
    ("a.jsonl", DEEP, ["evaluate", "run", "--candidates", "a.jsonl"], "a.jsonl"),
    (
        "a.jsonl",
        '{"head": 1' + "0" * 30 + ', "relation": "r", "tail": "t"}',
        ["evaluate", "run", "--candidates", "a.jsonl"],
        "a.jsonl, column head, should be names",
    ),
    ("q.tsv", "e1\tr0\t?\ne99\tr0\t?\n", [*QUERY[:2], "--queries", "q.tsv"], "Line 2: No entity"),
    ("q.tsv", "e1 r0 ?\n" * 9, [*QUERY[:2], "--queries", "q.tsv"], "Later lines were not read."),
    ("q.tsv", b"e1\tr0\t\xff", [*QUERY[:2], "--queries", "q.tsv"], "It is not valid UTF-8."),
    ("run/recipe.toml", "3", QUERY, "recipe.toml"),
    ("run/weights.safetensors", b"", ["evaluate", "run"], "weights.safetensors"),
    ("run/weights.safetensors", b"\xff" * 99, ["evaluate", "run"], "weights.safetensors"),
    ("run/report.json", DEEP, ["compare", "run", "run"], "report.json"),
    ("run/report.json", "[3]", QUERY, "report.json"),
    ("run/calibration.json", "null", QUERY, "calibration.json"),
    ("run/graph/graph.json", '{"a": 1}', QUERY, "graph"),
    ("run/graph/train.parquet", OUTSIDE, ["evaluate", "run"], "its heads should be ids from 0"),
    ("run/graph/train.parquet", b"", ["evaluate", "run"], "graph"),
    ("run/ranks-test.parquet", b"", ["compare", "run", "run"], "ranks-test.parquet"),
    ("run/ranks-test.parquet", NOT_UTF8, ["compare", "run", "run"], "ranks-test.parquet"),
    ("stopped/checkpoint.safetensors", b"", ["resume", "stopped"], "checkpoint.safetensors"),
    ("stopped/tracking.json", '{"mlflow": {}}', ["resume", "stopped"], "tracking.json is damaged"),
]


@pytest.mark.parametrize(
    ("name", "content", "words", "sentence"),
    FILES,
    ids=[f"{row[0]}-{row[3][:30]}" for row in FILES],
)
def test_a_damaged_file_is_named(
    refused: Any, name: str, content: str | bytes, words: list[str], sentence: str
) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert sentence in refused(*words)


@pytest.mark.parametrize("about", ["[]", "3", "null", DEEP, '{"shapes": 3}', '{"shapes": [1]}'])
def test_headers_of_tensors(refused: Any, about: str) -> None:
    tables = {"model/entities": np.zeros((2, 2), np.float32)}
    save_file(tables, "run/weights.safetensors", metadata={"about": about})
    assert "run/weights.safetensors" in refused("evaluate", "run")
    save_file(tables, "stopped/checkpoint.safetensors", metadata={"about": about})
    assert "stopped/checkpoint.safetensors" in refused("resume", "stopped")


@pytest.mark.parametrize("progress", [3, {"epoch": -1}, {"epoch": "x"}, {"history": [{}]}])
def test_progress_of_a_checkpoint(refused: Any, progress: Any) -> None:
    path = Path("stopped/checkpoint.safetensors")
    groups, about = load_tensors(path)
    is_table = isinstance(progress, dict)
    about["progress"] = {**about["progress"], **progress} if is_table else progress
    save_tensors(groups, path, about=about)
    assert str(path) in refused("resume", "stopped")


READ = ["recipe.toml", "weights.safetensors", "report.json", "calibration.json", "decisions.jsonl"]
READ += ["ranks-test.parquet", "graph/graph.json", "graph/train.parquet", "environment.json"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link"])
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_in_the_place_of_one(
    refused: Any, run_cli: Command, name: str, kind: str
) -> None:
    """A command ends at once, by a result or a sentence."""
    path = Path("run", name)
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    for words in (QUERY, ["compare", "run", "run", "--samples", 100], ["check", "run"]):
        result = run_cli(*words)
        assert result.code in (0, 1, 2)
        assert len(result.err) < 3000


def test_names_of_a_graph_that_are_no_text(refused: Any) -> None:
    path = Path("run/graph/graph.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": ["a"]}))
    assert "The graph of the run run cannot be read" in refused("evaluate", "run")


def test_an_error_of_the_system_exits_with_1(refused: Any) -> None:
    assert "good.tsv: File exists." in refused(
        "train", "world", *QUICK, "--out", "good.tsv/a", code=1
    )


def test_divergence_exits_with_1(refused: Any) -> None:
    settings = ["optimizer.name=SGD", "optimizer.learning_rate=1e12", "training.epochs=30"]
    changes = [word for setting in settings for word in ("--set", setting)]
    sentence = refused("train", "world", *QUICK, *changes, code=1)
    assert "Training diverged in epoch 1, step " in sentence
    assert "Lower the learning rate (now 1e+12), for instance to --lr 1e+11, " in sentence
