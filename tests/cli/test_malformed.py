"""Malformed inputs: a command that reads them ends in a short sentence that names the file."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import dualkg as kg
from dualkg.errors import MAX_SENTENCE, DualkgError
from dualkg.files import write_json
from dualkg.inference.decisions import DecisionStore, InvalidDecision, UnreadableDecisions
from dualkg.inference.index_build import build_index, save_index
from dualkg.training.checkpoint import load_tensors, save_tensors
from dualkg.training.run import RunFolder
from tests.conftest import graph_of

DEEP = "[" * 100_000
QUERY = ["--head", "e1", "--relation", "r1"]
SMALL = ["--no-tune", "--epochs", "1", "--dim", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run, the same interrupted, and an index of it."""
    home = tmp_path_factory.mktemp("made")
    triples = [(number % 20, number % 2, number * 7 % 19) for number in range(60)]
    graph = graph_of(triples, triples[:5], triples[5:15], num_entities=20)
    recipe = kg.Recipe().with_changes(
        {"training.epochs": 2, "training.checkpoint_seconds": 0.0, "model.dim": 2}
    )

    def stop(event: object) -> None:
        if event.epoch == 2:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kg.train_recipe(recipe, graph=graph, out=home / "stopped", on_progress=stop)
    run = kg.train_recipe(recipe, graph=graph, out=home / "run")
    save_index(build_index(run.model, run.graph, kind="ivf", recall=0.1), home / "ivf")
    folder = RunFolder(home / "run")
    write_json(
        folder.report, folder.saved_reports()
    )  # by somebody who left out the checksums of other files
    return home


@pytest.fixture
def refused(made: Path, tmp_path: Path, monkeypatch, run_cli) -> Callable[..., str]:
    """Run a command beside copies of all that was made; it must end in a sentence, which is
    returned.
    """
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int | None = 2) -> str:
        result = run_cli(*words)
        assert result.code == code or (code is None and result.code in (1, 2)), result.err
        sentence = result.err.strip().splitlines()[-1]
        assert sentence.startswith("dualkg: ")
        assert len(sentence) <= MAX_SENTENCE + 20
        return sentence

    return run


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "x = " + "[" * 2000 + "]" * 2000,
            "mine.toml is no recipe: its tables or lists are nested too deeply",
        ),
        (
            "x = " + "[" * 30 + "]" * 30,
            "mine.toml is no recipe: its tables or lists are nested too deeply",
        ),
        ("[training]\nepochs = " + "9" * 5000, "mine.toml is not TOML: Exceeds the limit"),
        (
            f"[training]\nbatch_size = {2**63}",
            f"mine.toml: training.batch_size should be less than {2**31}; {2**63} was given.",
        ),
        (
            f"[training]\nepochs = {2**70}",
            f"mine.toml: training.epochs should be less than {2**31}; {2**70} was given.",
        ),
        (
            f'[model]\nname = "{"x" * 10**6}"',
            "model.name should be at most 4,096 characters long; 'xxx",
        ),
        ("[loss]\nname = 3.5", "mine.toml: loss: name should be text; it is 3.5"),
        ('[regularizer]\nname = "DURA"', "DURA needs a weight, the paper's λ: set --weight."),
    ],
    ids=[
        "brackets",
        "some brackets",
        "digits",
        "batch size",
        "epochs",
        "megabyte",
        "loss",
        "weight",
    ],
)
def test_recipes(refused, text: str, reason: str) -> None:
    Path("mine.toml").write_text(text)
    assert reason in refused("train", "mine.toml")


@pytest.mark.parametrize(
    ("value", "expected", "quoted"),
    [
        ("9" * 5000, "at most 4,096 characters long; ", "'999"),
        ("[" * 3000, "a valid integer", "'[[["),
        (str(2**63), f"less than {2**31}; ", f"{2**63} was given"),
    ],
    ids=["digits", "brackets", "large"],
)
def test_values_of_set(refused, value: str, expected: str, quoted: str) -> None:
    sentence = refused("train", "world", *SMALL, "--set", f"training.batch_size={value}")
    assert sentence.startswith(f"dualkg: --batch-size should be {expected}")
    assert quoted in sentence


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000, "/".join(["x" * 200] * 40)]
)
@pytest.mark.parametrize("suffix", ["", ".tsv", ".toml", ".zip"])
def test_paths(refused, name: str, suffix: str) -> None:
    assert name.partition("\0")[0][:5] in refused("train", name + suffix, code=None)
    assert refused("inspect", name + suffix)
    assert refused("train", "world", "--labels", name + suffix)


