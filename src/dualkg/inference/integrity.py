"""Checking the files of a run: which are damaged, and what can be saved."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dualkg.analysis.projection import load_map
from dualkg.data.graph import SPLITS
from dualkg.errors import PYTHON, DamagedFile, DualkgError, RequestError, Words
from dualkg.evaluation.report import load_ranks
from dualkg.extras import UntrustedCode
from dualkg.files import exists, lock_holder, read_json
from dualkg.inference.calibration import NOT_BOUND, load_calibration, priors_damage
from dualkg.inference.decisions import DecisionStore
from dualkg.tables.processes import one_process
from dualkg.training.checkpoint import load_tensors
from dualkg.training.ensemble import SavedEnsemble
from dualkg.training.recipe import load_recipe
from dualkg.training.run import RunFolder
from dualkg.training.trainer import check_recipe


class Note(str):
    """What is worth knowing of a file that can be read."""


Reader = Callable[[Path], object]


@dataclass(frozen=True)
class FileCheck:
    """One file: good by its checksum, readable if it has none, or damaged for a reason.

    The reason of a readable file is a note.
    """

    file: str
    state: Literal["good", "readable", "damaged"]
    reason: str = ""

    @property
    def damaged(self) -> bool:
        return self.state == "damaged"

    @property
    def top_level_name(self) -> str:
        """The name of the file, or of the folder in the run that it is in."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Call:
    """A function or command with its arguments, which each kind of reader spells differently."""

    name: str
    argument: str
    options: Mapping[str, object] = field(default_factory=dict)

    def in_words(self, words: Words = PYTHON) -> str:
        return words.call(self.name, self.argument, **self.options)


@dataclass(frozen=True)
class Advice:
    """What to do about damaged files. `{call}` in the text stands for the call that repairs."""

    text: str
    call: Call | None = None

    def in_words(self, words: Words = PYTHON) -> str:
        if self.call is None:
            return self.text
        return self.text.replace("{call}", self.call.in_words(words))

    def __str__(self) -> str:
        return self.in_words()


@dataclass(frozen=True)
class RunCheck:
    """The files of a run, and what to do about those that are damaged.

    `written_by` is the process that holds the lock.
    """

    run: str
    finished: bool
    written_by: str | None
    files: list[FileCheck]
    advice: list[Advice]

    @property
    def ok(self) -> bool:
        return not any(file.damaged for file in self.files)

    def as_dict(self, words: Words = PYTHON) -> dict[str, Any]:
        """The check for JSON, with the advice in the words of a reader."""
        advice = [sentence.in_words(words) for sentence in self.advice]
        return {"ok": self.ok, **asdict(self), "advice": advice}


def check_run(path: str | Path, *, words: Words = PYTHON) -> list[RunCheck]:
    """Read and hash every file of a run.

    An ensemble is checked with its members, and a folder of several seeds by the runs in it. The
    reasons of damage are in the words of a reader.
    """
    folder = RunFolder(path)
    seeds = folder.seeds()
    if seeds:
        return [_check(RunFolder(recipe.parent), words) for recipe in seeds]

    folder.check_is_run()
    checks = [_check(folder, words)]
    if folder.ensemble.exists() and checks[0].ok:
        for member in SavedEnsemble.read(folder.ensemble).folders(folder.path):
            checks += check_run(member.path, words=words)
    return checks


def _check(folder: RunFolder, words: Words) -> RunCheck:
    """Check one run."""
    recorded = _check_recorded_files(folder)
    recorded_names = {check.top_level_name for check in recorded}
    unrecorded = _check_other_files(folder, recorded_names, words)
    checks = [*recorded, *unrecorded]
    return RunCheck(
        run=str(folder.path),
        finished=folder.finished,
        written_by=lock_holder(folder.path),
        files=checks,
        advice=_advice(folder, checks),
    )


def _check_recorded_files(folder: RunFolder) -> list[FileCheck]:
    """Check the files whose checksums the report has, and the report."""
    if not os.path.lexists(folder.report):
        return []
    damage = folder.damage()
    names = [folder.report.name]
    if folder.report.name not in damage:
        names += folder.records()

    checks = []
    for name in names:
        if name in damage:
            checks.append(FileCheck(name, "damaged", damage[name]))
        else:
            checks.append(FileCheck(name, "good"))
    return checks


def _check_other_files(folder: RunFolder, checked: set[str], words: Words) -> list[FileCheck]:
    """Check the files that the report has no checksums of, by reading them."""
    checks = []
    for file, read in _readers(folder).items():
        if file.name in checked or not os.path.lexists(file):
            continue
        try:
            exists(file)  # refuses a link that leads nowhere
            result = read(file)
            note = str(result) if isinstance(result, Note) else ""
            checks.append(FileCheck(file.name, "readable", note))
        except DualkgError as error:
            checks.append(FileCheck(file.name, "damaged", error.in_words(words)))
        except Exception as error:  # Libraries raise many kinds of errors for damaged bytes.
            checks.append(FileCheck(file.name, "damaged", str(error) or type(error).__name__))
    return checks


