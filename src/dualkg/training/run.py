"""A run: a trained model with its graph, recipe and reports, and the folder that it is saved in."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dualkg import files
from dualkg.data.archives import cache_folder
from dualkg.data.graph import SPLITS, Graph, Split, load_saved_graph, save_graph
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import Ranks
from dualkg.evaluation.report import Report, build_report, evaluate, load_ranks, save_ranks
from dualkg.models.base import Model
from dualkg.tables import LocalTables
from dualkg.training import checkpoint
from dualkg.training.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    import dualkg

PACKAGES = ("dualkg", "torch", "numpy", "pyarrow", "safetensors", "pydantic")


def environment(
    device: torch.device, *, fingerprint: str, engine: str | None = None
) -> dict[str, object]:
    """What a run was made with: versions, commit, device, threads, engine, and the hash of the
    data.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": describe_device(device),
        "engine": engine,
        "data": fingerprint,
    }


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """The name of the processor from Linux, or else from Python."""
    info = Path("/proc/cpuinfo")
    named = re.search(
        r"^model name.*?:(.*)",
        info.read_text() if info.is_file() else "",
        re.IGNORECASE | re.MULTILINE,
    )
    return named[1].strip() if named else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this tree, `-dirty` if files differ; None outside git. `DUALKG_COMMIT` names it
    for a copy.
    """
    if given := os.environ.get("DUALKG_COMMIT"):
        return given
    here = Path(__file__).parent
    if "site-packages" in here.parts:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


@dataclass(repr=False)
class Run:
    """A trained model with its graph, recipe and results."""

    model: Model
    graph: Graph
    recipe: Recipe
    history: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    folder: Path | None = None
    costs: dict[str, float | None] | None = None  # seconds of training and ranking, peak memory
    sparsity: dict[str, Any] | None = None  # how it was made sparse; `tables` are stored as CSR
    extension: dict[str, Any] | None = None  # of `dualkg extend`
    opened: tuple[int, ...] | None = None  # which report the folder had when it was loaded

    def __repr__(self) -> str:
        mrr = f", test MRR {self.reports['test'].mrr:.4f}" if "test" in self.reports else ""
        folder = f", {str(self.folder)!r}" if self.folder else ""
        return f"{type(self).__name__}({self.model_name} on {self.graph.name}{mrr}{folder})"

    @property
    def report(self) -> Report:
        """The report on the test split."""
        return self.report_on("test")

    def report_on(self, split: Split) -> Report:
        """The report on a split: from training, from saved ranks, or evaluated now."""
        folder = RunFolder(self.folder or "")
        if split not in self.reports and self.folder and folder.ranks(split).exists():
            self.reports[split] = build_report(folder.load_ranks(split), self.graph, split=split)
        elif split not in self.reports:
            self.reports[split] = evaluate(self.model, self.graph, split=split)
        return self.reports[split]

    @property
    def model_name(self) -> str:
        """The name of the class of the model."""
        return type(self.model.embedding).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe as tables, for JSON."""
        return self.recipe.model_dump(mode="json")

    @property
    def settings_text(self) -> str:
        return self.recipe.as_toml()

    @property
    def is_current(self) -> bool:
        """Whether the folder still holds this run: another one may have replaced it since it was
        loaded.
        """
        return self.folder is not None and self.opened in (None, RunFolder(self.folder).stamp())

    def predictor(self, **options: Any) -> dualkg.Predictor:
        """A predictor of this run, with probabilities if its folder has a calibration; options of
        `Predictor.of`.
        """
        import dualkg  # inference depends on this module

        return dualkg.Predictor.of(self, **options)

    @files.locks("path")
    def save(self, path: str | Path) -> Path:
        """Save a run that has no folder, such as one of imported embeddings."""
        folder = RunFolder(path)
        folder.check_free()
        with folder.create(self.recipe, self.graph, self.model.device) as fresh:
            fresh.finish(self)
        self.folder = folder.path
        return folder.path


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.toml"
        self.environment = self.path / "environment.json"
        self.graph = self.path / "graph"
        self.tuning = self.path / "tuning.json"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.weights = self.path / "weights.safetensors"
        self.checkpoint_folder = self.path / "checkpoint"  # of several processes
        self.weights_index = (
            self.path / "weights.safetensors.index.json"
        )  # of weights in several files
        self.ensemble = self.path / "ensemble.json"  # in place of recipe and weights
        self.history = self.path / "history.json"
        self.costs = self.path / "costs.json"
        self.report = self.path / "report.json"
        self.sparsity = self.path / "sparsity.json"
        self.calibration = self.path / "calibration.json"
        self.map = self.path / "map.parquet"
        self.decisions = self.path / "decisions.jsonl"
        self.extension = self.path / "extension.json"
        self.tracking = self.path / "tracking.json"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"

    def ranks(self, split: str) -> Path:
        return self.path / f"ranks-{split}.parquet"

    def weights_of_process(self, index: int, count: int) -> Path:
        """The weights that one of several processes has written."""
        return self.path / f"weights-{index + 1:05d}-of-{count:05d}.safetensors"

    def weight_files(self) -> list[Path]:
        """The files that the index of the weights names."""
        if not self.weights_index.exists():
            return []
        names = files.read_json(self.weights_index, dict[str, list[str]], checksum=True).get(
            "files", []
        )
        if not names or any(Path(name).name != name for name in names):
            raise RequestError(
                f"{self.weights_index} is damaged: it names no files of this folder."
            )
        return [self.path / name for name in names]

    @property
    def finished(self) -> bool:
        return self.report.exists() and any(
            path.exists() for path in (self.weights, self.weights_index, self.ensemble)
        )

    def stamp(self) -> tuple[int, ...] | None:
        """What tells the report of this folder from another."""
        with suppress(OSError):
            found = self.report.stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    def seeds(self) -> list[Path]:
        """The recipes of the runs `seed-*` in this folder, if it is no run itself."""
        return [] if self.recipe.exists() else sorted(self.path.glob("seed-*/recipe.toml"))

    def check_free(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that is not empty, unless it is a run that may be overwritten."""
        if not self.path.exists() or (self.path.is_dir() and not files.contents(self.path)):
            return
        if unknown := self._unknown_files():
            raise RequestError(
                f"{self.path} exists and is not a run: it has {', '.join(unknown[:3])}. Name "
                "another folder with --out."
            )
        if overwrite and not self.decisions.exists():
            return
        if overwrite:
            raise RequestError(
                f"{self.path} has decisions on new facts ({self.decisions.name}), which would be "
                "lost. Move that file elsewhere first, or name another folder with --out."
            )
        if self.finished:
            self.remove_checkpoint()
            raise RequestError(
                f"{self.path} is a finished run. Use --overwrite, or another folder with --out."
            )
        raise RequestError(
            f"The run {self.path} is not finished. Resume it with: dualkg resume {self.path}, or "
            "replace it with --overwrite."
        )

    def _unknown_files(self) -> list[str]:
        """Files that are not a run's, or that a run needs: a folder with any of these is never
        removed.
        """
        if not self.path.is_dir():
            return ["no folder"]
        known = {path.name for path in vars(self).values()} | {
            self.ranks(split).name for split in SPLITS
        }
        known |= {path.name for path in self.path.glob("weights-?????-of-?????.safetensors")}
        unknown = [name for name in files.contents(self.path) if name not in known]
        is_run = (self.recipe.exists() or self.ensemble.exists()) and (
            self.graph / "graph.json"
        ).exists()
        return unknown if is_run else [*unknown, "no recipe.toml"]

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
        """Write all that resuming needs atomically; a run is overwritten only when the new one can
        take its place.
        """
        keep = [
            self.decisions.name
        ]  # a decision that is made on the former run at this moment is not lost
        existing: Literal["replace", "refuse"] = "replace" if overwrite else "refuse"
        last = (self.recipe if recipe else self.ensemble).name  # an ensemble has no recipe
        with files.atomic_folder(self.path, existing=existing, last=last, keep=keep) as path:
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

    def finish(self, run: Run, *, trained: Path | None = None) -> None:
        """Write the results, the report last, and remove the checkpoint; `trained` is a file that
        has the weights.
        """
        if trained:
            files.link_or_copy(trained, self.weights)
        else:
            sparse = run.sparsity["tables"] if run.sparsity else ()
            checkpoint.save_weights(run.model.state_dict(), self.weights, sparse=sparse)
        self._save_results(run)
        self.checkpoint.unlink(missing_ok=True)
        self.remove_weight_files()

    def finish_in_parts(self, run: Run, count: int) -> None:
        """Write the results of a run whose weights all processes have written."""
        names = [self.weights_of_process(index, count).name for index in range(count)]
        for left in self.path.glob("weights-?????-of-?????.safetensors"):
            if (
                left.name not in names
            ):  # by another number of processes, killed before they wrote the report
                left.unlink()
        files.write_json(self.weights_index, {"files": names})
        self._save_results(run)
        shutil.rmtree(self.checkpoint_folder)

    def _save_results(self, run: Run) -> None:
        contents = {
            self.sparsity: run.sparsity,
            self.extension: run.extension,
            self.history: run.history,
        }
        for path, content in {**contents, self.costs: run.costs}.items():
            if content is not None:
                files.write_text(path, json.dumps(content, indent=1, ensure_ascii=False))
        self.save_reports(run)

    def remove_checkpoint(self) -> None:
        """Remove the checkpoint of a finished run that was killed just before it did; a damaged run
        keeps it.
        """
        if (self.checkpoint.exists() or self.checkpoint_folder.exists()) and not self.damage():
            self.checkpoint.unlink(missing_ok=True)
            shutil.rmtree(self.checkpoint_folder, ignore_errors=True)

    def save_reports(self, run: Run) -> None:
        """Write ranks and reports; last the report, with size and checksum of every file."""
        for split, report in run.reports.items():
            save_ranks(report.ranks, self.ranks(split))
        reports = {split: report.as_dict() for split, report in run.reports.items()}
        records = {name: files.file_record(self.path / name) for name in self.fixed_files()}
        files.write_json(self.report, {**reports, "files": records})

    def join_weights(self, graph: Graph) -> None:
        """Write weights in several files into one, too, unless that was done before a kill."""
        if not self.weights.exists():
            tables, about = checkpoint.read_weight_files(
                self.weight_files(), len(graph.entities), check=True
            )
            checkpoint.save_tensors({"model": tables}, self.weights, about=about)

    def remove_weight_files(self) -> None:
        if self.weights_index.exists():
            for path in self.weight_files():
                path.unlink(missing_ok=True)
            files.sync(self.path)
            self.weights_index.unlink()

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
        ]
        paths += [self.sparsity, self.extension, *map(self.ranks, SPLITS), *self.graph.glob("*.*")]
        if not self.weights.exists():  # which `gather` has written
            paths += [self.weights_index, *self.weight_files()]
        return sorted(path.relative_to(self.path).as_posix() for path in paths if path.is_file())

    def check_files(self, names: Iterable[str] | None = None) -> None:
        """Refuse damaged files, by the checksums in the report: those that are named, or all that
        predictions need.
        """
        recorded = self.records()
        if names is None:
            needed = (self.recipe.name, self.graph.name, self.ensemble.name)
            names = [
                name
                for name in recorded
                if name.partition("/")[0] in needed or name.startswith("weights")
            ]
        memory = cache_folder() / "verified"
        for name in names:
            if name in recorded and (
                damage := files.file_damage(self.path / name, recorded[name], memory=memory)
            ):
                raise RequestError(
                    f"{self.path / name} is damaged: {damage}. To see what can be saved: dualkg "
                    f"check {self.path}"
                )

    def damage(self) -> dict[str, str]:
        """What is wrong with the files of a finished run, by name; every file is read."""
        try:
            found = {
                name: files.file_damage(self.path / name, record)
                for name, record in self.records().items()
            }
        except RequestError as error:
            return {self.report.name: str(error)}
        return {name: damage for name, damage in found.items() if damage}

    def records(self) -> dict[str, Any]:
        """Sizes and checksums of the files of a finished run."""
        return dict(
            files.read_json(self.report, dict[str, dict[str, Any]], checksum=True).get("files", {})
        )

    def check_is_run(self) -> None:
        """Refuse anything but the folder of a run."""
        files.recover(self.path)
        if self.path.is_file():
            raise RequestError(f"{self.path} is a file; the folder of a run was expected.")
        if not (self.recipe.exists() or self.ensemble.exists()):
            what = (
                "does not exist"
                if not self.path.exists()
                else "is not a run (there is no recipe.toml)"
            )
            raise RequestError(f"{self.path} {what}.{_runs_nearby(self.path)}")

    def saved_reports(self) -> dict[str, Any]:
        """The saved reports of a finished run by split."""
        found = files.read_json(self.report, dict[str, dict[str, Any]], checksum=True)
        return {split: report for split, report in found.items() if split != "files"}

    def resume_advice(self) -> str:
        # It was interrupted in training, before its report, or in tuning.
        saved = (self.checkpoint, self.checkpoint_folder, self.weights, self.tuning)
        if any(path.exists() for path in saved):
            return f"Resume it with: dualkg resume {self.path}"
        return f"It has no checkpoint; train it again: dualkg train {self.recipe} --overwrite --out {self.path}"

    def load_ranks(self, split: str) -> Ranks:
        """The saved ranks of a split; damaged ones are refused."""
        if self.report.exists():
            self.check_files([self.ranks(split).name])
        return load_ranks(self.ranks(split))

    def load_graph(self) -> Graph:
        try:
            return load_saved_graph(self.graph)
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                f"The graph of the run {self.path} cannot be read: {error}."
            ) from None

    def read(self, path: Path, kind: Any = Any, *, default: Any = None) -> Any:
        """What a JSON file of the run holds as a type, or the default if there is no such file."""
        return files.read_json(path, kind) if path.exists() else default

    @cached_property
    def saved_environment(self) -> dict[str, Any]:
        return dict(self.read(self.environment, dict[str, Any], default={}))


@files.locks("path")
def gather(path: str | Path, *, trust_code: bool = False) -> Run:
    """Write the weights of several processes into one file; after a kill, the index that is left
    says to go on.
    """
    folder = RunFolder(path)
    folder.check_is_run()
    if not folder.weights_index.exists():
        raise RequestError(
            f"The weights of {path} are in one file already, or the run is not finished."
        )
    run = load_run(path, trust_code=trust_code)
    folder.join_weights(run.graph)
    for split in SPLITS:
        if folder.ranks(split).exists():
            run.report_on(split)
    folder.save_reports(run)  # which decides what is read: one file or several
    folder.remove_weight_files()
    return run


def load_run(path: str | Path, *, trust_code: bool = False) -> Run:
    """Load a finished run, an ensemble, or a folder of several seeds as an ensemble with equal
    weights.

    A class that is not part of dualkg is imported only with `trust_code`.
    """
    if isinstance(path, Run):
        raise RequestError(
            "load_run takes the folder of a run, and a run was given. Use it as it is."
        )
    folder = RunFolder(path)
    files.recover(folder.path)
    if folder.ensemble.exists() or folder.seeds():
        import dualkg  # ensembles depend on this module

        return dualkg.Ensemble.load(path, trust_code=trust_code)
    folder.check_is_run()
    if not folder.finished:
        raise RequestError(f"The run {folder.path} is not finished. {folder.resume_advice()}")
    opened = folder.stamp()
    folder.check_files()
    recipe = load_recipe(folder.recipe, trust_code=trust_code)
    graph = folder.load_graph()
    tables = LocalTables(len(graph.entities), initialize=False)
    model = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
    parts = [] if folder.weights.name in folder.records() else folder.weight_files()
    if parts:
        weights = checkpoint.read_weight_files(parts, len(graph.entities))[0]
        source = folder.weights_index
    else:
        weights = checkpoint.read_weights(folder.weights)
        source = folder.weights
    checkpoint.load_weights(model, weights, source=source)
    history = checkpoint.check_history(
        folder.read(folder.history, default=[]), source=folder.history
    )
    sparsity = folder.read(folder.sparsity, dict[str, Any])
    costs = folder.read(folder.costs, dict[str, float | None])
    return Run(
        model.eval(),
        graph,
        recipe,
        history,
        folder=folder.path,
        costs=costs,
        sparsity=sparsity,
        opened=opened,
    )


def _runs_nearby(path: Path) -> str:
    folders = (path.parent if path.parent.is_dir() else Path(), Path("runs"))
    patterns = ("[!.]*/recipe.toml", "[!.]*/ensemble.json")
    found = [file for folder in folders for pattern in patterns for file in folder.glob(pattern)]
    names = sorted({str(file.parent) for file in found})
    return f" Runs nearby: {', '.join(names[:5])}." if names else " Make one with: dualkg train"
