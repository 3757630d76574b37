"""Training from a file to an evaluated run: read, check, tune, train, evaluate, save, resume.

Each function reports its progress as events of `dualkg.workflows.events`. `kg.fit`,
`kg.train_recipe`, `kg.resume` and the commands `train` and `resume` are these functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.errors import PathExists, RequestError
from dualkg.evaluation.metrics import columns
from dualkg.extras import trusted_code
from dualkg.files import locked, write_text
from dualkg.logs import logger
from dualkg.training.api import (
    TrainingOptions,
    choose_device,
    load_recipe_graph,
    resume_training,
    spread,
    start_training,
    train_in_folder,
    wrong_argument,
)
from dualkg.training.callbacks import (
    Callbacks,
    check_folder,
    find_callbacks,
    save_trackers,
    saved_trackers,
)
from dualkg.training.recipe import Recipe, load_recipe
from dualkg.training.run import TrainedRun
from dualkg.training.run_folder import RunFolder
from dualkg.training.trainer import OnProgress, ProgressEvent, Trainer
from dualkg.tuning.automatic import AutomaticTuner, parse_budget, starting_recipe
from dualkg.tuning.plan import SearchPlan
from dualkg.tuning.starting_recipe import fast_softmax
from dualkg.workflows.events import (
    Event,
    EventCallback,
    OnEvent,
    TrainingPlanned,
    Tuned,
    TuningSkipped,
    TuningStarted,
    log_event,
)
from dualkg.workflows.expectation import expect_training, expect_tuning
from dualkg.workflows.processes import (
    is_first_process,
    num_processes,
    resume_together,
    train_together,
)
from dualkg.workflows.sources import TrainingSource, read_graph, read_source, report_graph

Device = str | torch.device | None
Tune = bool | float | str | SearchPlan | None
ReadSource = Callable[[OnEvent], TrainingSource]


def fit(
    data: str | Path | Graph | Any,
    *,
    model: str = "ComplEx",
    tune: bool | float | str = True,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: Device = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> TrainedRun:
    """Read triples, tune the hyperparameters on the validation split, train, and evaluate.

    Args:
        data: A graph, or what `load_graph` takes: a name, a path or a table.
        model: Name of the model.
        tune: True, False, a time such as "10m", seconds, or a `SearchPlan`. By default, tuning
            takes at most three times the final training, or two minutes.
        changes: Settings by their recipe keys, such as "model.dim"; they are not tuned.
        seed: Seed of all trainings.
        device: Default: a GPU if there is one.
        out: Folder of the run, in which an interrupted run can be resumed.
        overwrite: Whether to replace a run in this folder.
        on_event: Called with typed events of reading, tuning and training. Without it, notes of the
            reader, leakage and unseen entities are warnings of the logger `dualkg`.
        on_progress: Called with progress events of the final training.
        callbacks: Callbacks of the final training.

    Returns:
        The run of the final training.

    Examples:
        >>> run = kg.fit(graph, tune=False, changes={"model.dim": 8, "training.epochs": 1})
        >>> run.recipe.model.dim
        8
    """
    if not isinstance(model, str):
        raise wrong_argument(
            "model",
            expected="a name, such as 'ComplEx', with changes={'model.dim': 200}",
            found=repr(model),
            advice="kg.train(model, graph) trains an instance.",
        )
    if not isinstance(changes, Mapping | None):
        raise wrong_argument(
            "changes", expected="a mapping such as {'model.dim': 200}", found=repr(changes)
        )
    given = {"model.name": model, "training.seed": seed, **(changes or {})}
    return _read_and_train(
        lambda report: read_graph(data, given, on_event=report),
        tune,
        TrainingOptions(
            out=out,
            overwrite=overwrite,
            device=device,
            callbacks=callbacks,
            on_event=_subscriber(on_event, on_progress),
        ),
    )


def train_source(
    source: str | Path | Graph,
    *,
    changes: Mapping[str, Any] | None = None,
    tune: Tune = None,
    device: Device = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume_unfinished: bool = False,
    callbacks: Callbacks = None,
    on_event: OnEvent | None = None,
) -> TrainedRun:
    """Train what a source stands for: a recipe by file or name, or a graph.

    By default a recipe is trained as it is, and the hyperparameters of a graph are tuned first,
    but for those in `changes`; `tune` decides otherwise. Under `torchrun`, all processes train one
    recipe together. With `resume_unfinished`, a run in the folder that was interrupted is resumed.
    """
    options = TrainingOptions(
        out=out,
        overwrite=overwrite,
        device=device,
        callbacks=callbacks,
        on_event=on_event or log_event,
        resume_unfinished=resume_unfinished,
    )
    folder = options.folder
    is_alone = num_processes() == 1
    if folder and is_alone and resume_unfinished and folder.resumable and not folder.finished:
        return _resume(folder, options)
    return _read_and_train(
        lambda report: read_source(source, changes, on_event=report), tune, options
    )


def _read_and_train(read: ReadSource, tune: Tune, options: TrainingOptions) -> TrainedRun:
    options = replace(options, callbacks=find_callbacks(options.callbacks))
    if num_processes() > 1:
        return train_together(
            lambda report: _untuned_source(read(report), tune, choose_device(options.device)),
            options,
        )
    source = read(options.on_event)
    device = choose_device(options.device)
    tuner = _tuner_of(source, tune, device, options.on_event)
    if tuner is None:
        return _train_one(_untuned_recipe(source, device), source.graph, options)
    return tune_and_train(tuner, options)


def train_recipe(
    recipe: Recipe | str | Path,
    *,
    graph: Graph | None = None,
    device: Device = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> TrainedRun:
    """Read the graph, build the model and train it, as a recipe says.

    A recipe may be given by its file or name. A graph that is given is not checked again. Under
    `torchrun`, all processes train the recipe together.

    Args:
        recipe: A recipe, its path, or its name.
        graph: Used in place of the graph that the recipe names.
        out: Folder of the run.
        overwrite: Whether to replace a run in this folder.
        device: Where to train; a GPU by default, if there is one.
        on_event: Called with events of training.
        on_progress: Called with progress.
        callbacks: Instances of `Callback`.

    Returns:
        The finished run.

    Examples:
        >>> changes = {"model.dim": 8, "training.epochs": 1}
        >>> recipe = kg.load_recipe("umls/complex-dura", changes=changes)
        >>> kg.train_recipe(recipe, graph=graph).recipe.model.dim
        8
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    options = TrainingOptions(
        out=out,
        overwrite=overwrite,
        device=device,
        callbacks=find_callbacks(callbacks),
        on_event=_subscriber(on_event, on_progress),
    )
    return _train_one(recipe, graph, options)


