"""`fit`: from triples to an evaluated model with hyperparameters tuned on the validation split."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import RequestError
from dualkg.extras import check_trusted, trusted_code
from dualkg.files import locks, read_json, write_text
from dualkg.logs import logger
from dualkg.models import MODELS
from dualkg.training import api
from dualkg.training.callbacks import Callbacks, check_folder, find_callbacks, save_trackers, saved_trackers
from dualkg.training.recipe import Data, Recipe, known_name, named_classes, recipe_from
from dualkg.training.run import Run, RunFolder
from dualkg.training.trainer import InterruptedRunError, OnProgress, Trainer
from dualkg.tuning.automatic import SMALL_GRAPH, AutomaticProgress, AutomaticTrial, AutomaticTuner, init_scale_of_margin

OnTuning = Callable[[AutomaticProgress], None]
CHEAP_PRODUCTS = {"cpu": 5e7, "cuda": 2e10}  # training triples × entities up to which large models are cheap
MATRIX_MODELS = ("RESCAL", "TuckER", "SE")  # a relation has dim² parameters
DISTANCE_LOSS = {
    "regularizer.name": "none",
    "loss.name": "NegativeSampling",
    "loss.sampler": "shared",
    "loss.margin": 6.0,
    "loss.adversarial_temperature": 1.0,
    "optimizer.name": "Adam",
    "optimizer.learning_rate": 0.0005,
    "optimizer.decay_from": 0.0,
}
STARTS: dict[str, dict[str, Any]] = {  # where the search begins, if not at the values of `default_recipe`
    "RESCAL": {"regularizer.plain": 1.0, "regularizer.mapped": 1.0, "optimizer.learning_rate": 0.1},
    "TuckER": {"regularizer.plain": 1.0, "regularizer.mapped": 1.0, "optimizer.learning_rate": 0.1},
    "MuRP": {**DISTANCE_LOSS, "loss.margin": 0.0, "optimizer.learning_rate": 0.002, "optimizer.epsilon": 1e-4},
    **dict.fromkeys(("TransE", "RotatE", "ModE", "HAKE"), DISTANCE_LOSS),
}


def _default_size(graph: Graph, device: torch.device, model: str, *, of_distance: bool) -> dict[str, int]:
    """`model.dim` and `training.epochs` for a graph: larger where training is cheap, as on a GPU."""
    num_entities, num_triples = len(graph.entities), len(graph.train)
    cheap, small = num_entities * num_triples <= CHEAP_PRODUCTS[device.type], num_triples < SMALL_GRAPH
    if device.type == "cpu":
        dim, epochs = (200, 50) if cheap else (100, 20)
    elif small:
        dim, epochs = 500, 50
    else:
        limits = {50_000: 2000, 250_000: 1000, 10**6: 400}
        dim, epochs = next((dim for limit, dim in limits.items() if num_entities <= limit), 200), 100 if cheap else 50
    if small and not of_distance:  # 1-vs-all overfits soon
        epochs = 20
    if model in STARTS:
        dim = min(dim, 500)
    return {"model.dim": min(dim, 256) if model in MATRIX_MODELS else dim, "training.epochs": epochs}


def starting_recipe(
    data: Data,
    graph: Graph,
    device: torch.device,
    changes: Mapping[str, Any],
    *,
    starts: Mapping[str, Mapping[str, Any]] = STARTS,
    source: str = "--set",
) -> Recipe:
    """The recipe at which automatic tuning begins."""
    model, small = str(known_name(changes.get("model.name", "ComplEx"), MODELS)), len(graph.train) < SMALL_GRAPH
    own = starts.get(model, {})
    start: dict[str, Any] = {"optimizer.decay_from": 0.5}
    start |= _default_size(graph, device, model, of_distance="loss.name" in own)
    if not small and "optimizer.name" not in changes:
        start["optimizer.learning_rate"] = 0.1
    # A loss or a regularizer of the user's comes without our settings.
    start |= {key: value for key, value in own.items() if f"{key.partition('.')[0]}.name" not in changes}
    if small and start.get("optimizer.name") == "Adam":  # there are few steps
        start["optimizer.learning_rate"] = 0.01
    start |= changes
    if start.get("loss.sampler") == "shared":
        start.setdefault("loss.num_negatives", min(1024, len(graph.entities)))
    if model in MODELS and "loss.margin" in start and model != "MuRP":
        start.setdefault("model.init_scale", init_scale_of_margin(start["loss.margin"], start["model.dim"]))
    return api.default_recipe(data, graph, start, source=source)


def other_start(start: Recipe, graph: Graph, device: torch.device, fixed: Collection[str]) -> Recipe | None:
    """Of a distance model on a small graph, where the search may also begin: 1-vs-all, as without tuning."""
    model = start.model.name
    if len(graph.train) >= SMALL_GRAPH or "loss.name" not in STARTS.get(model, {}):
        return None
    if any(key.startswith(("loss.", "regularizer.", "optimizer.")) for key in fixed):
        return None
    given = {key: start.value_of(key) for key in fixed}
    if start != starting_recipe(start.data, graph, device, given):  # the search begins at a recipe of the user's
        return None
    return starting_recipe(start.data, graph, device, given, starts={})


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `1.5h`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise RequestError(f"A time is written 90s, 10m or 1.5h; '{text}' was given.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@dataclass(frozen=True)
class Search:
    """What an interrupted search needs to resume: where it started, which keys are fixed, its budget and its trials."""

    start: Recipe
    fixed: tuple[str, ...]
    seconds: float | None
    trials: tuple[AutomaticTrial, ...] = ()
    summary: str = ""

    def save(self, path: Path) -> None:
        trials, start = [asdict(trial) for trial in self.trials], self.start.model_dump(exclude_none=True)
        write_text(path, json.dumps({**vars(self), "trials": trials, "start": start}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Search:
        saved = read_json(path)
        try:
            trials = tuple(AutomaticTrial(**trial) for trial in saved["trials"])
            check_trusted(named_classes(saved["start"]), source=path)
            start = recipe_from(saved["start"], source=str(path))
            return cls(start, tuple(saved["fixed"]), saved["seconds"], trials, saved["summary"])
        except (KeyError, TypeError) as error:
            reason = f"{type(error).__name__} {error}"
            raise RequestError(f"{path} is damaged: {reason}. Train again with --overwrite.") from None

    def run(
        self, graph: Graph, device: torch.device, *, path: Path | None = None, on_tuning: OnTuning | None = None
    ) -> tuple[Recipe, Search]:
        """Search; return the chosen recipe and the finished search. Trials are saved at `path` as they end."""

        def save(trials: list[AutomaticTrial]) -> None:
            if path:
                replace(self, trials=tuple(trials)).save(path)

        options: dict[str, Any] = {"device": device, "fixed": self.fixed, "seconds": self.seconds, "saved": self.trials}
        options["other"] = other_start(self.start, graph, device, self.fixed)
        tuner = AutomaticTuner(self.start, graph, on_trial=save, on_progress=on_tuning, **options)
        try:
            chosen = tuner.run()
        except InterruptedRunError:
            saved = ", which are saved" if path and tuner.trials else ""
            raise InterruptedRunError(f"Stopped while tuning, after {len(tuner.trials)} trials{saved}.") from None
        done = replace(self, trials=tuple(tuner.trials), summary=tuner.summary())
        if path:
            done.save(path)
        return chosen, done


def fit(
    data: str | Path | Graph,
    *,
    model: str = "ComplEx",
    tune: bool | float | str = True,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_tuning: OnTuning | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> Run:
    """Read triples, tune the hyperparameters on the validation split, train, and evaluate.

    `tune` is a time such as "10m", or seconds; by default tuning takes at most three times the final training, or two
    minutes. Keys in `changes`, named as in a recipe ("model.dim"), are not tuned. With `out`, an interrupted run can be
    resumed. Notes of the reader, leakage and unseen entities are warnings of the logger `dualkg`.
    """
    if not isinstance(model, str):
        raise RequestError(
            f"kg.fit takes a model by its name, such as 'ComplEx', and changes={{'model.dim': 200}}; "
            f"{model!r} was given. kg.train(model, graph) trains an instance."
        )
    if not isinstance(changes, Mapping | None):
        raise RequestError(f"changes are a mapping such as {{'model.dim': 200}}; {changes!r} was given.")
    called = find_callbacks(callbacks)
    graph = data if isinstance(data, Graph) else load_graph(data)
    for sentence in (*graph.notes.sentences(), *graph.inspect().warnings()):
        logger.warning("%s: %s", graph.name, sentence)
    chosen, seconds = api.choose_device(device), None if isinstance(tune, bool) else parse_budget(str(tune))
    given = {"model.name": model, "training.seed": seed, **(changes or {})}
    options: dict[str, Any] = {"graph": graph, "device": chosen, "out": out, "overwrite": overwrite}
    options |= {"on_progress": on_progress, "callbacks": called}
    if not tune or not len(graph.valid):
        return api.train_recipe(api.default_recipe(api.data_of(graph), graph, given, source="changes"), **options)
    start = starting_recipe(api.data_of(graph), graph, chosen, given, source="changes")
    return tune_and_train(Search(start, tuple(given), seconds), on_tuning=on_tuning, **options)


@locks("out")
def tune_and_train(
    search: Search,
    graph: Graph,
    *,
    device: torch.device,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_tuning: OnTuning | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
) -> Run:
    """Search, and train the chosen recipe in the same run folder."""
    called = find_callbacks(callbacks)
    for callback in called:
        check_folder(callback, out)
    folder = RunFolder(out) if out else None
    if folder:
        folder.check_free(overwrite=overwrite)
        # Refuse what cannot be trained, before anything is written.
        Trainer.of_recipe(search.start, graph, device=device)
        with folder.create(search.start, graph, device, overwrite=overwrite) as fresh:
            search.save(fresh.tuning)
            save_trackers(fresh.path, called)
    return _tune_and_train(search, graph, device, folder, on_tuning, on_progress=on_progress, callbacks=called)


@locks("path")
def resume(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    on_tuning: OnTuning | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Callbacks = None,
    trust_code: bool = False,
) -> Run:
    """Resume a run that was interrupted or killed: tuning from its last trial, training from its last checkpoint.

    Classes that its recipe names and that are not part of dualkg are imported only with `trust_code`.
    """
    folder = RunFolder(path)
    folder.check_is_run()
    if folder.sharded_checkpoint.exists() and not folder.finished:  # of several processes, resumed in this one
        from dualkg.training.distributed import resume_in_processes

        return resume_in_processes(folder.path, device=device, on_progress=on_progress, trust_code=trust_code)
    if folder.weights.exists() or folder.checkpoint.exists() or not folder.tuning.exists():
        return api.resume(path, device=device, on_progress=on_progress, callbacks=callbacks, trust_code=trust_code)
    with trusted_code(trust_code):
        search, chosen = Search.load(folder.tuning), api.choose_device(device)
    called = find_callbacks(saved_trackers(folder.path) if callbacks is None else callbacks)
    graph = folder.load_graph()
    return _tune_and_train(search, graph, chosen, folder, on_tuning, on_progress=on_progress, callbacks=called)


def _tune_and_train(
    search: Search, graph: Graph, device: torch.device, folder: RunFolder | None, on_tuning: Any, **options: Any
) -> Run:
    try:
        recipe, _ = search.run(graph, device, path=folder.tuning if folder else None, on_tuning=on_tuning)
    except InterruptedRunError as error:
        advice = f" Resume with: dualkg resume {folder.path}" if folder else ""
        raise InterruptedRunError(f"{error}{advice}") from None
    return api.train_in_folder(recipe, graph, device, folder, **options)
