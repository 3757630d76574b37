"""From a recipe or from objects to a trained and evaluated run, in one process.

`train` takes objects. The workflows of `dualkg.workflows` read, check and tune first, and call
`start_training`, `train_in_folder` and `resume_training`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualkg.data.decisions import with_decisions
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, GraphShape, Split
from dualkg.data.loading import load_graph
from dualkg.errors import InvalidValue, RequestError
from dualkg.evaluation.report import Report, evaluate
from dualkg.files import folder_check, locked
from dualkg.logs import ProgressLog
from dualkg.losses import LOSSES, Loss
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.models.distance import DistanceModel
from dualkg.regularizers import (
    REGULARIZERS,
    NoRegularizer,
    PlainAndMapped,
    Regularizer,
    has_dura,
)
from dualkg.training.callbacks import (
    Callback,
    Callbacks,
    TrainingInfo,
    end_callbacks,
    find_callbacks,
)
from dualkg.training.checkpoint import read_about
from dualkg.training.classes import find_class, known_name, name_of
from dualkg.training.errors import RunNotFinished
from dualkg.training.launcher import num_processes
from dualkg.training.optimizers import OPTIMIZERS, Optimizer
from dualkg.training.recipe import (
    Data,
    ModelConfig,
    Recipe,
    RegularizerConfig,
    Validation,
    default_batch_size,
    load_recipe,
    recipe_from,
)
from dualkg.training.run import TrainedRun
from dualkg.training.run_folder import RunFolder
from dualkg.training.trainer import (
    OnProgress,
    ProgressEvent,
    Trainer,
    check_recipe,
    peak_mib,
)

# The arguments of `train` that are objects: the class, the names that stand for one, an example.
OBJECTS: dict[str, tuple[type, Iterable[str], str]] = {
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
MAX_SHOWN = 80  # characters of a wrong argument in a message
HELD_OUT: tuple[Split, ...] = ("valid", "test")
SMALL_DIM = 8  # of a model that is made to see what is defined for it


def wrong_argument(argument: str, *, expected: str, found: str, advice: str = "") -> RequestError:
    """The error of an argument of a wrong type, which `found` describes in words."""
    if len(found) > MAX_SHOWN:
        found = f"{found[: MAX_SHOWN - 3]}…"
    sentence = f"`{argument}` should be {expected}; {found} was given. {advice}"
    return RequestError(sentence.rstrip())


def data_of(graph: Graph) -> Data:
    """The table of a recipe that names this graph."""
    name = graph.name if graph.source == "memory" else graph.source
    return Data.model_validate({"graph": name, **graph.read_options})


def load_recipe_graph(recipe: Recipe) -> Graph:
    options = recipe.data.model_dump(exclude={"graph", "split_seed", "decisions"})
    graph = load_graph(recipe.data.graph, seed=recipe.data.split_seed, **options)
    if recipe.data.decisions is not None:
        graph = with_decisions(graph, recipe.data.decisions)
    return graph


def default_recipe(
    data: Data,
    graph: Graph,
    changes: Mapping[str, Any] | None = None,
    *,
    model: Model | None = None,
    loss: Loss | None = None,
) -> Recipe:
    """The recipe where none is given: ComplEx with DURA.

    Its values were chosen on the validation splits of several graphs. A model or a loss that DURA
    is not defined for is trained without a regularizer, unless one is named. `model` and `loss` are
    those of a training of objects, whose classes need not be found by a name.
    """
    given = dict(changes or {})
    settings = dict(given)
    model_class: type[Model] | None
    if model is None:
        name = given.get("model.name", "ComplEx")
        model_class = _class_named(name, MODELS, Model)
        # An option of a model may decide it, as that of TuckER does.
        example = _small_model(given) or model_class
        is_without_dura = example is not None and not has_dura(example)
    else:
        model_class = type(model)
        is_without_dura = not has_dura(model)
    if model_class is not None:
        own_defaults = _defaults_of(model_class, given, has_own_loss=loss is not None)
        settings = own_defaults | settings
    loss_class: type[Loss] | None
    if loss is None:
        loss_class = _class_named(given.get("loss.name", "OneVsAll"), LOSSES, Loss)
    else:
        loss_class = type(loss)
    trains_on_queries = loss_class is not None and loss_class.examples == "queries"
    if is_without_dura or trains_on_queries:
        settings.setdefault("regularizer.name", "none")
    if str(given.get("optimizer.name")).casefold() == "adam":
        # Chosen on the validation splits of world and UMLS.
        is_distance = model_class is not None and issubclass(model_class, DistanceModel)
        settings.setdefault("optimizer.learning_rate", 0.001 if is_distance else 0.03)

    regularizer = find_class(settings.get("regularizer.name", "DURA"), REGULARIZERS, Regularizer)
    if issubclass(regularizer, NoRegularizer):
        _check_no_weight(settings.get("regularizer.weight"), is_named="regularizer.name" in given)

    defaults: dict[str, Any] = {
        "regularizer.name": "DURA",
        "regularizer.weight": 0.05,
        "optimizer.learning_rate": 0.3,
        "optimizer.schedule": "linear",
        "training.batch_size": default_batch_size(len(graph.train)),
    }
    if issubclass(regularizer, PlainAndMapped):
        # No other regularizer has λ1 and λ2.
        defaults["regularizer.plain"] = 0.5
        defaults["regularizer.mapped"] = 1.5
    return Recipe(data=data).with_changes(defaults | settings)


def _check_no_weight(weight: Any, *, is_named: bool) -> None:
    """Refuse the weight of a regularizer where there is none, as named or by default."""
    if not weight:
        return
    if is_named:
        advice = "No regularizer is used."
    else:
        advice = "This model or loss has no regularizer by default."
    raise InvalidValue("regularizer.weight", expected="left out", found=weight, advice=advice)


def _defaults_of(
    model_class: type[Model], given: Mapping[str, Any], *, has_own_loss: bool
) -> dict[str, Any]:
    """The defaults of a model, without those of a loss or an optimizer that is not the default."""
    named = {key.partition(".")[0] for key in given if key.endswith(".name")}
    if has_own_loss:
        named.add("loss")
    defaults = model_class.recipe_defaults
    return {
        key: value
        for key, value in defaults.items()
        if key.partition(".")[0] not in named - {"model"}
    }


def _small_model(changes: Mapping[str, Any]) -> Model | None:
    """A model with the options that are given, and small tables.

    None is a model without options, whose class says all, or settings that cannot be used, which
    are refused later.
    """
    settings = {key: value for key, value in changes.items() if key.startswith("model.")}
    if not any(key.startswith("model.options") for key in settings):
        return None
    try:
        recipe = Recipe().with_changes({**settings, "model.dim": SMALL_DIM})
        return recipe.model.build(GraphShape(2, 1), seed=0).named
    except RequestError:
        return None


def _class_named(name: Any, registered: Mapping[str, type], base: type) -> Any:
    """A registered class or one of the user's own by its name.

    None is anything else, which the recipe refuses.
    """
    if isinstance(name, str) and ":" in name:
        return find_class(name, registered, base)
    return registered.get(known_name(name, registered))


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device by its name, or a GPU where there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device or default)
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidValue("device", expected="cpu, cuda or cuda:1", found=str(device))
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"The device {chosen} was requested, but PyTorch finds no such GPU here. Use "
            "`device=cpu`."
        )
    return chosen


# -- a training of objects ---------------------------------------------------


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
) -> TrainedRun:
    """Train a model on a graph; with `out`, in a run folder that survives interruption.

    The model is trained in place and moved to the device. What is left out has the values of a
    training without a recipe and without tuning: 1-vs-all with DURA where it is defined for the
    model, Adagrad with a learning rate that decreases to 0. Model, loss, regularizer and optimizer
    may be names, and then have those values, too.

    Args:
        model: A model, or the name of one.
        graph: A graph, or what `load_graph` takes.
        regularizer: Default: DURA where it is defined for the model.
        loss: Default: that of the model, `OneVsAll` for bilinear models.
        optimizer: Default: that of the model, Adagrad for bilinear models.
        validation: When to rank the validation split, and when to stop.
        epochs: Number of epochs.
        batch_size: Triples of a step.
        seed: Seed of the order of triples and of negatives.
        device: Default: a GPU if there is one.
        out: Folder of the run; without it nothing is written.
        on_progress: Called with progress events.
        callbacks: Objects with `on_epoch` and other methods, or names of trackers.

    Returns:
        The run, with its model and the reports on valid and test.

    Examples:
        >>> model = kg.ComplEx(graph.shape, dim=8)
        >>> run = kg.train(model, graph, regularizer=kg.DURA(0.05), epochs=1)
        >>> 0 < run.report.mrr < 1
        True
    """
    if isinstance(graph, Model):
        raise wrong_argument(
            "graph",
            expected="a graph",
            found="a model",
            advice="The model comes first, then the graph: kg.train(model, graph).",
        )
    _check_alone()
    if not isinstance(graph, Graph):
        graph = load_graph(graph)

    names = {
        "model.name": _name_given("model", model),
        "regularizer.name": _name_given("regularizer", regularizer),
        "loss.name": _name_given("loss", loss),
        "optimizer.name": _name_given("optimizer", optimizer),
        "validation.name": _name_given("validation", validation),
    }
    if isinstance(model, Model):
        names["model.name"] = name_of(model.named, MODELS)
    given = {key: name for key, name in names.items() if name}
    defaults = default_recipe(
        data_of(graph),
        graph,
        given,
        model=model.named if isinstance(model, Model) else None,
        loss=loss if isinstance(loss, Loss) else None,
    )

    if not isinstance(model, Model):
        model = defaults.model.build(graph.shape, seed=seed)
    if not isinstance(loss, Loss):
        loss = defaults.loss
    if not isinstance(optimizer, Optimizer):
        optimizer = defaults.optimizer
    if not isinstance(regularizer, Regularizer):
        regularizer = defaults.regularizer.build()
    if batch_size is None:
        batch_size = defaults.training.batch_size

    tables: dict[str, Any] = {
        "data": defaults.data,
        "model": ModelConfig.of(model),
        "regularizer": RegularizerConfig.of(regularizer),
        "loss": loss,
        "optimizer": optimizer,
        "validation": validation or Validation(),
        "training": {"epochs": epochs, "batch_size": batch_size, "seed": seed},
    }
    recipe = recipe_from(tables, source="train")
    options = TrainingOptions(out=out, callbacks=find_callbacks(callbacks))
    with locked(out):
        if options.folder:
            options.folder.check_free()
            recipe.check_importable()
        model.to(choose_device(device))
        trainer = Trainer(
            model,
            graph,
            recipe,
            regularizer,
            on_progress=on_progress,
            callbacks=find_callbacks(options.callbacks),
        )
        # The model is the caller's own, so its weights are saved from the start.
        return _create_and_finish(trainer, options, with_weights=True)


def _check_alone() -> None:
    """Refuse a model of this process where a launcher has started several for one training."""
    if num_processes() > 1:
        raise RequestError(
            "kg.train trains a model that is in one process, so each of several would train one of "
            "its own. Use kg.train_recipe or kg.fit, whose processes share one model."
        )


def _name_given(argument: str, value: object) -> str | None:
    """The name that was given in place of an object, or None; refuse what is neither."""
    base, names, example = OBJECTS[argument]
    is_left_out = value is None and argument != "model"
    if is_left_out or isinstance(value, base):
        return None
    if isinstance(value, str) and names:
        return value
    expected = f"an instance, such as {example}"
    if names:
        expected += f", or a name: {', '.join(names)}"
    if isinstance(value, type):
        found = f"the class {value.__name__}"
    else:
        found = f"{type(value).__name__} {value!r}"
    raise wrong_argument(argument, expected=expected, found=found)


# -- a training of a recipe --------------------------------------------------


@dataclass(frozen=True)
class TrainingOptions:
    """How a recipe is trained: on which device, in which folder, and who is told of it.

    One object is passed on whole by everything that trains. `on_event` gets progress and other
    events. A run that is resumed without `callbacks` has the trackers that it was started with.
    With `resume_unfinished`, a run in the folder that was interrupted is resumed.
    """

    out: str | Path | None = None
    overwrite: bool = False
    device: str | torch.device | None = None
    callbacks: Callbacks = None
    on_event: Callable[[Any], None] = lambda event: None
    resume_unfinished: bool = False
    trust_code: bool = False

    @property
    def folder(self) -> RunFolder | None:
        return RunFolder(self.out) if self.out else None

    def trainer(self, recipe: Recipe, graph: Graph) -> Trainer:
        """A trainer of a recipe, whose device and callbacks these are."""
        return Trainer.of_recipe(
            recipe,
            graph,
            device=choose_device(self.device),
            on_progress=self.on_event,
            callbacks=find_callbacks(self.callbacks),
        )


def start_training(recipe: Recipe, graph: Graph, options: TrainingOptions) -> TrainedRun:
    """Build the model of a recipe and train it, in a new run folder."""
    if options.folder:
        options.folder.check_free(overwrite=options.overwrite)
    # The seed of the recipe creates the same weights again, so they are not saved at the start.
    return _create_and_finish(options.trainer(recipe, graph), options, with_weights=False)


def train_in_folder(recipe: Recipe, graph: Graph, options: TrainingOptions) -> TrainedRun:
    """Train a recipe in a folder that exists and has no checkpoint, such as one after tuning."""
    trainer = options.trainer(recipe, graph)
    folder = options.folder
    if folder:
        folder.save_settings(recipe, graph, trainer.model.device, engine=str(trainer.engine))
        trainer.save(folder.checkpoint, when="start", weights=False)
    return finish(trainer, folder)


def resume_training(options: TrainingOptions) -> TrainedRun:
    """Resume a training from its last checkpoint.

    A finished run whose results are damaged is evaluated again.
    """
    folder = options.folder
    assert folder is not None
    damage = folder.damage() if folder.finished else {}
    if folder.finished and not damage:
        folder.remove_checkpoint()
        raise RequestError(
            f"The run {folder.path} is finished. To train longer, start a new run with more epochs."
        )
    recipe = load_recipe(folder.recipe, trust_code=options.trust_code)
    graph = folder.load_graph()

    start = folder.checkpoint
    weights_are_good = not any(name.startswith("weights") for name in damage)
    if not start.exists() and weights_are_good:
        if folder.finished and folder.weights_index.exists():
            folder.join_weights(graph)
        start = folder.weights
    if not start.exists():
        raise RunNotFinished(folder.path, resumable=folder.resumable, wanted="resume")

    # Before a model is built of a recipe that may have changed.
    check_recipe(folder.recipe, read_about(start), checkpoint=start)
    trainer = options.trainer(recipe, graph)
    trainer.restore(start, recipe=folder.recipe)
    return finish(trainer, folder)


def _create_and_finish(
    trainer: Trainer, options: TrainingOptions, *, with_weights: bool
) -> TrainedRun:
    """Train from the start.

    The folder appears together with its first checkpoint, so it can always be resumed.
    """
    folder = options.folder
    if folder:
        with folder.create(
            trainer.recipe,
            trainer.graph,
            trainer.model.device,
            engine=str(trainer.engine),
            overwrite=options.overwrite,
        ) as fresh:
            trainer.save(fresh.checkpoint, when="start", weights=with_weights)
    return finish(trainer, folder)


def finish(
    trainer: Trainer,
    folder: RunFolder | None,
    checkpoint: Path | None = None,
    *,
    save: Callable[[TrainedRun], None] | None = None,
) -> TrainedRun:
    """Train to the end, evaluate and save the results; callbacks get the start and either end.

    `save` writes the results in place of the run folder, as several processes do.
    """
    path = folder.path if folder else None
    trainer.checkpoint_path = checkpoint or (folder.checkpoint if folder else None)
    info = TrainingInfo(
        trainer.model,
        trainer.graph,
        trainer.recipe,
        trainer.describe_engine(),
        path,
        epoch=trainer.progress.epoch,
    )
    check_folder = folder_check(folder.recipe) if folder else None
    started: list[Callback] = []
    try:
        for callback in trainer.callbacks:
            callback.on_start(info)
            started.append(callback)
        run = _train_and_evaluate(trainer, path)
        if check_folder:
            trainer.group.on_first(check_folder)
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


def _train_and_evaluate(trainer: Trainer, folder: Path | None) -> TrainedRun:
    log = ProgressLog(f"{trainer.graph.name} {trainer.recipe.model.name}")
    report_progress = trainer.on_progress

    def on_progress(event: ProgressEvent) -> None:
        report_progress(event)
        log(lambda: _progress_line(event))

    trainer.on_progress = on_progress
    # The model may be in evaluation mode.
    trainer.model.train()
    trainer.run()
    model = trainer.model.eval()
    graph = trainer.graph
    history = trainer.progress.history
    peak = peak_mib(model.device)

    started = time.perf_counter()
    # Warm-up and validation are not among these seconds.
    seconds = sum(entry["seconds"] for entry in history)
    log(
        lambda: (
            f"{len(history)} epochs in {seconds:.1f} s, loss {history[-1]['loss']:.3f}; now ranking"
        ),
        last=True,
    )
    reports = evaluate_held_out(
        model,
        graph,
        queries=trainer.recipe.validation.final_queries,
        # Runs with other seeds of training rank the same sample, so that they can be compared.
        seed=trainer.recipe.data.split_seed,
    )
    ranking_seconds = time.perf_counter() - started
    mrrs = []
    for split, report in reports.items():
        if len(report.ranks.triples):
            of_sample = f" ({report.sample})" if report.sample else ""
            mrrs.append(f"{split} MRR {report.mrr:.4f}{of_sample}")
    log(lambda: ", ".join(mrrs) or "no held-out triples to rank", last=True)
    # Warm-up and peak of a resumed run are those of the last process.
    costs = {
        "warm_up_seconds": round(trainer.warm_up.seconds, 3),
        "training_seconds": round(seconds, 3),
        "ranking_seconds": round(ranking_seconds, 3),
        "peak_mib": round(peak, 3),
    }
    model.tables.release(model)
    return TrainedRun(model, graph, trainer.recipe, history, reports, folder, costs=costs)


def _progress_line(event: ProgressEvent) -> str:
    parts = [event.text, f"step {event.step:,}/{event.steps:,}", event.time_left]
    return "  ".join(part for part in parts if part)


def evaluate_held_out(
    model: Model, graph: Graph, *, queries: int | None = None, seed: int = 0
) -> dict[str, Report]:
    """Reports on valid and test, with one filter; with `queries`, on a sample of each.

    A large graph has a filter for the queries of each split instead.
    """
    known = None if graph.is_large else KnownAnswers.of(graph)
    reports: dict[str, Report] = {}
    for split in HELD_OUT:
        reports[split] = evaluate(
            model, graph, split=split, known=known, queries=queries, seed=seed
        )
    return reports


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), deviation
