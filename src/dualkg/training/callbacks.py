"""Callbacks of a training, and trackers: TensorBoard, MLflow, Weights & Biases."""

import json
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from dualkg.data.graph import Graph
from dualkg.errors import (
    DamagedFile,
    InvalidValue,
    RequestError,
    UnknownName,
    close_matches,
)
from dualkg.evaluation.report import Report
from dualkg.extras import optional_import
from dualkg.files import write_text
from dualkg.logs import logger
from dualkg.models.base import Model
from dualkg.training.recipe import Recipe
from dualkg.training.run import TrainedRun
from dualkg.training.run_folder import RunFolder


class StopTraining(Exception):
    """Raised by `on_epoch` or `on_validation` to end training after this epoch.

    The run ends as with early stopping.

    Examples:
        >>> class Once(kg.Callback):
        ...     def on_epoch(self, epoch, metrics):
        ...         raise kg.StopTraining
        >>> len(kg.train("ComplEx", graph, epochs=50, callbacks=[Once()]).history)
        1
    """


@dataclass(frozen=True)
class TrainingInfo:
    """What a callback gets at the start.

    `epoch` is the number of epochs that a resumed run has finished before.
    """

    model: Model
    graph: Graph
    recipe: Recipe
    engine: str
    folder: Path | None = None
    epoch: int = 0

    @property
    def title(self) -> str:
        """The name of the run folder, or of graph and model where there is none."""
        if self.folder:
            return self.folder.name
        return f"{self.graph.name} {self.recipe.model.name}"


class Callback:
    """Subclass it, override the methods you need, and pass instances.

    An example is `kg.train(…, callbacks=[MyCallback()])`. `StopTraining`, raised in `on_epoch` or
    `on_validation`, ends training early: the run is evaluated and saved. Any other exception ends
    it as a failure and is passed on; a run with a folder can then be resumed.

    Examples:
        >>> class Losses(kg.Callback):
        ...     values = []
        ...     def on_epoch(self, epoch, metrics):
        ...         self.values.append(metrics["loss"])
        >>> run = kg.train("ComplEx", graph, epochs=1, callbacks=[Losses()])
        >>> len(Losses.values)
        1
    """

    def on_start(self, training: TrainingInfo) -> None:
        """Before the first step, also of a resumed run."""

    def on_validation(self, epoch: int, report: Report) -> None:
        """After the validation split was ranked, before `on_epoch` of the same epoch."""

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """After an epoch, counted from 1.

        Metrics are `loss`, `learning_rate`, `seconds`, and `valid_mrr` if the epoch was validated.
        """

    def on_end(self, run: TrainedRun | None) -> None:
        """After the run was evaluated and saved.

        `run` is None if training failed or was interrupted.
        """


