"""Several processes at one study."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from dualkg.data.graph import Graph
from dualkg.data.loading import load_saved_graph, save_graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.training.api import choose_device, load_recipe_graph
from dualkg.training.registry import build_model, build_regularizer
from dualkg.training.run import RunFolder
from dualkg.training.trainer import InterruptedRunError, ProgressEvent, Trainer
from dualkg.tuning.space import Range, Space, Value, load_space
from dualkg.tuning.study import WHY, Ledger, SearchResult, Standing, beating, collect, open_study, outcome

if TYPE_CHECKING:
    from dualkg.tuning.study import Standing


@dataclass(frozen=True)
class SearchProgress:
    """What a progress display needs to know; `training` is of the trial at work in this process."""

    num_done: int
    num_trials: int
    best: float | None
    training: ProgressEvent | None


OnProgress = Callable[[SearchProgress], None]


def search(
    space: Space | str | Path,
    *,
    out: str | Path,
    graph: Graph | None = None,
    device: str | torch.device | None = None,
    storage: str | None = None,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """Search a space for the recipe of the best validation MRR; called again, it goes on where it was.

    The study is kept in `out`/study.db, or in the database of the URL `storage`, which machines may share. With
    `jobs` above 1, so many processes train side by side. The test split is not looked at.
    """
    _need_optuna()
    space = space if isinstance(space, Space) else load_space(space)
    graph = graph or load_recipe_graph(space.base)
    if not len(graph.valid):
        raise RequestError(f"{graph.name} has no valid triples, and a search chooses by them.")
    out, chosen = Path(out), str(choose_device(device))
    if RunFolder(out).recipe.exists():
        raise RequestError(f"{out} holds a run; a search needs a folder of its own: use --out.")
    out.mkdir(parents=True, exist_ok=True)
    return _search(
        space, graph, out, device=chosen, storage=storage, jobs=jobs, on_progress=on_progress or (lambda event: None)
    )


def _search(
    space: Space, graph: Graph, out: Path, *, device: str, storage: str | None, jobs: int, on_progress: OnProgress
) -> SearchResult:
    import optuna

    from dualkg.tuning.study import url_of

    def tell(standing: Standing, event: ProgressEvent | None) -> None:
        on_progress(SearchProgress(standing.num_done, standing.num_trials, standing.best, event))

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it warns of is told in our own words
    graph = without_test(graph)
    job = Job(space, storage or url_of(out / "study.db"), "The storage" if storage else str(out), device)
    study = job.study(graph)
    started, before = time.monotonic(), collect(study, space, graph=graph.name).num_done
    try:
        if jobs == 1:
            job.work(graph, tell)
        else:
            work_side_by_side(job, graph, jobs, tell=tell)
    except (KeyboardInterrupt, InterruptedRunError):
        done = collect(study, space, graph=graph.name)
        done.write(out)
        raise InterruptedRunError(f"Stopped; {done.num_done} of {space.num_trials} trials are done and kept.") from None
    except optuna.exceptions.StorageInternalError as error:
        raise DualkgError(f"{job.where} failed: {error.__cause__ or error}. Finished trials are kept in it.") from None
    result = collect(study, space, graph=graph.name)
    if result.num_done > before:
        minutes = (time.monotonic() - started) / 60
        result = replace(result, per_minute=round((result.num_done - before) / minutes, 2))
    result.write(out)
    return result


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise RequestError("A search needs Optuna. Install it: pip install 'dualkg[search]'") from None


Tell = Callable[[Standing, ProgressEvent | None], None]


class FailedTrialError(DualkgError):
    """A trial came to no result; why is written down with it, and the search goes on."""


class SpareTrialError(DualkgError):
    """Another process does what this trial was made for."""


class Point(BaseSampler):
    """Chooses one point of a grid."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Value:
        return self.values[param_name]


def sampler_for(space: Space, slot: int) -> BaseSampler:
    """Drawn by seed and slot alone, so that neither processes nor interruptions draw the same twice over."""
    if space.choice.method == "grid":
        return Point(space.point(slot))
    seed = int(np.random.SeedSequence([space.choice.seed, slot]).generate_state(1)[0])
    if space.choice.method == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=True)


def suggest(trial: Trial, name: str, choices: tuple[Value, ...] | Range) -> Value:
    if isinstance(choices, tuple):
        return choices[choices.index(trial.suggest_categorical(name, choices))]
    if isinstance(choices.low, float) or isinstance(choices.step, float):
        return trial.suggest_float(name, choices.low, choices.high, step=choices.step, log=choices.log)
    return trial.suggest_int(name, choices.low, int(choices.high), step=int(choices.step or 1), log=choices.log)


