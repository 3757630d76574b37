"""The benchmark of serving: what it asks, and what it says of a measurement."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serving
from dualkg.data.graph import SPLITS

ROOT = Path(__file__).parents[2]
JOB = serving.Job("made", 4, 5, probabilities=True)


def test_the_section_of_a_page():
    found = {
        "responses_per_second": 300.0,
        "p50_ms": 20.0,
        "p99_ms": 40.5,
        "refused": 1,
        "broken": 2,
        "batches": 31.5,
    }
    plain = {**found, "responses_per_second": 100.0, "refused": 0, "broken": 0, "batches": None}
    measured = {"one": {"measured": {"micro-batching": found, "unbatched": plain}}}
    page = serving.lines(
        {**measured, "two": {"measured": {"micro-batching": {"failed": "no server"}}}}
    )
    assert "| one | micro-batching | 300 | 3.00 × | 20.0 | 40.5 | 3 | 31.5 |" in page
    assert "| one | unbatched | 100 | 1.00 × | 20.0 | 40.5 | 0 | – |" in page
    assert "| two | micro-batching | no server | – | – | – | – | – |" in page


def test_the_queries_are_distinct(run_folders, served):
    addresses = serving.requests(JOB, run_folders[0], "micro-batching")
    graph = served.get("calibrated").run.graph
    queries = {(head, relation) for split in SPLITS for head, relation, _ in graph.split(split)}
    assert len(addresses) == len(set(addresses)) == len(queries)
    assert all(
        address.startswith("/api/tails?head=") and address.endswith("&k=5") for address in addresses
    )
    assert not any("\n" in address for address in addresses)


def test_a_part_of_the_queries_is_repeated(run_folders, monkeypatch):
    monkeypatch.setattr(serving, "REPEATED", 3)
    addresses = serving.requests(JOB, run_folders[0], "micro-batching")
    assert serving.requests(JOB, run_folders[0], "repeated") == addresses[:3]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("wrk") is None, reason="wrk makes the load, and it is not installed"
)
def test_a_load_without_errors(run_folders, tmp_path):
    found = serving.measure(JOB, run_folders[0], "micro-batching", seconds=1, folder=tmp_path)
    assert found["responses_per_second"] > 0
    assert found["refused"] == found["broken"] == 0
    assert found["batches"] >= 1


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("installed", [True, False])
def test_make_bench_measures_serving_where_it_can(tmp_path, installed):
    """With environments whose Python only says what it would run."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "sh", "echo"):
        (tools / name).symlink_to(shutil.which(name))
    if installed:
        executable(tools / "wrk", "#!/bin/sh\n")
    for name in ("venv", "bench"):
        (tmp_path / name / "bin").mkdir(parents=True)
        executable(tmp_path / name / "bin" / "python", '#!/bin/sh\necho "ran $1"\n')
        (tmp_path / name / ".ready").touch()
    words = ["make", "bench", f"VENV={tmp_path / 'venv'}", f"BENCH={tmp_path / 'bench'}"]
    result = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("ran benchmarks/serving.py" in result.stdout) is installed
    assert (
        "Serving is not measured: wrk makes the load, and it is not installed." in result.stdout
    ) is not installed
    assert "ran benchmarks/report.py" in result.stdout


def executable(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
