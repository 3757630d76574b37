"""Locks and checksums of runs: two writers, damaged files, and `dualkg check`."""

import json
import os
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
from dualkg.errors import DamagedFile, LockedError
from dualkg.files import locked, write_json
from dualkg.inference.decisions import Decision, DecisionStore
from dualkg.inference.export import export
from dualkg.inference.index import save_index
from dualkg.inference.integrity import check_run
from dualkg.training.errors import DamagedRun
from dualkg.training.recipe import Recipe
from dualkg.training.run_folder import RunFolder
from dualkg.workflows import extend_run
from tests.raising import refused

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
    return {file.file: file.state for file in check.files}


def damaged_files(path: Path) -> list[str]:
    return [name for name, state in states(path).items() if state == "damaged"]


def contents(folder: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


# -- locks -------------------------------------------------------------------

WRITERS = {
    "train": lambda run, out, graph: kg.train(
        kg.ComplEx(graph, dim=2), graph, epochs=1, out=out
    ),
    "train_recipe": lambda run, out, graph: kg.train_recipe(
        RECIPE, graph=graph, out=out, overwrite=True
    ),
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
    written = out.with_suffix(".tsv") if writer == "complete" else out
    with held(written):
        with refused(LockedError, path=written) as caught:
            WRITERS[writer](run, out, small_graph)
        assert caught.value.holder.startswith(f"process {os.getpid()} on ")
        assert {path.name for path in out.parent.iterdir()} <= {"run", ".out.lock", ".out.tsv.lock"}
    assert [path.name for path in out.parent.iterdir()] == ["run"]


def test_a_run_that_is_being_written_is_read_and_not_changed(folder):
    before = contents(folder)
    with held(folder.path):
        with pytest.raises(LockedError):
            kg.resume(folder.path)
        with pytest.raises(LockedError):
            kg.calibrate(folder.path, overwrite=True)
        assert kg.load_run(folder.path).predictor().tails(0, 0)
        assert check_run(folder.path)[0].written_by is not None
    assert contents(folder) == before


def test_a_calibration_is_not_saved_with_another_run(folder, small_graph):
    folder.calibration.unlink()
    run = kg.load_run(folder.path)
    other_recipe = RECIPE.with_changes({"training.seed": 1})
    kg.train_recipe(other_recipe, graph=small_graph, out=folder.path, overwrite=True)
    with pytest.raises(kg.RequestError, match="was replaced after it was loaded"):
        kg.calibrate(run)
    assert not folder.calibration.exists()
    kg.complete(run, top=3)
    assert not folder.calibration.exists()


def test_a_decision_made_while_a_run_is_replaced_is_kept(folder, small_graph, monkeypatch):
    decision = Decision("a", "b", "c", "accepted", 0.5, "2026-01-01T00:00:00+00:00")
    create = RunFolder.create

    def decide_before(self, *arguments, **options):
        DecisionStore(folder.decisions).update([decision])
        return create(self, *arguments, **options)

    monkeypatch.setattr(RunFolder, "create", decide_before)
    kg.train_recipe(RECIPE, graph=small_graph, out=folder.path, overwrite=True)
    assert list(DecisionStore(folder.decisions).load().values()) == [decision]


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
        assert damaged_files(folder.path) == [file.relative_to(folder.path).as_posix()]
        if file in (folder.weights, folder.recipe) or file.parent == folder.graph:
            name = file.relative_to(folder.path).as_posix()
            with refused(DamagedRun, run=folder.path, file=name):
                kg.load_run(folder.path)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["decisions.jsonl", "map.parquet", "report.json", "history.json"])
def test_a_link_that_leads_nowhere_is_damage(folder, name):
    path = folder.path / name
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")
    assert damaged_files(folder.path) == [name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    write_json(folder.report, folder.saved_reports())  # without checksums of other files
    tensors = load_file(folder.weights)
    tensors["model/entities"][3, 1] = value
    save_file(tensors, folder.weights)
    with pytest.raises(kg.RequestError, match="model/entities has NaN or infinity"):
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
    with pytest.raises(kg.RequestError, match="its checksum is not that of its content"):
        kg.resume(folder.path)


@pytest.mark.parametrize("removed", [["sha256"], ["sha256", "files"]])
def test_a_report_without_its_checksum_is_told_and_made_again(folder, run_cli, removed):
    report = json.loads(folder.report.read_text())
    for key in removed:
        del report[key]
    folder.report.write_text(json.dumps(report, indent=1))
    with refused(DamagedFile, path=folder.report, reason="it has no checksum (the entry 'sha256')"):
        kg.load_run(folder.path)
    assert run_cli("check", folder.path).code == 1
    kg.resume(folder.path)
    assert run_cli("check", folder.path).code == 0


def test_a_checkpoint_without_its_checksum_is_not_resumed(folder):
    folder.report.unlink()
    tensors = load_file(folder.weights)
    save_file(tensors, folder.checkpoint)
    with pytest.raises(kg.RequestError, match="it has no checksum"):
        kg.resume(folder.path)


def test_damaged_results_are_computed_again(folder, run_cli):
    files = (folder.weights, folder.ranks("test"), folder.history)
    before = [file.read_bytes() for file in files]
    folder.report.unlink()
    kg.resume(folder.path)
    assert [file.read_bytes() for file in files] == before

    flip(folder.ranks("test"), 40)
    folder.history.unlink()
    with refused(DamagedRun, run=folder.path, file="ranks-test.parquet"):
        kg.load_run(folder.path).report_on("test")
    assert run_cli("check", folder.path).code == 1

    kg.resume(folder.path)
    assert [file.read_bytes() for file in files] == before
    assert run_cli("check", folder.path).code == 0


def test_damaged_weights_are_made_again_from_a_good_checkpoint(folder):
    before = folder.weights.read_bytes()
    shutil.copy(folder.weights, folder.checkpoint)
    flip(folder.weights, -9)
    assert damaged_files(folder.path) == ["weights.safetensors"]
    kg.resume(folder.path)
    assert folder.weights.read_bytes() == before


def test_every_damaged_file_is_named(folder, run_cli):
    flip(folder.weights, -9)
    folder.calibration.write_text("{")
    folder.decisions.write_text('{"head": 1}\n')
    flip(folder.environment, 5)
    damaged = ["calibration.json", "decisions.jsonl", "environment.json", "weights.safetensors"]
    assert sorted(damaged_files(folder.path)) == damaged
    printed = run_cli("check", folder.path)
    assert printed.code == 1
    assert all(name in printed.out for name in damaged)
    assert "Files are damaged" in printed.err
    [check] = run_cli("check", folder.path, "--json").json["runs"]
    assert not check["ok"]


def test_a_damaged_ensemble(folder, trained, tmp_path):
    both = kg.Ensemble([folder.path, trained], weights="equal").save(tmp_path / "both")
    flip(RunFolder(both).ensemble, 5)
    assert damaged_files(both) == ["ensemble.json"]


def test_ensembles_are_checked_with_their_runs(folder, trained, tmp_path):
    both = tmp_path / "both"
    kg.Ensemble([folder.path, trained], weights="equal").save(both)
    checked = [Path(check.run) for check in check_run(both)]
    assert checked == [both, folder.path, trained]


def test_seeds_are_checked_as_runs(trained, tmp_path):
    seeds = tmp_path / "seeds"
    shutil.copytree(trained, seeds / "seed-0")
    [check] = check_run(seeds)
    assert check.run == str(seeds / "seed-0")
    assert check.ok
