"""Automatic tuning: the search that `dualkg train DATA` and `kg.fit` make before the final training.

A coordinate search with short trainings finds good hyperparameters, one after the other. The best of these trials are
trained longer, and the best of those is chosen (successive halving). If there is time, the best are trained with other
seeds too. Trials are compared by the MRR on the validation split. The test split is not used, not even as a filter.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.logs import ProgressLog
from dualkg.losses import KvsAll, OneVsAll, SampledSoftmax
from dualkg.losses.negative_sampling import NegativeSampling
from dualkg.training.recipe import Recipe
from dualkg.training.trainer import ProgressEvent, Trainer

SMALL_GRAPH = 20_000  # training triples
RUNGS = (1 / 9, 1 / 3)  # length of the trials of each rung, as a share of the final epochs
SMALL_RUNGS = (1 / 3, 1.0)  # of small graphs, whose final training takes seconds
SHARE_OF_FIRST_RUNG = 0.55  # of the budget
BUDGET = 3.0  # times the final training
MIN_BUDGET_SECONDS = 120.0  # small graphs are trained in a few seconds
MAX_PROMOTED = 4
REPEATED, SEEDS = 3, 3  # how many of the best are trained with how many seeds
SEED, LOSS = "training.seed", "loss.name"
HOPELESS = 0.8  # a trial stops half-way below this share of the best trial's MRR at that time
MAX_VALIDATION_TRIPLES = 10_000

Value = bool | int | float | str
Params = dict[str, Value]
Dimensions = dict[str, tuple[Value, ...]]  # hyperparameters and their values; the search moves between neighbours


@dataclass(frozen=True)
class AutomaticTrial:
    """A short training; `mrr` is measured on the validation split at its end, `half_way` after half of its epochs."""

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


def dimensions_of(recipe: Recipe, fixed: Collection[str] = ()) -> Dimensions:
    """What matters for the model and the loss of a recipe, most important first; `fixed` keys are left alone."""
    found: Dimensions = {}
    if recipe.regularizer.name != "none" and (weight := recipe.regularizer.weight):
        found["regularizer.weight"] = _around(weight, 10**0.5, below=4, above=2)
    if isinstance(recipe.loss, (OneVsAll, SampledSoftmax)):
        found |= {"loss.relation_weight": (0.0, 0.5, 4.0), "loss.frequency_weight": (0.0, 0.9)}
    elif isinstance(recipe.loss, KvsAll):
        found |= {"loss.label_smoothing": (0.0, 0.1, 0.3), "loss.dropout": (0.0, 0.2, 0.4)}
    elif isinstance(recipe.loss, NegativeSampling):
        found |= {"loss.margin": (1.0, 3.0, 6.0, 9.0, 12.0, 18.0), "loss.adversarial_temperature": (0.5, 1.0)}
    found["optimizer.learning_rate"] = _around(recipe.optimizer.learning_rate, 2, below=3, above=2)
    found["training.batch_size"] = tuple(map(int, _around(recipe.training.batch_size, 2, below=2, above=2)))
    return {key: values for key, values in found.items() if key not in fixed}


def init_scale_of_margin(margin: float, dim: int) -> float:
    """The standard deviation of numbers that are uniform within (γ + 2) / dim (Sun et al., 2019)."""
    return round((margin + 2) / dim / 3**0.5, 5)


def _around(value: float, factor: float, *, below: int, above: int) -> tuple[float, ...]:
    return tuple(float(f"{value * factor**power:.2g}") for power in range(-below, above + 1))


@dataclass
class AutomaticTuner:
    """Searches for the hyperparameters of one training. Called with the trials of an interrupted search, it resumes.

    The search begins at `recipe`, or at the `other` with another loss if that is better in a short trial. The best with
    each loss are compared in long trials.
    """

    recipe: Recipe
    graph: Graph
    _: KW_ONLY
    device: torch.device
    fixed: Collection[str] = ()
    other: Recipe | None = None
    seconds: float | None = None
    saved: Collection[AutomaticTrial] = ()
    on_trial: Callable[[list[AutomaticTrial]], None] = lambda trials: None
    on_progress: Callable[[AutomaticProgress], None] | None = None

    def __post_init__(self) -> None:
        valid, name = self.graph.valid, self.graph.name
        if not len(valid):
            raise RequestError(f"{name} has no validation triples, and tuning selects by their MRR.")
        if len(valid) > MAX_VALIDATION_TRIPLES:
            random = np.random.default_rng(self.recipe.training.seed)
            valid = valid[np.sort(random.choice(len(valid), MAX_VALIDATION_TRIPLES, replace=False))]
        self.graph = dataclasses.replace(self.graph, valid=valid, test=self.graph.test[:0])
        self.is_small = len(self.graph.train) < SMALL_GRAPH
        self.dimensions = dimensions_of(self.recipe, self.fixed)
        self.trials: list[AutomaticTrial] = []
        self.log = ProgressLog(f"Tuning {self.recipe.model.name} on {name}")

    def run(self) -> Recipe:
        """Search, and return the recipe of the final training."""
        best = self._try({}, rung=0)
        if self.other is not None and self._has_time(rung=0):
            other = self._try({LOSS: type(self.other.loss).__name__}, rung=0)
            if other is not None and (best is None or _better(other, best)):
                best, self.dimensions = other, dimensions_of(self.other, self.fixed)
        factor = 1.78
        while best is not None and self._has_time(rung=0):
            before = best
            for key, values in self.dimensions.items():
                best = self._climb(best, key, values)
            best, factor = self._refine_weight(best, factor), 1.33
            if best is before or self.seconds is None:
                break
        for params in self._promoted():
            if self._has_time(rung=1):
                self._try(params, rung=1)
        if self._ranked(rung=1):
            self._polish()
            self._repeat()
        return self.chosen_recipe()

    def _climb(self, best: AutomaticTrial, key: str, values: tuple[Value, ...], *, rung: int = 0) -> AutomaticTrial:
        """Move along one dimension while the MRR grows, upwards first."""
        start, before = float(self._with(best.params).value_of(key)), best
        position = min(range(len(values)), key=lambda i: abs(float(values[i]) - start))
        for direction in (values[position + 1 :], values[:position][::-1]):
            for value in direction if best is before else ():
                params = {**best.params, key: value}
                if not self._has_time(self._epochs(rung, params), rung=rung):
                    break
                trial = self._try(params, rung=rung)
                if trial is None or not _better(trial, best):
                    break
                best = trial
        return best

    def _refine_weight(self, best: AutomaticTrial, factor: float) -> AutomaticTrial:
        """Try relation weights with a stronger regularizer, which the relation loss counts against; then near ones."""
        key, relation_key = "regularizer.weight", "loss.relation_weight"
        if key not in self.dimensions:
            return best
        weight = float(f"{10**0.5 * self._with(best.params).value_of(key):.2g}")
        for value in (0.5, 4.0) if relation_key in self.dimensions else ():
            if value != best.params.get(relation_key, 0.0) and self._has_time(rung=0):
                trial = self._try({**best.params, relation_key: value, key: weight}, rung=0)
                best = trial if trial and _better(trial, best) else best
        weight = self._with(best.params).value_of(key)
        return self._climb(best, key, _around(weight, factor, below=1, above=1))

    def _polish(self) -> None:
        """Climb in long trials along what short trials misjudge: λ, the number of epochs, and the learning rate."""
        best = self._ranked(rung=1)[0]
        start = self._start(best.params)
        long, epochs = dimensions_of(start, self.fixed), start.training.epochs
        if self.is_small and "training.epochs" not in self.fixed:
            long["training.epochs"] = (5 * epochs // 2, epochs, epochs // 2)
        for key in ("regularizer.weight", "training.epochs", "optimizer.learning_rate"):
            if key in long:
                best = self._climb(best, key, long[key], rung=1)

    def _repeat(self) -> None:
        """Train the best with other seeds. Their mean counts, because MRRs of one seed differ by chance."""
        best = [trial.params for trial in self._ranked(rung=1)[:REPEATED]]
        for seed in range(self.recipe.training.seed + 1, self.recipe.training.seed + SEEDS):
            if self._has_time(sum(self._epochs(1, params) for params in best), rung=1):
                for params in best:
                    self._try({**params, SEED: seed}, rung=1)

    def _promoted(self) -> list[Params]:
        """The best of the first rung: those with each loss and each relation weight, which pays late, then by rank."""
        ranked = [trial.params for trial in self._ranked(rung=0)]
        first: dict[object, Params] = {}
        for params in ranked:
            first.setdefault((params.get(LOSS), params.get("loss.relation_weight", 0.0)), params)
        chosen = [*first.values(), *(params for params in ranked if params not in first.values())]
        if self.is_small:
            return chosen[: max(len(first), 3)]  # the rest of the time is for `_polish` and `_repeat`
        return chosen[: MAX_PROMOTED if self.seconds is None else 2 * MAX_PROMOTED]

    def _ranked(self, *, rung: int) -> list[AutomaticTrial]:
        """The trials of a rung, best first, with the mean MRR of their seeds; those with most seeds come first."""
        seeds: dict[str, list[AutomaticTrial]] = {}
        for trial in self.trials:
            if trial.rung == rung and trial.mrr is not None:
                seeds.setdefault(describe_params(_without_seed(trial.params)), []).append(trial)
        means = [(len(same), float(np.mean([trial.mrr for trial in same])), same[0]) for same in seeds.values()]
        means.sort(key=lambda mean: (-mean[0], -mean[1]))
        return [dataclasses.replace(first, mrr=mrr) for _, mrr, first in means]

    @property
    def budget_seconds(self) -> float | None:
        """Seconds of the whole search, known after the first trial."""
        if self.seconds is not None:
            return self.seconds
        if not self.trials:
            return None
        final = self.trials[0].seconds_per_epoch * self.recipe.training.epochs
        return max(BUDGET * final, MIN_BUDGET_SECONDS)

    @property
    def spent_seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    def _has_time(self, epochs: int = 0, *, rung: int) -> bool:
        """Whether so many epochs, or else one trial of the rung, would end within the budget of the rung."""
        budget = self.budget_seconds
        if budget is None:
            return True
        spent, of_epoch = self.spent_seconds, self.trials[0].seconds_per_epoch
        long_fits = spent + of_epoch * self._epochs(1, {}) <= budget
        share = SHARE_OF_FIRST_RUNG if rung == 0 and long_fits else 1.0
        return spent + of_epoch * (epochs or self._epochs(rung, {})) <= share * budget

    def _epochs(self, rung: int, params: Params) -> int:
        rungs = SMALL_RUNGS if self.is_small else RUNGS
        return max(1, round(int(params.get("training.epochs", self._start(params).training.epochs)) * rungs[rung]))

    def _try(self, params: Params, *, rung: int) -> AutomaticTrial | None:
        """Train with these hyperparameters, or look the trial up if it was made before; None if it failed."""

        def same(trials: Collection[AutomaticTrial]) -> AutomaticTrial | None:
            return next((trial for trial in trials if trial.params == params and trial.rung == rung), None)

        done = same(self.trials)
        if done is None:
            done = same(self.saved) or self._train(params, rung)
            self.trials.append(done)
            self.on_trial(self.trials)
        return done if done.mrr is not None else None

    def _train(self, params: Params, rung: int) -> AutomaticTrial:
        epochs, started = self._epochs(rung, params), time.perf_counter()
        history: list[dict[str, Any]] = []
        mrr, error = None, ""
        changes = {"training.epochs": epochs, "validation.every": (epochs + 1) // 2, "validation.patience": 0}
        try:
            recipe = self._with(params).with_changes(changes)
            trainer = Trainer.of_recipe(recipe, self.graph, device=self.device)
            history = trainer.progress.history
            trainer.on_progress = self._watch(history, epochs, params, rung)
            trainer.run()
            mrr = history[-1].get("valid_mrr")
        except _HopelessTrialError:
            mrr, error = history[-1]["valid_mrr"], "stopped half-way"
        except (RequestError, DivergedError) as problem:
            if not params and isinstance(problem, RequestError):
                raise  # a mistake in what was requested
            error = str(problem)
        except torch.OutOfMemoryError:
            error = f"{self.device} is out of memory"
        seconds_per_epoch = float(np.median([entry["seconds"] for entry in history])) if history else 0.0
        half_way = next((entry["valid_mrr"] for entry in history if "valid_mrr" in entry), None)
        seconds = round(time.perf_counter() - started, 3)
        return AutomaticTrial(params, rung, epochs, mrr, half_way, seconds, seconds_per_epoch, error)

    def _with(self, params: Params) -> Recipe:
        """The recipe with these hyperparameters; an `init_scale` that the starting margin gave follows the margin."""
        start = self._start(params)
        model, follows = start.model, "loss.margin" in params and "model.init_scale" not in self.fixed
        if follows and model.init_scale == init_scale_of_margin(start.value_of("loss.margin"), model.dim):
            params = {**params, "model.init_scale": init_scale_of_margin(float(params["loss.margin"]), model.dim)}
        return start.with_changes(params)

    def _start(self, params: Params) -> Recipe:
        """The recipe that these hyperparameters change."""
        return self.other if self.other is not None and LOSS in params else self.recipe

    def _watch(self, history: list[Any], epochs: int, params: Params, rung: int) -> Callable[[ProgressEvent], None]:
        """Report the progress of a trial, and stop it half-way if it is far behind the best."""
        ranked, text = self._ranked(rung=rung), describe_params(params)
        best = next((trial for trial in ranked if (LOSS in trial.params) == (LOSS in params)), None)
        top = ranked[0].mrr if ranked else None
        found = "" if top is None else f"  best valid MRR {top:.4f}"

        def on_progress(event: ProgressEvent) -> None:
            mrr = history[-1].get("valid_mrr", math.inf) if 0 < len(history) < epochs else math.inf
            if best and best.half_way and mrr < HOPELESS * best.half_way:
                raise _HopelessTrialError
            spent, budget = self.spent_seconds, self.budget_seconds
            if self.on_progress:
                self.on_progress(AutomaticProgress(text, len(self.trials), top, spent, budget, event))
            step = f"epoch {event.epoch}/{event.epochs}  loss {event.loss:.3f}"
            self.log(lambda: f"trial {len(self.trials) + 1}: {text}{found}  {step}")

        return on_progress

    @property
    def chosen(self) -> AutomaticTrial | None:
        """The best trial of the last rung that has any; its MRR is the mean of its seeds."""
        return next((ranked[0] for rung in (1, 0) if (ranked := self._ranked(rung=rung))), None)

    def chosen_recipe(self) -> Recipe:
        if self.chosen is None:
            reason = next((trial.error for trial in self.trials if trial.error), "no trial was made")
            raise DualkgError(f"Tuning found no hyperparameters that train on {self.graph.name}: {reason}")
        chosen = self._with(_without_seed(self.chosen.params))
        changes: dict[str, Any] = {"validation.every": chosen.validation.every or max(1, chosen.training.epochs // 10)}
        if "validation.keep" not in self.fixed and chosen.optimizer.average_from == 1:
            changes["validation.keep"] = "best"
        return chosen.with_changes(changes)

    def summary(self) -> str:
        """What was chosen and why, in a line."""
        chosen = self.chosen
        assert chosen is not None
        params = _without_seed(chosen.params)
        rung = [trial for trial in self.trials if trial.rung == chosen.rung and trial.mrr is not None]
        first = next((trial.mrr for trial in rung if not trial.params), None)
        start = f" ({first:.4f} with the starting values)" if first and chosen.params else ""
        seeds = sum(_without_seed(trial.params) == params for trial in rung)
        mean = f" (mean of {seeds} seeds)" if seeds > 1 else ""
        count = f"{len(self.trials)} trials" if len(self.trials) > 1 else "1 trial"
        return (
            f"Chose {describe_params(params)}: validation MRR {chosen.mrr:.4f} after {chosen.epochs} epochs{mean}"
            f"{start}, filtered by train and valid, the best of {count} in {self.spent_seconds:.0f} s."
        )


class _HopelessTrialError(Exception):
    """A trial is far behind the best half-way."""


def describe_params(params: Params) -> str:
    """`weight 0.016, learning_rate 0.3`."""
    if not params:
        return "the starting values"
    texts = {key: value if isinstance(value, str) else f"{value:g}" for key, value in params.items()}
    return ", ".join(f"{'loss' if key == LOSS else key.rpartition('.')[2]} {text}" for key, text in texts.items())


def _without_seed(params: Params) -> Params:
    return {key: value for key, value in params.items() if key != SEED}


def _better(trial: AutomaticTrial, best: AutomaticTrial) -> bool:
    return trial.mrr is not None and best.mrr is not None and trial.mrr > best.mrr