def _train_one(recipe: Recipe, graph: Graph | None, options: TrainingOptions) -> TrainedRun:
    """Train a recipe once, without tuning."""
    if num_processes() > 1:
        return train_together(
            lambda report: TrainingSource(recipe, _graph_of(recipe, graph, report), {}, True),
            options,
        )
    report = options.on_event
    with locked(options.out):
        if options.folder:
            options.folder.check_free(overwrite=options.overwrite)
        graph = _graph_of(recipe, graph, report)
        expect = partial(expect_training, recipe, graph, choose_device(options.device))
        report(TrainingPlanned(recipe, graph, expect))
        return start_training(recipe, graph, _with_events(options))


def _with_events(options: TrainingOptions) -> TrainingOptions:
    """The options of a training that reports its start and end as events."""
    callbacks = [*find_callbacks(options.callbacks), EventCallback(options.on_event)]
    return replace(options, callbacks=callbacks)


def _graph_of(recipe: Recipe, graph: Graph | None, on_event: OnEvent) -> Graph:
    """The graph that was given, or the one that a recipe names."""
    if graph is None:
        graph = load_recipe_graph(recipe)
        report_graph(graph, on_event)
    return graph


def tune_and_train(tuner: AutomaticTuner, options: TrainingOptions) -> TrainedRun:
    """Search for hyperparameters, and train the chosen recipe in the same run folder."""
    callbacks = find_callbacks(options.callbacks)
    folder = options.folder
    with locked(options.out):
        for callback in callbacks:
            check_folder(callback, options.out)
        if folder:
            folder.check_free(overwrite=options.overwrite)
        # Refuse what cannot be trained, before anything is written or announced.
        Trainer.of_recipe(tuner.start, tuner.graph, device=tuner.device)
        # A subscriber may decline, and then nothing is written.
        _announce_search(tuner, options.on_event)
        if folder:
            with folder.create(
                tuner.start, tuner.graph, tuner.device, overwrite=options.overwrite
            ) as fresh:
                tuner.save(fresh.tuning)
                save_trackers(fresh.path, callbacks)
        return _tune_in_folder(tuner, options)


