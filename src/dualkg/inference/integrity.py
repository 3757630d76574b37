"""Checking the files of a run: which are damaged, and what can be saved."""

import os
import shlex
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dualkg.analysis.projection import load_map
from dualkg.data.graph import SPLITS
from dualkg.errors import RequestError
from dualkg.evaluation.report import load_ranks
from dualkg.files import lock_holder, read_json, strays
from dualkg.inference.calibration import load_calibration
from dualkg.inference.decisions import DecisionStore
from dualkg.training.checkpoint import load_tensors
from dualkg.training.run import RunFolder


@dataclass(frozen=True)
class FileCheck:
    """One file: good by its checksum, readable if it has none, or damaged for a reason."""

    file: str
    state: Literal["good", "readable", "damaged"]
    reason: str = ""


@dataclass(frozen=True)
class RunCheck:
    """The files of a run, and what to do about those that are damaged."""

    run: str
    finished: bool
    written_by: str | None  # the process that holds the lock
    files: list[FileCheck]
    temporary: list[
        str
    ]  # left by killed processes; removed by the next command that writes the run
    advice: list[str]

    @property
    def ok(self) -> bool:
        return not any(one.state == "damaged" for one in self.files)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def check_run(path: str | Path) -> list[RunCheck]:
    """Read and hash every file of a run, and of the runs that an ensemble or a folder of several
    seeds consists of.
    """
    folder = RunFolder(path)
    if seeds := folder.seeds():
        return [_check(RunFolder(file.parent)) for file in seeds]
    folder.check_is_run()
    checks = [_check(folder)]
    if folder.ensemble.exists() and checks[0].ok:
        members = [
            Path(os.path.normpath(folder.path / one["run"]))
            for one in read_json(folder.ensemble)["members"]
        ]
        checks += [check for member in members for check in check_run(member)]
    return checks


def _check(folder: RunFolder) -> RunCheck:
    checks = []
    if folder.report.exists():
        damage = folder.damage()
        names = [
            folder.report.name,
            *(folder.records() if folder.report.name not in damage else ()),
        ]
        checks = [
            FileCheck(name, "damaged" if name in damage else "good", damage.get(name, ""))
            for name in names
        ]
    known = {one.file.partition("/")[0] for one in checks}
    for file, read in _readers(folder).items():
        if file.name not in known and file.exists():
            try:
                read(file)
                checks.append(FileCheck(file.name, "readable"))
            except Exception as error:  # whatever a library makes of damaged bytes
                checks.append(FileCheck(file.name, "damaged", str(error) or type(error).__name__))
    left = [str(stray) for stray in strays(folder.path)]
    holder = lock_holder(folder.path)
    return RunCheck(
        str(folder.path), folder.finished, holder, checks, left, _advice(folder, checks)
    )


def _readers(folder: RunFolder) -> dict[Path, Callable[[Path], object]]:
    """How each file is read that has no checksum in the report; without a graph, not all can be
    said.
    """
    graph = None
    with suppress(RequestError):
        graph = folder.load_graph()
    tables = (
        folder.environment,
        folder.tuning,
        folder.ensemble,
        folder.history,
        folder.costs,
        folder.sparsity,
    )
    return {
        folder.recipe: lambda file: tomllib.loads(file.read_text(encoding="utf-8")),
        folder.graph: lambda _: folder.load_graph(),
        folder.weights: lambda file: load_tensors(file, check=True),
        folder.checkpoint: lambda file: load_tensors(file, check=True),
        **dict.fromkeys((*tables, folder.extension, folder.tracking), read_json),
        **dict.fromkeys(map(folder.ranks, SPLITS), load_ranks),
        folder.calibration: lambda file: (
            load_calibration(folder.path, graph) if graph else read_json(file, checksum=True)
        ),
        folder.map: lambda file: load_map(file, len(graph.entities)) if graph else None,
        folder.decisions: lambda file: DecisionStore(file).load(),
    }


def _advice(folder: RunFolder, checks: list[FileCheck]) -> list[str]:
    """What can be saved, one sentence for each group of damaged files."""
    damaged = {one.file.partition("/")[0] for one in checks if one.state == "damaged"}
    path = shlex.quote(str(folder.path))
    again = f"dualkg train {shlex.quote(str(folder.recipe))} --overwrite --out {path}"
    results = {
        file.name
        for file in (folder.report, folder.history, folder.costs, *map(folder.ranks, SPLITS))
    }
    of_weights = any(name.startswith("weights") for name in damaged)  # in one file or in several
    found = []
    if folder.ensemble.name in damaged:
        found.append(
            "The runs of the ensemble are not affected. Make it again: dualkg ensemble RUN RUN "
            f"--out {path}"
        )
    if folder.recipe.name in damaged:
        found.append(
            "Weights cannot be used without their recipe.toml. Restore it from a copy, or train "
            "again."
        )
    elif folder.graph.name in damaged:
        found.append(
            "The graph folder is the same in every run on the same data: copy it from one. Or "
            f"train again: {again}"
        )
    elif of_weights and any(
        one.file == folder.checkpoint.name and one.state != "damaged" for one in checks
    ):
        found.append(f"The checkpoint is good. Finish the run from it: dualkg resume {path}")
    elif of_weights or folder.checkpoint.name in damaged:
        found.append(
            f"The recipe and the graph are good. Train again, with the same seed: {again}. The "
            "weights are the same on the same type of CPU, with the same number of threads and "
            "the same versions."
        )
    elif results & damaged:
        found.append(f"The weights are good. Evaluate them again: dualkg resume {path}")
    if folder.calibration.name in damaged:
        found.append(f"Make the calibration again: dualkg calibrate {path} --overwrite")
    if folder.map.name in damaged:
        found.append(f"Remove {folder.map}: it is computed again when the map is next shown.")
    if folder.decisions.name in damaged:
        found.append(
            f"Correct or remove the line of {folder.decisions} that cannot be read; the others "
            "are good."
        )
    noted = (folder.environment, folder.tuning, folder.sparsity, folder.extension, folder.tracking)
    if names := sorted(file.name for file in noted if file.name in damaged):
        found.append(
            f"Predictions do not depend on {', '.join(names)}. Restore from a copy, if there is "
            "one."
        )
    return found
