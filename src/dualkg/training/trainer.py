"""The training loop: epochs, validation, progress, checkpoints and graceful shutdown."""

from __future__ import annotations

import gc
import math
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.evaluation.report import evaluate
from dualkg.files import check_type
from dualkg.kernels.hardware import matmul_precision
from dualkg.losses.base import BoundLoss
from dualkg.models.base import Model, only_rows
from dualkg.regularizers import Regularizer
from dualkg.training import batches, checkpoint
from dualkg.training.batches import (
    GroupedByQuery,
    MappedExamples,
    most_queries,
    one_of_each_query,
    queries_on_disk,
)
from dualkg.training.callbacks import Callback, StopTraining
from dualkg.training.checkpoint import Progress
from dualkg.training.engines import CudaGraphStep, Step, build_step, choose_engine
from dualkg.training.memory import check_memory, predict
from dualkg.training.optimizers import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from dualkg.training.recipe import Recipe
from dualkg.training.run import Run, RunFolder

STEPS_OF_WARM_UP = {
    "cpu": 1,
    "cuda": 5,
}  # in which kernels are compiled, and on a GPU a CUDA graph is captured
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 50}  # of the loss, for which the host waits for a GPU
OnProgress = Callable[["ProgressEvent"], None]
Groups = dict[str, dict[str, Tensor]]  # tensors of a checkpoint: model, optimizer, best and mean
When = Literal["start", "between", "end"]  # a checkpoint is written


class InterruptedRunError(DualkgError):
    """Training was stopped by its user; the state is saved."""

    exit_code = 130