def _readers(folder: RunFolder) -> dict[Path, Reader]:
    """How the files are read that have no checksum in the report.

    If the graph cannot be read, less can be said about the files that depend on it.
    """
    graph = None
    with suppress(RequestError):
        graph = folder.load_graph()

    identity = folder.known_identity()

    def read_calibration(file: Path) -> object:
        if graph is None:
            return read_json(file, checksum=True)
        made_from = load_calibration(folder.path, graph, identity=identity).made_from
        return Note(NOT_BOUND) if made_from is None else None

    def read_priors(file: Path) -> None:
        damage = None
        with suppress(OSError, RequestError):  # damage of the calibration is reported as its own
            damage = priors_damage(folder)
        if damage:
            raise DamagedFile(file, damage)

    def read_map(file: Path) -> object:
        if graph is None:
            return None
        return load_map(file, len(graph.entities), identity=identity)

    def read_decisions(file: Path) -> object:
        decisions = DecisionStore(file).load().values()
        others = [decision for decision in decisions if decision.made_from not in (None, identity)]
        if identity is None or not others:
            return None
        return Note(f"the probabilities of {len(others):,} decisions are of another run")

    readers: dict[Path, Reader] = {
        folder.recipe: lambda file: _check_recipe(folder),
        folder.graph: lambda _: folder.load_graph(),
        folder.weights: lambda file: load_tensors(file, check=True),
        folder.checkpoint: lambda file: load_tensors(file, check=True),
        folder.checkpoint_folder: _check_shards,
        folder.environment: read_json,
        folder.tuning: read_json,
        folder.ensemble: SavedEnsemble.read,
        folder.history: read_json,
        folder.costs: read_json,
        folder.sparsity: read_json,
        folder.extension: read_json,
        folder.tracking: read_json,
    }
    for split in SPLITS:
        readers[folder.ranks(split)] = load_ranks
    readers[folder.calibration] = read_calibration
    readers[folder.priors] = read_priors
    readers[folder.map] = read_map
    readers[folder.decisions] = read_decisions
    return readers


def _check_recipe(folder: RunFolder) -> None:
    """Validate a recipe, and compare it with that of the checkpoint of an unfinished run."""
    with suppress(UntrustedCode):  # it is valid as far as can be said without its classes
        load_recipe(folder.recipe)
    if folder.finished:
        return
    about: dict[str, Any] = {}
    place = folder.checkpoint
    with suppress(RequestError, OSError):  # damage of a checkpoint is reported as its own
        if folder.checkpoint_folder.exists():
            place = folder.checkpoint_folder
            about = read_json(place / "latest.json", dict[str, Any], checksum=True)
        elif place.exists():
            about = load_tensors(place)[1]
    check_recipe(folder.recipe, about, checkpoint=place)


def _check_shards(folder: Path) -> None:
    """Read and hash the last checkpoint of several processes."""
    from dualkg.tables.checkpoints import CheckpointFolder  # It takes long to import.

    checkpoint = CheckpointFolder(folder, one_process(torch.device("cpu")))
    about = checkpoint.about()
    if about["when"] != "start":
        checkpoint.check(about)


# -- advice ------------------------------------------------------------------


def _advice(folder: RunFolder, checks: list[FileCheck]) -> list[Advice]:
    """What can be saved, one sentence for each group of damaged files."""
    damaged = {check.top_level_name for check in checks if check.damaged}
    advice = []
    if folder.ensemble.name in damaged:
        advice.append(
            Advice(
                "The runs of the ensemble are not affected. Make an ensemble of them again, and "
                f"save it to {folder.path}."
            )
        )

    training_advice = _training_advice(folder, checks, damaged)
    if training_advice is not None:
        advice.append(training_advice)

    if folder.calibration.name in damaged:
        again = Call("calibrate", str(folder.path), {"overwrite": True})
        advice.append(Advice("Make the calibration again: {call}", again))
    elif folder.priors.name in damaged:
        advice.append(
            Advice(f"Remove {folder.priors}: predictions compute it, until the next calibration.")
        )
    if folder.map.name in damaged:
        advice.append(
            Advice(f"Remove {folder.map}: it is computed again when the map is next shown.")
        )
    if folder.decisions.name in damaged:
        advice.append(
            Advice(
                f"Correct or remove the line of {folder.decisions} that cannot be read; the others "
                "are good."
            )
        )

    notes = (folder.environment, folder.tuning, folder.sparsity, folder.extension, folder.tracking)
    damaged_notes = sorted(file.name for file in notes if file.name in damaged)
    if damaged_notes:
        advice.append(
            Advice(
                f"Predictions do not depend on {', '.join(damaged_notes)}. Restore from a copy, if "
                "there is one."
            )
        )
    return advice


def _training_advice(
    folder: RunFolder, checks: list[FileCheck], damaged: set[str]
) -> Advice | None:
    """What to do about damaged files of the training: the first that the others depend on."""
    path = str(folder.path)
    train_again = Call("train", str(folder.recipe), {"overwrite": True, "out": path})
    resume = Call("resume", path)

    # Weights are in one file or in several.
    weights_damaged = any(name.startswith("weights") for name in damaged)
    checkpoint_good = any(
        check.file == folder.checkpoint.name and not check.damaged for check in checks
    )
    results = {folder.report.name, folder.history.name, folder.costs.name}
    results |= {folder.ranks(split).name for split in SPLITS}

    if folder.recipe.name in damaged:
        return Advice(
            "Weights cannot be used without their recipe.toml. Restore it from a copy, or train "
            "again."
        )
    if folder.graph.name in damaged:
        return Advice(
            "The graph folder is the same in every run on the same data: copy it from one. Or "
            "train again: {call}",
            train_again,
        )
    if weights_damaged and checkpoint_good:
        return Advice("The checkpoint is good. Finish the run from it: {call}", resume)
    if weights_damaged or damaged & {folder.checkpoint.name, folder.checkpoint_folder.name}:
        return Advice(
            "The recipe and the graph are good. Train again, with the same seed: {call}. The "
            "weights are the same on the same type of CPU, with the same number of threads and "
            "the same versions.",
            train_again,
        )
    if results & damaged:
        return Advice("The weights are good. Evaluate them again: {call}", resume)
    return None
