"""The training loop: epochs, validation, progress, checkpoints and graceful shutdown."""

from __future__ import annotations

import gc
import math
import os
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import Graph
from dualkg.data.triples import NO_TRIPLES
from dualkg.errors import DamagedFile, DivergedError, RequestError
from dualkg.evaluation.ranking import sample_triples
from dualkg.evaluation.report import Report, evaluate
from dualkg.files import check_type, read_text
from dualkg.kernels.hardware import matmul_precision
from dualkg.logs import describe_time_left, logger
from dualkg.losses.rejected import WithRejected
from dualkg.models.base import EmbeddingModel, Model
from dualkg.regularizers import Regularizer
from dualkg.tables.processes import Processes, one_process
from dualkg.training import batches, checkpoint
from dualkg.training.batches import (
    ComputedExamples,
    GroupedByQuery,
    most_queries,
    one_of_each_query,
    queries_of_both_directions,
)
from dualkg.training.callbacks import Callback, StopTraining
from dualkg.training.checkpoint import (
    CheckpointSchedule,
    CheckpointStore,
    FileStore,
    Progress,
)
from dualkg.training.engines import choose_engine
from dualkg.training.errors import InterruptedRunError
from dualkg.training.memory import check_memory
from dualkg.training.optimizers import build_optimizer, learning_rate
from dualkg.training.placement import check_placement, choose_tables
from dualkg.training.recipe import Recipe
from dualkg.training.recipe import checksum as recipe_checksum
from dualkg.training.shutdown import GracefulShutdown, shutdown_warning
from dualkg.training.steps import CudaGraphStep, Step, build_step
from dualkg.training.updates import optimizer_tensors, restore_optimizer

# Steps in which kernels are compiled, and on a GPU a CUDA graph is captured.
STEPS_OF_WARM_UP = {"cpu": 1, "cuda": 5}
# Steps after which the loss is read, for which the host waits for a GPU.
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 50}
OnProgress = Callable[["ProgressEvent"], None]
When = Literal["start", "between", "end"]  # when a checkpoint is written


def check_recipe(path: Path, about: dict[str, Any], *, checkpoint: Path) -> None:
    """Refuse a file that is not the recipe of a checkpoint; the final weights note none."""
    if about.get("recipe") not in (None, recipe_checksum(read_text(path))):
        raise RequestError(
            f"{path} is not the recipe that {checkpoint} was written with: one of them was damaged "
            "or changed, or is of another run. Restore it from a copy, or start a new run."
        )