def resume(
    path: str | Path,
    *,
    device: Device = None,
    on_event: OnEvent | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
    trust_code: bool = False,
) -> TrainedRun:
    """Resume a run that was interrupted or killed.

    Tuning resumes from its last trial, and training from its last checkpoint. A finished run whose
    results are damaged is evaluated again. Without `callbacks`, the trackers that it was started
    with continue what they wrote. Classes that its recipe names and that are not part of dualkg
    are imported only with `trust_code`.

    Args:
        path: Folder of the run.
        device: Where to train; as before if left out.
        on_event: Called with events of tuning and training.
        on_progress: Called with progress.
        callbacks: Instances of `Callback`.
        trust_code: Whether the recipe may name classes that are not part of dualkg.

    Returns:
        The finished run.

    Examples:
        >>> run = kg.resume("runs/interrupted")  # doctest: +SKIP
    """
    options = TrainingOptions(
        out=path,
        device=device,
        callbacks=callbacks,
        on_event=_subscriber(on_event, on_progress),
        trust_code=trust_code,
    )
    if num_processes() > 1:
        # The first process alone may lock the folder.
        return resume_together(options)
    return _resume(RunFolder(path), options)


def _resume(folder: RunFolder, options: TrainingOptions) -> TrainedRun:
    """Resume a run in one process, or what several have left in the folder."""
    with locked(folder.path):
        is_tuned_for_seeds = folder.tuning.exists() and not folder.recipe.exists()
        if folder.seeds() or is_tuned_for_seeds:
            raise RequestError(
                f"{folder.path} has several seeds. Repeat the command or the call that started "
                "them: finished seeds are not repeated."
            )
        folder.check_is_run()
        if folder.checkpoint_folder.exists() and not folder.finished:
            return resume_together(options)
        if options.callbacks is None:
            options = replace(options, callbacks=saved_trackers(folder.path))
        was_training = folder.weights.exists() or folder.checkpoint.exists()
        if was_training or not folder.tuning.exists():
            return resume_training(_with_events(options))
        with trusted_code(options.trust_code):
            graph = folder.load_graph()
            tuner = AutomaticTuner.load(folder.tuning, graph, choose_device(options.device))
        _announce_search(tuner, options.on_event)
        return _tune_in_folder(tuner, options)


# -- several seeds -----------------------------------------------------------