class Worker:
    """Takes trials of a study until none is left."""

    def __init__(self, study: optuna.Study, space: Space, graph: Graph, device: str, tell: Tell) -> None:
        self.study = study
        self.space = space
        self.graph = graph
        self.device = device
        self.tell = tell
        self.ledger = Ledger(study, space.num_trials)
        self.standing = self.ledger.standing()

    def work(self) -> None:
        """Do what is open; wait for what others are at, in case they are killed."""
        while True:
            self._end_with_parent()
            self.ledger.bury_the_dead()
            self.standing = self.ledger.standing()
            self.tell(self.standing, None)
            match self.standing.work:
                case "open":
                    self._one_trial()
                case "busy":
                    time.sleep(1)
                case _:
                    return

    def _end_with_parent(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise InterruptedRunError("The search that started this process has ended.")

    def _one_trial(self) -> None:
        trial = self.study.ask()
        value, state = None, TrialState.FAIL
        try:
            with beating(trial):
                value, state = self._objective(trial), TrialState.COMPLETE
        except TrialPruned:
            state = TrialState.PRUNED
        except (FailedTrialError, SpareTrialError, UpdateFinishedTrialError):
            pass  # why is written down; or others do it, having taken this process for dead
        finally:
            with suppress(UpdateFinishedTrialError):
                self.study.tell(trial, value, state, skip_if_finished=True)
        if self.device != "cpu":
            torch.cuda.empty_cache()  # others may share this GPU

    def _objective(self, trial: Trial) -> float:
        rows = self.ledger.rows()
        slot = next((slot for slot, row in rows.items() if row.number == trial.number), None)
        if slot is None:
            raise SpareTrialError("Another process came first.")
        self.study.sampler = sampler_for(self.space, slot)
        values = {name: suggest(trial, name, choices) for name, choices in self.space.dimensions.items()}
        for other in rows.values():
            if other.params == values and outcome(other) == "finished" and other.value is not None:
                return other.value  # drawn twice, trained once
        try:
            return self._train(trial, values)
        except (RequestError, DivergedError) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = f"{self.device} ran out of memory. Search smaller dims and batches, or use fewer --jobs."
        trial.set_user_attr(WHY, why)
        raise FailedTrialError(why)

    def _train(self, trial: Trial, values: Mapping[str, Value]) -> float:
        """The MRR on the validation split, told to Optuna while it grows."""
        recipe = self.space.trial_recipe(values)
        model = build_model(recipe.model, self.graph.shape, seed=recipe.training.seed).to(torch.device(self.device))
        trainer = Trainer(model, self.graph, recipe, build_regularizer(recipe.regularizer))
        told = 0

        def look(event: ProgressEvent) -> None:
            nonlocal told
            history = trainer.progress.history
            if len(history) > told:
                told = len(history)
                if "valid_mrr" in history[-1]:
                    trial.report(history[-1]["valid_mrr"], step=told)
                    if trial.should_prune():
                        raise TrialPruned
            self.tell(self.standing, event)  # as it was: asking the storage takes longer than a step

        trainer.on_progress = look
        trainer.run()
        if recipe.validation.keep == "best":
            return trainer.progress.best_mrr
        return float(trainer.progress.history[-1]["valid_mrr"])


def without_test(graph: Graph) -> Graph:
    """The graph as a search may see it: nothing of the test split, not even to filter by."""
    return dataclasses.replace(graph, test=np.empty((0, 3), dtype=np.int32))


@dataclass(frozen=True)
class Job:
    """What a process needs to take part in a search, but for the graph."""

    space: Space
    url: str
    where: str
    device: str

    def work(self, graph: Graph, tell: Tell) -> None:
        Worker(self.study(graph), self.space, graph, self.device, tell).work()

    def study(self, graph: Graph) -> optuna.Study:
        return open_study(self.space, self.url, data=graph.fingerprint, where=self.where)


def work_side_by_side(job: Job, graph: Graph, num_jobs: int, *, tell: Tell) -> None:
    """Let several processes share the study; they are started again, as a GPU wants it."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // num_jobs)
    ledger = Ledger(job.study(graph), job.space.num_trials)
    with tempfile.TemporaryDirectory() as folder, _handling(signal.SIGTERM, signal.default_int_handler):
        path = Path(folder) / "graph"
        save_graph(graph, path)
        processes = [context.Process(target=_take_part, args=(job, path, threads)) for _ in range(num_jobs)]
        with _handling(signal.SIGINT, signal.SIG_IGN):  # they are stopped from here
            for process in processes:
                process.start()
        try:
            while any(process.is_alive() for process in processes):
                tell(ledger.standing(), None)
                time.sleep(0.5)
        finally:
            for process in processes:
                process.terminate()  # which stops a training after its step
                process.join()
    early = sum(process.exitcode != 0 for process in processes)
    if early and ledger.standing().work != "done":
        raise DualkgError(f"{early} of {num_jobs} processes ended early; what is done is kept.")


def _take_part(job: Job, path: Path, threads: int) -> None:
    """The life of one of several processes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(threads)
    try:
        job.work(load_saved_graph(path), lambda standing, event: None)
    except (InterruptedRunError, KeyboardInterrupt):
        sys.exit(130)
    except DualkgError as error:
        print(f"dualkg: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def _handling(number: signal.Signals, handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Answer a signal otherwise for a while; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
