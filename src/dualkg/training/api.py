"""Where training starts: from objects, from a recipe, from a checkpoint, or several times over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError
from dualkg.evaluation.report import Report, evaluate
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.regularizers import NoRegularizer, Regularizer
from dualkg.training.recipe import (
    Data,
    Loss,
    ModelConfig,
    Optimizer,
    Recipe,
    RegularizerConfig,
    Training,
    Validation,
    load_recipe,
    recipe_from,
)
from dualkg.training.registry import (
    build_model,
    build_regularizer,
    check_can_be_named,
    describe_model,
    describe_regularizer,
)
from dualkg.training.run import Run, RunFolder, environment
from dualkg.training.trainer import Costs, ProgressEvent, Trainer, peak_mib

OnProgress = Callable[[ProgressEvent], None]


def default_batch_size(graph: Graph) -> int:
    """Small graphs want many small steps, large ones full matrix products."""
    return 100 if len(graph.train) < 20_000 else 500 if len(graph.train) < 200_000 else 1000


def default_recipe(data: Data, graph: Graph, changes: Mapping[str, Any] | None = None) -> Recipe:
    """What is trained where no recipe is given: ComplEx with DURA, chosen on several graphs' validation splits.

    A model that DURA is not defined for is trained without, unless a regularizer is asked for.
    """
    base = Recipe(
        data=data,
        model=ModelConfig(name="ComplEx"),
        regularizer=RegularizerConfig(name="DURA", weight=0.05, plain=0.5, mapped=1.5),
        optimizer=Optimizer(learning_rate=0.3, schedule="linear"),
        training=Training(batch_size=default_batch_size(graph)),
    )
    changes = dict(changes or {})
    kind = MODELS.get(changes.get("model.name", base.model.name))
    if kind and not kind.has_adjoint:
        changes.setdefault("regularizer.name", "none")
    if changes.get("regularizer.name", "DURA") not in ("DURA", "UnweightedDURA"):  # λ1 and λ2 are theirs alone
        base = base.model_copy(update={"regularizer": RegularizerConfig(weight=base.regularizer.weight)})
    return base.with_changes(changes)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or a GPU where there is one."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"'{device}' is no device to train on. Use cpu, cuda or cuda:1.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"The device {chosen} was asked for, but PyTorch finds no such GPU here. Use --device cpu.")
    return chosen


def train(
    model: Model,
    graph: Graph,
    *,
    regularizer: Regularizer | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    validation: Validation | None = None,
    epochs: int = 20,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> Run:
    """Train a model on a graph; with `out`, in a run folder that survives interruption.

    The model given is the one that is trained, and is moved to the device.
    """
    regularizer = regularizer or NoRegularizer()
    sections = {
        "data": Data.model_validate(
            {"graph": graph.name if graph.source == "memory" else graph.source, **graph.read_options}
        ),
        "model": describe_model(model),
        "regularizer": describe_regularizer(regularizer),
        "loss": loss,
        "optimizer": optimizer,
        "validation": validation,
    }
    tables = {name: section.model_dump() for name, section in sections.items() if section}
    size = batch_size if batch_size is not None else default_batch_size(graph)
    tables["training"] = {"epochs": epochs, "batch_size": size, "seed": seed}
    recipe = recipe_from(tables, source="train")
    folder = RunFolder(out) if out else None
    if folder:
        folder.check_free()
        check_can_be_named(recipe.model.name)
        check_can_be_named(recipe.regularizer.name)
    model.to(choose_device(device))
    return _begin(Trainer(model, graph, recipe, regularizer, on_progress=on_progress), folder, by_seed=False)


def train_recipe(
    recipe: Recipe,
    *,
    graph: Graph | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Run:
    """Load the graph, build the model and train it, all as the recipe says."""
    folder = RunFolder(out) if out else None
    if folder:
        folder.check_free(overwrite=overwrite)
    graph = graph or load_recipe_graph(recipe)
    model = build_model(recipe.model, graph.shape, seed=recipe.training.seed).to(choose_device(device))
    trainer = Trainer(model, graph, recipe, build_regularizer(recipe.regularizer), on_progress=on_progress)
    return _begin(trainer, folder, by_seed=True, overwrite=overwrite)


def load_recipe_graph(recipe: Recipe) -> Graph:
    data = recipe.data
    return load_graph(data.graph, columns=data.columns, split=data.split, seed=data.split_seed, labels=data.labels)


def resume(path: str | Path, *, device: str | torch.device | None = None, on_progress: OnProgress | None = None) -> Run:
    """Go on with a run that was interrupted or killed, from its last checkpoint."""
    folder = RunFolder(path)
    folder.check_is_run()
    recipe = load_recipe(folder.recipe)
    if folder.finished:
        folder.checkpoint.unlink(missing_ok=True)  # a kill may have come just before this
        raise RequestError(f"The run {folder.path} is finished. To train longer, begin again with more epochs.")
    if not folder.checkpoint.exists():
        raise RequestError(f"The run {folder.path} cannot go on. {folder.how_to_go_on()}")
    graph = folder.load_graph()
    model = build_model(recipe.model, graph.shape, seed=recipe.training.seed).to(choose_device(device))
    trainer = Trainer(model, graph, recipe, build_regularizer(recipe.regularizer), on_progress=on_progress)
    trainer.checkpoint_path = folder.checkpoint
    trainer.restore(folder.checkpoint)
    return _go(trainer, folder)


def train_seeds(
    recipe: Recipe,
    num_seeds: int,
    *,
    out: Path,
    graph: Graph | None = None,
    device: str | torch.device | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[int, dict[str, Any]]:
    """Repeat a recipe with seeds counted up from its own, each in a folder of its own; the reports by seed.

    Runs of the same recipe that are already there are not repeated, and unfinished ones go on.
    """
    graph = graph or load_recipe_graph(recipe)
    if RunFolder(out).recipe.exists():
        raise RequestError(f"{out} holds a single run; runs of several seeds need a folder of their own: use --out.")
    reports = {}
    for seed in range(recipe.training.seed, recipe.training.seed + num_seeds):
        one = recipe.with_changes({"training.seed": seed})
        folder = RunFolder(out / f"seed-{seed}")
        begun = folder.recipe.exists() and load_recipe(folder.recipe) == one and not overwrite
        if begun and folder.saved_environment.get("data") != graph.fingerprint:
            raise RequestError(f"{folder.path} is of other data than {graph.name} is now. Use --overwrite or --out.")
        if begun and not folder.finished:
            resume(folder.path, device=device, on_progress=on_progress)
        elif not begun:
            train_recipe(one, graph=graph, device=device, out=folder.path, overwrite=overwrite, on_progress=on_progress)
        reports[seed] = folder.saved_reports()
    return reports


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _begin(trainer: Trainer, folder: RunFolder | None, *, by_seed: bool, overwrite: bool = False) -> Run:
    """Train from the start. The folder appears with the first checkpoint in it, so the model's own start is kept.

    `by_seed`: the recipe's seed makes the same model again, so that its weights need not be written.
    """
    if folder:
        about = environment(trainer.model.device, engine=trainer.engine, fingerprint=trainer.graph.fingerprint)
        with folder.beginning(trainer.recipe, trainer.graph, about, overwrite=overwrite) as fresh:
            trainer.save_start(fresh.checkpoint, by_seed=by_seed)
        trainer.checkpoint_path = folder.checkpoint
    return _go(trainer, folder)


def _go(trainer: Trainer, folder: RunFolder | None) -> Run:
    """Train to the end, evaluate, and keep the results."""
    trainer.model.train()  # it may have been trained or asked before
    trainer.run()
    model, graph, history = trainer.model.eval(), trainer.graph, trainer.progress.history
    peak, started = peak_mib(model.device), time.perf_counter()
    reports = evaluate_held_out(model, graph)
    costs = Costs(
        warm_up_seconds=trainer.warm_up.seconds,
        training_seconds=sum(entry["seconds"] for entry in history),
        ranking_seconds=time.perf_counter() - started,
        peak_mib=peak,
    )
    run = Run(model, graph, trainer.recipe, history, reports, folder.path if folder else None, costs=costs.as_dict())
    if folder:
        folder.finish(run, trained=folder.checkpoint)
    return run


def evaluate_held_out(model: Model, graph: Graph) -> dict[str, Report]:
    """Reports on valid and test, the filter built once."""
    known = KnownAnswers.of(graph)
    return {name: evaluate(model, graph, split=name, known=known) for name in ("valid", "test")}
