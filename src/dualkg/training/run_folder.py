"""The folder of a run: its files by name, what is checked, written and read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from dualkg import files
from dualkg.data.archives import cache_folder
from dualkg.data.graph import SPLITS, Graph, GraphShape, load_saved_graph, save_graph
from dualkg.errors import (
    DamagedFile,
    PathExists,
    RequestError,
)
from dualkg.evaluation.ranking import Ranks
from dualkg.evaluation.report import Report, load_ranks, save_ranks
from dualkg.models.base import Model
from dualkg.training import checkpoint
from dualkg.training.environment import environment
from dualkg.training.errors import (
    DamagedRun,
    NotARun,
    OtherSource,
    RunInTraining,
    RunNotFinished,
)
from dualkg.training.recipe import Recipe

MAX_NEARBY = 5  # runs that a message names
WEIGHT_FILES = "weights-?????-of-?????.safetensors"


class Results(Protocol):
    """What the folder of a run keeps of its evaluation."""

    reports: dict[str, Report]
    identity: str | None


class TrainedResults(Results, Protocol):
    """What the folder of a run keeps of a training."""

    model: Model
    history: list[dict[str, Any]]
    costs: dict[str, float | None] | None
    sparsity: dict[str, Any] | None
    extension: dict[str, Any] | None


def hash_of(parts: Mapping[str, str | None]) -> str:
    """One hash of several, by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_source(path: Path, made_from: object, identity: str | None) -> None:
    """Refuse a file that was derived from another run than that of an identity.

    A file of an earlier version does not say what it was made from, and is accepted. So is any, if
    there is no identity to compare with.
    """
    if None not in (made_from, identity) and made_from != identity:
        raise OtherSource(path)


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._names: set[str] = set()
        self.recipe = self._file("recipe.toml")
        self.environment = self._file("environment.json")
        self.graph = self._file("graph")
        self.tuning = self._file("tuning.json")
        self.checkpoint = self._file("checkpoint.safetensors")
        self.weights = self._file("weights.safetensors")
        # Several processes write a folder of checkpoints, and weights in several files.
        self.checkpoint_folder = self._file("checkpoint")
        self.weights_index = self._file("weights.safetensors.index.json")
        # An ensemble has this file in place of recipe and weights.
        self.ensemble = self._file("ensemble.json")
        self.history = self._file("history.json")
        self.costs = self._file("costs.json")
        self.report = self._file("report.json")
        self.sparsity = self._file("sparsity.json")
        self.calibration = self._file("calibration.json")
        self.priors = self._file("priors.safetensors")
        self.map = self._file("map.parquet")
        self.decisions = self._file("decisions.jsonl")
        self.extension = self._file("extension.json")
        self.tracking = self._file("tracking.json")
        self.tensorboard = self._file("tensorboard")
        self.wandb = self._file("wandb")

    def _file(self, name: str) -> Path:
        self._names.add(name)
        return self.path / name

    def ranks(self, split: str) -> Path:
        return self.path / f"ranks-{split}.parquet"

    def weights_of_process(self, index: int, count: int) -> Path:
        """The weights that one of several processes has written."""
        return self.path / f"weights-{index + 1:05d}-of-{count:05d}.safetensors"

    def weight_files(self) -> list[Path]:
        """The files that the index of the weights names."""
        if not self.weights_index.exists():
            return []
        index = files.read_json(self.weights_index, dict[str, list[str]], checksum=True)
        names = index.get("files", [])
        if not names or any(Path(name).name != name for name in names):
            raise DamagedFile(self.weights_index, "it names no files of this folder")
        return [self.path / name for name in names]

    @property
    def finished(self) -> bool:
        weights = (self.weights, self.weights_index, self.ensemble)
        # A link that leads nowhere is damage, and not a run that was never finished.
        return os.path.lexists(self.report) and any(map(os.path.lexists, weights))

    @property
    def resumable(self) -> bool:
        """Whether it was interrupted while it was tuned, trained or evaluated."""
        saved = (self.checkpoint, self.checkpoint_folder, self.weights, self.tuning)
        return any(path.exists() for path in saved)

    def identity(self) -> str:
        """The hash of what predictions of a finished run come from: recipe, graph and weights.

        Files that are derived from a run keep it. Several seeds have that of all of them.
        """
        seeds = {}
        for recipe in self.seeds():
            seeds[recipe.parent.name] = RunFolder(recipe.parent).identity()
        if seeds:
            return hash_of(seeds)
        parts = {}
        for name, record in self._needed_records().items():
            if not name.startswith("weights"):
                parts[name] = record["sha256"]
        return hash_of({**parts, "weights": self.weights_checksum()})

    def known_identity(self) -> str | None:
        """The identity, or None of a run that is not finished or has a damaged report."""
        try:
            return self.identity()
        except (OSError, RequestError):
            return None

    @property
    def has_calibration(self) -> bool:
        """Whether there is a file, also one that cannot be read, or a link."""
        return os.path.lexists(self.calibration)

    def weights_checksum(self) -> str:
        """The checksum of the weights, or those of their files one after the other.

        Weights that `gather` has joined have that of the files that they were in.
        """
        records = self._needed_records()
        if self.weights.name in records:
            joined_from = checkpoint.read_about(self.weights).get("joined_from")
            return str(joined_from or records[self.weights.name]["sha256"])
        return self._checksum_of(self.weight_files(), records)

    def _checksum_of(self, paths: Iterable[Path], records: dict[str, Any]) -> str:
        return " ".join(str(records[path.name]["sha256"]) for path in paths)

    def _needed_records(self) -> dict[str, Any]:
        """Sizes and checksums of the files that predictions need, by the report or computed."""
        records = self.records()
        if not records:  # a report that was written without them
            records = {name: files.file_record(self.path / name) for name in self.fixed_files()}
        return {name: record for name, record in records.items() if self._is_needed(name)}

    def seeds(self) -> list[Path]:
        """The recipes of the runs `seed-*` in this folder, if it is no run itself."""
        return [] if self.recipe.exists() else sorted(self.path.glob("seed-*/recipe.toml"))

    # -- checks ---------------------------------------------------------------

    def check_free(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that is not empty, unless it is a run that may be overwritten."""
        if not self.path.exists() or (self.path.is_dir() and not files.contents(self.path)):
            return
        foreign = self._foreign_files()
        if foreign:
            raise RequestError(
                f"{self.path} exists and is not a run: it has {', '.join(foreign[:3])}. Name "
                "another folder with `out`."
            )
        if overwrite:
            if files.exists(self.decisions):
                raise RequestError(
                    f"{self.path} has decisions on new facts ({self.decisions.name}), which would "
                    "be lost. Move that file elsewhere first, or name another folder with `out`."
                )
            return
        if self.finished:
            self.remove_checkpoint()
            raise PathExists(self.path, what="a finished run")
        raise RunNotFinished(self.path, resumable=self.resumable, wanted="write")

    def _foreign_files(self) -> list[str]:
        """What is no file of a run, or is missing in a run; such a folder is never removed."""
        if not self.path.is_dir():
            return ["no folder"]
        known = set(self._names)
        known.update(self.ranks(split).name for split in SPLITS)
        known.update(path.name for path in self.path.glob(WEIGHT_FILES))
        foreign = [name for name in files.contents(self.path) if name not in known]
        has_settings = self.recipe.exists() or self.ensemble.exists()
        if not has_settings or not (self.graph / "graph.json").exists():
            foreign.append("no recipe.toml")
        return foreign

    def check_is_run(self) -> None:
        """Refuse anything but the folder of a run."""
        files.recover(self.path)
        if self.path.is_file():
            reason = "is a file; the folder of a run was expected"
            raise NotARun(self.path, reason, nearby=self._nearby())
        if self.recipe.exists() or self.ensemble.exists():
            return
        self._check_not_in_training()
        if self.path.exists():
            reason = "is not a run (there is no recipe.toml)"
        else:
            reason = "does not exist"
        raise NotARun(self.path, reason, nearby=self._nearby())

    def _nearby(self) -> list[str]:
        """Runs beside this path, and in the folder `runs`."""
        parent = self.path.parent if self.path.parent.is_dir() else Path()
        names: set[str] = set()
        for folder in (parent, Path("runs")):
            for pattern in ("[!.]*/recipe.toml", "[!.]*/ensemble.json"):
                names.update(str(file.parent) for file in folder.glob(pattern))
        return sorted(names)[:MAX_NEARBY]

    def check_finished(self) -> None:
        """Refuse a run that is in training, or was interrupted."""
        if not self.finished:
            self._check_not_in_training()
            raise RunNotFinished(self.path, resumable=self.resumable)

    def _check_not_in_training(self) -> None:
        holder = files.lock_holder(self.path, other=True)
        if holder:
            raise RunInTraining(self.path, holder)

    def check_files(self, names: Iterable[str] | None = None) -> None:
        """Refuse damaged files, by the checksums in the report.

        Without `names`, those that predictions need are checked.
        """
        records = self.records()
        if names is None:
            names = [name for name in records if self._is_needed(name)]
        memory = cache_folder() / "verified"
        for name in names:
            if name not in records:
                continue
            damage = files.file_damage(self.path / name, records[name], memory=memory)
            if damage:
                raise DamagedRun(self.path, name, damage)

    def _is_needed(self, name: str) -> bool:
        """Whether predictions need a file, by its path in the folder."""
        needed = (self.recipe.name, self.graph.name, self.ensemble.name)
        return name.partition("/")[0] in needed or name.startswith("weights")

    def damage(self) -> dict[str, str]:
        """What is wrong with the files of a finished run, by name; every file is read."""
        damages = {}
        try:
            for name, record in self.records().items():
                damage = files.file_damage(self.path / name, record)
                if damage:
                    damages[name] = damage
        except RequestError as error:
            return {self.report.name: str(error)}
        return damages

    # -- writing --------------------------------------------------------------

    @contextmanager
    def create(
        self,
        recipe: Recipe | None,
        graph: Graph,
        device: torch.device,
        *,
        engine: str = "",
        overwrite: bool = False,
    ) -> Iterator[RunFolder]:
        """Write all that resuming needs atomically.

        A run is overwritten only when the new one can take its place. An ensemble has no recipe.
        """
        existing: Literal["replace", "refuse"] = "replace" if overwrite else "refuse"
        settings = self.recipe if recipe else self.ensemble
        # A decision that is made on the former run at this moment is not lost.
        kept = [self.decisions.name]
        with files.atomic_folder(
            self.path, existing=existing, last=settings.name, keep=kept
        ) as path:
            fresh = RunFolder(path)
            save_graph(graph, fresh.graph)
            fresh.save_settings(recipe, graph, device, engine=engine)
            yield fresh

    def save_settings(
        self, recipe: Recipe | None, graph: Graph, device: torch.device, *, engine: str = ""
    ) -> None:
        made_with = environment(device, fingerprint=graph.fingerprint, engine=engine or None)
        files.write_text(self.environment, json.dumps(made_with, indent=1))
        if recipe:
            files.write_text(self.recipe, recipe.as_toml())

    def finish(self, run: TrainedResults, *, trained: Path | None = None) -> None:
        """Write the results, the report last, and remove the checkpoint.

        `trained` is a file that has the weights already.
        """
        if trained:
            files.link_or_copy(trained, self.weights)
        else:
            sparse = run.sparsity["tables"] if run.sparsity else ()
            checkpoint.save_weights(run.model.state_dict(), self.weights, sparse=sparse)
        self._save_results(run)
        files.remove(self.checkpoint)
        files.remove(self.checkpoint_folder)
        self.remove_weight_files()

    def finish_in_parts(self, run: TrainedResults, count: int) -> None:
        """Write the results of a run whose weights all processes have written."""
        names = [self.weights_of_process(index, count).name for index in range(count)]
        for path in self.path.glob(WEIGHT_FILES):
            # Another number of processes may have been killed before they wrote the report.
            if path.name not in names:
                files.remove(path)
        files.write_json(self.weights_index, {"files": names})
        self._save_results(run)
        files.remove(self.checkpoint_folder)

    def _save_results(self, run: TrainedResults) -> None:
        contents = {
            self.sparsity: run.sparsity,
            self.extension: run.extension,
            self.history: run.history,
            self.costs: run.costs,
        }
        for path, content in contents.items():
            if content is not None:
                files.write_text(path, json.dumps(content, indent=1, ensure_ascii=False))
        self.save_reports(run)

    def save_reports(self, run: Results) -> None:
        """Write ranks and reports; last the report, with size and checksum of every file."""
        for split, report in run.reports.items():
            save_ranks(report.ranks, self.ranks(split))
        reports = {split: report.as_dict() for split, report in run.reports.items()}
        records = {name: files.file_record(self.path / name) for name in self.fixed_files()}
        files.write_json(self.report, {**reports, "files": records})
        run.identity = self.identity()

    def remove_calibration(self) -> None:
        """Remove a calibration that was made for other weights."""
        files.remove(self.calibration)
        files.remove(self.priors)

    def remove_checkpoint(self) -> None:
        """Remove the checkpoint of a finished run that was killed just before it did.

        A damaged run keeps it.
        """
        has_checkpoint = self.checkpoint.exists() or self.checkpoint_folder.exists()
        if has_checkpoint and not self.damage():
            files.remove(self.checkpoint)
            files.remove(self.checkpoint_folder)

    def join_weights(self, graph: Graph) -> None:
        """Write weights in several files into one, too, unless that was done before a kill."""
        if self.weights.exists():
            return
        tables, about = checkpoint.read_weight_files(
            self.weight_files(), len(graph.entities), check=True
        )
        records = {path.name: files.file_record(path) for path in self.weight_files()}
        about["joined_from"] = self._checksum_of(self.weight_files(), records)
        checkpoint.save_tensors({"model": tables}, self.weights, about=about)

    def remove_weight_files(self) -> None:
        if not self.weights_index.exists():
            return
        for path in self.weight_files():
            files.remove(path)
        files.sync(self.path)
        files.remove(self.weights_index)

    # -- reading --------------------------------------------------------------

    def fixed_files(self) -> list[str]:
        """The files that do not change once a run is finished, by their paths in the folder."""
        paths = [
            self.recipe,
            self.environment,
            self.tuning,
            self.weights,
            self.ensemble,
            self.history,
            self.costs,
            self.sparsity,
            self.extension,
        ]
        paths += [self.ranks(split) for split in SPLITS]
        paths += self.graph.glob("*.*")
        # `gather` may have written the weights into one file.
        if not self.weights.exists():
            paths += [self.weights_index, *self.weight_files()]
        return sorted(path.relative_to(self.path).as_posix() for path in paths if path.is_file())

    def records(self) -> dict[str, Any]:
        """Sizes and checksums of the files of a finished run."""
        records = self._report_tables().get("files", {})
        files.check_type(records, dict[str, files.FileRecord], source=self.report)
        return records

    def saved_reports(self) -> dict[str, Any]:
        """The saved reports of a finished run by split."""
        tables = self._report_tables()
        return {split: report for split, report in tables.items() if split != "files"}

    def _report_tables(self) -> dict[str, dict[str, Any]]:
        tables: dict[str, dict[str, Any]] = files.read_json(
            self.report, dict[str, dict[str, Any]], checksum=True
        )
        return tables

    def load_ranks(self, split: str, shape: GraphShape | None = None) -> Ranks:
        """The saved ranks of a split; damaged ones, or those of another graph, are refused."""
        if self.report.exists():
            self.check_files([self.ranks(split).name])
        return load_ranks(self.ranks(split), shape)

    def load_graph(self) -> Graph:
        try:
            return load_saved_graph(self.graph)
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                f"The graph of the run {self.path} cannot be read: {error}."
            ) from None

    def load_weights(self, model: Model, graph: Graph) -> None:
        """Load the weights of a finished run, in one file or in several, into its model."""
        parts = [] if self.weights.name in self.records() else self.weight_files()
        if parts:
            weights, _ = checkpoint.read_weight_files(parts, len(graph.entities))
            source = self.weights_index
        else:
            weights = checkpoint.read_weights(self.weights)
            source = self.weights
        checkpoint.load_weights(model, weights, source=source)

    def read(self, path: Path, kind: Any = Any, *, default: Any = None) -> Any:
        """The content of a JSON file of the run as a type, or the default without the file."""
        return files.read_json(path, kind) if files.exists(path) else default

    @cached_property
    def saved_environment(self) -> dict[str, Any]:
        return dict(self.read(self.environment, dict[str, Any], default={}))
