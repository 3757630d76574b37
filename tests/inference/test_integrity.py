"""Locks and checksums of runs: two writers, damaged files, what a kill leaves, and `dualkg
check`.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dualkg as kg
from dualkg.analysis.sparsity import sparsify
from dualkg.errors import LockedError
from dualkg.files import locked, write_json
from dualkg.inference.decisions import Decision, DecisionStore
from dualkg.inference.export import export
from dualkg.inference.extension import extend_run
from dualkg.inference.index_build import save_index
from dualkg.inference.integrity import check_run
from dualkg.training.recipe import Recipe
from dualkg.training.run import RunFolder

RECIPE = Recipe().with_changes({"model.dim": 4, "training.epochs": 2, "training.batch_size": 50})


@pytest.fixture(scope="module")
def small_graph() -> kg.Graph:
    rows = [
        (f"thing{i}", kind, f"{kind}{i % 4}") for kind in ("colour", "shape") for i in range(60)
    ]
    return kg.Graph.from_triples(rows)


@pytest.fixture(scope="module")
def trained(small_graph: kg.Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    kg.train_recipe(RECIPE, graph=small_graph, out=path)
    kg.calibrate(path)
    return path


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(trained, tmp_path / "run"))


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Another thread writes the folder, which is the same to a lock as another process."""
    ready = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with locked(path):
            ready.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def flip(path: Path, position: int, bit: int = 2) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def states(path: Path) -> dict[str, str]:
    [check] = check_run(path)
    return {one.file: one.state for one in check.files}


# -- locks -------------------------------------------------------------------

