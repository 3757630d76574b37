"""Several processes share a study, also when some of them are killed."""

import multiprocessing
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from dualkg.errors import RequestError
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
epochs = 1
batch_size = 50
[space]
"model.dim" = [2, 3, 4]
"training.seed" = [0, 1]
[search]
prune = false
"""
# Short heartbeats, so that a killed process is noticed soon, and a long grace period: no process
# that runs may take another for dead on a busy machine.
SETTINGS = (
    "import dualkg.tuning.study as study; study.HEARTBEAT_SECONDS, study.GRACE_SECONDS = 1, 3600\n"
)
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
    "select t.trial_id, param_name, param_value from trials t join trial_params p on p.trial_id "
    "= t.trial_id where state = 'COMPLETE'"
)


def count_points(rows: list[tuple]) -> Counter:
    """How often each point was finished, from the rows of FINISHED."""
    points: dict[int, dict] = {}
    for number, name, value in rows:
        points.setdefault(number, {})[name] = value
    return Counter(tuple(sorted(point.items())) for point in points.values())


def kill_when_paused(folder: Path, *processes: Started) -> None:
    def all_paused() -> bool:
        assert all(process.running for process in processes), [
            process.finish() for process in processes
        ]
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


@pytest.mark.slow
def test_a_process_killed_before_its_first_heartbeat_is_retried(folder: Path, resume):
    with start(
        folder, patch="study.RDBStorage.record_heartbeat = lambda *ignored: None\n" + PAUSE
    ) as paused:
        kill_when_paused(folder, paused)
    assert not query(folder, "select 1 from trial_heartbeats")
    resume()
    assert set(count_points(query(folder, FINISHED)).values()) == {1}
    assert len(count_points(query(folder, FINISHED))) == 6


def test_indexes_that_a_kill_prevented_are_created(tmp_path: Path) -> None:
    """Optuna creates the table of the studies and then the index that keeps their names unique."""
    url = study.sqlite_url(tmp_path / "study.db")
    study.open_storage(url).engine.dispose()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        find = (
            "select name from sqlite_master where type = 'index' and sql is not null order by name"
        )
        names = connection.execute(find).fetchall()
        for (name,) in names:
            connection.execute(f"drop index {name}")
        connection.commit()
        assert names
        study.open_storage(url).engine.dispose()
        assert connection.execute(find).fetchall() == names


def test_a_killed_trial_is_repeated_before_others_and_samples_the_same(
    small_graph, tmp_path, monkeypatch
):
    """What TPE samples depends on the trials before; the first ten are random."""
    tables = {
        "training": {"epochs": 1},
        "model": {"dim": 2},
        "search": {"method": "tpe", "trials": 12, "prune": False},
    }
    tables["space"] = {
        "model.dim": {"low": 2, "high": 9},
        "optimizer.learning_rate": {"low": 0.01, "high": 1.0, "log": True},
    }
    space = space_from(tables, source="it", name="it")
    suggest = study.suggest

    def killed(trial, name, choices):
        if trial.number == 10 and name == "optimizer.learning_rate":
            # Optuna leaves the trial as a kill does: running, with one of its values.
            raise SystemExit
        return suggest(trial, name, choices)

    monkeypatch.setattr(study.Worker, "_train", lambda self, trial, params: 1 / params["model.dim"])
    expected = tune(space, out=tmp_path / "one", graph=small_graph, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(study, "suggest", killed)
        with pytest.raises(SystemExit):
            tune(space, out=tmp_path / "out", graph=small_graph, device="cpu")
    with closing(sqlite3.connect(tmp_path / "out" / "study.db")) as database:
        database.execute("update trial_heartbeats set heartbeat = datetime('now', '-1 hour')")
        database.commit()
    found = tune(space, out=tmp_path / "out", graph=small_graph, device="cpu")
    assert [trial.params for trial in found.trials] == [trial.params for trial in expected.trials]


def finished_in_journal(folder: Path) -> Counter:
    """How often each point was finished, from the journal."""
    with study.experimental():
        found = optuna.load_study(
            study_name="mine", storage=study.open_storage(f"journal:{folder / 'study.log'}")
        )
    done = found.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    return Counter(tuple(sorted(trial.params.items())) for trial in done)


@pytest.mark.slow
def test_a_process_replaces_a_killed_one_on_a_journal(folder: Path):
    """The clock of a heartbeat is that of the file system; taking over before the kill would do no
    harm.
    """
    words = [*WORDS, "--storage", "journal:study.log"]
    with Started(SETTINGS + PAUSE + COMMAND, *words, cwd=folder) as paused:
        until(lambda: list(folder.glob("*.paused")) or not paused.running)
        assert paused.running, paused.finish()
        words[words.index("out")] = "other"
        soon = SETTINGS.replace("3600", "2")
        with Started(soon + COMMAND, *words, cwd=folder) as other:
            until(
                lambda: (folder / "study.log").read_text().count('"op_code":4') > 2
            )  # the other has begun a trial
            paused.kill()
            end = other.finish()
    assert end.code == 0, end.err
    points = finished_in_journal(folder)
    assert sorted(points.values()) == [1] * 6
    assert len((folder / "other" / "trials.csv").read_text().splitlines()) == 7


def test_a_journal_survives_an_incomplete_line_and_refuses_other_files(small_graph, tmp_path):
    tables = {"training": {"epochs": 1}, "model": {"dim": 2}, "space": {"training.seed": [0, 1]}}
    journal = tmp_path / "study.log"
    options = {"graph": small_graph, "device": "cpu", "storage": str(journal)}
    one = space_from({**tables, "search": {"trials": 1}}, source="it", name="it")
    first = tune(one, out=tmp_path / "one", **options)
    with journal.open("a") as file:
        file.write('{"op_code":4,"worker')  # a machine lost power
    both = tune(space_from(tables, source="it", name="it"), out=tmp_path / "two", **options)
    assert both.trials[0] == first.trials[0]
    assert [trial.state for trial in both.trials] == ["finished"] * 2
    journal.write_text("no\njournal\n")
    with pytest.raises(
        RequestError, match=r"study.log is damaged, or not a journal of Optuna \(Expecting value"
    ):
        tune(one, out=tmp_path / "three", **options)
    with pytest.raises(
        RequestError, match=r"cannot be opened: .*nowhere/x.log: No such file or directory\."
    ):
        tune(
            one,
            out=tmp_path / "three",
            **{**options, "storage": f"journal:{tmp_path}/nowhere/x.log"},
        )


SEEDS = {
    "training": {"epochs": 2, "precision": "float32"},
    "model": {"dim": 2},
    "space": {"training.seed": [0, 1]},
}
# `sh -c` calls these with the words `resume FOLDER`.
TRAIN = """echo '[{"epoch": 1, "loss": 1, "seconds": 1, "valid_mrr": 0.25},' >$2/history.json
grep -q 'seed = 1' $2/recipe.toml && best=0.5 || best=0.75
echo '{"epoch": 2, "loss": 1, "seconds": 1, "valid_mrr": '$best'}]' >>$2/history.json
touch $2/weights.safetensors $2/report.json"""
FAIL = "echo loading >&2; echo 'dualkg: two GPUs were expected.' >&2; exit 3"


def test_trials_are_launched_by_a_command(small_graph, tmp_path):
    options = {"graph": small_graph, "device": "cpu"}
    space = space_from(SEEDS, source="it", name="it")
    result = tune(space, out=tmp_path / "good", launcher=["sh", "-c", TRAIN, "sh"], **options)
    assert {trial.params["training.seed"]: trial.mrr for trial in result.trials} == {
        0: 0.75,
        1: 0.5,
    }
    assert not list((tmp_path / "good" / "trials").iterdir())
    failed = tune(space, out=tmp_path / "bad", launcher=["sh", "-c", FAIL, "sh"], **options)
    assert [trial.state for trial in failed.trials] == ["failed"] * 2
    assert "ended with status 3; see" in failed.trials[0].error
    assert failed.trials[0].error.endswith("dualkg: two GPUs were expected.")
    with pytest.raises(
        RequestError,
        match="--launcher should start with a program that is installed; .* 'no-torchrun'",
    ):
        tune(space, out=tmp_path / "none", launcher=["no-torchrun", "-m", "dualkg"], **options)


@pytest.mark.slow
def test_a_launched_trial_has_the_result_of_an_ordinary_one(small_graph, tmp_path):
    space = space_from(SEEDS, source="it", name="it")
    options = {"graph": small_graph, "device": "cpu"}
    plain = tune(space, out=tmp_path / "plain", **options)
    launched = tune(
        space, out=tmp_path / "launched", launcher=[sys.executable, "-m", "dualkg"], **options
    )
    assert [trial.mrr for trial in launched.trials] == [trial.mrr for trial in plain.trials]
    assert None not in [trial.mrr for trial in plain.trials]


@pytest.mark.slow
def test_trials_in_two_processes_are_launched_by_torchrun(small_graph, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    space = space_from(SEEDS, source="it", name="it")
    options = {"graph": small_graph, "device": "cpu"}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dualkg",
    ]
    plain = tune(space, out=tmp_path / "plain", **options)
    launched = tune(space, out=tmp_path / "launched", launcher=torchrun, **options)
    assert [trial.mrr for trial in launched.trials] == pytest.approx(
        [trial.mrr for trial in plain.trials], abs=1e-3
    )
    assert not list((tmp_path / "launched" / "trials").iterdir())
    space = space_from(
        {**SEEDS, "regularizer": {"name": "DURA"}, "search": {"trials": 1}}, source="it", name="it"
    )
    failed = tune(space, out=tmp_path / "failed", launcher=torchrun, **options)
    assert failed.trials[0].error.endswith(
        "dualkg: DURA needs a weight, the paper's λ: set regularizer.weight."
    )


@pytest.fixture
def with_sleeping_trial(folder: Path) -> Iterator[tuple[Started, Path]]:
    """A search whose command sleeps, and the file with the number of its process."""
    sleep = shlex.join(["sh", "-c", "echo $$ >$2/pid; exec sleep 10000", "sh"])
    with Started(SETTINGS + COMMAND, *WORDS, "--launcher", sleep, cwd=folder) as search:
        path = folder / "out" / "trials" / "0" / "pid"
        until(lambda: not search.running or (path.exists() and path.read_text()))
        assert search.running, search.finish()
        yield search, path


def test_a_stopped_search_stops_the_command_of_its_trial(with_sleeping_trial):
    search, path = with_sleeping_trial
    search.signal(signal.SIGTERM)
    end = search.finish()
    assert end.code == 130, end.err
    assert "Stopped; 0 of 6 trials are done and saved. Resume with: dualkg tune" in end.err
    assert not Path(f"/proc/{path.read_text().strip()}").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_killed_search_stops_the_command_of_its_trial(
    with_sleeping_trial, folder: Path, resume, monkeypatch
):
    search, path = with_sleeping_trial
    search.kill()
    until(lambda: not is_running(int(path.read_text())))
    monkeypatch.setattr(
        sys.modules[__name__],
        "WORDS",
        (*WORDS, "--launcher", shlex.join(["sh", "-c", TRAIN, "sh"])),
    )
    resume()
    assert set(count_points(query(folder, FINISHED)).values()) == {1}
    assert not list((folder / "out" / "trials").iterdir())


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended stays listed until its parent takes note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_parallel_jobs(small_graph, tmp_path, monkeypatch, method):
    """The processes are spawned, and import PyTorch; forked ones have it."""
    context = FORKS if method == "forkserver" else multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.get)
    tables = {"training": {"epochs": 2}, "model": {"dim": 4}, "space": {"training.seed": [0, 1, 2]}}
    space = space_from(tables, source="it", name="it")
    events = []
    result = tune(
        space, out=tmp_path, graph=small_graph, jobs=2, device="cpu", on_progress=events.append
    )
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
        subprocess.run(
            [initdb, "-D", f"{folder}/data", "-U", "test", "-A", "trust", "-N"], check=True, **quiet
        )
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
    assert (folder / "one" / "best.toml").read_text() == (
        folder / "other" / "best.toml"
    ).read_text()
