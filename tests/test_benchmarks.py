"""The benchmarks: what they generate, count, fit and write. No test measures speed."""

import argparse
import ast
import json
import math
import runpy
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import distributed
import fits
import graphs
import host_memory
import limits
import measurement
import ranking
import report
import scaling
import training

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = (
    "distributed",
    "host_memory",
    "loading",
    "startup",
    "versions",
    "measurement",
    "training",
    "ranking",
    "peers",
    "graphs",
    "scaling",
    "completion",
    "serving",
    "report",
)
ON = {
    "cpu": "A",
    "cores": 2,
    "bf16": [],
    "gpu": None,
    "python": "3",
    "torch": "2",
    "date": "2026-01-01",
    "commit": "c0ffee",
    "device": "2 cores of A",
}


# -- the page ----------------------------------------------------------------


def test_the_committed_page_is_made_from_the_committed_results():
    assert (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8") == report.page(report.load_all())


def test_a_page_marks_what_was_not_measured(tmp_path):
    job = training.JOBS["cpu"][0]
    sizes = {
        "num_entities": 10,
        "width": 4,
        "relation_width": 4,
        "present_heads": 3.0,
        "present_relations": 2.0,
    }
    ours = {
        "seconds_per_epoch": 20.0,
        "warm_up_seconds": 1.5,
        "peak_mib": 400.0,
        "steps_per_epoch": 545,
    }
    measured = {
        "dualkg float32": {**ours, **sizes, "two_entity_tables": False},
        "tutorial": {**ours, "seconds_per_epoch": 50.0, "peak_mib": 800.0},
        "PyKEEN": {"failed": "PyKEEN is not installed"},
    }
    measurement.save(
        "training", job.name, {"job": asdict(job), "measured": measured}, on=ON, folder=tmp_path
    )
    page = report.page(report.load_all(tmp_path))
    assert f"| {job.name} | tutorial-style PyTorch | 50.0 | 2.50 × | – | 800 | 1.50 |" in page
    assert f"| {job.name} | PyKEEN | not measured here |" in page
    assert "Measured on 2 cores of A, 2026-01-01, commit c0ffee; python 3, torch 2." in page


def test_a_gpu_is_compared_with_its_limit(tmp_path):
    gpu = {**ON, "gpu": "G", "device": "G"}
    job = training.JOBS["cuda"][0]
    ours = {
        "seconds_per_epoch": 0.5,
        "warm_up_seconds": 3.0,
        "peak_mib": 2048.0,
        "steps_per_epoch": 10,
        "num_entities": 1000,
        "width": 10,
        "relation_width": 10,
        "present_heads": 1.0,
        "present_relations": 1.0,
        "two_entity_tables": False,
    }
    record = {
        "job": asdict(job),
        "measured": {"dualkg bf16": ours, "reference engine": {"failed": "out of memory"}},
    }
    # A step is 3 · 2 · 1000 · 1000 · 10 operations, and few bytes beside this bandwidth.
    ceilings = {"bf16_operations_per_second": 3e9, "copied_bytes_per_second": 1e18}
    measurement.save("training", job.name, record, on=gpu, folder=tmp_path)
    measurement.save("ceilings", "all", ceilings, on=gpu, folder=tmp_path)
    page = report.page(report.load_all(tmp_path))
    cells = (
        "6.10 | 0.500 | – | – | 0.200 | 0.200 | 2.50 × | 12.2 × | 3.00 | 2.00 / not measured here"
    )
    assert f"| {job.name} | {cells} |" in page


def test_results_of_one_machine_do_not_erase_those_of_another(tmp_path):
    here = tmp_path / "here"
    there = tmp_path / "there"
    measurement.save("scaling", "dim", {"points": [1]}, on=ON, folder=here)
    measurement.save("scaling", "batch", {"points": [2]}, on=ON, folder=here)
    measurement.save("scaling", "dim", {"points": [3]}, on={**ON, "device": "G"}, folder=there)
    measurement.merge(report.TOPICS, there, here)
    results = json.loads((here / "scaling.json").read_text())
    assert results["2 cores of A"]["dim"]["points"] == [1]
    assert results["2 cores of A"]["batch"]["points"] == [2]
    assert results["G"]["dim"]["points"] == [3]


def test_quick_results_have_another_folder(tmp_path):
    def folder(*words):
        return measurement.folder_of(measurement.parser("").parse_args(words))

    assert folder() == measurement.RESULTS
    assert folder("--quick") != measurement.RESULTS
    assert folder("--quick", "--out", str(tmp_path)) == tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_prints_its_options(script, monkeypatch, capsys):
    path = BENCHMARKS / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {script}.py")


# -- imports -----------------------------------------------------------------


def imported_names(path):
    """Modules and names of dualkg that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports = [(alias.name, "") for alias in node.names]
        else:
            continue
        for module, name in imports:
            if module.partition(".")[0] == "dualkg":
                yield module, name


def can_be_imported(module, name):
    try:
        holder = import_module(module)
        # A name of a package may be one of its modules.
        if name and not hasattr(holder, name):
            import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_every_import_of_dualkg_resolves():
    """Many are inside functions that only a measurement of minutes calls."""
    missing = []
    for folder in ("benchmarks", "paper", "scripts"):
        for path in sorted((BENCHMARKS.parent / folder).rglob("*.py")):
            for module, name in imported_names(path):
                if not can_be_imported(module, name):
                    missing.append(f"{path.name}: {module}.{name}")
    assert missing == []


# -- large graphs ------------------------------------------------------------


@pytest.mark.parametrize("negatives", [0, 7, 40])
def test_a_step_sends_the_bytes_of_the_cost_model(capsys, negatives):
    sizes = {"entities": 50, "triples": 40, "dim": 3, "batch": 10, "steps": 2, "shards": 2}
    others = {"negatives": negatives, "sums": "elements", "mapped": False, "device": "cpu"}
    others["checkpoint"] = False
    distributed.take_steps(argparse.Namespace(**sizes, **others))
    figures = json.loads(capsys.readouterr().out)
    width = 2 * sizes["dim"]
    assert figures["all_reduced_bytes"] == distributed.all_reduced_bytes(sizes["batch"], width)
    assert figures["seconds"] > 0


def test_rows_of_initial_weights_are_counted():
    figures = distributed.measure_weights(argparse.Namespace(device="cpu", rows=1000, width=3))
    assert figures["rows a second"] == pytest.approx(1000 / figures["seconds"])
    assert figures["rows a second in order"] > 0


def test_two_processes_are_compared_with_one_at_half_the_negatives(monkeypatch):
    seconds = {(0, 0): 2.0, (0, 2): 2.5, (2, 0): 3.0}  # by processes and shards
    jobs = []

    def figures(job, num_processes):
        jobs.append((num_processes, job["shards"], job["negatives"]))
        return {"seconds": seconds[num_processes, job["shards"]] + len(jobs) % 2}

    monkeypatch.setattr(distributed, "_figures_of", figures)
    found = distributed.measure_sampled(argparse.Namespace(device="cuda", rounds=2))
    assert jobs == [(0, 0, 5000)] * 2 + [(0, 2, 10000)] * 2 + [(2, 0, 10000)] * 2
    assert found["one of two shards"]["ratio"] == 1.25
    assert found["two processes"]["ratio"] == 1.5
    assert found["bytes of the formula"] == 4 * (3 * 4000 * 1000 + 2 * 4000)


def test_everything_that_needs_a_gpu_is_one_command(tmp_path, monkeypatch):
    jobs = []

    def figures(job, num_processes):
        jobs.append((num_processes, job["negatives"], job["device"]))
        return {"seconds": 1.0}

    monkeypatch.setattr(distributed, "_figures_of", figures)
    monkeypatch.setattr(distributed, "measure_weights", lambda choices: {"rows": choices.rows})
    monkeypatch.setattr(distributed, "describe", lambda device, commit: {"commit": commit})
    words = ["distributed.py", "gpu", "--out", str(tmp_path / "there"), "--commit", "c0ffee"]
    monkeypatch.setattr("sys.argv", words)
    distributed.main()
    full = [(0, 0, "cuda"), (2, 0, "cuda")]
    assert jobs == [*full, (0, 5_000, "cuda"), (0, 10_000, "cuda"), (2, 10_000, "cuda")]

    here = tmp_path / "here"
    distributed.write({"data": {}, "initial weights, cuda": {"rows": 1}}, here)
    words = ["distributed.py", "merge", str(tmp_path / "there"), "--out", str(here)]
    monkeypatch.setattr("sys.argv", words)
    distributed.main()
    results = json.loads((here / "distributed.json").read_text(encoding="utf-8"))
    assert results["initial weights, cuda"]["rows"] == 86_054_151
    assert results["1-vs-all on a GPU"]["bytes of the formula"] == 4 * (3_000 * 1_000 + 2_000)
    assert {of["machine"]["commit"] for of in results.values() if of} == {"c0ffee"}


def test_steps_of_tables_in_host_memory_are_listed():
    record = {
        "seconds_of_step": {"device": 0.002, "host": 0.005, "host, none ahead": 0.01},
        "hours_of_epoch": {"device": 0.2, "host": 0.5},
        "device_dim": 200,
        "dim": 400,
        "ratio": 2.5,
        "bytes_of_step_each_way": 58_000_000,
    }
    _, _, on_device, on_host, _ = host_memory.lines({"Freebase": record})
    assert on_device == "| Freebase | on the device | 200 | 2.00 | 0.20 |  |  |"
    assert on_host == "| Freebase | in host memory | 400 | 5.00 | 0.50 | 2.50 | 58.0 |"


# -- made graphs -------------------------------------------------------------


def test_a_synthetic_graph_has_the_given_size_and_no_triple_twice():
    graph = graphs.generate_graph(500, 3000, num_relations=20)
    assert graph.shape == (500, 20)
    assert len(np.unique(graph.train, axis=0)) == len(graph.train) == 3000
    assert set(graph.train[:, 0]) == set(range(500))
    assert set(graph.train[:, 1]) == set(range(20))
    assert graph.train[:, 2].max() < 500


def test_a_synthetic_graph_is_skewed_as_real_ones_are():
    """The most frequent tenth of FB15k-237 has 38 %, 55 % and 56 % of its three columns."""
    heads, relations, tails = graphs.generate_graph(5000, 50_000, num_relations=200).train.T
    assert 0.25 < graphs.share_of_most_frequent(heads, 5000) < 0.4
    assert 0.45 < graphs.share_of_most_frequent(relations, 200) < 0.65
    assert 0.4 < graphs.share_of_most_frequent(tails, 5000) < 0.6
    # The id of an entity is independent of its frequency.
    frequencies = np.bincount(tails, minlength=5000)
    assert abs(np.corrcoef(np.arange(5000), frequencies)[0, 1]) < 0.1


# -- limits ------------------------------------------------------------------


def test_work_of_a_step_by_hand():
    """2 queries, 5 entities of 3 numbers, 2 relations present."""
    step = limits.Step(
        batch=2,
        num_entities=5,
        width=3,
        relation_width=3,
        present_heads=1,
        present_relations=2,
        two_entity_tables=False,
        bf16=True,
    )
    table = 5 * 3 * (16 + 2 + 2 + 2)  # Adagrad, the copy written, the copy read twice
    relations = 2 * 3 * (16 + 8)
    scores = 2 * 5 * (2 + 2 + 2)
    rows = 2 * 3 * (4 + 4)
    assert step.work() == (3 * 2 * 2 * 5 * 3, table + relations + scores + rows)


def test_work_of_a_step_with_matrices_two_tables_and_float32():
    step = limits.Step(
        batch=2,
        num_entities=5,
        width=3,
        relation_width=9,
        present_heads=1,
        present_relations=2,
        two_entity_tables=True,
        bf16=False,
    )
    maps = 2 * 3 * (2 * 2 * 3 * 3)  # h R and t Rᵀ; each forward, and for both gradients
    table = 5 * 3 * (16 + 4 + 4)
    heads = 1 * 3 * 16
    relations = 2 * 9 * (16 + 8)
    scores = 2 * 5 * (4 + 4 + 4)
    rows = 2 * 3 * (4 + 4)
    assert step.work() == (3 * 2 * 2 * 5 * 3 + maps, table + heads + relations + scores + rows)


def test_a_limit_is_the_larger_part_and_the_sum():
    ceilings = {"float32_operations_per_second": 10.0, "copied_bytes_per_second": 100.0}
    assert limits.limit(limits.Work(20, 100), ceilings, bf16=False, times=3) == (6.0, 9.0)
    assert limits.limit(limits.Work(20, 100), ceilings, bf16=True) is None


# -- growth ------------------------------------------------------------------


def test_a_fit_recovers_the_exponent():
    x = [100.0, 200.0, 400.0, 800.0]
    fit = fits.fit_exponent(x, [3 * value**1.5 for value in x])
    assert fit == pytest.approx((1.5, 3.0, 1.0))


def test_a_point_is_trained_by_the_ordinary_loop():
    found = scaling.train_point(scaling.TINY, "cpu")
    assert found["seconds"] > 0
    assert found["mib"] > 0


# -- rankings that are compared ----------------------------------------------


@pytest.mark.slow
def test_the_rankings_that_are_compared_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "STEPS", 2)
    job = asdict(ranking.Job("world", "test", 8))
    arrays = str(tmp_path / "weights.npz")
    ranking.make_weights(job, device="cpu", arrays=arrays)
    ours = ranking.measure_dualkg(job, device="cpu", arrays=arrays, num_triples=50, repeats=1)
    theirs = ranking.measure_tutorial(job, device="cpu", arrays=arrays, num_triples=50)
    assert math.isclose(ours["mrr"], theirs["mrr"], abs_tol=ranking.TOLERANCE)
    assert ours["num_distinct_queries"] <= ours["num_queries"] == 100


def test_rankings_that_differ_are_not_compared():
    with pytest.raises(SystemExit, match="do not agree"):
        ranking.check_agreement(
            {"one": {"mrr": 0.31}, "other": {"mrr": 0.32}, "third": {"failed": "missing"}}
        )