WRITERS = {
    "train": lambda run, out, graph: kg.train(
        kg.ComplEx(graph, dim=2), graph, epochs=1, out=out
    ),
    "train_recipe": lambda run, out, graph: kg.train_recipe(RECIPE, graph=graph, out=out, overwrite=True),
    "fit": lambda run, out, graph: kg.fit(graph, tune="1s", out=out, overwrite=True),
    "save": lambda run, out, graph: run.save(out),
    "ensemble": lambda run, out, graph: kg.Ensemble([run], weights="equal").save(out),
    "extend": lambda run, out, graph: extend_run(run.folder, "none.tsv", out=out),
    "sparsify": lambda run, out, graph: sparsify(run.folder, share=0.5, out=out),
    "index": lambda run, out, graph: save_index(run, out),
    "export": lambda run, out, graph: export(run, out),
    "complete": lambda run, out, graph: kg.complete(run, top=5, out=out.with_suffix(".tsv")),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_a_second_writer_is_refused_and_writes_nothing(folder, small_graph, writer):
    run = kg.load_run(folder.path)
    out = folder.path.with_name("out")
    with held(out.with_suffix(".tsv") if writer == "complete" else out):
        with pytest.raises(LockedError, match="out.* is being written by process"):
            WRITERS[writer](run, out, small_graph)
        assert {path.name for path in out.parent.iterdir()} <= {"run", ".out.lock", ".out.tsv.lock"}
    assert [path.name for path in out.parent.iterdir()] == ["run"]


def test_a_run_that_is_being_written_is_read_and_not_changed(folder):
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with held(folder.path):
        for change in (kg.resume, lambda path: kg.calibrate(path, overwrite=True)):
            with pytest.raises(LockedError):
                change(folder.path)
        assert kg.load_run(folder.path).predictor().tails(0, 0)
        assert check_run(folder.path)[0].written_by is not None
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_calibration_is_not_saved_with_another_run(folder, small_graph):
    folder.calibration.unlink()
    run = kg.load_run(folder.path)
    kg.train_recipe(
        RECIPE.with_changes({"training.seed": 1}),
        graph=small_graph,
        out=folder.path,
        overwrite=True,
    )
    with pytest.raises(kg.RequestError, match="was replaced after it was loaded"):
        kg.calibrate(run)
    assert not folder.calibration.exists()
    kg.complete(run, top=3)
    assert not folder.calibration.exists()


def test_a_decision_made_while_a_run_is_replaced_is_kept(folder, small_graph, monkeypatch):
    decision = Decision("a", "b", "c", "accepted", 0.5, "2026-01-01T00:00:00+00:00")
    check_free = RunFolder.check_free

    def decide_after(self, **options):
        check_free(self, **options)
        DecisionStore(folder.decisions).update([decision])

    monkeypatch.setattr(RunFolder, "check_free", decide_after)
    kg.train_recipe(RECIPE, graph=small_graph, out=folder.path, overwrite=True)
    assert list(DecisionStore(folder.decisions).load().values()) == [decision]


# -- what a kill leaves ------------------------------------------------------


def test_what_a_killed_process_left_is_removed_and_the_run_overwritten(folder, small_graph):
    beside = folder.path.with_name(".run.abcd1234.tmp")
    (beside / "graph").mkdir(parents=True)
    left = folder.path / ".weights.safetensors.00_11_22.tmp"
    left.write_bytes(b"half")
    others = folder.path.with_name(".run.snapshot"), folder.path.with_name(".running.abcd1234.tmp")
    for other in others:
        other.mkdir()
    assert check_run(folder.path)[0].temporary == [str(beside), str(left)]
    kg.load_run(folder.path)
    kg.train_recipe(RECIPE, graph=small_graph, out=folder.path, overwrite=True)
    assert not beside.exists()
    assert not left.exists()
    assert all(other.exists() for other in others)


# -- damage ------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_goes_unseen(folder, data):
    files = sorted(path for path in folder.path.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    position = data.draw(st.integers(0, file.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    before = file.read_bytes()
    flip(file, position, bit)
    try:
        found = [name for name, state in states(folder.path).items() if state == "damaged"]
        assert found == [file.relative_to(folder.path).as_posix()]
        if file in (folder.weights, folder.recipe) or file.parent == folder.graph:
            with pytest.raises(kg.RequestError, match=f"{file.name} is damaged"):
                kg.load_run(folder.path)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    write_json(folder.report, folder.saved_reports())  # without checksums of other files
    tensors = load_file(folder.weights)
    tensors["model/entities"][3, 1] = value
    save_file(tensors, folder.weights)
    with pytest.raises(
        kg.RequestError, match="cannot be read .*: model/entities has NaN or infinity"
    ):
        kg.load_run(folder.path)


def test_large_finite_weights_are_not_refused(folder):
    write_json(folder.report, folder.saved_reports())
    tensors = load_file(folder.weights)
    tensors["model/entities"][:] = 3e38  # the sum overflows
    save_file(tensors, folder.weights)
    assert kg.load_run(folder.path).model.entities.max() == torch.tensor(3e38)


def test_a_damaged_checkpoint_is_not_resumed(folder):
    folder.report.unlink()
    folder.weights.rename(folder.checkpoint)
    flip(folder.checkpoint, -5)
    with pytest.raises(
        kg.RequestError, match="checkpoint.safetensors cannot be read .* its checksum is not that"
    ):
        kg.resume(folder.path)


@pytest.mark.parametrize("removed", [["sha256"], ["sha256", "files"]])
def test_a_report_without_its_checksum_is_told_and_made_again(folder, run_cli, removed):
    saved = json.loads(folder.report.read_text())
    folder.report.write_text(
        json.dumps({key: value for key, value in saved.items() if key not in removed}, indent=1)
    )
    with pytest.raises(kg.RequestError, match="report.json is damaged: it has no checksum"):
        kg.load_run(folder.path)
    checked = run_cli("check", folder.path)
    assert checked.code == 1
    assert f"Evaluate them again: dualkg resume {folder.path}" in " ".join(checked.out.split())
    kg.resume(folder.path)
    assert run_cli("check", folder.path).code == 0


def test_a_checkpoint_without_its_checksum_is_not_resumed(folder):
    folder.report.unlink()
    tensors = load_file(folder.weights)
    save_file(tensors, folder.checkpoint)
    with pytest.raises(
        kg.RequestError, match="checkpoint.safetensors cannot be read .*: it has no checksum"
    ):
        kg.resume(folder.path)


def test_damaged_results_are_computed_again(folder, run_cli):
    before = {
        path.name: path.read_bytes()
        for path in (folder.weights, folder.ranks("test"), folder.history)
    }
    folder.report.unlink()
    kg.resume(folder.path)
    assert {name: (folder.path / name).read_bytes() for name in before} == before
    flip(folder.ranks("test"), 40)
    folder.history.unlink()
    with pytest.raises(kg.RequestError, match="ranks-test.parquet is damaged"):
        kg.load_run(folder.path).report_on("test")
    checked = run_cli("check", folder.path)
    assert checked.code == 1
    assert f"Evaluate them again: dualkg resume {folder.path}" in " ".join(checked.out.split())
    kg.resume(folder.path)
    assert {name: (folder.path / name).read_bytes() for name in before} == before
    assert run_cli("check", folder.path).code == 0


def test_damaged_weights_are_made_again_from_a_good_checkpoint(folder):
    before = folder.weights.read_bytes()
    shutil.copy(folder.weights, folder.checkpoint)
    flip(folder.weights, -9)
    [check] = check_run(folder.path)
    assert check.advice == [
        f"The checkpoint is good. Finish the run from it: dualkg resume {folder.path}"
    ]
    kg.resume(folder.path)
    assert folder.weights.read_bytes() == before


def test_what_can_be_saved_is_said_for_each_file(folder, run_cli):
    flip(folder.weights, -9)
    folder.calibration.write_text("{")
    folder.decisions.write_text('{"head": 1}\n')
    flip(folder.environment, 5)
    found = run_cli("check", folder.path, "--json")
    assert found.code == 1
    [check] = json.loads(found.out)["runs"]
    assert not check["ok"]
    damaged = [one["file"] for one in check["files"] if one["state"] == "damaged"]
    assert damaged == [
        "environment.json",
        "weights.safetensors",
        "calibration.json",
        "decisions.jsonl",
    ]
    train_again, calibrate, decisions, environment = check["advice"]
    assert f"dualkg train {folder.recipe} --overwrite --out {folder.path}" in train_again
    assert calibrate.endswith("--overwrite")
    assert "decisions.jsonl" in decisions
    assert "environment.json" in environment


def test_seeds_and_ensembles_are_checked_with_their_runs(folder, trained, tmp_path):
    kg.Ensemble([folder.path, trained], weights="equal").save(tmp_path / "both")
    assert [Path(one.run) for one in check_run(tmp_path / "both")] == [
        tmp_path / "both",
        folder.path,
        trained,
    ]
    seeds = tmp_path / "seeds"
    shutil.copytree(trained, seeds / "seed-0")
    assert [(one.run, one.ok) for one in check_run(seeds)] == [(str(seeds / "seed-0"), True)]
