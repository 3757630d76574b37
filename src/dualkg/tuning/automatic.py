"""Automatic tuning: `fit`, `dualkg train DATA`, from triples to an evaluated model with tuned
hyperparameters.

A coordinate search with short trials finds good hyperparameters, one after the other. The best of
these trials are trained longer, and the best of those is chosen (successive halving). If there
is time, the best are trained with other seeds too. Trials are compared by the MRR on the validation
split. The test split is not used, not even as a filter.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualkg.data.graph import Graph
from dualkg.errors import DamagedFile, DualkgError, InvalidValue, RequestError
from dualkg.extras import check_trusted
from dualkg.files import read_json, write_text
from dualkg.logs import ProgressLog, describe_time_left
from dualkg.training.costs import WorkEstimate
from dualkg.training.errors import InterruptedRunError
from dualkg.training.recipe import Recipe, named_classes, recipe_from
from dualkg.training.trainer import OnProgress, ProgressEvent
from dualkg.tuning.plan import LONG, SHORT, SearchPlan
from dualkg.tuning.starting_recipe import (
    EPOCHS,
    Dimensions,
    Params,
    Value,
    dimensions_of,
    init_scale_of_margin,
    is_small,
    network_start,
    other_start,
    values_around,
)
from dualkg.tuning.starting_recipe import (
    starting_recipe as starting_recipe,
)
from dualkg.tuning.trials import (
    STOPPED_HALF_WAY,
    AutomaticTrial,
    RunTrial,
    TrialOutcome,
    TrialPlan,
    TrialTrainer,
    trial_graph,
)

SHARE_OF_FIRST_RUNG = 0.55  # of the budget; the rest is for long trials, which decide
MAX_PROMOTED = 4  # the best with each of three relation weights, and one more by rank
MIN_PROMOTED_OF_SMALL = 3  # as many as are trained with other seeds
NUM_REPEATED = 3  # of the best are trained with other seeds
NUM_SEEDS = 3  # of each of them: MRRs of one seed vary by chance on small graphs
MIN_MEASURED_SHARE = 0.02  # of the budget, before the time left is told
# A trial stops half-way below this fraction of the MRR that the best trial had at that time. This
# saves half of its work, and a trial that is only a little slower at first goes on.
HOPELESS = 0.8
NUM_VALIDATIONS = 10  # of the final training
# A path network answers queries more slowly, so it is chosen only if its MRR is larger than the MRR
# of the best embeddings by this factor.
MIN_NETWORK_GAIN = 1.02
# The steps between values of λ in the first round of the search and in later rounds: a half and a
# quarter of √10 on a logarithmic scale.
FINER_STEPS = (1.78, 1.33)

SEED = "training.seed"
LOSS = "loss.name"
MODEL = "model.name"
NETWORK: Params = {MODEL: "PathNetwork"}
LEARNING_RATE = "optimizer.learning_rate"
WEIGHT = "regularizer.weight"
BATCH_SIZE = "training.batch_size"
RELATION_WEIGHT = "loss.relation_weight"
MARGIN = "loss.margin"
# Short trials misjudge these settings, so that long trials tune them again.
POLISHED = (WEIGHT, EPOCHS, LEARNING_RATE)

OnTuning = Callable[["AutomaticProgress"], None]


@dataclass(frozen=True)
class AutomaticProgress:
    """Progress of automatic tuning; `training` is the progress of the trial that runs."""

    trial: str
    num_trials: int
    best: float | None
    spent: float  # work so far, with the part of the trial that runs
    budget: float  # work of the whole search, at most
    seconds_left: float | None = None  # if the search uses all of its budget
    training: ProgressEvent | None = None

    @property
    def text(self) -> str:
        best = "" if self.best is None else f"  best valid MRR {self.best:.4f}"
        return f"trial {self.num_trials + 1}: {self.trial}{best}"

    @property
    def time_left(self) -> str:
        """`at most 3 min left`, or nothing: a search may end before its budget."""
        return describe_time_left(self.seconds_left, prefix="at most")


class AutomaticTuner:
    """Searches for the hyperparameters of one training and saves its trials at `path`.

    Keys in `fixed` are not tuned. The search begins at `start`, or at another recipe with another
    loss (`other`) if that is better in a short trial. The best with each loss are compared in long
    trials. Where that is affordable, the best is compared with a path network (`network`), which
    takes work besides the budget, and as much as that at most.

    The `saved` trials of an interrupted search are not repeated; `run_folder` is the run that
    resumes them. `run_trial` trains; by default by PyTorch.

    How much is tried follows from the `plan`, which is counted in work. With `seconds`, the search
    also ends when this time is up, even within a trial; `clock` tells the time.
    """

    def __init__(
        self,
        start: Recipe,
        graph: Graph,
        *,
        device: torch.device,
        fixed: Collection[str] = (),
        seconds: float | None = None,
        saved: Collection[AutomaticTrial] = (),
        path: Path | None = None,
        run_folder: Path | None = None,
        on_progress: OnTuning | None = None,
        run_trial: RunTrial | None = None,
        plan: SearchPlan | None = None,
        work: WorkEstimate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start = start
        self.graph = graph
        self.device = device
        self.fixed = tuple(fixed)
        self.seconds = seconds
        self.saved = saved
        self.path = path
        self.run_folder = run_folder
        self.on_progress = on_progress
        self.clock = clock
        self.is_small = is_small(graph)
        self.work = work or WorkEstimate.of(graph, device)
        self.plan = plan or SearchPlan.of(
            start, graph, self.work, fixed=self.fixed, seconds=seconds
        )
        self.other = other_start(start, graph, device, self.fixed)
        self.network = network_start(start, graph, device, self.fixed)
        self.dimensions = self._dimensions(start)
        self.run_trial = run_trial or TrialTrainer(
            trial_graph(
                graph,
                seed=start.training.seed,
                num_validation_triples=self.plan.num_validation_triples,
            ),
            device,
        )
        self.trials: list[AutomaticTrial] = []
        self.tuned: list[str] = []  # the hyperparameters that were varied
        self.started = clock()
        self.deadline = math.inf
        self.time_is_up = False
        self.log = ProgressLog(f"Tuning {start.model.name} on {graph.name}")
        self._work_of_epoch: dict[str, float] = {}

    # -- saving ---

    @classmethod
    def load(cls, path: Path, graph: Graph, device: torch.device) -> AutomaticTuner:
        """A search that was interrupted."""
        saved = read_json(path)
        try:
            trials = [AutomaticTrial(**trial) for trial in saved["trials"]]
            check_trusted(named_classes(saved["start"]), source=path)
            return cls(
                recipe_from(saved["start"], source=str(path)),
                graph,
                device=device,
                fixed=saved["fixed"],
                seconds=saved["seconds"],
                plan=SearchPlan.of_saved(saved["plan"]),
                saved=trials,
                path=path,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                path,
                f"{type(error).__name__} {error}",
                advice="Train again with `overwrite=True`.",
            ) from None

    def save(self, path: Path | None = None, *, summary: str = "") -> None:
        """Save what an interrupted search needs to resume, by default at `self.path`."""
        path = path or self.path
        if path is None:
            return
        content = {
            "start": self.start.model_dump(exclude_none=True),
            "fixed": self.fixed,
            "seconds": self.seconds,
            "plan": asdict(self.plan),
            "trials": [asdict(trial) for trial in self.trials],
            "summary": summary,
        }
        write_text(path, json.dumps(content, indent=1))

    # -- the search ---

    def run(self) -> Recipe:
        """Search, and return the recipe of the final training."""
        self.started = self.clock()
        if self.seconds is not None:
            spent_before = sum(trial.seconds for trial in self.saved)
            self.deadline = self.clock() + self.seconds - spent_before
        try:
            self._search()
        except _TimeIsUp:
            self.time_is_up = True
        except InterruptedRunError:
            raise InterruptedRunError(self._interruption()) from None
        recipe = self.chosen_recipe()
        self.save(summary=self.summary())
        return recipe

    def _interruption(self) -> str:
        is_saved = bool(self.path and self.trials)
        saved = ", which are saved" if is_saved else ""
        stopped = f"Stopped while tuning, after {len(self.trials)} trials{saved}."
        if self.run_folder is not None:
            return f"{stopped} Resume with: dualkg resume {self.run_folder}"
        # A search for several seeds has no run that could be resumed.
        return f"{stopped} Repeat it to resume." if is_saved else stopped

    def _search(self) -> None:
        self._run_short_trials()
        promoted: list[Params] = []
        for params in self._promoted():
            if self._has_budget([*promoted, params], rung=LONG):
                promoted.append(params)
        # A single long trial would be compared with nothing, unless a path network is tried.
        if len(promoted) < 2 and not self.affords_network():
            return
        for params in promoted:
            self._try(params, rung=LONG)
        if not self._ranked(rung=LONG):
            return
        self._polish()
        self._repeat()
        # It is compared with embeddings that were trained as long.
        if self.affords_network():
            self._try(NETWORK, rung=LONG)

    def _run_short_trials(self) -> None:
        """Change one hyperparameter after the other, as long as this helps and there is time."""
        best = self._best_start()
        factor, finer_factor = FINER_STEPS
        while best.mrr is not None and self._has_budget([best.params], rung=SHORT):
            before = best
            for key, values in self.dimensions.items():
                best = self._climb(best, key, values, rung=SHORT)
            best = self._refine_weight(best, factor)
            factor = finer_factor
            if best is before or self.seconds is None:
                break

    def _best_start(self) -> AutomaticTrial:
        """The better of the one or two recipes at which the search may begin."""
        best = self._try({}, rung=SHORT)
        if self.other is None:
            return best
        other: Params = {LOSS: type(self.other.loss).__name__}
        if not self._has_budget([other], rung=SHORT):
            return best
        trial = self._try(other, rung=SHORT)
        if not trial.is_better_than(best):
            return best
        self.dimensions = self._dimensions(self.other)
        return trial

    def _climb(
        self, best: AutomaticTrial, key: str, values: tuple[Value, ...], *, rung: int
    ) -> AutomaticTrial:
        """Move along one dimension while the MRR grows: upwards, or else downwards."""
        start = float(self._recipe(best.params).value_of(key))
        distances = [abs(float(value) - start) for value in values]
        position = distances.index(min(distances))

        upwards = values[position + 1 :]
        downwards = values[:position][::-1]
        higher = self._climb_along(best, key, upwards, rung=rung)
        if higher is not best:
            return higher
        return self._climb_along(best, key, downwards, rung=rung)

    def _climb_along(
        self, best: AutomaticTrial, key: str, values: Iterable[Value], *, rung: int
    ) -> AutomaticTrial:
        """Try values in their order until one is not better than the one before."""
        for value in values:
            params = {**best.params, key: value}
            if not self._has_budget([params], rung=rung):
                break
            trial = self._try(params, rung=rung)
            if key not in self.tuned:
                self.tuned.append(key)
            if not trial.is_better_than(best):
                break
            best = trial
        return best

    def _refine_weight(self, best: AutomaticTrial, factor: float) -> AutomaticTrial:
        """Tune λ together with the relation weight, and then in smaller steps.

        The loss of relations counts against the regularizer, so a relation weight is tried with a
        stronger one.
        """
        if WEIGHT not in self.dimensions:
            return best
        if RELATION_WEIGHT in self.dimensions:
            stronger = float(f"{10**0.5 * self._recipe(best.params).value_of(WEIGHT):.2g}")
            for relation_weight in (0.5, 4.0):
                is_new = relation_weight != best.params.get(RELATION_WEIGHT, 0.0)
                params = {**best.params, RELATION_WEIGHT: relation_weight, WEIGHT: stronger}
                if is_new and self._has_budget([params], rung=SHORT):
                    trial = self._try(params, rung=SHORT)
                    if trial.is_better_than(best):
                        best = trial
        weight = self._recipe(best.params).value_of(WEIGHT)
        return self._climb(
            best, WEIGHT, values_around(weight, factor, below=1, above=1), rung=SHORT
        )

    def _dimensions(self, recipe: Recipe) -> Dimensions:
        """What is tuned in the search from a recipe."""
        factor = self.plan.weight_factor
        dimensions = dimensions_of(recipe, self.fixed, weight_factor=factor)
        if not self.plan.tunes_batches:
            dimensions.pop(BATCH_SIZE, None)
        return dimensions

    def _promoted(self) -> list[Params]:
        """The short trials that are trained longer.

        These are the best with each loss and each relation weight, which pays late, and then
        others by rank.
        """
        trials = self._ranked(rung=SHORT)
        best_of_kind: dict[object, Params] = {}
        for trial in trials:
            kind = trial.params.get(LOSS), trial.params.get(RELATION_WEIGHT, 0.0)
            if (trial.mrr or 0.0) >= self.plan.promoted_share * (trials[0].mrr or 0.0):
                best_of_kind.setdefault(kind, trial.params)
        promoted = list(best_of_kind.values())
        promoted += [trial.params for trial in trials if trial.params not in promoted]

        if self.is_small:
            # The rest of the time is for `_polish` and `_repeat`.
            limit = max(len(best_of_kind), MIN_PROMOTED_OF_SMALL)
        elif self.seconds is None:
            limit = MAX_PROMOTED
        else:
            limit = 2 * MAX_PROMOTED
        return promoted[:limit]

    def _polish(self) -> None:
        """Climb in long trials along what short trials misjudge."""
        best = self._ranked(rung=LONG)[0]
        start = self._start(best.params)
        dimensions = self._dimensions(start)
        epochs = start.training.epochs
        if self.is_small and EPOCHS not in self.fixed:
            dimensions[EPOCHS] = (5 * epochs // 2, epochs, epochs // 2)
        for key in POLISHED:
            if key in dimensions:
                best = self._climb(best, key, dimensions[key], rung=LONG)

    def _repeat(self) -> None:
        """Train the best with other seeds; the mean counts, as MRRs of one seed vary by chance."""
        best = [trial.params for trial in self._ranked(rung=LONG)[:NUM_REPEATED]]
        first_seed = self.start.training.seed
        for seed in range(first_seed + 1, first_seed + NUM_SEEDS):
            if self._has_budget(best, rung=LONG):
                for params in best:
                    self._try({**params, SEED: seed}, rung=LONG)

    def _ranked(self, *, rung: int) -> list[AutomaticTrial]:
        """The trials of a rung, best first, with the mean MRR of their seeds.

        Those with most seeds come first.
        """
        by_params: dict[str, list[AutomaticTrial]] = {}
        for trial in self.trials:
            if trial.rung == rung and trial.mrr is not None:
                text = describe_params(_without_seed(trial.params))
                by_params.setdefault(text, []).append(trial)

        def order(trials: list[AutomaticTrial]) -> tuple[int, float]:
            return -len(trials), -_mean_mrr(trials)

        ranked = sorted(by_params.values(), key=order)
        return [replace(trials[0], mrr=_mean_mrr(trials)) for trials in ranked]

    # -- the budget ---

    def most_trials(self) -> int:
        """About the most trials that the budget allows."""
        if self.plan.max_trials is not None:
            return self.plan.max_trials[LONG]
        of_short = self._work_of({}, SHORT)
        of_long = self._work_of({}, LONG)
        budget = self.plan.budget
        num_short = max(1, int(SHARE_OF_FIRST_RUNG * budget / max(of_short, 1e-9)))
        num_long = int((budget - num_short * of_short) / max(of_long, 1e-9))
        return num_short + max(0, num_long) + (self.budget > budget)

    @property
    def spent(self) -> float:
        """The work of the trials so far."""
        return sum(trial.work for trial in self.trials)

    @property
    def spent_seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    def _has_budget(self, trials: Sequence[Params], *, rung: int) -> bool:
        """Whether some more trials are within the budget of their rung."""
        if self.plan.max_trials is not None:
            return len(self.trials) + len(trials) <= self.plan.max_trials[rung]
        spent = self.spent
        budget = self.plan.budget
        long_trial_fits = spent + self._work_of({}, LONG) <= budget
        share = SHARE_OF_FIRST_RUNG if rung == SHORT and long_trial_fits else 1.0
        needed = sum(self._work_of(params, rung) for params in trials)
        return spent + needed <= share * budget

    def affords_network(self) -> bool:
        """Whether a path network is tried.

        If the user gave no time, its trial may take as much work as the search of embeddings.
        """
        if self.network is None:
            return False
        if self._network_is_within_budget:
            return self._has_budget([NETWORK], rung=LONG)
        return self._work_of(NETWORK, LONG) <= self.plan.budget

    @property
    def _network_is_within_budget(self) -> bool:
        return self.seconds is not None or self.plan.max_trials is not None

    @property
    def budget(self) -> float:
        """The most work of the whole search."""
        if not self._network_is_within_budget and self.affords_network():
            return self.plan.budget + self._work_of(NETWORK, LONG)
        return self.plan.budget

    def _work_of(self, params: Params, rung: int) -> float:
        """The work of a trial: its epochs, and two rankings of validation triples."""
        try:
            recipe = self.trial_recipe(_without_seed(params))
        except RequestError:
            return 0.0  # it fails at once
        text = recipe.as_toml()
        if text not in self._work_of_epoch:
            self._work_of_epoch[text] = self.work.epoch(recipe)
        num_triples = min(len(self.graph.valid), self.plan.num_validation_triples)
        epochs = self._epochs(rung, params) * self._work_of_epoch[text]
        return epochs + 2 * self.work.ranking(recipe, num_triples)

    def _epochs(self, rung: int, params: Params) -> int:
        """The length of a trial."""
        final = int(params.get(EPOCHS, self._start(params).training.epochs))
        return max(1, round(final * self.plan.rungs[rung]))

    # -- trials ---

    def _try(self, params: Params, *, rung: int) -> AutomaticTrial:
        """Train with these hyperparameters, or look the trial up if it was made before."""
        made = _trial_with(self.trials, params, rung)
        if made is not None:
            return made
        trial = _trial_with(self.saved, params, rung) or self._train(params, rung)
        if not trial.work:
            share = 0.5 if trial.error == STOPPED_HALF_WAY else 1.0
            trial = replace(trial, work=share * self._work_of(params, rung))
        self.trials.append(trial)
        self.save()
        return trial

    def _train(self, params: Params, rung: int) -> AutomaticTrial:
        epochs = self._epochs(rung, params)
        try:
            recipe = self.trial_recipe(params)
        except RequestError as problem:
            failed = TrialOutcome(None, None, 0.0, 0.0, str(problem))
            return AutomaticTrial(params, rung, epochs, **vars(failed))
        plan = TrialPlan(
            params=params,
            rung=rung,
            epochs=epochs,
            recipe=recipe,
            hopeless=self._hopeless_mrr(params, rung),
            on_progress=self._reporter(params, rung),
        )
        if self.clock() > self.deadline:
            raise _TimeIsUp
        return AutomaticTrial(params, rung, epochs, **vars(self.run_trial(plan)))

    def _hopeless_mrr(self, params: Params, rung: int) -> float:
        """The MRR below which a trial stops half-way.

        Trials with another loss or model are not compared: half of the time is another stage for
        them.
        """
        if MODEL in params:
            return 0.0
        for trial in self._ranked(rung=rung):
            if (LOSS in trial.params) == (LOSS in params):
                return HOPELESS * (trial.half_way or 0.0)
        return 0.0

    def _reporter(self, params: Params, rung: int) -> OnProgress:
        """What reports the progress of a trial."""
        ranked = self._ranked(rung=rung)
        best_mrr = ranked[0].mrr if ranked else None
        text = describe_params(params)
        budget = self.budget
        work = self._work_of(params, rung)

        def report(event: ProgressEvent) -> None:
            part = work * event.share_done
            progress = AutomaticProgress(
                text,
                len(self.trials),
                best_mrr,
                self.spent + part,
                budget,
                self._seconds_left(part),
                event,
            )
            if self.clock() > self.deadline:
                raise _TimeIsUp
            if self.on_progress:
                self.on_progress(progress)

            def line() -> str:
                epoch = f"epoch {event.epoch}/{event.epochs}"
                parts = [progress.text, epoch, f"loss {event.loss:.3f}", progress.time_left]
                return "  ".join(part for part in parts if part)

            self.log(line)

        return report

    def _seconds_left(self, part: float) -> float | None:
        """Time of the rest of the budget, at the speed so far; `part` is of the present trial."""
        budget = self.budget
        elapsed = self.clock() - self.started
        done = part + sum(trial.work for trial in self.trials if trial not in self.saved)
        # The first steps compile kernels, and say nothing about the others.
        is_too_early = done < MIN_MEASURED_SHARE * budget
        if is_too_early or not elapsed or math.isinf(budget):
            return None
        left = (budget - self.spent - part) * elapsed / done
        return max(0.0, min(left, self.deadline - self.clock()))

    def _recipe(self, params: Params) -> Recipe:
        """The recipe with these hyperparameters.

        An `init_scale` that the starting margin gave follows the margin.
        """
        start = self._start(params)
        if MARGIN in params and "model.init_scale" not in self.fixed:
            dim = start.model.dim
            scale_of_start = init_scale_of_margin(start.value_of(MARGIN), dim)
            if start.model.init_scale == scale_of_start:
                scale = init_scale_of_margin(float(params[MARGIN]), dim)
                params = {**params, "model.init_scale": scale}
        return start.with_changes(params)

    def trial_recipe(self, params: Params) -> Recipe:
        """The recipe of a trial, which may be cheaper than the final training."""
        return self._recipe(params).with_changes(self.plan.trial_changes)

    def _start(self, params: Params) -> Recipe:
        """The recipe that these hyperparameters change."""
        if self.network is not None and MODEL in params:
            return self.network
        if self.other is not None and LOSS in params:
            return self.other
        return self.start

    # -- the result ---

    @property
    def chosen(self) -> AutomaticTrial | None:
        """The best trial of the last rung that has any; its MRR is the mean of its seeds.

        A path network is chosen if it is clearly better than that.
        """
        network = _trial_with(self.trials, NETWORK, LONG)
        ranked = [*self._ranked(rung=LONG), *self._ranked(rung=SHORT)]
        best = next((trial for trial in ranked if MODEL not in trial.params), None)
        if network is None or network.mrr is None:
            return best
        if best is None or network.mrr > MIN_NETWORK_GAIN * (best.mrr or 0.0):
            return network
        return best

    def chosen_recipe(self) -> Recipe:
        """The recipe of the final training."""
        chosen = self.chosen
        if chosen is None and not self.time_is_up:
            errors = [trial.error for trial in self.trials if trial.error]
            reason = errors[0] if errors else "no trial was made"
            raise DualkgError(
                f"Tuning found no hyperparameters that train on {self.graph.name}: {reason}"
            )
        recipe = self._recipe(_without_seed(chosen.params) if chosen else {})
        every = recipe.validation.every or max(1, recipe.training.epochs // NUM_VALIDATIONS)
        changes: dict[str, Any] = {"validation.every": every}
        averages_weights = recipe.optimizer.average_from < 1
        if "validation.keep" not in self.fixed and not averages_weights:
            changes["validation.keep"] = "best"
        return recipe.with_changes(changes)

    def summary(self) -> str:
        """What was chosen and why, and what was not tried."""
        chosen = self.chosen
        if chosen is None:
            return f"The first trial did not end: {self._not_tried()} The starting values are used."
        params = _without_seed(chosen.params)
        rung = [
            trial for trial in self.trials if trial.rung == chosen.rung and trial.mrr is not None
        ]
        num_seeds = sum(_without_seed(trial.params) == params for trial in rung)
        mean = f" (mean of {num_seeds} seeds)" if num_seeds > 1 else ""
        mrrs_of_start = [trial.mrr for trial in rung if not trial.params]
        start = ""
        if mrrs_of_start and mrrs_of_start[0] and chosen.params:
            start = f" ({mrrs_of_start[0]:.4f} with the starting values)"
        result = (
            f"validation MRR {chosen.mrr:.4f} after {chosen.epochs} epochs{mean}{start}, filtered "
            f"by train and valid"
        )
        spent = f"in {self.spent_seconds:.0f} s."
        if len(self.trials) == 1:
            sentence = f"Nothing was compared: one trial, with the starting values, has {result}, "
        else:
            sentence = f"Chose {describe_params(params)}: {result}, the best of "
            sentence += f"{len(self.trials)} trials "
        others = f"{self._of_network()} {self._not_tried()}".strip()
        return f"{sentence}{spent} {others}".rstrip()

    def _of_network(self) -> str:
        """What a path network reached that was not chosen, as a sentence, or nothing."""
        network = _trial_with(self.trials, NETWORK, LONG)
        chosen = self.chosen
        if network is None or chosen is None or MODEL in chosen.params:
            return ""
        if network.mrr is None:
            return f"A path network could not be trained: {network.error}"
        gain = f"{100 * (MIN_NETWORK_GAIN - 1):.0f} %"
        return f"A path network has {network.mrr:.4f}; it is chosen if it is {gain} better."

    def _not_tried(self) -> str:
        """What the end of the time left out, as a sentence, or nothing."""
        if not self.time_is_up:
            return ""
        remaining = [key for key in self.dimensions if key not in self.tuned]
        names = [key.rpartition(".")[2] for key in remaining]
        left_out = f" Not tried: other values of {', '.join(names)}." if names else ""
        return f"The {self.seconds:.0f} s for tuning are up.{left_out}"


class _TimeIsUp(Exception):
    """The time that the user gave a search is up."""


def _trial_with(
    trials: Iterable[AutomaticTrial], params: Params, rung: int
) -> AutomaticTrial | None:
    for trial in trials:
        if trial.params == params and trial.rung == rung:
            return trial
    return None


def _mean_mrr(trials: Iterable[AutomaticTrial]) -> float:
    return float(np.mean([trial.mrr for trial in trials]))


def describe_params(params: Params) -> str:
    """`weight 0.016, learning_rate 0.3`."""
    if not params:
        return "the starting values"
    parts = []
    for key, value in params.items():
        name = key.rpartition(".")[2]
        if key in (LOSS, MODEL):
            name = key.partition(".")[0]
        text = value if isinstance(value, str) else f"{value:g}"
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def _without_seed(params: Params) -> Params:
    return {key: value for key, value in params.items() if key != SEED}


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `1.5h`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) <= 0:
        raise InvalidValue("tune", expected="a time such as 90s, 10m or 1.5h", found=text)
    number, unit = match.groups()
    seconds_of_unit = {"": 1, "s": 1, "m": 60, "h": 3600}
    return float(number) * seconds_of_unit[unit]