class Tracker(Callback):
    """Writes the settings and the metrics of a training for a tool that draws them.

    A training is not lost by its tracker: after the start, an exception is logged and the tracker
    writes no more.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, training: TrainingInfo, settings: Mapping[str, Any], run_id: str | None) -> str:
        """Begin to write and return the id of the tracked run.

        The id is passed again when a run is resumed.
        """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of an epoch."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End writing."""

    def check(self) -> None:
        """Raise how to install the package of this tracker, before a run folder is made."""
        with optional_import(self.name, purpose=f"Tracking with {type(self).__name__}"):
            import_module(self.name)

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that construct this tracker again: its public attributes."""
        options = {}
        for name, value in vars(self).items():
            if not name.startswith("_"):
                options[name] = value and str(value)
        return options

    def on_start(self, training: TrainingInfo) -> None:
        self._failed = False
        saved = read_tracking(training.folder)
        run_id = self.open(training, _settings(training), saved.get(self.name, {}).get("id"))
        if training.folder:
            saved[self.name] = {"id": run_id, "options": self.options}
            write_text(RunFolder(training.folder).tracking, json.dumps(saved, indent=1))

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        values = {f"train/{key}": value for key, value in metrics.items() if key != "valid_mrr"}
        self._try(self.log, values, epoch)

    def on_validation(self, epoch: int, report: Report) -> None:
        self._try(self.log, _metrics("valid", report), epoch)

    def on_end(self, run: TrainedRun | None) -> None:
        if run is not None:
            for split, report in run.reports.items():
                self._try(self.log, _metrics(f"final/{split}", report), len(run.history))
        self._try(self.close, failed=run is None)

    def _try(self, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if self._failed:
            return
        try:
            write(*arguments, **options)
        except Exception as error:  # a server that is down, a disk that is full
            self._failed = True
            logger.warning("%s stopped tracking: %s: %s", self.name, type(error).__name__, error)


def _settings(training: TrainingInfo) -> dict[str, Any]:
    """Settings as `model.dim`, numbers of the graph, and the engine."""
    settings = {}
    tables = training.recipe.model_dump(mode="json", exclude_none=True)
    for table, keys in tables.items():
        for key, value in keys.items():
            settings[f"{table}.{key}"] = value
    for key, number in training.graph.counts.items():
        settings[f"graph.{key}"] = number
    settings["engine"] = training.engine
    return settings


def _metrics(prefix: str, report: Report) -> dict[str, float]:
    metrics = {}
    for key, value in report.metrics.as_dict().items():
        if value is not None and key != "num_queries":
            metrics[f"{prefix}/{key}"] = value
    return metrics


def check_folder(tracker: Callback, folder: str | Path | None) -> None:
    """Refuse a tracker that writes into a run folder where there is none.

    It may have a folder of its own.
    """
    if isinstance(tracker, TensorBoard | WandB) and not (tracker.folder or folder):
        name = type(tracker).__name__
        raise RequestError(
            f"{name} needs a folder: {name}(folder='logs'), or a run folder, `out=runs/mine`."
        )


class TensorBoard(Tracker):
    """Event files in `folder`, by default RUN/tensorboard.

    `tensorboard --logdir runs` shows all runs.

    Args:
        folder: Folder of the event files.

    Examples:
        >>> run = kg.train("ComplEx", graph, callbacks=[kg.TensorBoard("events")])  # doctest: +SKIP
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else None

    def open(self, training: TrainingInfo, settings: Mapping[str, Any], run_id: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        check_folder(self, training.folder)
        path = self.folder or RunFolder(training.folder or "").tensorboard
        # A run that was killed may have written epochs after its last checkpoint. They are trained
        # again, so their events are removed.
        purge_step = training.epoch + 1 if run_id else None
        self._writer = SummaryWriter(str(path), purge_step=purge_step)
        if not run_id:
            rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        return str(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of an MLflow experiment at `uri`.

    The default is MLFLOW_TRACKING_URI, or else mlflow.db in the working folder.

    Args:
        experiment: Name of the experiment.
        uri: Address of the tracking server, or of a database.

    Examples:
        >>> run = kg.train("ComplEx", graph, callbacks=[kg.MLflow("experiment")])  # doctest: +SKIP
    """

    name = "mlflow"

    def __init__(self, experiment: str = "dualkg", *, uri: str | None = None) -> None:
        self.experiment = experiment
        self.uri = uri

    def open(self, training: TrainingInfo, settings: Mapping[str, Any], run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # The address is not saved with the run: it may hold a password.
        from_environment = os.environ.get("MLFLOW_TRACKING_URI")
        if not self.uri and not from_environment:
            self.uri = f"sqlite:///{Path('mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=self.uri or from_environment)
        if run_id:
            self._run = run_id
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(self.experiment)
        tags = {}
        if training.folder:
            tags["dualkg.folder"] = str(training.folder.resolve())
        run = self._client.create_run(experiment_id, run_name=training.title, tags=tags)
        self._run = str(run.info.run_id)
        params = [Param(key, str(value)) for key, value in settings.items()]
        self._client.log_batch(self._run, params=params)
        return self._run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(key, value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """A run of Weights & Biases, offline in RUN/wandb or `folder`/wandb.

    `wandb sync` uploads it. With WANDB_MODE=online it is uploaded while it is trained.

    Args:
        project: Name of the project.
        folder: Folder of the offline run.

    Examples:
        >>> run = kg.train("ComplEx", graph, callbacks=[kg.WandB("project")])  # doctest: +SKIP
    """

    name = "wandb"

    def __init__(self, project: str = "dualkg", *, folder: str | Path | None = None) -> None:
        self.project = project
        self.folder = Path(folder) if folder is not None else None

    def open(self, training: TrainingInfo, settings: Mapping[str, Any], run_id: str | None) -> str:
        import wandb

        check_folder(self, training.folder)
        path = Path(self.folder or training.folder or "")
        path.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            settings=wandb.Settings(silent=True, console="off"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            project=os.environ.get("WANDB_PROJECT", self.project),
            name=training.title,
            dir=path,
            id=run_id,
            resume="allow" if run_id else None,
            config=dict(settings),
        )
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "epoch": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, type[TensorBoard | MLflow | WandB]] = {
    kind.name: kind for kind in (TensorBoard, MLflow, WandB)
}
Callbacks = Sequence[Callback | str] | None


def find_callbacks(given: Callbacks) -> list[Callback]:
    """Callbacks as they are, and trackers by name."""
    if isinstance(given, (str, Callback)) or not isinstance(given, (Iterable, type(None))):
        raise InvalidValue("callbacks", expected="a list, such as [kg.TensorBoard()]", found=given)
    callbacks = []
    for item in given or ():
        callback = _tracker(item) if isinstance(item, str) else item
        if not isinstance(callback, Callback):
            trackers = ", ".join(TRACKERS)
            raise InvalidValue(
                "callbacks",
                expected=f"instances of subclasses of kg.Callback, or names of {trackers}",
                found=item,
            )
        if isinstance(callback, Tracker):
            callback.check()
        callbacks.append(callback)
    return callbacks


def _tracker(name: str) -> Tracker:
    kind = TRACKERS.get(name.casefold())
    if kind is None:
        similar = close_matches(name, TRACKERS)
        raise UnknownName("tracker", name, suggestions=similar, known=list(TRACKERS))
    return kind()


def read_tracking(folder: Path | None) -> dict[str, Any]:
    """The trackers that a run was started with, by name."""
    if folder is None:
        return {}
    run = RunFolder(folder)
    return dict(run.read(run.tracking, dict[str, dict[str, Any]], default={}))


def save_trackers(folder: Path, callbacks: Sequence[Callback]) -> None:
    """Save the trackers of a run before its training starts, which may be after tuning."""
    trackers = {}
    for callback in callbacks:
        if isinstance(callback, Tracker):
            trackers[callback.name] = {"options": callback.options}
    if trackers:
        write_text(RunFolder(folder).tracking, json.dumps(trackers, indent=1))


def saved_trackers(folder: Path) -> list[Callback]:
    """The trackers that a run was started with, to resume it with."""
    trackers: list[Callback] = []
    try:
        for name, saved in read_tracking(folder).items():
            trackers.append(TRACKERS[name](**saved["options"]))
    except (KeyError, TypeError) as error:
        path = RunFolder(folder).tracking
        advice = "Remove it to resume untracked."
        raise DamagedFile(path, str(error), advice=advice) from None
    return trackers


def end_callbacks(started: Sequence[Callback], run: TrainedRun | None) -> None:
    """End all callbacks that started, whatever they raise."""
    errors = []
    for callback in started:
        try:
            callback.on_end(run)
        except Exception as error:
            errors.append(error)
    if not errors:
        return
    first = errors[0]
    if run is not None:
        raise first
    kind = type(first).__name__
    logger.warning("A callback failed after the training did: %s: %s", kind, first)
