"""Entry points of training: from objects, from a recipe, from a checkpoint, or with several
seeds.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError
from dualkg.evaluation.report import Report, evaluate
from dualkg.files import locked, locks
from dualkg.logs import ProgressLog, logger
from dualkg.losses import LOSSES, Loss
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.models.distance import DistanceModel
from dualkg.regularizers import REGULARIZERS, NoRegularizer, PlainAndMapped, Regularizer
from dualkg.training.callbacks import (
    Callback,
    Callbacks,
    TrainingInfo,
    end_callbacks,
    find_callbacks,
    saved_trackers,
)
from dualkg.training.classes import find_class, known_name, name_of
from dualkg.training.optimizers import OPTIMIZERS, Optimizer
from dualkg.training.recipe import (
    Data,
    ModelConfig,
    Recipe,
    RegularizerConfig,
    Validation,
    load_recipe,
    recipe_from,
)
from dualkg.training.run import Run, RunFolder
from dualkg.training.trainer import OnProgress, ProgressEvent, Trainer, peak_mib

OBJECTS: dict[
    str, tuple[type, Iterable[str], str]
] = {  # arguments of `train`: class, names, and an example
    "model": (Model, MODELS, "kg.ComplEx(graph, dim=100)"),
    "regularizer": (Regularizer, REGULARIZERS, "kg.DURA(0.05, plain=0.5, mapped=1.5)"),
    "loss": (Loss, LOSSES, "kg.OneVsAll()"),
    "optimizer": (
        Optimizer,
        OPTIMIZERS,
        'kg.Optimizer(name="Adam", learning_rate=0.03)',
    ),
    "validation": (Validation, (), "kg.Validation(every=1, patience=3)"),
}


def data_of(graph: Graph) -> Data:
    """The table of a recipe that names this graph."""
    name = graph.name if graph.source == "memory" else graph.source
    return Data.model_validate({"graph": name, **graph.read_options})


def default_recipe(
    data: Data, graph: Graph, changes: Mapping[str, Any] | None = None, *, source: str = "--set"
) -> Recipe:
    """The recipe where none is given: ComplEx with DURA, chosen on the validation splits of several
    graphs.

    A model or a loss that DURA is not defined for is trained without a regularizer, unless one is
    named.
    """
    given = changes or {}
    changes = dict(changes or {})
    kind = MODELS.get(known_name(changes.get("model.name", "ComplEx"), MODELS))
    loss = LOSSES.get(known_name(changes.get("loss.name", "OneVsAll"), LOSSES))
    if (kind and not kind.has_adjoint) or (loss and loss.examples == "queries"):
        changes.setdefault("regularizer.name", "none")
    if (
        str(changes.get("optimizer.name")).casefold() == "adam"
    ):  # chosen on the validation splits of world and UMLS
        changes.setdefault(
            "optimizer.learning_rate", 0.001 if kind and issubclass(kind, DistanceModel) else 0.03
        )
    regularizer = find_class(changes.get("regularizer.name", "DURA"), REGULARIZERS, Regularizer)
    if issubclass(regularizer, NoRegularizer) and changes.get("regularizer.weight"):
        without = (
            "no regularizer is used"
            if "regularizer.name" in given
            else "this model or loss has none by default"
        )
        raise RequestError(f"{source}: regularizer.weight should be left out: {without}.")
    defaults: dict[str, Any] = {"regularizer.name": "DURA", "regularizer.weight": 0.05}
    if issubclass(regularizer, PlainAndMapped):  # which alone have λ1 and λ2
        defaults |= {"regularizer.plain": 0.5, "regularizer.mapped": 1.5}
    defaults |= {"optimizer.learning_rate": 0.3, "optimizer.schedule": "linear"}
    num = len(
        graph.train
    )  # a small graph needs many steps; larger batches are efficient matrix products
    defaults["training.batch_size"] = 100 if num < 20_000 else 500 if num < 200_000 else 1000
    return Recipe(data=data).with_changes(defaults | changes, source=source)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device by its name, or a GPU where there is one."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"'{device}' is not a device to train on. Use cpu, cuda or cuda:1.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"The device {chosen} was requested, but PyTorch finds no such GPU here. Use --device "
            "cpu."
        )
    return chosen


@locks("out")
def train(
    model: Model | str,
    graph: Graph | str | Path,
    *,
    regularizer: Regularizer | str | None = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | str | None = None,
    validation: Validation | None = None,
    epochs: int = 20,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> Run:
    """Train a model on a graph; with `out`, in a run folder that survives interruption.

    The model is trained in place and moved to the device. What is left out is as in `dualkg train
    --no-tune`: 1-vs-all with DURA where it is defined for the model, Adagrad with a learning rate
    that decreases to 0. Model, loss, regularizer and optimizer may be names, and then have the
    settings of `dualkg train --no-tune`, too.
    """
    if isinstance(graph, Model):
        raise RequestError("The model comes first, then the graph: kg.train(model, graph).")
    graph = graph if isinstance(graph, Graph) else load_graph(graph)
    objects = dict(zip(OBJECTS, (model, regularizer, loss, optimizer, validation), strict=True))
    names = {
        f"{argument}.name": _name_given(argument, value) for argument, value in objects.items()
    }
    if isinstance(model, Model):
        names["model.name"] = name_of(model.embedding, MODELS)
    given = {key: name for key, name in names.items() if name}
    defaults = default_recipe(data_of(graph), graph, given, source="train")
    model = model if isinstance(model, Model) else defaults.model.build(graph.shape, seed=seed)
    loss = loss if isinstance(loss, Loss) else defaults.loss
    if not isinstance(regularizer, Regularizer):
        has_default = loss.examples == "triples" and getattr(model.embedding, "has_adjoint", False)
        regularizer = (
            defaults.regularizer.build() if has_default or regularizer else NoRegularizer()
        )
    batch_size = defaults.training.batch_size if batch_size is None else batch_size
    tables: dict[str, Any] = {
        "data": defaults.data,
        "model": ModelConfig.of(model),
        "regularizer": RegularizerConfig.of(regularizer),
        "loss": loss,
        "optimizer": optimizer if isinstance(optimizer, Optimizer) else defaults.optimizer,
        "validation": validation or Validation(),
        "training": {"epochs": epochs, "batch_size": batch_size, "seed": seed},
    }
    recipe = recipe_from(tables, source="train")
    called = find_callbacks(callbacks)
    folder = RunFolder(out) if out else None
    if folder:
        folder.check_free()
        recipe.check_importable()
    model.to(choose_device(device))
    trainer = Trainer(model, graph, recipe, regularizer, on_progress=on_progress, callbacks=called)
    return _start(trainer, folder, by_seed=False)


def _name_given(argument: str, value: object) -> str | None:
    """The name that was given in place of an instance, or None; refuse what is neither, with the
    right call.
    """
    base, known, example = OBJECTS[argument]
    if isinstance(value, base) or (value is None and argument != "model"):
        return None
    if not isinstance(value, str) or not known:
        what = f"{'The model' if argument == 'model' else argument} should be an instance, such as {example}"
        names = f", or a name: {', '.join(known)}" if known else ""
        found = (
            f"the class {value.__name__}"
            if isinstance(value, type)
            else f"{type(value).__name__} {value!r}"
        )
        raise RequestError(
            f"{what}{names}; {found if len(found) <= 80 else f'{found[:77]}…'} was given."
        )
    return value


@locks("out")
def train_recipe(
    recipe: Recipe,
    *,
    graph: Graph | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> Run:
    """Load the graph, build the model and train it, as the recipe says."""
    called = find_callbacks(callbacks)
    folder = RunFolder(out) if out else None
    if folder:
        folder.check_free(overwrite=overwrite)
    graph = graph or load_recipe_graph(recipe)
    device = choose_device(device)
    trainer = Trainer.of_recipe(
        recipe, graph, device=device, on_progress=on_progress, callbacks=called
    )
    return _start(trainer, folder, by_seed=True, overwrite=overwrite)


def train_in_folder(
    recipe: Recipe, graph: Graph, device: torch.device, folder: RunFolder | None, **options: Any
) -> Run:
    """Train a recipe in a run folder that exists already and has no checkpoint, such as one after
    automatic tuning.
    """
    trainer = Trainer.of_recipe(recipe, graph, device=device, **options)
    if folder:
        folder.save_settings(recipe, graph, device, engine=str(trainer.engine))
        trainer.save(folder.checkpoint, when="start", weights=False)
    return finish(trainer, folder)


def load_recipe_graph(recipe: Recipe) -> Graph:
    options = recipe.data.model_dump(exclude={"graph", "split_seed"})
    return load_graph(recipe.data.graph, seed=recipe.data.split_seed, **options)


@locks("path")
def resume(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
    trust_code: bool = False,
) -> Run:
    """Resume a run that was interrupted or killed, from its last checkpoint.

    A finished run whose results are damaged is evaluated again. Without `callbacks`, the trackers
    that it was started with continue what they wrote.
    """
    folder = RunFolder(path)
    folder.check_is_run()
    damage = folder.damage() if folder.finished else {}
    if folder.finished and not damage:
        folder.remove_checkpoint()
        raise RequestError(
            f"The run {folder.path} is finished. To train longer, start a new run with more epochs."
        )
    recipe = load_recipe(folder.recipe, trust_code=trust_code)
    start = folder.checkpoint
    graph = folder.load_graph()
    if not folder.checkpoint.exists() and not any(name.startswith("weights") for name in damage):
        if folder.finished and folder.weights_index.exists():
            folder.join_weights(graph)
        start = folder.weights
    if not start.exists():
        raise RequestError(f"The run {folder.path} cannot be resumed. {folder.resume_advice()}")
    called = find_callbacks(saved_trackers(folder.path) if callbacks is None else callbacks)
    device = choose_device(device)
    trainer = Trainer.of_recipe(
        recipe, graph, device=device, on_progress=on_progress, callbacks=called
    )
    trainer.restore(start)
    return finish(trainer, folder)


@locks("out")
def train_seeds(
    recipe: Recipe,
    num_seeds: int,
    *,
    out: Path,
    graph: Graph | None = None,
    overwrite: bool = False,
    callbacks: Callbacks = None,
    **options: Any,
) -> dict[int, dict[str, Any]]:
    """Train a recipe with consecutive seeds from its own, each in its own folder; return the
    reports by seed.

    Finished runs of the same recipe are not repeated, and unfinished ones are resumed. Options are
    those of `resume`.
    """
    graph = graph or load_recipe_graph(recipe)
    if RunFolder(out).recipe.exists():
        raise RequestError(
            f"{out} is a single run; runs of several seeds need another folder: use --out."
        )
    options["callbacks"] = find_callbacks(callbacks)
    reports = {}
    for seed in range(recipe.training.seed, recipe.training.seed + num_seeds):
        one = recipe.with_changes({"training.seed": seed})
        logger.info("%s: seed %d", graph.name, seed)
        folder = RunFolder(out / f"seed-{seed}")
        trusted = bool(one.own_classes)  # which were imported here
        exists = (
            folder.recipe.exists()
            and load_recipe(folder.recipe, trust_code=trusted) == one
            and not overwrite
        )
        if exists and folder.saved_environment.get("data") != graph.fingerprint:
            place = f"{folder.path} was trained on other data than {graph.name} is now."
            raise RequestError(f"{place} Use --overwrite or --out.")
        if not exists:
            RunFolder(out).calibration.unlink(
                missing_ok=True
            )  # of the ensemble of the seeds before
            train_recipe(one, graph=graph, out=folder.path, overwrite=overwrite, **options)
        elif not folder.finished:
            resume(folder.path, **options)
        else:
            with locked(folder.path, wait=True):
                folder.remove_checkpoint()
        reports[seed] = folder.saved_reports()
    return reports


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _start(
    trainer: Trainer, folder: RunFolder | None, *, by_seed: bool, overwrite: bool = False
) -> Run:
    """Train from the start. The folder appears together with its first checkpoint, so it can always
    be resumed.
    """
    if folder:
        options: dict[str, Any] = {"engine": str(trainer.engine), "overwrite": overwrite}
        with folder.create(trainer.recipe, trainer.graph, trainer.model.device, **options) as fresh:
            trainer.save(
                fresh.checkpoint, when="start", weights=not by_seed
            )  # the recipe's seed creates the same
    return finish(trainer, folder)


def finish(
    trainer: Trainer,
    folder: RunFolder | None,
    checkpoint: Path | None = None,
    *,
    save: Callable[[Run], None] | None = None,
) -> Run:
    """Train to the end, evaluate and save the results; callbacks get the start and either end.

    `save` writes the results in place of the run folder, as several processes do.
    """
    path = folder.path if folder else None
    done = trainer.progress.epoch
    started = list[Callback]()
    trainer.checkpoint_path = checkpoint or (folder.checkpoint if folder else None)
    about = TrainingInfo(
        trainer.model, trainer.graph, trainer.recipe, trainer.describe_engine(), path, epoch=done
    )
    try:
        for callback in trainer.callbacks:
            callback.on_start(about)
            started.append(callback)
        run = _train_and_evaluate(trainer, path)
        if save is not None:
            save(run)
        elif folder:
            # The last checkpoint has the weights.
            folder.finish(run, trained=folder.checkpoint)
    except BaseException:
        end_callbacks(started, None)
        raise
    end_callbacks(started, run)
    return run


def _train_and_evaluate(trainer: Trainer, folder: Path | None) -> Run:
    log = ProgressLog(f"{trainer.graph.name} {trainer.recipe.model.name}")
    show = trainer.on_progress

    def on_progress(event: ProgressEvent) -> None:
        show(event)
        log(lambda: f"{event.text}  step {event.step:,}/{event.steps:,}")

    trainer.on_progress = on_progress
    trainer.model.train()  # it may be in evaluation mode
    trainer.run()
    model = trainer.model.eval()
    graph = trainer.graph
    history = trainer.progress.history
    peak = peak_mib(model.device)
    started = time.perf_counter()
    seconds = sum(entry["seconds"] for entry in history)  # without warm-up and validation
    log(
        lambda: (
            f"{len(history)} epochs in {seconds:.1f} s, loss {history[-1]['loss']:.3f}; now ranking"
        ),
        last=True,
    )
    reports = evaluate_held_out(model, graph)
    ranking = time.perf_counter() - started
    log(
        lambda: ", ".join(f"{split} MRR {report.mrr:.4f}" for split, report in reports.items()),
        last=True,
    )
    # Of a resumed run, warm-up and peak are those of the last process.
    costs = {
        "warm_up_seconds": trainer.warm_up.seconds,
        "training_seconds": seconds,
        "ranking_seconds": ranking,
    }
    costs = {name: round(value, 3) for name, value in {**costs, "peak_mib": peak}.items()}
    return Run(model, graph, trainer.recipe, history, reports, folder, costs=costs)


def evaluate_held_out(model: Model, graph: Graph) -> dict[str, Report]:
    """Reports on valid and test, with one filter; of a graph larger than memory, with one for the
    queries of each.
    """
    known = None if graph.is_mapped else KnownAnswers.of(graph)
    return {name: evaluate(model, graph, split=name, known=known) for name in ("valid", "test")}