@dataclass(frozen=True)
class ProgressEvent:
    """What a progress display shows."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    mrr: float | None

    @property
    def text(self) -> str:
        best = "" if self.mrr is None else f"  best valid MRR {self.mrr:.4f}"
        return f"epoch {self.epoch}/{self.epochs}  loss {self.loss:.3f}{best}"


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
    ) -> None:
        model.check_shape(graph.shape)
        regularizer.check(model.embedding)
        self.model = model
        self.graph = graph
        self.recipe = recipe
        self.regularizer = regularizer
        self.checkpoint_path: Path | None = None
        self.on_progress = on_progress or (lambda event: None)
        self.callbacks = list(callbacks)
        self.engine = choose_engine(recipe, model, regularizer)
        if model.device.type == "cuda":
            gc.collect()  # reference cycles may hold large tensors
            torch.cuda.reset_peak_memory_stats(model.device)
        self.warm_up = WarmUp(model.device)
        examples = self._examples()
        mapped = isinstance(examples, MappedExamples)
        self.need = predict(
            recipe, model, regularizer, self.engine, num_examples=len(examples), mapped=mapped
        )
        check_memory(self.need, model, min(recipe.training.batch_size, len(examples)))
        self.examples = examples.to(model.device) if isinstance(examples, Tensor) else examples
        self.grouped_by_query: GroupedByQuery | None = None
        if recipe.training.order == "queries" and isinstance(self.examples, Tensor):
            self.grouped_by_query = GroupedByQuery(self.examples)
        self.optimizer = build_optimizer(
            recipe.optimizer,
            model.parameters(),
            entity_tables=model.embedding.entity_tables,
            one_pass=self.engine.fast or self.engine.step == "sparse",
            captured=self.engine.step == "captured",
        )
        self.step = self._step()
        self.num_steps = math.ceil(len(self.examples) / recipe.training.batch_size)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.mean: dict[str, Tensor] = {}
        self._saved_at = time.monotonic()
        self.stop = GracefulShutdown()

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, graph: Graph, *, device: torch.device, **options: Any
    ) -> Trainer:
        """A trainer of the model and the regularizer that a recipe names."""
        with only_rows(None, device=device) if device.type == "cuda" else nullcontext():
            model = recipe.model.build(graph.shape, seed=recipe.training.seed).to(device)
        return cls(model, graph, recipe, recipe.regularizer.build(), **options)

    def _step(self) -> Step:
        """A step for the current weights: a fused one may hold copies of the tables."""
        training = self.recipe.training
        grouped = self.grouped_by_query is not None
        options: dict[str, Any] = {"batch_size": training.batch_size, "seed": training.seed}
        return self._build_step(
            self.recipe.loss.bind(self.model, self.graph, grouped_by_query=grouped, **options)
        )

    def _build_step(self, loss: BoundLoss) -> Step:
        return build_step(self.engine, self.model, loss, self.regularizer, self.optimizer)

    def _examples(self) -> Tensor | MappedExamples:
        triples = self.graph.train
        if not len(triples):
            raise RequestError(f"{self.graph.name} has no training triples.")
        if self.recipe.validation.every and not len(self.graph.valid):
            raise RequestError(
                f"{self.graph.name} has no valid triples, so validation.every should be 0."
            )
        num_relations = self.graph.shape.num_relations
        reciprocal = self.model.reciprocal
        if self.graph.is_mapped and self.recipe.training.order == "triples":
            if self.recipe.loss.examples == "queries":
                triples = queries_on_disk(self.graph)
                reciprocal = False
            return MappedExamples(
                triples, num_relations, reciprocal=reciprocal, device=self.model.device
            )
        examples = (with_reciprocals(triples, num_relations) if reciprocal else triples).astype(
            np.int64
        )
        return torch.from_numpy(
            one_of_each_query(examples) if self.recipe.loss.examples == "queries" else examples
        )

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """The batches of one epoch, `(batch, 3)` each."""
        device = self.examples.device
        size = self.recipe.training.batch_size
        seed = self.recipe.training.seed
        if isinstance(self.examples, MappedExamples):
            yield from self.examples.batches(size, seed=seed, epoch=epoch)
            return
        if self.grouped_by_query is None:
            order = batches.shuffled(len(self.examples), seed=seed, epoch=epoch, device=device)
        else:
            order = self.grouped_by_query.shuffled(seed=seed, epoch=epoch)
        examples = self.examples[order]  # at once, which saves a kernel in each step on a GPU
        if self.grouped_by_query is not None and isinstance(self.step, CudaGraphStep):
            self.step.reserve(most_queries(examples, size))
        yield from examples.split(size)  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Train to the end; the model then has the final weights."""
        device = self.model.device
        precision = matmul_precision(self.recipe.training.precision)
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self.stop.listening(), flush_denormals(), on_device, precision:
            while self.progress.epoch < self.recipe.training.epochs and not self.progress.stopped:
                self._run_epoch()
        self._check_weights()
        if final := self.mean or self.best:
            self.model.load_state_dict(final)
        if self.checkpoint_path:  # the evaluation after training may be interrupted too
            self.save(self.checkpoint_path, when="end")

    def _run_epoch(self) -> None:
        progress = self.progress
        epochs = self.recipe.training.epochs
        started = self.warm_up.clock()
        total = torch.tensor(progress.loss_sum, dtype=torch.float64, device=self.model.device)
        check_every = STEPS_BETWEEN_CHECKS[self.model.device.type]
        for number, batch in islice(enumerate(self.batches(progress.epoch)), progress.step, None):
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
            raise DivergedError(self._divergence(f"the loss is {total}"))
        progress = self.progress
        step = self.progress.step
        epochs = self.recipe.training.epochs
        mrr = progress.best_mrr if progress.best_mrr >= 0 else None
        self.on_progress(
            ProgressEvent(progress.epoch + 1, epochs, step, self.num_steps, total / step, mrr)
        )
        return total

    def _check_weights(self) -> None:
        """Raise if a weight is not finite: the last step may have diverged after its loss was
        checked.
        """
        finite = all(
            checkpoint.all_finite(parameter.detach()) for parameter in self.model.parameters()
        )
        if self._anywhere(not finite):
            raise DivergedError(self._divergence("the weights hold NaN or infinity"))

    def _divergence(self, what: str) -> str:
        path = self.checkpoint_path
        rate = self.recipe.optimizer.learning_rate
        saved = f" The last good state is in {path}." if path and path.exists() else ""
        return (
            f"Training diverged in epoch {self.progress.epoch + 1}, step {self.progress.step}: "
            f"{what}. Lower the learning rate (now {rate:g}), for instance with --set "
            f"optimizer.learning_rate={rate / 10:g}, or use a smaller init_scale.{saved}"
        )

    def _end_epoch(self) -> None:
        progress = self.progress
        every = self.recipe.validation.every
        epochs = self.recipe.training.epochs
        metrics = {
            "loss": progress.loss_sum / self.num_steps,
            "seconds": round(progress.seconds, 4),
        }
        progress.epoch = progress.epoch + 1
        progress.step = 0
        progress.loss_sum = 0.0
        progress.seconds = 0.0
        if progress.epoch > self.recipe.optimizer.average_from * epochs:
            self._average()
        if every and (progress.epoch % every == 0 or progress.epoch == epochs):
            metrics["valid_mrr"] = self._validate()
        progress.history.append({"epoch": progress.epoch, **metrics})
        done = progress.epoch / epochs - 1 / (self.num_steps * epochs)  # with the last step
        metrics["learning_rate"] = learning_rate(self.recipe.optimizer, done)
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
        self.progress.stopped = self._anywhere(self.progress.stopped)

    def _anywhere(self, flag: bool) -> bool:
        """Whether the flag is set in this process, or in any of several."""
        return flag

    def _average(self) -> None:
        """Add the weights of this epoch to the running mean."""
        self.progress.averaged += 1
        self.mean = self.mean or self._copy_of_weights()
        for name, value in self.model.state_dict().items():
            self.mean[name].lerp_(value, 1 / self.progress.averaged)

    def _validate(self) -> float:
        progress = self.progress
        choice = self.recipe.validation
        self._check_weights()
        weights = self._copy_of_weights() if self.mean else {}
        if self.mean:  # the final weights of the run
            self.model.load_state_dict(self.mean)
        report = evaluate(self.model, self.graph, split="valid", known=self._known)
        if weights:
            self.model.load_state_dict(weights)
        if report.mrr > progress.best_mrr:
            progress.best_mrr = report.mrr
            progress.since_best = 0
            if choice.keep == "best":
                self.best = self._copy_of_weights()
        else:
            progress.since_best += 1
            progress.stopped = bool(choice.patience) and progress.since_best >= choice.patience
        self._call(lambda callback: callback.on_validation(progress.epoch, report))
        return report.mrr

    def _copy_of_weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    @cached_property
    def _known(self) -> KnownAnswers:
        return KnownAnswers.of(self.graph, queries=self.graph.valid)

    def _checkpoint_due(self) -> bool:
        is_old = time.monotonic() - self._saved_at >= self.recipe.training.checkpoint_seconds
        return self.stop.requested or (self.checkpoint_path is not None and is_old)

    def _pause(self) -> None:
        """Save a checkpoint, and raise if a shutdown was requested."""
        if self.checkpoint_path:
            self.save(self.checkpoint_path)
        if self._anywhere(self.stop.requested):
            path = self.checkpoint_path
            stopped = f"Stopped in epoch {self.progress.epoch + 1}"
            saved = f", all work saved. Resume with: dualkg resume {path.parent}" if path else "."
            raise InterruptedRunError(f"{stopped} of {self.recipe.training.epochs}{saved}")

    def describe_engine(self) -> str:
        return str(self.engine)

    def about(self, when: When) -> dict[str, Any]:
        """What a checkpoint says beside its tensors."""
        return {
            "when": when,
            "optimizer": self.recipe.optimizer.name,
            "progress": asdict(self.progress),
        }

    def save(self, path: Path, *, when: When = "between", weights: bool = True) -> None:
        """Write a checkpoint: the weights, unless a seed creates the same, and between start and
        end the optimizer.
        """
        groups = {"model": self.model.state_dict()} if weights else {}
        if when == "between":
            groups |= {
                "optimizer": optimizer_tensors(self.optimizer),
                "best": self.best,
                "mean": self.mean,
            }
        try:
            self._write(groups, path, self.about(when))
        except DivergedError:
            raise DivergedError(self._divergence("the weights hold NaN or infinity")) from None
        self._saved_at = time.monotonic()

    def _write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        checkpoint.save_tensors(groups, path, about=about)

    def _read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        return checkpoint.load_tensors(path, check=True)

    def save_results(self, run: Run, folder: RunFolder) -> None:
        """Finish the run folder; the last checkpoint has the weights."""
        folder.finish(run, trained=folder.checkpoint)

    def restore(self, path: Path) -> None:
        """Load the state of a checkpoint."""
        groups, about = self._read(path)
        when = about.get("when", "between")
        if "progress" not in about:
            raise RequestError(
                f"{path} holds weights alone, of a model that was not trained in this folder."
            )
        if groups or when != "start":
            checkpoint.load_weights(self.model, groups.get("model", {}), source=path)
        if about.get("optimizer") not in (None, self.recipe.optimizer.name):
            raise RequestError(
                f"{path} was written with {about.get('optimizer')}; the recipe says "
                f"{self.recipe.optimizer.name}. The optimizer cannot change during a run: start a "
                "new run."
            )
        progress: Progress = check_type(about["progress"], Progress, source=path)
        checkpoint.check_history(progress.history, source=path)
        least = min(progress.epoch, progress.step, progress.since_best, progress.averaged)
        if (
            least < 0
            or progress.epoch > self.recipe.training.epochs
            or progress.step > self.num_steps
        ):
            raise RequestError(
                f"{path} is damaged: epoch {progress.epoch}, step {progress.step} is none of this "
                "run."
            )
        shapes = {name: value.shape for name, value in self.model.state_dict().items()}
        for group in ("best", "mean"):
            if (
                groups.get(group)
                and {name: value.shape for name, value in groups[group].items()} != shapes
            ):
                raise RequestError(f"{path} is damaged: its {group} weights do not fit the model.")
        if when == "between":
            try:
                restore_optimizer(self.optimizer, groups.get("optimizer", {}))
            except (ValueError, KeyError, RuntimeError) as error:
                raise RequestError(
                    f"{path} is damaged: its optimizer does not fit the model ({error})."
                ) from None
        self.progress = progress
        del self.step  # two might not fit in memory
        self.step = self._step()
        self.best, self.mean = (
            {name: value.to(self.model.device) for name, value in groups.get(group, {}).items()}
            for group in ("best", "mean")
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
        if self._taken[len(batch)] >= (STEPS_OF_WARM_UP[self.device.type] if is_usual else 1):
            return step(batch, learning_rate)
        self._taken[len(batch)] += 1
        self._wait()
        started = time.perf_counter()
        objective = step(batch, learning_rate)
        self._wait()
        self.seconds += time.perf_counter() - started
        return objective

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


class GracefulShutdown:
    """Whether a shutdown was requested."""

    requested = False

    def listening(self) -> AbstractContextManager[None]:
        """Turn the first Ctrl-C or TERM into a request; a second one interrupts."""
        return signal_handler(self._request, signal.SIGINT, signal.SIGTERM)

    def _request(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def signal_handler(
    handler: Callable[[int, Any], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Replace the handler of signals for the duration of a block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