@dataclass(frozen=True)
class ProgressEvent:
    """What a progress display shows."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    mrr: float | None
    seconds_left: float | None = None  # of all epochs; unknown in the warm-up
    is_sampled: bool = False  # whether validation ranks a sample

    @property
    def text(self) -> str:
        best = "" if self.mrr is None else f"  best valid MRR {self.mrr:.4f}"
        if best and self.is_sampled:
            best += " (sample)"
        return f"epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}{best}"

    @property
    def share_done(self) -> float:
        """The part of all steps that is done."""
        num_done = (self.epoch - 1) * self.steps + self.step
        return num_done / (self.epochs * self.steps)

    @property
    def time_left(self) -> str:
        """`about 3 min left`, or nothing."""
        return describe_time_left(self.seconds_left)


class Trainer:
    """Trains a model by a recipe, from the start or from a checkpoint.

    Batches depend on seed and epoch alone, so a checkpoint needs no random state, and a run that
    was killed and resumed ends with the same weights as one that was not.
    """

    def __init__(
        self,
        model: Model,
        graph: Graph,
        recipe: Recipe,
        regularizer: Regularizer,
        *,
        on_progress: OnProgress | None = None,
        callbacks: Sequence[Callback] = (),
        group: Processes | None = None,
        store: CheckpointStore | None = None,
    ) -> None:
        """With a `group`, this process is one of several that train one model.

        `store` is how checkpoints are written and read: as one file, unless another is given.
        """
        model.check_shape(graph.shape)
        model.read_graph(graph)
        check_regularizer(model, regularizer)
        recipe.loss.check_model(model.named)
        _check_tables(model, regularizer)
        self.group = group or one_process(model.device)
        self.store = store or FileStore()
        self.weights = self.store.module(model)
        self.model = model
        self.graph = graph
        self.recipe = recipe
        self._recipe_checksum = ""  # of the file, if there was one
        self.regularizer = regularizer
        self.checkpoint_path: Path | None = None
        self.on_progress = on_progress or (lambda event: None)
        self.callbacks = list(callbacks)
        # Path networks learn from accepted triples alone.
        self.rejected = NO_TRIPLES if model.reads_graph else graph.rejected
        has_rejected = bool(len(self.rejected))
        check_placement(recipe, model, regularizer, has_rejected=has_rejected)
        self.engine = choose_engine(recipe, model, regularizer, has_rejected=has_rejected)
        if model.device.type == "cuda":
            # Reference cycles may hold large tensors.
            gc.collect()
            torch.cuda.reset_peak_memory_stats(model.device)
        self.warm_up = WarmUp(model.device)
        check_memory(recipe, model, num_sharing=self.group.num_sharing)
        examples = self._examples()
        self.examples = examples.to(model.device) if isinstance(examples, Tensor) else examples
        self.grouped_by_query: GroupedByQuery | None = None
        if recipe.training.order == "queries" and isinstance(self.examples, Tensor):
            self.grouped_by_query = GroupedByQuery(self.examples)
        self.optimizer = build_optimizer(
            recipe.optimizer,
            model.parameters(),
            entity_tables=model.entity_tables,
            one_pass=self.engine.fast or self.engine.sparse,
            captured=self.engine.step == "captured",
        )
        self.step = self._step()
        self.num_steps = recipe.training.num_steps(len(self.examples))
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.mean: dict[str, Tensor] = {}
        self.schedule = CheckpointSchedule(recipe.training.checkpoint_seconds, time.monotonic())
        self._started_at = self.warm_up.clock()
        self._num_steps_before = 0
        self._has_warned = False
        self.stop = GracefulShutdown()

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, graph: Graph, *, device: torch.device, **options: Any
    ) -> Trainer:
        """A trainer of the model and the regularizer that a recipe names."""
        has_rejected = bool(len(graph.rejected))
        tables = choose_tables(recipe, graph.shape, device=device, has_rejected=has_rejected)
        model = recipe.model.build(graph.shape, seed=recipe.training.seed, tables=tables)
        return cls(model.to(device), graph, recipe, recipe.regularizer.build(), **options)

    def _step(self) -> Step:
        """A step for the current weights: a fused one may hold copies of the tables."""
        training = self.recipe.training
        grouped = self.grouped_by_query is not None
        loss = self.recipe.loss.bind(
            self.model,
            self.graph,
            batch_size=training.batch_size,
            seed=training.seed,
            grouped_by_query=grouped,
        )
        if len(self.rejected):
            rejected = torch.from_numpy(self.rejected).long().to(self.model.device)
            loss = WithRejected(loss, rejected)
        return build_step(self.engine, self.model, loss, self.regularizer, self.optimizer)

    def num_own_examples(self, num_examples: int) -> int:
        """How many examples of the largest batch this process computes with."""
        size = min(self.recipe.training.batch_size, num_examples)
        return math.ceil(size / self.group.count) if self.model.tables.has_all_entities else size

    def _examples(self) -> Tensor | ComputedExamples:
        triples = self.graph.train
        if not len(triples):
            raise RequestError(f"{self.graph.name} has no training triples.")
        if self.recipe.validation.every and not len(self.graph.valid):
            raise RequestError(
                f"{self.graph.name} has no validation triples, so `validation.every` should be 0."
            )
        num_relations = self.graph.shape.num_relations
        reciprocal = self.model.reciprocal
        if self.graph.is_large and self.recipe.training.order == "triples":
            if self.recipe.loss.examples == "queries":
                triples = queries_of_both_directions(self.graph)
                reciprocal = False
            return ComputedExamples(
                triples, num_relations, reciprocal=reciprocal, device=self.model.device
            )
        if reciprocal:
            triples = with_reciprocals(triples, num_relations)
        examples = triples.astype(np.int64)
        if self.recipe.loss.examples == "queries":
            examples = one_of_each_query(examples)
        return torch.from_numpy(examples)

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """The batches of one epoch, `(batch, 3)` each."""
        return islice(self._all_batches(epoch), self.num_steps)

    def _all_batches(self, epoch: int) -> Iterator[Tensor]:
        """All examples as batches, in the order of an epoch."""
        device = self.examples.device
        size = self.recipe.training.batch_size
        seed = self.recipe.training.seed
        if isinstance(self.examples, ComputedExamples):
            yield from self.examples.batches(size, seed=seed, epoch=epoch)
            return
        if self.grouped_by_query is None:
            order = batches.shuffled(len(self.examples), seed=seed, epoch=epoch, device=device)
        else:
            order = self.grouped_by_query.shuffled(seed=seed, epoch=epoch)
        # Ordered at once, which saves a kernel in each step on a GPU.
        examples = self.examples[order]
        if self.grouped_by_query is not None and isinstance(self.step, CudaGraphStep):
            self.step.reserve(most_queries(examples, size))
        yield from torch.split(examples, size)

    def run(self) -> None:
        """Train to the end; the model then has the final weights."""
        self._started_at = self.warm_up.clock()
        self._num_steps_before = self._num_steps_taken
        with self.stop.listening(), self.computing():
            try:
                while self._goes_on:
                    self._run_epoch()
            except DivergedError:
                # All processes have found it, and the last good state is being written.
                self._finish_save()
                raise
        self._check_weights()
        final = self.mean or self.best
        if final:
            self.weights.load_state_dict(final)
        if self.checkpoint_path:
            # The evaluation after training may be interrupted, too.
            self.save(self.checkpoint_path, when="end")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Take steps in the precision of the recipe, on the device of the model."""
        device = self.model.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with flush_denormals(), on_device, matmul_precision(self.recipe.training.precision):
            yield

    def _renew_step(self) -> None:
        """A step for weights that were loaded. Two steps might not fit in memory."""
        del self.step
        self.step = self._step()

    @property
    def _goes_on(self) -> bool:
        return self.progress.epoch < self.recipe.training.epochs and not self.progress.stopped

    def _run_epoch(self) -> None:
        progress = self.progress
        epochs = self.recipe.training.epochs
        started = self.warm_up.clock()
        total = torch.tensor(progress.loss_sum, dtype=torch.float64, device=self.model.device)
        check_every = STEPS_BETWEEN_CHECKS[self.model.device.type]
        upcoming = islice(self.batches(progress.epoch), progress.step, None)
        for number, batch in enumerate(self.model.tables.ahead(upcoming), progress.step):
            done = (progress.epoch * self.num_steps + number) / (epochs * self.num_steps)
            total += self.warm_up.take(self.step, batch, learning_rate(self.recipe.optimizer, done))
            progress.step = number + 1
            if progress.step % check_every == 0:
                self._check_loss(float(total))
            if self._checkpoint_due():
                progress.loss_sum = self._check_loss(float(total))
                progress.seconds += self.warm_up.clock() - started
                self._pause()
                started = self.warm_up.clock()
        progress.loss_sum = self._check_loss(float(total))
        progress.seconds += self.warm_up.clock() - started
        self._end_epoch()

    def _check_loss(self, total: float) -> float:
        """Raise if a sum of losses is not finite, report progress otherwise, and return the sum."""
        if not math.isfinite(total):
            raise self._divergence(f"the loss is {total}")
        progress = self.progress
        step = self.progress.step
        epochs = self.recipe.training.epochs
        mrr = progress.best_mrr if progress.best_mrr >= 0 else None
        loss = total / step
        event = ProgressEvent(
            progress.epoch + 1,
            epochs,
            step,
            self.num_steps,
            loss,
            mrr,
            self._seconds_left(),
            is_sampled=self.recipe.validation.queries is not None,
        )
        self.on_progress(event)
        return total

    def _seconds_left(self) -> float | None:
        """Time of the remaining steps, at the speed of this process so far."""
        num_taken = self._num_steps_taken - self._num_steps_before
        num_timed = num_taken - self.warm_up.num_steps
        if num_timed <= 0:
            return None
        num_left = self.recipe.training.epochs * self.num_steps - self._num_steps_taken
        return num_left * (self.warm_up.clock() - self._started_at) / num_timed

    @property
    def _num_steps_taken(self) -> int:
        return self.progress.epoch * self.num_steps + self.progress.step

    def _check_weights(self) -> None:
        """Raise if a weight is not finite.

        The last step may have diverged after its loss was checked.
        """
        parameters = self.model.parameters()
        are_finite = all(checkpoint.all_finite(table.detach()) for table in parameters)
        if self.group.any(not are_finite):
            raise self._divergence("the weights hold NaN or infinity")

    def _divergence(self, what: str) -> DivergedError:
        path = self.checkpoint_path
        saved = f" The last good state is in {path}." if path and path.exists() else ""
        rate = self.recipe.optimizer.learning_rate
        return DivergedError(
            f"Training diverged in epoch {self.progress.epoch + 1}, step {self.progress.step}: "
            f"{what}. Lower the learning rate (now {rate:g}), for instance to "
            f"`optimizer.learning_rate = {rate / 10:g}`, or use a smaller init_scale.{saved}"
        )

    def _end_epoch(self) -> None:
        self.model.tables.synchronize(self.model.named.state_dict())
        progress = self.progress
        every = self.recipe.validation.every
        epochs = self.recipe.training.epochs
        metrics = {
            "loss": progress.loss_sum / self.num_steps,
            "seconds": round(progress.seconds, 4),
        }
        progress.epoch += 1
        progress.step = 0
        progress.loss_sum = 0.0
        progress.seconds = 0.0
        if progress.epoch > self.recipe.optimizer.average_from * epochs:
            self._average()
        if every and (progress.epoch % every == 0 or progress.epoch == epochs):
            report = self._validate()
            metrics["valid_mrr"] = report.mrr
            if report.sampled_from is not None:
                metrics["valid_queries"] = report.metrics.num_queries
        progress.history.append({"epoch": progress.epoch, **metrics})
        at_last_step = progress.epoch / epochs - 1 / (self.num_steps * epochs)
        metrics["learning_rate"] = learning_rate(self.recipe.optimizer, at_last_step)
        self._call(lambda callback: callback.on_epoch(progress.epoch, metrics))
        if self._checkpoint_due():
            self._pause()

    def _call(self, call: Callable[[Callback], None]) -> None:
        """Call all callbacks; a request of one to stop reaches all."""
        for callback in self.callbacks:
            try:
                call(callback)
            except StopTraining:
                self.progress.stopped = True
        self.progress.stopped = self.group.any(self.progress.stopped)

    def _average(self) -> None:
        """Add the weights of this epoch to the running mean."""
        self.progress.averaged += 1
        self.mean = self.mean or self._copy_of_weights()
        for name, value in self.weights.state_dict().items():
            self.mean[name].lerp_(value, 1 / self.progress.averaged)

    def _validate(self) -> Report:
        progress = self.progress
        choice = self.recipe.validation
        self._check_weights()
        current = self._copy_of_weights() if self.mean else {}
        if self.mean:
            # The mean will be the final weights of the run.
            self.weights.load_state_dict(self.mean)
        report = evaluate(
            self.model,
            self.graph,
            split="valid",
            known=self._known,
            queries=choice.queries,
            seed=self.recipe.data.split_seed,
        )
        if current:
            self.weights.load_state_dict(current)
        if report.mrr > progress.best_mrr:
            progress.best_mrr = report.mrr
            progress.since_best = 0
            if choice.keep == "best":
                self.best = self._copy_of_weights()
        else:
            progress.since_best += 1
            progress.stopped = bool(choice.patience) and progress.since_best >= choice.patience
        self._call(lambda callback: callback.on_validation(progress.epoch, report))
        return report

    def _copy_of_weights(self) -> dict[str, Tensor]:
        state = self.weights.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    @cached_property
    def _known(self) -> KnownAnswers:
        seed = self.recipe.data.split_seed
        sample = sample_triples(self.graph.valid, self.recipe.validation.queries, seed=seed)
        return KnownAnswers.of(self.graph, queries=sample)

    def _checkpoint_due(self) -> bool:
        """Whether to write a checkpoint now.

        Process 0 decides when one is due, and any process may have been told to stop.
        """
        check_every = STEPS_BETWEEN_CHECKS[self.model.device.type]
        if self.group.count > 1 and self.progress.step % check_every:
            return False
        if self.store.is_writing and not self.group.any(not self.store.is_written):
            self._finish_save()
        is_old = self.checkpoint_path is not None and self.schedule.is_due(time.monotonic())
        # One that is being written is waited for only where training ends.
        is_due = is_old and self.group.first and not self.store.is_writing
        return self.group.any(self.stop.requested or is_due)

    def _pause(self) -> None:
        """Save a checkpoint, and raise if a shutdown was requested."""
        self.model.tables.complete_updates()
        if self.checkpoint_path:
            self.save(self.checkpoint_path, wait=False)
        if self.group.any(self.stop.requested):
            self._finish_save()
            epochs = self.recipe.training.epochs
            stopped = f"Stopped in epoch {self.progress.epoch + 1} of {epochs}"
            if self.checkpoint_path is None:
                raise InterruptedRunError(f"{stopped}.")
            folder = shlex.quote(str(self.checkpoint_path.parent))
            raise InterruptedRunError(
                f"{stopped}, all work saved. Resume with: dualkg resume {folder}"
            )

    def describe_engine(self) -> str:
        """The engine, and the number of processes."""
        count = self.group.count
        if self.model.tables.has_all_entities and count == 1:
            return str(self.engine)
        return f"{self.engine}, {count} process{'' if count == 1 else 'es'}"

    def about(self, when: When) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        about = {
            "when": when,
            "optimizer": self.recipe.optimizer.name,
            "progress": asdict(self.progress),
        }
        if when == "end":
            return about
        return {**about, "recipe": self._recipe_checksum or recipe_checksum(self.recipe.as_toml())}

    def save(
        self, path: Path, *, when: When = "between", weights: bool = True, wait: bool = True
    ) -> None:
        """Write a checkpoint, or start to if its end is not waited for.

        It has the weights, unless a seed creates the same, and between start and end the state of
        the optimizer.
        """
        groups = {"model": self.weights.state_dict()} if weights else {}
        if when == "between":
            groups |= {
                "optimizer": optimizer_tensors(self.optimizer),
                "best": self.best,
                "mean": self.mean,
            }
        if self.group.count > 1:
            self._check_weights()
        self._finish_save()
        started = time.monotonic()
        try:
            self.store.write(groups, path, self.about(when))
        except DivergedError:
            raise self._divergence("the weights hold NaN or infinity") from None
        now = time.monotonic()
        self.schedule.saved(now, cost=now - started)
        if wait or self.group.count == 1:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if not self.store.is_writing:
            return
        started = time.monotonic()
        seconds = self.store.finish()
        now = time.monotonic()
        held_up = self.schedule.cost + now - started
        # On a CPU, what writes takes the time of what trains.
        cost = max(held_up, seconds) if self.model.device.type == "cpu" else held_up
        self.schedule.saved(now, cost=cost)
        warning = shutdown_warning(max(held_up, seconds), os.environ)
        if warning and self.group.first and not self._has_warned:
            self._has_warned = True
            logger.warning(warning)

    def restore(self, path: Path, *, recipe: Path | None = None) -> None:
        """Load the state of a checkpoint; with `recipe`, the file that it must be of."""
        groups, about = self.store.read(path)
        when = about.get("when", "between")
        if "progress" not in about:
            raise RequestError(
                f"{path} holds weights alone, of a model that was not trained in this folder."
            )
        if groups or when != "start":
            checkpoint.load_weights(self.weights, groups.get("model", {}), source=path)
        saved_optimizer = about.get("optimizer")
        if saved_optimizer not in (None, self.recipe.optimizer.name):
            raise RequestError(
                f"{path} was written with {saved_optimizer}; the recipe says "
                f"{self.recipe.optimizer.name}. The optimizer cannot change during a run: start a "
                "new run."
            )
        if recipe is not None:
            check_recipe(recipe, about, checkpoint=path)
            self._recipe_checksum = recipe_checksum(read_text(recipe))
        progress = self._check_progress(about["progress"], path)
        shapes = {name: value.shape for name, value in self.weights.state_dict().items()}
        for group in ("best", "mean"):
            saved_shapes = {name: value.shape for name, value in groups.get(group, {}).items()}
            if saved_shapes and saved_shapes != shapes:
                raise DamagedFile(path, f"its {group} weights do not fit the model")
        if when == "between":
            try:
                restore_optimizer(self.optimizer, groups.get("optimizer", {}))
            except (ValueError, KeyError, RuntimeError) as error:
                reason = f"its optimizer does not fit the model ({error})"
                raise DamagedFile(path, reason) from None
        self.progress = progress
        self._renew_step()
        self.best = self._on_device(groups.get("best", {}))
        self.mean = self._on_device(groups.get("mean", {}))

    def _on_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the weights, each on the device of its table."""
        tables = self.weights.state_dict()
        return {name: value.to(tables[name].device) for name, value in tensors.items()}

    def _check_progress(self, saved: Any, path: Path) -> Progress:
        """The progress that a checkpoint has reached, if that is possible in this run."""
        progress: Progress = check_type(saved, Progress, source=path)
        checkpoint.check_history(progress.history, source=path)
        least = min(progress.epoch, progress.step, progress.since_best, progress.averaged)
        is_beyond = progress.epoch > self.recipe.training.epochs or progress.step > self.num_steps
        if least < 0 or is_beyond:
            reason = f"epoch {progress.epoch}, step {progress.step} is none of this run"
            raise DamagedFile(path, reason)
        return progress


def check_regularizer(model: Model, regularizer: Regularizer) -> None:
    """Refuse a regularizer that does not apply to the model."""
    if isinstance(model.named, EmbeddingModel):
        regularizer.check(model.named)
    elif regularizer.weight:
        raise RequestError(
            f"{type(regularizer).__name__} regularizes embeddings, and "
            f"{type(model.named).__name__} has none. Train it without a regularizer."
        )


def _check_tables(model: Model, regularizer: Regularizer) -> None:
    """Refuse a regularizer that needs the rows of other processes."""
    needs_all_rows = regularizer.reads_whole_tables and not regularizer.sums_over_rows
    if needs_all_rows and not model.tables.has_all_entities:
        raise RequestError(
            f"{type(regularizer).__name__} reads whole tables, and each process has a part of "
            "them. Use DURA, or one process."
        )


class WarmUp:
    """Times the first steps, and the first step of any other batch size, separately."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._taken: Counter[int] = Counter()

    def take(
        self, step: Callable[[Tensor, float], Tensor], batch: Tensor, learning_rate: float
    ) -> Tensor:
        """Take one step. On a GPU the host waits only for steps of the warm-up."""
        is_usual = len(batch) == next(iter(self._taken), len(batch))
        num_steps = STEPS_OF_WARM_UP[self.device.type] if is_usual else 1
        if self._taken[len(batch)] >= num_steps:
            return step(batch, learning_rate)
        self._taken[len(batch)] += 1
        self._wait()
        started = time.perf_counter()
        objective = step(batch, learning_rate)
        self._wait()
        self.seconds += time.perf_counter() - started
        return objective

    @property
    def num_steps(self) -> int:
        """Steps so far that were timed separately."""
        return self._taken.total()

    def clock(self) -> float:
        """Seconds of a clock that stands still during warm-up."""
        return time.perf_counter() - self.seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_mib(device: torch.device) -> float:
    """Peak memory: on a GPU allocated by PyTorch for this run, on a CPU of the process since its
    start.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Treat numbers below 10⁻³⁸ as zero: they are slow on CPUs, and early in training there are
    many.
    """
    before = bool(torch.tensor([2.0**-126]).mul(0.5) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
