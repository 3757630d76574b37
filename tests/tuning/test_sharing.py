"""Real processes that share a study, and one that is killed in the middle of it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from dualkg.tuning.search import search
from dualkg.tuning.space import space_from

SPACE = """
[data]
graph = "mine.tsv"
[model]
dim = 4
[training]
epochs = 30
batch_size = 50
[space]
"model.dim" = [2, 3, 4]
"training.seed" = [0, 1]
[search]
prune = false
"""
# A search whose processes are taken for dead soon, so that a test need not wait for it.
HASTY = (
    "import dualkg.search.study as study; study.BEAT_SECONDS, study.DEAD_AFTER_SECONDS = 0.2, 2; "
    "from dualkg.cli import main; main()"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [f"thing{i}\t{kind}\t{kind}{i % 4}\n" for kind in ("colour", "shape") for i in range(60)]
    (tmp_path / "mine.tsv").write_text("".join(rows))
    return tmp_path


def start(folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", HASTY, "search", "mine.toml", "--out", "out", "--threads", "1", "--device", "cpu"]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err.decode()
    return out.decode()


def ask(folder: Path, question: str) -> list[tuple]:
    try:
        with closing(sqlite3.connect(folder / "out" / "study.db", timeout=30)) as database:
            return database.execute(question).fetchall()
    except sqlite3.OperationalError:
        return []  # its tables are not made yet


def finished_points(folder: Path) -> Counter:
    rows = ask(
        folder,
        "select t.trial_id, param_name, param_value from trials t join trial_params p on p.trial_id = t.trial_id "
        "where state = 'COMPLETE'",
    )
    points: dict[int, dict] = {}
    for number, name, value in rows:
        points.setdefault(number, {})[name] = value
    return Counter(tuple(sorted(point.items())) for point in points.values())


def wait_for_work(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Until a trial is done, and another is at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        states = {state for (state,) in ask(folder, "select state from trials")}
        if {"COMPLETE", "RUNNING"} <= states:
            return
        time.sleep(0.02)
    raise AssertionError(f"no trial was at work: {[process.communicate() for process in processes]}")


def test_two_processes_killed_half_way_and_nothing_is_lost_or_repeated(folder: Path):
    (folder / "mine.toml").write_text(SPACE)
    processes = [start(folder), start(folder)]
    wait_for_work(folder, processes)
    for process in processes:
        process.kill()
        process.communicate()
    before = finished_points(folder)
    num_dead = len(ask(folder, "select 1 from trials where state = 'RUNNING'"))
    finish(start(folder))
    after = finished_points(folder)
    assert set(after.values()) == {1}
    assert len(after) == 6
    assert before.keys() < after.keys()
    states = Counter(state for (state,) in ask(folder, "select state from trials"))
    assert states["COMPLETE"] == 6
    assert states["FAIL"] >= num_dead >= 1  # more where a process on a busy machine is taken for dead
    assert set(states) == {"COMPLETE", "FAIL"}


def test_jobs_side_by_side(small_graph, tmp_path):
    tables = {"training": {"epochs": 2}, "model": {"dim": 4}, "space": {"training.seed": [0, 1, 2]}}
    space = space_from(tables, source="it", name="it")
    events = []
    result = search(space, out=tmp_path, graph=small_graph, jobs=2, device="cpu", on_progress=events.append)
    assert [row.outcome for row in result.trials] == ["finished"] * 3
    assert {row.values["training.seed"] for row in result.trials} == {0, 1, 2}
    assert events
