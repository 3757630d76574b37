"""Pipes, devices, sockets and sparse files in the place of any file that a command reads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import dualkg as kg
from benchmarks.torture.special_files import SPARSE_BYTES, SPECIAL, replace_by_special
from dualkg.errors import DamagedFile, FileTooLarge, NotRegularFile
from dualkg.files import (
    file_record,
    link_or_copy,
    locked,
    open_regular,
    read_json,
    read_text,
    regular_file,
)
from dualkg.files.reads import MAX_PARTS
from dualkg.inference.index_build import build_index, save_index
from dualkg.training.run import RunFolder
from tests.conftest import CommandResult, graph_of
from tests.raising import check_error, refused

QUERY = ["--head", "e1", "--relation", "r1"]
SMALL = ["--no-tune", "--epochs", "1", "--dim", "2"]
GRAPH_FILES = [
    "graph.json",
    "entities.parquet",
    "relations.parquet",
    "train.parquet",
    "valid.parquet",
    "test.parquet",
]
RUN_FILES = [
    "recipe.toml",
    "weights.safetensors",
    "report.json",
    "calibration.json",
    "costs.json",
    "history.json",
    "environment.json",
    "decisions.jsonl",
    "ranks-test.parquet",
    "map.parquet",
    "sparsity.json",
    *(f"graph/{name}" for name in GRAPH_FILES),
]
# Temporary files and locks of processes that were killed.
LEFT = [".run.lock", ".run.abcdefgh.tmp", "run/.lock", "run/.report.json.abcdefgh.tmp"]
Command = Callable[..., CommandResult]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a calibration, the same interrupted, and an index."""
    home = tmp_path_factory.mktemp("made")
    triples = [(number % 20, number % 2, number * 7 % 19) for number in range(60)]
    graph = graph_of(triples[20:], triples[:10], triples[10:20], num_entities=20)
    recipe = kg.Recipe().with_changes(
        {"training.epochs": 2, "training.checkpoint_seconds": 0.0, "model.dim": 2}
    )

    def stop(event: object) -> None:
        if event.epoch == 2:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kg.train_recipe(recipe, graph=graph, out=home / "stopped", on_progress=stop)
    run = kg.train_recipe(recipe, graph=graph, out=home / "run")
    kg.calibrate(home / "run")
    save_index(build_index(run.model, run.graph, kind="exact"), home / "index")
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_ended(result: CommandResult) -> None:
    """Every command ends, by a result or a short sentence."""
    assert result.code in (0, 1, 2)
    assert len(result.err) < 3000


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine.json"
    replace_by_special(path, kind)
    for read in (open_regular, regular_file, read_text, file_record):
        with pytest.raises(OSError, match=r"regular file|sparse|No such device|bytes, and at most"):
            read(path)
    if kind != "socket":
        with pytest.raises(DamagedFile):
            read_json(path)
    if kind != "sparse":
        with pytest.raises(OSError, match=r"regular file|No such device"):
            link_or_copy(path, tmp_path / "other.json")


def test_special_files_are_named(tmp_path: Path) -> None:
    replace_by_special(tmp_path / "a", "pipe")
    replace_by_special(tmp_path / "b", "endless")
    with refused(NotRegularFile, path=str(tmp_path / "a"), kind="a pipe") as pipe:
        open_regular(tmp_path / "a")
    assert pipe.value.strerror == "it is a pipe, not a regular file"
    with refused(NotRegularFile, kind="a device"):
        open_regular(tmp_path / "b")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_a_file_has_at_most_the_bytes_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("12345")
    assert read_text(path, max_bytes=5) == "12345"
    with pytest.raises(FileTooLarge) as caught:
        read_text(path, max_bytes=4)
    check_error(caught.value, FileTooLarge, path=path, size=5, limit=4, stored=None)
    assert caught.value.strerror == "it has 5 bytes, and at most 4 are read"


def test_a_sparse_file_expands_no_further_than_a_compressed_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.npy"
    replace_by_special(path, "sparse")
    with pytest.raises(FileTooLarge) as caught:
        open_regular(path)
    assert caught.value.size == SPARSE_BYTES
    assert caught.value.stored is not None
    assert caught.value.stored <= 1 << 16
    # Half of it is stored, and the file is read from its beginning.
    with path.open("wb") as file:
        for number in range(2 * MAX_PARTS):
            file.seek(number << 14)
            file.write(b"x" * (1 << 13))
    with open_regular(path) as file:
        assert file.tell() == 0
        assert len(file.read()) > 16 << 20


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_special_file_in_a_run_ends_in_a_sentence(
    home: Path, run_cli: Command, name: str, kind: str
) -> None:
    path = home / "run" / name
    replace_by_special(path, kind)
    for words in (
        ["predict", "run", *QUERY],
        ["evaluate", "run"],
        ["check", "run"],
        ["serve", "run", "--get", "/api/decisions"],
    ):
        check_ended(run_cli(*words))
    report = run_cli("check", "run", "--json")
    assert report.code == 1, "the file is damaged"
    assert path.exists()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", LEFT)
def test_a_special_file_that_was_left_does_not_stop_a_command(
    home: Path, run_cli: Command, name: str, kind: str
) -> None:
    replace_by_special(home / name, kind)
    for words in (
        ["check", "run"],
        ["predict", "run", *QUERY],
        ["calibrate", "run", "--overwrite"],
        ["evaluate", "run"],
    ):
        check_ended(run_cli(*words))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "tuning.json", "checkpoint"])
def test_a_special_checkpoint_ends_in_a_sentence(
    home: Path, run_cli: Command, name: str, kind: str
) -> None:
    replace_by_special(home / "stopped" / name, kind)
    check_ended(run_cli("resume", "stopped"))
    check_ended(run_cli("check", "stopped"))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "mine.tsv"],
        ["inspect", "mine.parquet"],
        ["inspect", "mine.zip"],
        ["inspect", "mine.tar"],
        ["inspect", "mine.tsv.gz"],
        ["inspect", "world", "--labels", "mine.tsv"],
        ["train", "mine.toml", *SMALL],
        ["tune", "mine.toml"],
        ["predict", "run", "--queries", "mine.tsv"],
        ["evaluate", "run", "--candidates", "mine.jsonl"],
        ["evaluate", "run", "--candidates", "mine.npz"],
        ["evaluate", "run", "--candidates", "mine.parquet"],
        ["predict", "run", *QUERY, "--index", "index"],
    ],
)
def test_a_special_file_of_the_user_is_refused(
    home: Path, run_cli: Command, words: list[str], kind: str
) -> None:
    name = next((word for word in words if word.startswith("mine.")), "index/table.safetensors")
    files = [home / name]
    if name.startswith("index"):
        files = list((home / "index").rglob("*.*"))
    for path in files:
        replace_by_special(path, kind)
    result = run_cli(*words)
    assert result.code in (1, 2), result.out
    assert len(result.err) < 3000
    assert any(path.name in result.err for path in files)


def test_a_run_is_replaced_though_its_decisions_are_a_pipe(home: Path, run_cli: Command) -> None:
    replace_by_special(home / "run" / "decisions.jsonl", "pipe")
    result = run_cli("train", "run/recipe.toml", "--out", "run", "--overwrite")
    check_ended(result)
    assert RunFolder("run").finished


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    replace_by_special(lock, "pipe")
    with refused(NotRegularFile, filename=str(lock)), locked(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == [lock]