@dataclass(frozen=True)
class SeedResults:
    """The reports of the runs of one recipe with several seeds, by seed and split."""

    graph: str
    folder: Path
    reports: Mapping[int, Mapping[str, Any]]

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The metrics on the test split, by seed."""
        return {seed: report["test"]["metrics"] for seed, report in self.reports.items()}

    def summary(self) -> dict[str, Any]:
        """Mean and standard deviation of the metrics on the test split, for JSON."""
        metrics = self.metrics()
        summary: dict[str, Any] = {
            "graph": self.graph,
            "split": "test",
            "seeds": list(self.reports),
        }
        for key in columns().values():
            mean, deviation = spread([of_seed[key] for of_seed in metrics.values()])
            summary[key] = {"mean": mean, "sd": deviation}
        return summary

    def save_summary(self) -> None:
        write_text(self.folder / "summary.json", json.dumps(self.summary(), indent=1))


def train_source_seeds(
    source: str | Path | Graph,
    num_seeds: int,
    *,
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    tune: Tune = None,
    device: Device = None,
    overwrite: bool = False,
    callbacks: Callbacks = None,
    on_event: OnEvent | None = None,
) -> SeedResults:
    """Train what a source stands for with several seeds, after tuning once.

    The folder has a run `seed-N` for each, and summary.json with mean and standard deviation of
    the metrics. The same call again resumes what was interrupted.
    """
    options = TrainingOptions(
        out=out,
        overwrite=overwrite,
        device=device,
        callbacks=find_callbacks(callbacks),
        on_event=on_event or log_event,
    )
    folder = Path(out)
    if num_processes() > 1:
        error = _one_recipe_only()
        error.silent = not is_first_process()
        raise error
    read = read_source(source, changes, on_event=options.on_event)
    chosen = choose_device(device)
    tuner = _tuner_of(read, tune, chosen, options.on_event)
    with locked(folder):
        recipe = _untuned_recipe(read, chosen)
        if tuner is not None:
            recipe = _tune_for_seeds(tuner, options)
        reports = _train_seeds(recipe, num_seeds, read.graph, options)
    if not len(read.graph.test):
        raise RequestError(
            f"{read.graph.name} has no test triples to report on; the runs are saved in {folder}."
        )
    results = SeedResults(read.graph.name, folder, reports)
    results.save_summary()
    return results


def train_seeds(
    recipe: Recipe,
    num_seeds: int,
    *,
    out: str | Path,
    graph: Graph | None = None,
    device: Device = None,
    overwrite: bool = False,
    callbacks: Callbacks = None,
    on_event: OnEvent | None = None,
    on_progress: OnProgress | None = None,
) -> dict[int, dict[str, Any]]:
    """Train a recipe with consecutive seeds from its own; return the reports by seed.

    Each seed has its own folder. Finished runs of the same recipe are not repeated, and unfinished
    ones are resumed.
    """
    options = TrainingOptions(
        out=out,
        overwrite=overwrite,
        device=device,
        callbacks=find_callbacks(callbacks),
        on_event=_subscriber(on_event, on_progress),
    )
    with locked(out):
        graph = _graph_of(recipe, graph, options.on_event)
        return _train_seeds(recipe, num_seeds, graph, options)


def _train_seeds(
    recipe: Recipe, num_seeds: int, graph: Graph, options: TrainingOptions
) -> dict[int, dict[str, Any]]:
    whole = options.folder
    assert whole is not None
    if whole.recipe.exists():
        raise PathExists(whole.path, what="a single run, not of several seeds", overwritable=False)
    reports = {}
    for seed in range(recipe.training.seed, recipe.training.seed + num_seeds):
        of_seed = recipe.with_changes({"training.seed": seed})
        logger.info("%s: seed %d", graph.name, seed)
        folder = RunFolder(whole.path / f"seed-{seed}")
        options_of_seed = replace(options, out=folder.path)
        if options.overwrite or not _has_run_of(folder, of_seed, graph):
            _train_one(of_seed, graph, options_of_seed)
            # The ensemble of the former seeds may have been calibrated.
            whole.remove_calibration()
        elif not folder.finished:
            _resume(folder, options_of_seed)
            whole.remove_calibration()
        else:
            with locked(folder.path, wait=True):
                folder.remove_checkpoint()
        reports[seed] = folder.saved_reports()
    return reports


def _has_run_of(folder: RunFolder, recipe: Recipe, graph: Graph) -> bool:
    """Whether a folder has a run of the recipe; one that was trained on other data is refused."""
    if not folder.recipe.exists():
        return False
    # Classes of the user's own were imported here, so the saved recipe may name them too.
    if load_recipe(folder.recipe, trust_code=bool(recipe.own_classes)) != recipe:
        return False
    if folder.saved_environment.get("data") != graph.fingerprint:
        raise RequestError(
            f"{folder.path} was trained on other data than {graph.name} is now. Use "
            "`overwrite=True`, or name another folder with `out`."
        )
    return True


# -- tuning ------------------------------------------------------------------


def _tuner_of(
    source: TrainingSource, tune: Tune, device: torch.device, on_event: OnEvent
) -> AutomaticTuner | None:
    """The search of a source, or None if it is trained as it is."""
    plan = tune if isinstance(tune, SearchPlan) else None
    has_time = not (tune is None or isinstance(tune, (bool, SearchPlan)))
    seconds = parse_budget(str(tune)) if has_time else None
    is_tuned = not source.is_recipe if tune is None else tune is not False
    if not is_tuned:
        return None
    if not len(source.graph.valid):
        on_event(TuningSkipped(source.graph))
        return None
    start = source.recipe
    if not source.is_recipe:
        start = starting_recipe(source.recipe.data, source.graph, device, source.changes)
    return AutomaticTuner(
        start,
        source.graph,
        device=device,
        fixed=tuple(source.changes),
        seconds=seconds,
        plan=plan,
    )


def _untuned_recipe(source: TrainingSource, device: torch.device) -> Recipe:
    """The recipe of a training without tuning; that of a graph is the fastest on the device."""
    if source.is_recipe:
        return source.recipe
    return source.recipe.with_changes(fast_softmax(source.graph, device, source.changes))


def _tune_in_folder(tuner: AutomaticTuner, options: TrainingOptions) -> TrainedRun:
    """Search, from the trials that are saved in the folder, and train the chosen recipe there."""
    folder = options.folder
    if folder:
        tuner.path = folder.tuning
        tuner.run_folder = folder.path
    recipe = _search(tuner, options.on_event)
    return train_in_folder(recipe, tuner.graph, _with_events(options))


def _tune_for_seeds(tuner: AutomaticTuner, options: TrainingOptions) -> Recipe:
    """Search once for all seeds; the trials of the same search before are not repeated."""
    assert options.folder is not None
    path = options.folder.tuning
    if path.exists() and not options.overwrite:
        saved = tuner.load(path, tuner.graph, tuner.device)
        wanted = (tuner.start, tuner.fixed, tuner.seconds)
        if (saved.start, saved.fixed, saved.seconds) != wanted:
            raise PathExists(path, what="of another search")
        tuner = saved
    tuner.path = path
    _announce_search(tuner, options.on_event)
    return _search(tuner, options.on_event)


def _announce_search(tuner: AutomaticTuner, on_event: OnEvent) -> None:
    on_event(TuningStarted(tuner.start, tuner.graph, partial(expect_tuning, tuner)))


def _search(tuner: AutomaticTuner, on_event: OnEvent) -> Recipe:
    tuner.on_progress = on_event
    recipe = tuner.run()
    on_event(Tuned(recipe, tuner.summary()))
    return recipe


# -- helpers -----------------------------------------------------------------


def _subscriber(on_event: OnEvent | None, on_progress: OnProgress | None) -> OnEvent:
    """One function that serves both subscribers; `on_progress` gets progress of training alone."""
    report = on_event or log_event
    if on_progress is None:
        return report

    def notify(event: Event) -> None:
        if isinstance(event, ProgressEvent):
            on_progress(event)
        report(event)

    return notify


def _untuned_source(source: TrainingSource, tune: Tune, device: torch.device) -> TrainingSource:
    """A source with the recipe that one process would train; several do not tune."""
    trains_as_it_is = tune is False or (tune is None and source.is_recipe)
    if not trains_as_it_is:
        raise _one_recipe_only()
    return replace(source, recipe=_untuned_recipe(source, device))


def _one_recipe_only() -> RequestError:
    return RequestError(
        "A training in several processes is of one recipe, with one seed and without tuning. Use "
        "`tune=False`, or a recipe file, such as the recipe of a run that one process has tuned."
    )
