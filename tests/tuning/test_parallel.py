"""Several processes share a study, also when some of them are killed."""

import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dualkg.tuning import study
from dualkg.tuning.space import space_from
from dualkg.tuning.tune import tune
from tests.processes import COMMAND, FORKS, Started, until

SPACE = """
[data]
graph = "mine.tsv"
[model]
dim = 4
[training]
epochs = 5
batch_size = 50
[space]
"model.dim" = [2, 3, 4]
"training.seed" = [0, 1]
[search]
prune = false
"""
# Short heartbeats, so that a killed process is noticed soon, and a long grace period: no process that runs may take
# another for dead on a busy machine.
SETTINGS = "import dualkg.tuning.study as study; study.HEARTBEAT_SECONDS, study.GRACE_SECONDS = 1, 3600\n"
# Once a trial is done, stop in the middle of the next and say so by a file.
PAUSE = """
import os, pathlib, time
train = study.Worker._train
def train_or_pause(self, trial, params):
    if self.progress.num_done:
        pathlib.Path(f"{os.getpid()}.paused").touch()
        time.sleep(10_000)
    return train(self, trial, params)
study.Worker._train = train_or_pause
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [f"thing{i}\t{kind}\t{kind}{i % 4}\n" for kind in ("colour", "shape") for i in range(60)]
    (tmp_path / "mine.tsv").write_text("".join(rows))
    (tmp_path / "mine.toml").write_text(SPACE)
    return tmp_path


WORDS = ("tune", "mine.toml", "--out", "out", "--threads", "1", "--device", "cpu")


def start(folder: Path, *, patch: str) -> Started:
    return Started(SETTINGS + patch + COMMAND, *WORDS, cwd=folder)


@pytest.fixture
def resume(folder: Path, run_cli, monkeypatch) -> Callable[[], None]:
    """Continue the search in this process, which soon takes the others for dead."""

    def run() -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(study, "HEARTBEAT_SECONDS", 1)
        monkeypatch.setattr(study, "GRACE_SECONDS", 1)
        result = run_cli(*WORDS)
        assert result.code == 0, result.err

    return run


def query(folder: Path, sql: str) -> list[tuple]:
    try:
        with closing(sqlite3.connect(folder / "out" / "study.db", timeout=30)) as database:
            return database.execute(sql).fetchall()
    except sqlite3.OperationalError:
        return []  # the tables do not exist yet


FINISHED = (
    "select t.trial_id, param_name, param_value from trials t join trial_params p on p.trial_id = t.trial_id "
    "where state = 'COMPLETE'"
)


def count_points(rows: list[tuple]) -> Counter:
    """How often each point was finished, from the rows of FINISHED."""
    points: dict[int, dict] = {}
    for number, name, value in rows:
        points.setdefault(number, {})[name] = value
    return Counter(tuple(sorted(point.items())) for point in points.values())


def kill_when_paused(folder: Path, *processes: Started) -> None:
    def all_paused() -> bool:
        assert all(process.running for process in processes), [process.finish() for process in processes]
        return len(list(folder.glob("*.paused"))) == len(processes)

    until(all_paused)
    for process in processes:
        process.kill()


def test_two_killed_processes_lose_and_repeat_nothing(folder: Path, resume):
    with start(folder, patch=PAUSE) as one, start(folder, patch=PAUSE) as other:
        kill_when_paused(folder, one, other)
    before = count_points(query(folder, FINISHED))
    assert len(query(folder, "select 1 from trials where state = 'RUNNING'")) == 2
    resume()
    after = count_points(query(folder, FINISHED))
    assert len(after) == 6
    assert set(after.values()) == {1}
    assert before.keys() < after.keys()
    states = Counter(state for (state,) in query(folder, "select state from trials"))
    assert states == {"COMPLETE": 6, "FAIL": 2}


def test_a_process_killed_before_its_first_heartbeat_is_retried(folder: Path, resume):
    with start(folder, patch="study.RDBStorage.record_heartbeat = lambda *ignored: None\n" + PAUSE) as paused:
        kill_when_paused(folder, paused)
    assert not query(folder, "select 1 from trial_heartbeats")
    resume()
    assert set(count_points(query(folder, FINISHED)).values()) == {1}
    assert len(count_points(query(folder, FINISHED))) == 6


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_parallel_jobs(small_graph, tmp_path, monkeypatch, method):
    """The processes are spawned, and import PyTorch; forked ones have it."""
    context = FORKS if method == "forkserver" else multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.get)
    tables = {"training": {"epochs": 2}, "model": {"dim": 4}, "space": {"training.seed": [0, 1, 2]}}
    space = space_from(tables, source="it", name="it")
    events = []
    result = tune(space, out=tmp_path, graph=small_graph, jobs=2, device="cpu", on_progress=events.append)
    assert [trial.state for trial in result.trials] == ["finished"] * 3
    assert {trial.params["training.seed"] for trial in result.trials} == {0, 1, 2}
    assert events


@pytest.fixture
def postgresql(tmp_path_factory) -> Iterator[str]:
    """The URL of a PostgreSQL server that listens on a socket in a folder of its own."""
    pytest.importorskip("psycopg")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    initdb = shutil.which("initdb") or (str(programs[-1] / "initdb") if programs else None)
    if initdb is None:
        pytest.skip("PostgreSQL's server is not installed")
    user = {"user": "postgres"} if os.geteuid() == 0 else {}  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="pg") as folder:  # the path of a socket is short
        Path(folder).chmod(0o777)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
        subprocess.run([initdb, "-D", f"{folder}/data", "-U", "test", "-A", "trust", "-N"], check=True, **quiet)
        words = ["-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses=", "-F"]
        with subprocess.Popen([str(Path(initdb).with_name("postgres")), *words], **quiet) as server:
            try:
                until(lambda: Path(folder, ".s.PGSQL.5432").exists())
                yield f"postgresql://test@/postgres?host={folder}"
            finally:
                server.send_signal(signal.SIGQUIT)


def test_processes_share_a_study_in_postgresql(folder: Path, postgresql: str):
    import psycopg

    words = [*WORDS, "--storage", postgresql]
    words[words.index("out")] = "one"
    with Started(SETTINGS + COMMAND, *words, cwd=folder) as one:
        words[words.index("one")] = "other"
        with Started(SETTINGS + COMMAND, *words, cwd=folder) as other:
            ends = one.finish(), other.finish()
    assert [end.code for end in ends] == [0, 0], ends
    with psycopg.connect(postgresql) as database:
        points = count_points(database.execute(FINISHED).fetchall())
    assert sorted(points.values()) == [1] * 6
    assert (folder / "one" / "best.toml").read_text() == (folder / "other" / "best.toml").read_text()
