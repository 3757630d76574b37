"""Automatic tuning of the hyperparameters of one training, as in `kg.fit` and `dualkg train DATA`.

A coordinate search with short trainings finds good hyperparameters, one after the other. The best
of these trials are trained longer, and the best of those is chosen (successive halving). If there
is time, the best are trained with other seeds too. Trials are compared by the MRR on the validation
split. The test split is not used, not even as a filter.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.extras import check_trusted
from dualkg.files import read_json, write_text
from dualkg.logs import ProgressLog
from dualkg.losses import KvsAll, OneVsAll, SampledSoftmax
from dualkg.losses.negative_sampling import NegativeSampling
from dualkg.models import MODELS
from dualkg.training.api import default_recipe
from dualkg.training.recipe import Data, Recipe, known_name, named_classes, recipe_from
from dualkg.training.trainer import InterruptedRunError, ProgressEvent, Trainer

SMALL_GRAPH = 20_000  # training triples
RUNGS = (1 / 9, 1 / 3)  # length of the trials of each rung, as a share of the final epochs
SMALL_RUNGS = (1 / 3, 1.0)  # of small graphs, whose final training takes seconds
SHARE_OF_FIRST_RUNG = 0.55  # of the budget
BUDGET = 3.0  # times the final training
MIN_BUDGET_SECONDS = 120.0  # small graphs are trained in a few seconds
MAX_PROMOTED = 4
REPEATED = 3
SEEDS = 3  # how many of the best are trained with how many seeds
SEED = "training.seed"
LOSS = "loss.name"
HOPELESS = 0.8  # a trial stops half-way below this share of the best trial's MRR at that time
MAX_VALIDATION_TRIPLES = 10_000

CHEAP_PRODUCTS = {
    "cpu": 5e7,
    "cuda": 2e10,
}  # training triples × entities up to which large models are cheap
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
STARTS: dict[
    str, dict[str, Any]
] = {  # where the search begins, if not at the values of `default_recipe`
    "RESCAL": {"regularizer.plain": 1.0, "regularizer.mapped": 1.0, "optimizer.learning_rate": 0.1},
    "TuckER": {"regularizer.plain": 1.0, "regularizer.mapped": 1.0, "optimizer.learning_rate": 0.1},
    "MuRP": {
        **DISTANCE_LOSS,
        "loss.margin": 0.0,
        "optimizer.learning_rate": 0.002,
        "optimizer.epsilon": 1e-4,
    },
    **dict.fromkeys(("TransE", "RotatE", "ModE", "HAKE"), DISTANCE_LOSS),
}

Value = bool | int | float | str
Params = dict[str, Value]
Dimensions = dict[
    str, tuple[Value, ...]
]  # hyperparameters and their values; the search moves between neighbours
OnTuning = Callable[["AutomaticProgress"], None]


@dataclass(frozen=True)
class AutomaticTrial:
    """A short training; `mrr` is measured on the validation split at its end, `half_way` after half
    of its epochs.
    """

    params: Params
    rung: int
    epochs: int
    mrr: float | None
    half_way: float | None
    seconds: float
    seconds_per_epoch: float
    error: str = ""


@dataclass(frozen=True)
class AutomaticProgress:
    """Progress of automatic tuning; `training` is the progress of the trial that runs."""

    trial: str
    num_trials: int
    best: float | None
    spent_seconds: float
    budget_seconds: float | None
    training: ProgressEvent | None = None

    @property
    def text(self) -> str:
        best = "" if self.best is None else f"  best valid MRR {self.best:.4f}"
        return f"trial {self.num_trials + 1}: {self.trial}{best}"


def dimensions_of(recipe: Recipe, fixed: Collection[str] = ()) -> Dimensions:
    """What matters for the model and the loss of a recipe, most important first; `fixed` keys are
    left alone.
    """
    found: Dimensions = {}
    if recipe.regularizer.name != "none" and (weight := recipe.regularizer.weight):
        found["regularizer.weight"] = _around(weight, 10**0.5, below=4, above=2)
    if isinstance(recipe.loss, (OneVsAll, SampledSoftmax)):
        found |= {"loss.relation_weight": (0.0, 0.5, 4.0), "loss.frequency_weight": (0.0, 0.9)}
    elif isinstance(recipe.loss, KvsAll):
        found |= {"loss.label_smoothing": (0.0, 0.1, 0.3), "loss.dropout": (0.0, 0.2, 0.4)}
    elif isinstance(recipe.loss, NegativeSampling):
        found |= {
            "loss.margin": (1.0, 3.0, 6.0, 9.0, 12.0, 18.0),
            "loss.adversarial_temperature": (0.5, 1.0),
        }
    found["optimizer.learning_rate"] = _around(recipe.optimizer.learning_rate, 2, below=3, above=2)
    found["training.batch_size"] = tuple(
        map(int, _around(recipe.training.batch_size, 2, below=2, above=2))
    )
    return {key: values for key, values in found.items() if key not in fixed}


def init_scale_of_margin(margin: float, dim: int) -> float:
    """The standard deviation of numbers that are uniform within (γ + 2) / dim (Sun et al.,
    2019).
    """
    return round((margin + 2) / dim / 3**0.5, 5)


def _around(value: float, factor: float, *, below: int, above: int) -> tuple[float, ...]:
    return tuple(float(f"{value * factor**power:.2g}") for power in range(-below, above + 1))


@dataclass
class AutomaticTuner:
    """Searches for the hyperparameters of one training, but for the `fixed` ones, and saves its
    trials at `path`.

    The search begins at `start`, or at the `other` with another loss if that is better in a short
    trial. The best with each loss are compared in long trials. The `saved` trials of an interrupted
    search are not repeated; `command` resumes it.
    """

    start: Recipe
    graph: Graph
    _: KW_ONLY
    device: torch.device
    fixed: tuple[str, ...] = ()
    seconds: float | None = None
    saved: Collection[AutomaticTrial] = ()
    path: Path | None = None
    command: str = ""
    on_progress: OnTuning | None = None

    def __post_init__(self) -> None:
        valid = self.graph.valid
        if len(valid) > MAX_VALIDATION_TRIPLES:
            random = np.random.default_rng(self.start.training.seed)
            valid = valid[np.sort(random.choice(len(valid), MAX_VALIDATION_TRIPLES, replace=False))]
        self.trial_graph = replace(self.graph, valid=valid, test=self.graph.test[:0])
        self.is_small = len(self.graph.train) < SMALL_GRAPH
        self.other = other_start(self.start, self.graph, self.device, self.fixed)
        self.dimensions = dimensions_of(self.start, self.fixed)
        self.trials: list[AutomaticTrial] = []
        self.log = ProgressLog(f"Tuning {self.start.model.name} on {self.graph.name}")

    @classmethod
    def load(cls, path: Path, graph: Graph, device: torch.device) -> AutomaticTuner:
        """A search that was interrupted."""
        saved = read_json(path)
        try:
            trials = [AutomaticTrial(**trial) for trial in saved["trials"]]
            check_trusted(named_classes(saved["start"]), source=path)
            start = recipe_from(saved["start"], source=str(path))
            fixed = tuple(saved["fixed"])
            return cls(
                start,
                graph,
                device=device,
                fixed=fixed,
                seconds=saved["seconds"],
                saved=trials,
                path=path,
            )
        except (KeyError, TypeError) as error:
            reason = f"{type(error).__name__} {error}"
            raise RequestError(
                f"{path} is damaged: {reason}. Train again with --overwrite."
            ) from None

    def save(self, path: Path | None = None, *, summary: str = "") -> None:
        """Save what an interrupted search needs to resume."""
        if path := path or self.path:
            start = self.start.model_dump(exclude_none=True)
            trials = [asdict(trial) for trial in self.trials]
            saved = {
                "start": start,
                "fixed": self.fixed,
                "seconds": self.seconds,
                "trials": trials,
                "summary": summary,
            }
            write_text(path, json.dumps(saved, indent=1))

    def run(self) -> Recipe:
        """Search, and return the recipe of the final training."""
        try:
            self._search()
        except InterruptedRunError:
            saved = ", which are saved" if self.path and self.trials else ""
            advice = f" Resume with: {self.command}" if self.command else ""
            message = f"Stopped while tuning, after {len(self.trials)} trials{saved}.{advice}"
            raise InterruptedRunError(message) from None
        recipe = self.chosen_recipe()
        self.save(summary=self.summary())
        return recipe

    def _search(self) -> None:
        best = self._try({}, rung=0)
        if self.other is not None and self._has_time(rung=0):
            other = self._try({LOSS: type(self.other.loss).__name__}, rung=0)
            if _better(other, best):
                best = other
                self.dimensions = dimensions_of(self.other, self.fixed)
        factor = 1.78
        while best.mrr is not None and self._has_time(rung=0):
            before = best
            for key, values in self.dimensions.items():
                best = self._climb(best, key, values)
            best = self._refine_weight(best, factor)
            factor = 1.33
            if best is before or self.seconds is None:
                break
        for params in self._promoted():
            if self._has_time(rung=1):
                self._try(params, rung=1)
        if self._ranked(rung=1):
            self._polish()
            self._repeat()

    def _climb(
        self, best: AutomaticTrial, key: str, values: tuple[Value, ...], *, rung: int = 0
    ) -> AutomaticTrial:
        """Move along one dimension while the MRR grows, upwards first."""
        start = float(self._with(best.params).value_of(key))
        before = best
        position = min(range(len(values)), key=lambda i: abs(float(values[i]) - start))
        for direction in (values[position + 1 :], values[:position][::-1]):
            for value in direction if best is before else ():
                params = {**best.params, key: value}
                if not self._has_time(self._epochs(rung, params), rung=rung):
                    break
                trial = self._try(params, rung=rung)
                if not _better(trial, best):
                    break
                best = trial
        return best

    def _refine_weight(self, best: AutomaticTrial, factor: float) -> AutomaticTrial:
        """Try relation weights with a stronger regularizer, which the relation loss counts against;
        then near ones.
        """
        key = "regularizer.weight"
        relation_key = "loss.relation_weight"
        if key not in self.dimensions:
            return best
        weight = float(f"{10**0.5 * self._with(best.params).value_of(key):.2g}")
        for value in (0.5, 4.0) if relation_key in self.dimensions else ():
            if value != best.params.get(relation_key, 0.0) and self._has_time(rung=0):
                trial = self._try({**best.params, relation_key: value, key: weight}, rung=0)
                best = trial if _better(trial, best) else best
        weight = self._with(best.params).value_of(key)
        return self._climb(best, key, _around(weight, factor, below=1, above=1))

    def _polish(self) -> None:
        """Climb in long trials along what short trials misjudge: λ, the number of epochs, and the
        learning rate.
        """
        best = self._ranked(rung=1)[0]
        start = self._start(best.params)
        long = dimensions_of(start, self.fixed)
        epochs = start.training.epochs
        if self.is_small and "training.epochs" not in self.fixed:
            long["training.epochs"] = (5 * epochs // 2, epochs, epochs // 2)
        for key in ("regularizer.weight", "training.epochs", "optimizer.learning_rate"):
            if key in long:
                best = self._climb(best, key, long[key], rung=1)

    def _repeat(self) -> None:
        """Train the best with other seeds. Their mean counts, because MRRs of one seed differ by
        chance.
        """
        best = [trial.params for trial in self._ranked(rung=1)[:REPEATED]]
        for seed in range(self.start.training.seed + 1, self.start.training.seed + SEEDS):
            if self._has_time(sum(self._epochs(1, params) for params in best), rung=1):
                for params in best:
                    self._try({**params, SEED: seed}, rung=1)

    def _promoted(self) -> list[Params]:
        """The best of the first rung: those with each loss and each relation weight, which pays
        late, then by rank.
        """
        ranked = [trial.params for trial in self._ranked(rung=0)]
        first: dict[object, Params] = {}
        for params in ranked:
            first.setdefault((params.get(LOSS), params.get("loss.relation_weight", 0.0)), params)
        chosen = [*first.values(), *(params for params in ranked if params not in first.values())]
        if self.is_small:
            return chosen[
                : max(len(first), 3)
            ]  # the rest of the time is for `_polish` and `_repeat`
        return chosen[: MAX_PROMOTED if self.seconds is None else 2 * MAX_PROMOTED]

    def _ranked(self, *, rung: int) -> list[AutomaticTrial]:
        """The trials of a rung, best first, with the mean MRR of their seeds; those with most seeds
        come first.
        """
        seeds: dict[str, list[AutomaticTrial]] = {}
        for trial in self.trials:
            if trial.rung == rung and trial.mrr is not None:
                seeds.setdefault(describe_params(_without_seed(trial.params)), []).append(trial)
        means = [
            (len(same), float(np.mean([trial.mrr for trial in same])), same[0])
            for same in seeds.values()
        ]
        means.sort(key=lambda mean: (-mean[0], -mean[1]))
        return [replace(first, mrr=mrr) for _, mrr, first in means]

    @property
    def budget_seconds(self) -> float | None:
        """Seconds of the whole search, known after the first trial."""
        if self.seconds is not None:
            return self.seconds
        if not self.trials:
            return None
        final = self.trials[0].seconds_per_epoch * self.start.training.epochs
        return max(BUDGET * final, MIN_BUDGET_SECONDS)

    @property
    def spent_seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    def _has_time(self, epochs: int = 0, *, rung: int) -> bool:
        """Whether so many epochs, or else one trial of the rung, would end within the budget of the
        rung.
        """
        budget = self.budget_seconds
        assert budget is not None  # since the first trial
        spent = self.spent_seconds
        of_epoch = self.trials[0].seconds_per_epoch
        long_fits = spent + of_epoch * self._epochs(1, {}) <= budget
        share = SHARE_OF_FIRST_RUNG if rung == 0 and long_fits else 1.0
        return spent + of_epoch * (epochs or self._epochs(rung, {})) <= share * budget

    def _epochs(self, rung: int, params: Params) -> int:
        rungs = SMALL_RUNGS if self.is_small else RUNGS
        return max(
            1,
            round(
                int(params.get("training.epochs", self._start(params).training.epochs))
                * rungs[rung]
            ),
        )

    def _try(self, params: Params, *, rung: int) -> AutomaticTrial:
        """Train with these hyperparameters, or look the trial up if it was made before."""

        def same(trials: Collection[AutomaticTrial]) -> AutomaticTrial | None:
            return next(
                (trial for trial in trials if trial.params == params and trial.rung == rung), None
            )

        done = same(self.trials)
        if done is None:
            done = same(self.saved) or self._train(params, rung)
            self.trials.append(done)
            self.save()
        return done

    def _train(self, params: Params, rung: int) -> AutomaticTrial:
        epochs = self._epochs(rung, params)
        started = time.perf_counter()
        history: list[dict[str, Any]] = []
        mrr = None
        error = ""
        changes = {
            "training.epochs": epochs,
            "validation.every": (epochs + 1) // 2,
            "validation.patience": 0,
        }
        try:
            recipe = self._with(params).with_changes(changes)
            trainer = Trainer.of_recipe(recipe, self.trial_graph, device=self.device)
            history = trainer.progress.history
            trainer.on_progress = self._watch(history, epochs, params, rung)
            trainer.run()
            mrr = history[-1].get("valid_mrr")
        except _HopelessTrialError:
            mrr = history[-1]["valid_mrr"]
            error = "stopped half-way"
        except (RequestError, DivergedError) as problem:
            if not params and isinstance(problem, RequestError):
                raise  # a mistake in what was requested
            error = str(problem)
        except torch.OutOfMemoryError:
            error = f"{self.device} is out of memory"
        seconds_per_epoch = (
            float(np.median([entry["seconds"] for entry in history])) if history else 0.0
        )
        half_way = next((entry["valid_mrr"] for entry in history if "valid_mrr" in entry), None)
        seconds = round(time.perf_counter() - started, 3)
        return AutomaticTrial(
            params, rung, epochs, mrr, half_way, seconds, seconds_per_epoch, error
        )

    def _with(self, params: Params) -> Recipe:
        """The recipe with these hyperparameters; an `init_scale` that the starting margin gave
        follows the margin.
        """
        start = self._start(params)
        model = start.model
        follows = "loss.margin" in params and "model.init_scale" not in self.fixed
        if follows and model.init_scale == init_scale_of_margin(
            start.value_of("loss.margin"), model.dim
        ):
            params = {
                **params,
                "model.init_scale": init_scale_of_margin(float(params["loss.margin"]), model.dim),
            }
        return start.with_changes(params)

    def _start(self, params: Params) -> Recipe:
        """The recipe that these hyperparameters change."""
        return self.other if self.other is not None and LOSS in params else self.start

    def _watch(
        self, history: list[Any], epochs: int, params: Params, rung: int
    ) -> Callable[[ProgressEvent], None]:
        """Report the progress of a trial, and stop it half-way if it is far behind the best."""
        ranked = self._ranked(rung=rung)
        text = describe_params(params)
        best = next((trial for trial in ranked if (LOSS in trial.params) == (LOSS in params)), None)
        top = ranked[0].mrr if ranked else None

        def on_progress(event: ProgressEvent) -> None:
            mrr = history[-1].get("valid_mrr", math.inf) if 0 < len(history) < epochs else math.inf
            if best and best.half_way and mrr < HOPELESS * best.half_way:
                raise _HopelessTrialError
            spent = self.spent_seconds
            budget = self.budget_seconds
            progress = AutomaticProgress(text, len(self.trials), top, spent, budget, event)
            if self.on_progress:
                self.on_progress(progress)
            self.log(
                lambda: (
                    f"{progress.text}  epoch {event.epoch}/{event.epochs}  loss {event.loss:.3f}"
                )
            )

        return on_progress

    @property
    def chosen(self) -> AutomaticTrial | None:
        """The best trial of the last rung that has any; its MRR is the mean of its seeds."""
        return next((ranked[0] for rung in (1, 0) if (ranked := self._ranked(rung=rung))), None)

    def chosen_recipe(self) -> Recipe:
        if self.chosen is None:
            reason = next(
                (trial.error for trial in self.trials if trial.error), "no trial was made"
            )
            raise DualkgError(
                f"Tuning found no hyperparameters that train on {self.graph.name}: {reason}"
            )
        chosen = self._with(_without_seed(self.chosen.params))
        changes: dict[str, Any] = {
            "validation.every": chosen.validation.every or max(1, chosen.training.epochs // 10)
        }
        if "validation.keep" not in self.fixed and chosen.optimizer.average_from == 1:
            changes["validation.keep"] = "best"
        return chosen.with_changes(changes)

    def summary(self) -> str:
        """What was chosen and why, in a line."""
        chosen = self.chosen
        assert chosen is not None
        params = _without_seed(chosen.params)
        rung = [
            trial for trial in self.trials if trial.rung == chosen.rung and trial.mrr is not None
        ]
        first = next((trial.mrr for trial in rung if not trial.params), None)
        start = f" ({first:.4f} with the starting values)" if first and chosen.params else ""
        seeds = sum(_without_seed(trial.params) == params for trial in rung)
        mean = f" (mean of {seeds} seeds)" if seeds > 1 else ""
        count = f"{len(self.trials)} trials" if len(self.trials) > 1 else "1 trial"
        return (
            f"Chose {describe_params(params)}: validation MRR {chosen.mrr:.4f} after "
            f"{chosen.epochs} epochs{mean}{start}, filtered by train and valid, the best of "
            f"{count} in {self.spent_seconds:.0f} s."
        )


class _HopelessTrialError(Exception):
    """A trial is far behind the best half-way."""


def describe_params(params: Params) -> str:
    """`weight 0.016, learning_rate 0.3`."""
    if not params:
        return "the starting values"
    texts = {
        key: value if isinstance(value, str) else f"{value:g}" for key, value in params.items()
    }
    return ", ".join(
        f"{'loss' if key == LOSS else key.rpartition('.')[2]} {text}" for key, text in texts.items()
    )


def _without_seed(params: Params) -> Params:
    return {key: value for key, value in params.items() if key != SEED}


def _better(trial: AutomaticTrial, best: AutomaticTrial) -> bool:
    return trial.mrr is not None and (best.mrr is None or trial.mrr > best.mrr)


# -- where the search begins ---


def _default_size(
    graph: Graph, device: torch.device, model: str, *, of_distance: bool
) -> dict[str, int]:
    """`model.dim` and `training.epochs` for a graph: larger where training is cheap, as on a
    GPU.
    """
    num_entities = len(graph.entities)
    num_triples = len(graph.train)
    cheap = num_entities * num_triples <= CHEAP_PRODUCTS[device.type]
    small = num_triples < SMALL_GRAPH
    if device.type == "cpu":
        dim, epochs = (200, 50) if cheap else (100, 20)
    elif small:
        dim = 500
        epochs = 50
    else:
        limits = {50_000: 2000, 250_000: 1000, 10**6: 400}
        dim = next((dim for limit, dim in limits.items() if num_entities <= limit), 200)
        epochs = 100 if cheap else 50
    if small and not of_distance:  # 1-vs-all overfits soon
        epochs = 20
    if model in STARTS:
        dim = min(dim, 500)
    return {
        "model.dim": min(dim, 256) if model in MATRIX_MODELS else dim,
        "training.epochs": epochs,
    }


def starting_recipe(
    data: Data,
    graph: Graph,
    device: torch.device,
    changes: Mapping[str, Any],
    *,
    starts: Mapping[str, Mapping[str, Any]] = STARTS,
) -> Recipe:
    """The recipe at which automatic tuning begins."""
    model = str(known_name(changes.get("model.name", "ComplEx"), MODELS))
    small = len(graph.train) < SMALL_GRAPH
    own = starts.get(model, {})
    start: dict[str, Any] = {"optimizer.decay_from": 0.5}
    start |= _default_size(graph, device, model, of_distance="loss.name" in own)
    if not small and "optimizer.name" not in changes:
        start["optimizer.learning_rate"] = 0.1
    # A loss or a regularizer of the user's comes without our settings.
    start |= {
        key: value for key, value in own.items() if f"{key.partition('.')[0]}.name" not in changes
    }
    if small and start.get("optimizer.name") == "Adam":  # there are few steps
        start["optimizer.learning_rate"] = 0.01
    start |= changes
    if start.get("loss.sampler") == "shared":
        start.setdefault("loss.num_negatives", min(1024, len(graph.entities)))
    if model in MODELS and "loss.margin" in start and model != "MuRP":
        start.setdefault(
            "model.init_scale", init_scale_of_margin(start["loss.margin"], start["model.dim"])
        )
    return default_recipe(data, graph, start)


def other_start(
    start: Recipe, graph: Graph, device: torch.device, fixed: Collection[str]
) -> Recipe | None:
    """Of a distance model on a small graph, where the search may also begin: 1-vs-all, as without
    tuning.
    """
    model = start.model.name
    if len(graph.train) >= SMALL_GRAPH or "loss.name" not in STARTS.get(model, {}):
        return None
    if any(key.startswith(("loss.", "regularizer.", "optimizer.")) for key in fixed):
        return None
    given = {key: start.value_of(key) for key in fixed}
    if start != starting_recipe(
        start.data, graph, device, given
    ):  # the search begins at a recipe of the user's
        return None
    return starting_recipe(start.data, graph, device, given, starts={})


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `1.5h`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise RequestError(f"A time is written 90s, 10m or 1.5h; '{text}' was given.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
