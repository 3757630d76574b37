"""Several processes share a study, also when some of them are killed."""

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from dualkg.errors import DamagedFile, InvalidValue
from dualkg.tuning import storage
from dualkg.tuning.search import search
from dualkg.tuning.space import space_from
from dualkg.tuning.storage import StorageNotOpened, open_storage, sqlite_url
from dualkg.tuning.study import HEARTBEAT, Heartbeats, SearchStudy
from dualkg.tuning.worker import Worker
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
# Search `mine.toml`. Its words are the folder, the storage, the seconds after which another process
# is taken for dead, and `pause` if the second trial is to stop in its middle and say so by a file.
SEARCH = """
import os, pathlib, sys, time
import torch
from dualkg.tuning.search import search
from dualkg.tuning.study import Heartbeats

def pause(event):
    if event.num_done and event.training:
        pathlib.Path(f"{os.getpid()}.paused").touch()
        time.sleep(10_000)

torch.set_num_threads(1)
out, storage, grace, pauses = sys.argv[1:]
search(
    "mine.toml",
    out=out,
    storage=storage,
    device="cpu",
    heartbeats=Heartbeats(interval=1.0, grace=float(grace)),
    on_progress=pause if pauses == "pause" else None,
)
"""
# No process that runs may take another for dead on a busy machine.
PATIENT = 3600.0
# Every trial that runs when a process begins is taken for lost.
IMPATIENT = Heartbeats(grace=0.0, abandoned=0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The working directory, with a search space and its graph."""
    monkeypatch.chdir(tmp_path)
    rows = [f"thing{i}\t{kind}\t{kind}{i % 4}\n" for kind in ("colour", "shape") for i in range(60)]
    (tmp_path / "mine.tsv").write_text("".join(rows))
    (tmp_path / "mine.toml").write_text(SPACE)
    return tmp_path


def start(folder: Path, *, storage: str, grace: float, pause: bool, out: str = "out") -> Started:
    words = (out, storage, grace, "pause" if pause else "")
    return Started(SEARCH, *words, cwd=folder)


def trials_in(storage: str) -> list[FrozenTrial]:
    study = optuna.load_study(study_name="mine", storage=open_storage(storage).backend)
    return study.get_trials()


def count_points(storage: str) -> Counter:
    """How often each point was finished."""
    points: Counter = Counter()
    for trial in trials_in(storage):
        if trial.state == TrialState.COMPLETE:
            points[tuple(sorted(trial.params.items()))] += 1
    return points


def wait_until_paused(folder: Path, *processes: Started) -> None:
    def all_paused() -> bool:
        for process in processes:
            assert process.running, process.finish()
        return len(list(folder.glob("*.paused"))) == len(processes)

    until(all_paused)


@pytest.mark.parametrize(
    "url", [pytest.param("sqlite:///study.db", marks=pytest.mark.slow), "journal:study.log"]
)
def test_two_killed_processes_lose_and_repeat_nothing(folder: Path, url: str):
    paused = {"storage": url, "grace": PATIENT, "pause": True}
    with start(folder, **paused) as first, start(folder, **paused) as second:
        wait_until_paused(folder, first, second)
        first.kill()
        second.kill()
    before = count_points(url)
    assert [trial.state for trial in trials_in(url)].count(TrialState.RUNNING) == 2
    search("mine.toml", out="out", storage=url, device="cpu", heartbeats=IMPATIENT)
    after = count_points(url)
    assert len(after) == 6
    assert set(after.values()) == {1}
    assert before.keys() < after.keys()
    states = Counter(trial.state.name for trial in trials_in(url))
    assert states == {"COMPLETE": 6, "FAIL": 2}


@pytest.mark.slow
def test_a_running_process_replaces_a_killed_one(folder: Path):
    """Taking over before the kill would do no harm."""
    url = "journal:study.log"
    with start(folder, storage=url, grace=PATIENT, pause=True) as paused:
        wait_until_paused(folder, paused)
        with start(folder, storage=url, grace=5.0, pause=False, out="other") as replacing:
            until(lambda: len(trials_in(url)) > 2)  # the other has begun a trial
            paused.kill()
            end = replacing.finish()
    assert end.code == 0, end.err
    assert sorted(count_points(url).values()) == [1] * 6
    assert len((folder / "other" / "trials.csv").read_text().splitlines()) == 7


@pytest.fixture
def study(folder: Path) -> Callable[[Heartbeats], SearchStudy]:
    """A study as a process opens it that is patient or not."""
    space = space_from(SEEDS, source="it", name="it")

    def open_study(heartbeats: Heartbeats) -> SearchStudy:
        return SearchStudy(
            space, open_storage("sqlite:///study.db"), data="it", heartbeats=heartbeats
        )

    return open_study


def test_a_process_killed_before_its_first_heartbeat_is_retried(study):
    study(Heartbeats()).take_trial()
    watching = study(Heartbeats(grace=0.0))
    watching.retry_lost_trials()  # it sees the trial for the first time
    assert watching.states() == ["running"]
    watching.retry_lost_trials()
    assert watching.states() == ["waiting"]
    trial, slot = watching.take_trial()
    assert (trial.number, slot) == (1, 0)


def test_a_trial_with_heartbeats_is_not_lost(study):
    running = study(Heartbeats(interval=0.01))
    watching = study(Heartbeats(grace=PATIENT))
    trial, _ = running.take_trial()

    def heartbeat() -> float | None:
        return running.trials()[0].user_attrs.get(HEARTBEAT)

    with running.heartbeat(trial):
        until(lambda: heartbeat() is not None)
        first = heartbeat()
        until(lambda: heartbeat() != first)
        watching.retry_lost_trials()
    assert watching.states() == ["running"]
    last = heartbeat()
    watching.retry_lost_trials()
    assert heartbeat() == last


def test_a_trial_that_another_process_took_for_lost_has_no_result(study):
    """As after a suspended machine has been woken up."""
    suspended = study(Heartbeats())
    trial, _ = suspended.take_trial()
    study(IMPATIENT).retry_lost_trials()
    with suspended.heartbeat(trial):
        suspended.tell(trial, 0.5)
    assert suspended.states() == ["waiting"]


def test_a_retry_that_two_processes_queue_is_run_once(study):
    first = study(IMPATIENT)
    second = study(IMPATIENT)
    first.take_trial()
    first.retry_lost_trials()
    assert first.states() == ["waiting"]
    second.optuna_study.enqueue_trial({}, user_attrs={"retry_of": 0})
    slots = [process.take_trial()[1] for process in (first, second)]
    assert slots == [0, None]


def test_a_database_appears_when_it_is_complete(tmp_path: Path, monkeypatch) -> None:
    """Optuna creates the table of the studies and then the index that keeps their names unique."""

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "RDBStorage", killed)
    with pytest.raises(KeyboardInterrupt):
        open_storage(sqlite_url(tmp_path / "study.db"))
    assert not (tmp_path / "study.db").exists()


@pytest.mark.slow
def test_a_killed_trial_is_repeated_before_others_and_samples_the_same(
    small_graph, tmp_path, monkeypatch
):
    """What TPE samples depends on the trials before; the first ten are random."""
    dimensions = {
        "model.dim": {"low": 2, "high": 9},
        "optimizer.learning_rate": {"low": 0.01, "high": 1.0, "log": True},
    }

    def space(num_trials: int):
        tables = {
            "training": {"epochs": 1},
            "model": {"dim": 2},
            "search": {"method": "tpe", "trials": num_trials, "prune": False},
            "space": dimensions,
        }
        return space_from(tables, source="it", name="it")

    monkeypatch.setattr(Worker, "_train", lambda self, params, trial: 1 / params["model.dim"])
    options = {"graph": small_graph, "device": "cpu"}
    expected = search(space(12), out=tmp_path / "whole", **options)

    out = tmp_path / "killed"
    search(space(10), out=out, **options)
    url = sqlite_url(out / "study.db")
    study = optuna.load_study(study_name="it", storage=open_storage(url).backend)
    # A kill leaves a trial that runs, with some of its values.
    study.ask().suggest_int("model.dim", 2, 9)
    resumed = search(space(12), out=out, heartbeats=IMPATIENT, **options)
    params = [trial.params for trial in resumed.trials]
    assert params == [trial.params for trial in expected.trials]


def test_a_journal_survives_an_incomplete_line(small_graph, tmp_path):
    tables = {"training": {"epochs": 1}, "model": {"dim": 2}, "space": {"training.seed": [0, 1]}}
    journal = tmp_path / "study.log"
    options = {"graph": small_graph, "device": "cpu", "storage": str(journal)}
    space = space_from({**tables, "search": {"trials": 1}}, source="it", name="it")
    first = search(space, out=tmp_path / "first", **options)
    with journal.open("a") as file:
        file.write('{"op_code":4,"worker')  # a machine lost power
    both = search(space_from(tables, source="it", name="it"), out=tmp_path / "second", **options)
    assert both.trials[0] == first.trials[0]
    assert [trial.state for trial in both.trials] == ["finished"] * 2


def test_other_files_are_no_journals(tmp_path):
    path = tmp_path / "study.log"
    path.write_text("no\njournal\n")
    with pytest.raises(DamagedFile, match=r"not a journal of Optuna \(Expecting value") as damaged:
        open_storage(str(path))
    assert damaged.value.path == path
    with pytest.raises(StorageNotOpened) as missing:
        open_storage(f"journal:{tmp_path}/nowhere/x.log")
    assert missing.value.reason == f"{tmp_path}/nowhere/x.log: No such file or directory"


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
    space = space_from(SEEDS, source="it", name="it")
    launcher = ["sh", "-c", TRAIN, "sh"]
    result = search(space, out=tmp_path, graph=small_graph, device="cpu", launcher=launcher)
    mrrs = {trial.params["training.seed"]: trial.mrr for trial in result.trials}
    assert mrrs == {0: 0.75, 1: 0.5}
    assert not list((tmp_path / "trials").iterdir())


def test_a_launched_trial_fails_with_its_command(small_graph, tmp_path):
    space = space_from(SEEDS, source="it", name="it")
    launcher = ["sh", "-c", FAIL, "sh"]
    result = search(space, out=tmp_path, graph=small_graph, device="cpu", launcher=launcher)
    assert [trial.state for trial in result.trials] == ["failed"] * 2
    assert "ended with status 3; see" in result.trials[0].error
    assert result.trials[0].error.endswith("dualkg: two GPUs were expected.")


def test_a_launcher_that_is_not_installed_is_refused(small_graph, tmp_path):
    space = space_from(SEEDS, source="it", name="it")
    with pytest.raises(InvalidValue, match="starts with an installed program") as refused:
        search(space, out=tmp_path, graph=small_graph, launcher=["no-torchrun", "-m", "dualkg"])
    assert (refused.value.setting, refused.value.found) == ("launcher", "no-torchrun")


@pytest.mark.slow
def test_a_launched_trial_has_the_result_of_an_ordinary_one(small_graph, tmp_path):
    space = space_from(SEEDS, source="it", name="it")
    options = {"graph": small_graph, "device": "cpu"}
    plain = search(space, out=tmp_path / "plain", **options)
    launched = search(
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
    plain = search(space, out=tmp_path / "plain", **options)
    launched = search(space, out=tmp_path / "launched", launcher=torchrun, **options)
    assert [trial.mrr for trial in launched.trials] == pytest.approx(
        [trial.mrr for trial in plain.trials], abs=1e-3
    )
    assert not list((tmp_path / "launched" / "trials").iterdir())
    space = space_from(
        {**SEEDS, "regularizer": {"name": "DURA"}, "search": {"trials": 1}}, source="it", name="it"
    )
    failed = search(space, out=tmp_path / "failed", launcher=torchrun, **options)
    assert failed.trials[0].error.endswith(
        "dualkg: DURA needs a weight, the paper's λ: set regularizer.weight."
    )


WORDS = ("tune", "mine.toml", "--out", "out", "--threads", "1", "--device", "cpu")


@pytest.fixture
def sleeping_search(folder: Path) -> Iterator[tuple[Started, int]]:
    """A search whose command sleeps, and the number of the process of that command."""
    sleep = shlex.join(["sh", "-c", "echo $$ >$2/pid; exec sleep 10000", "sh"])
    path = folder / "out" / "trials" / "0" / "pid"
    with Started(COMMAND, *WORDS, "--launcher", sleep, cwd=folder) as process:
        until(lambda: not process.running or (path.exists() and path.read_text()))
        assert process.running, process.finish()
        yield process, int(path.read_text())


def test_a_stopped_search_stops_the_command_of_its_trial(sleeping_search):
    process, pid = sleeping_search
    process.signal(signal.SIGTERM)
    end = process.finish()
    assert end.code == 130, end.err
    assert "Stopped; 0 of 6 trials are done and saved. Resume with: dualkg tune" in end.err
    assert not is_running(pid)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_killed_search_stops_the_command_of_its_trial(sleeping_search, folder: Path):
    process, pid = sleeping_search
    process.kill()
    until(lambda: not is_running(pid))
    launcher = ["sh", "-c", TRAIN, "sh"]
    search("mine.toml", out="out", device="cpu", launcher=launcher, heartbeats=IMPATIENT)
    assert sorted(count_points("sqlite:///out/study.db").values()) == [1] * 6
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
    result = search(
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

    options = {"storage": postgresql, "grace": PATIENT, "pause": False}
    with (
        start(folder, out="first", **options) as first,
        start(folder, out="second", **options) as second,
    ):
        ends = first.finish(), second.finish()
    assert [end.code for end in ends] == [0, 0], ends
    with psycopg.connect(postgresql) as database:
        states = database.execute("select state from trials").fetchall()
    assert states.count(("COMPLETE",)) == 6
    recipes = [(folder / out / "best.toml").read_text() for out in ("first", "second")]
    assert recipes[0] == recipes[1]