def test_long_paths_of_runs_are_named(refused) -> None:
    assert "xxx" in refused("evaluate", "x" * 5000, code=1)
    assert "xxx" in refused("export", "run", "--out", "x" * 5000, code=1)


def test_names_of_columns_that_are_not_utf8(refused) -> None:
    columns = {name: pa.array(["a", "b"]) for name in ("head", "relation", "tail")}
    pq.write_table(pa.table(columns), "mine.parquet", store_schema=False)
    path = Path("mine.parquet")
    path.write_bytes(path.read_bytes().replace(b"tail", b"tai\xe1"))
    assert "dualkg: mine.parquet is damaged, cut short, " in refused("inspect", "mine.parquet")


@pytest.mark.parametrize("change", ["cut", "empty", "other", "column", "ranks"])
def test_ranks(refused, change: str) -> None:
    path = Path("run/ranks-test.parquet")
    table = pq.read_table(path)
    if change in ("column", "ranks", "other"):
        ranks = pa.array(np.zeros(len(table), np.int32))
        table = table.drop(["head"]) if change == "column" else table.drop(["optimistic"])
        pq.write_table(
            table.append_column("optimistic", ranks) if change == "ranks" else table, path
        )
    else:
        path.write_bytes(path.read_bytes()[:-100] if change == "cut" else b"")
    assert "ranks-test.parquet" in refused("compare", "run", "run")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}\n", b'{"head": "\xff"}', DEEP.encode(), b"3", None]
)
def test_decisions(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "decisions.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UnreadableDecisions if content is None else InvalidDecision) as caught:
        DecisionStore(path).load()
    assert caught.value.path == path
    if content is not None:
        assert caught.value.line == 1


@pytest.mark.parametrize(
    "about", ["[]", "3", "null", DEEP, '{"shapes": 3}', '{"shapes": [1]}', '{"shapes": {"x": 3}}']
)
def test_headers_of_tensors(refused, about: str) -> None:
    tables = {"model/entities": np.zeros((2, 2), np.float32)}
    save_file(tables, "run/weights.safetensors", metadata={"about": about})
    assert "run/weights.safetensors" in refused("evaluate", "run")
    save_file(tables, "stopped/checkpoint.safetensors", metadata={"about": about})
    assert "stopped/checkpoint.safetensors" in refused("resume", "stopped")


@pytest.mark.parametrize(
    "progress",
    [3, {"epoch": -1}, {"epoch": "x"}, {"step": 10**9}, {"history": [{}]}, {"history": 1}],
)
def test_progress_of_a_checkpoint(refused, progress: object) -> None:
    path = Path("stopped/checkpoint.safetensors")
    groups, about = load_tensors(path)
    about["progress"] = (
        {**about["progress"], **progress} if isinstance(progress, dict) and progress else progress
    )
    save_tensors(groups, path, about=about)
    assert str(path) in refused("resume", "stopped")


@pytest.mark.parametrize("place", range(0, 200, 25))
def test_flipped_bits_of_an_index(refused, place: int) -> None:
    path = next(Path("ivf").rglob("*.faiss"))
    content = bytearray(path.read_bytes())
    content[place] ^= 0x41
    path.write_bytes(content)
    assert "The index ivf is damaged" in refused("predict", "run", *QUERY, "--index", "ivf")


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json"])
@pytest.mark.parametrize("content", [DEEP, '[{"head": ' + DEEP, "[[1" + "0" * 5000 + ", 2, 3]]"])
def test_nested_json(refused, name: str, content: str) -> None:
    Path(name).write_text(content)
    assert name in refused("inspect", name)
    Path("mine.jsonl").write_text(content)
    assert "mine.jsonl" in refused("evaluate", "run", "--candidates", "mine.jsonl")


JSON_FILES = [
    "report.json",
    "environment.json",
    "history.json",
    "costs.json",
    "calibration.json",
    "graph/graph.json",
]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", [DEEP, "[3]", "null", '{"a": 1}'])
def test_json_of_a_run(refused, run_cli, name: str, content: str) -> None:
    """A file of the wrong shape is refused, or does not matter to the command."""
    Path("run", name).write_text(content)
    for words in (["predict", "run", *QUERY], ["compare", "run", "run", "--samples", 100]):
        result = run_cli(*words)
        assert result.code in (0, 2), result.err + result.out
        if result.code:
            assert Path(name).stem in result.err + result.out


FILES = [
    "recipe.toml",
    "weights.safetensors",
    "ranks-test.parquet",
    "graph/train.parquet",
    "graph/entities.parquet",
]


@pytest.mark.parametrize("name", [*FILES, *JSON_FILES])
def test_a_folder_in_the_place_of_a_file(
    made: Path, tmp_path: Path, monkeypatch, run_cli, name: str
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    path = Path("run", name)
    path.unlink(missing_ok=True)
    path.mkdir()
    for words in (["evaluate", "run"], ["compare", "run", "run", "--samples", 100]):
        result = run_cli(*words)
        assert "Traceback" not in result.out
        assert result.code in (0, 1, 2)
        if result.code:
            assert Path(name).name.partition(".")[0] in result.err + result.out


@pytest.mark.parametrize(
    "content", ['{"other": {"options": {}}}', '{"mlflow": {}}', '{"mlflow": {"options": {"x": 1}}}']
)
def test_trackers(refused, content: str) -> None:
    Path("stopped/tracking.json").write_text(content)
    assert "stopped/tracking.json is damaged" in refused("resume", "stopped")


def test_the_name_of_a_graph_is_text(refused) -> None:
    path = Path("run/graph/graph.json")
    for change in (
        {"name": ["a"]},
        {"notes": {"duplicates": {"train": "x"}, "overlaps": {}, "remarks": []}},
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert "The graph of the run run cannot be read" in refused("evaluate", "run")


def test_numbers_without_end(refused) -> None:
    Path("mine.jsonl").write_text('{"head": 1' + "0" * 30 + ', "relation": "r", "tail": "t"}')
    assert "mine.jsonl, column head, should be names" in refused(
        "evaluate", "run", "--candidates", "mine.jsonl"
    )
    Path("stopped/environment.json").write_text('{"threads": {}}')
    RunFolder("stopped").checkpoint.write_bytes(b"")
    assert "checkpoint.safetensors" in refused("resume", "stopped")


def test_ids_outside_of_a_graph(refused) -> None:
    path = Path("run/graph/train.parquet")
    table = pq.read_table(path)
    for bad in (10**6, -1):
        pq.write_table(table.set_column(0, "head", pa.array([bad] * len(table), pa.int32())), path)
        assert "graph/train.parquet is damaged: its heads should be ids from 0 to" in refused(
            "evaluate", "run"
        )


def test_a_sentence_is_short_whatever_it_quotes() -> None:
    assert str(DualkgError("ordinary words")) == "ordinary words"
    one = str(DualkgError(f"before {'x' * 10**6} after"))
    assert one.startswith("before xxx")
    assert one.endswith("xxx after")
    assert "…" in one
    assert len(str(DualkgError("many words " * 10**5))) <= MAX_SENTENCE


def test_few_bytes_that_stand_for_many_rows(refused) -> None:
    column = pa.DictionaryArray.from_arrays(
        pa.array(bytes(2_000_000), pa.uint8()).cast(pa.int32()), pa.array(["e1"])
    )
    np.savez_compressed("mine.npz", head=np.zeros(20 << 20, np.uint8))
    sentence = refused("evaluate", "run", "--candidates", "mine.npz")
    assert "mine.npz cannot be read as arrays: they expand to 20 MiB" in sentence
    table = pa.table(dict.fromkeys(("head", "relation", "tail"), column))
    for name in ("mine.parquet", "run/ranks-test.parquet", "run/graph/train.parquet"):
        pq.write_table(table, name)
        words = {"mine.parquet": ["evaluate", "run", "--candidates", name]}.get(
            name, ["compare", "run", "run"]
        )
        assert f"{name} expands to more than 16 MiB" in refused(*words)


@pytest.mark.parametrize(
    "text",
    [
        '[model]\nname = "' + "x" * 1_000_000 + '"\n',
        '[data]\ngraph = "' + "x" * 5000 + '"\n',
        "[model]\n" + "a" * 40_000 + " = 1\n",
        ".".join(["a"] * 20_000) + " = 1\n",
        "[" + " . ".join(['"a\\"b"'] * 8000) + "]\n",
        "x = {" + ".".join(["a"] * 20_000) + " = 1}\n",
        "a" * 40_000 + "\n",
        '"' * 40_000,
    ],
)
def test_long_texts_and_keys_of_a_recipe_are_refused_at_once(refused, tmp_path, text):
    """`tomllib` takes 40 s for a key of 20,000 parts; the test has 20 s, also on a busy machine."""
    (tmp_path / "long.toml").write_text(text)
    started = time.process_time()
    refused("train", "long.toml", *SMALL)
    assert time.process_time() - started < 20
    sentences = refused("train", "long.toml", "--out", "other")
    assert len(sentences) < 2000
