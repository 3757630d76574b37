"""Checking the files of a run by their sizes and hashes: which are damaged."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch

from dualkg.data.graph import SPLITS
from dualkg.errors import DamagedFile
from dualkg.evaluation.report import load_ranks
from dualkg.extras import UntrustedCode
from dualkg.files import exists, lock_holder, read_json
from dualkg.inference.decisions import DecisionStore
from dualkg.tables.processes import one_process
from dualkg.training.checkpoint import load_tensors
from dualkg.training.ensemble import SavedEnsemble
from dualkg.training.recipe import load_recipe
from dualkg.training.run_folder import RunFolder


@dataclass(frozen=True)
class FileCheck:
    """One file: good by the checksum that the report has, readable if it has none, or damaged for a
    reason.
    """

    file: str
    state: Literal["good", "readable", "damaged"]
    reason: str = ""

    @property
    def damaged(self) -> bool:
        return self.state == "damaged"


@dataclass(frozen=True)
class RunCheck:
    """The files of a run; `written_by` is the process that holds the lock."""

    run: str
    finished: bool
    written_by: str | None
    files: list[FileCheck]

    @property
    def ok(self) -> bool:
        return not any(file.damaged for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def check_run(path: str | Path) -> list[RunCheck]:
    """Read and hash every file of a run.

    An ensemble is checked with its members, and a folder of several seeds by the runs in it.
    """
    folder = RunFolder(path)
    seeds = folder.seeds()
    if seeds:
        return [_check(RunFolder(recipe.parent)) for recipe in seeds]

    folder.check_is_run()
    checks = [_check(folder)]
    if folder.ensemble.exists() and checks[0].ok:
        for member in SavedEnsemble.read(folder.ensemble).folders(folder.path):
            checks += check_run(member.path)
    return checks


def _check(folder: RunFolder) -> RunCheck:
    files = []
    if os.path.lexists(folder.report):
        damage = folder.damage()
        names = [folder.report.name]
        if folder.report.name not in damage:
            names += folder.records()
        for name in names:
            state: Literal["good", "damaged"] = "damaged" if name in damage else "good"
            files.append(FileCheck(name, state, damage.get(name, "")))

    recorded = {file.file.partition("/")[0] for file in files}
    for path, read in _readers(folder).items():
        if path.name not in recorded and os.path.lexists(path):
            files.append(_read(path, read))
    return RunCheck(str(folder.path), folder.finished, lock_holder(folder.path), files)


def _read(path: Path, read: Callable[[Path], object]) -> FileCheck:
    """Check a file that the report has no checksum of; most have one of their own."""
    try:
        exists(path)  # refuses a link that leads nowhere
        read(path)
    except Exception as error:  # Libraries raise many kinds of errors for damaged bytes.
        return FileCheck(path.name, "damaged", str(error) or type(error).__name__)
    return FileCheck(path.name, "readable")


def _readers(folder: RunFolder) -> dict[Path, Callable[[Path], object]]:
    """How the files are read that may have no checksum in the report."""
    readers: dict[Path, Callable[[Path], object]] = {
        folder.recipe: _read_recipe,
        folder.graph: lambda _: folder.load_graph(),
        folder.weights: partial(load_tensors, check=True),
        folder.checkpoint: partial(load_tensors, check=True),
        folder.checkpoint_folder: _read_shards,
        folder.ensemble: SavedEnsemble.read,
        folder.calibration: lambda _: _read_calibration(folder),
        folder.priors: lambda _: None,  # of an earlier version, and not used
        folder.map: pq.read_table,
        folder.decisions: lambda file: DecisionStore(file).load(),
    }
    others = (folder.environment, folder.tuning, folder.history, folder.costs, folder.sparsity)
    for file in (*others, folder.extension, folder.tracking):
        readers[file] = read_json
    for split in SPLITS:
        readers[folder.ranks(split)] = load_ranks
    return readers


def _read_recipe(file: Path) -> None:
    with suppress(UntrustedCode):  # it is valid as far as can be said without its classes
        load_recipe(file)


def _read_calibration(folder: RunFolder) -> None:
    made_from = read_json(folder.calibration, dict[str, Any], checksum=True).get("made_from")
    identity = folder.known_identity()
    if made_from and identity and made_from != identity:
        raise DamagedFile(folder.calibration, "it was made from another run")


def _read_shards(folder: Path) -> None:
    """Read and hash the last checkpoint of several processes."""
    from dualkg.tables.checkpoints import CheckpointFolder  # It takes long to import.

    checkpoint = CheckpointFolder(folder, one_process(torch.device("cpu")))
    about = checkpoint.about()
    if about["when"] != "start":
        checkpoint.check(about)
