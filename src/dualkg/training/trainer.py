"""What a run costs: seconds of training, of getting ready for it and of ranking, and the peak of memory."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.filters import KnownAnswers, with_reciprocals
from dualkg.data.graph import Graph
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.evaluation.report import evaluate
from dualkg.kernels.hardware import matmul_precision
from dualkg.kernels.hashing import STEP, splitmix64
from dualkg.losses.grouping import asks_anew
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training import checkpoint
from dualkg.training.checkpoint import Progress
from dualkg.training.cuda_graphs import CudaGraphStep
from dualkg.training.engines import Step, build_step, choose_engine
from dualkg.training.memory import check_memory
from dualkg.training.optimizers import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
from dualkg.training.recipe import Recipe
from dualkg.training.registry import build_loss

# In these kernels are compiled, and on a GPU a step is captured as a graph.
STEPS_OF_WARM_UP = {"cpu": 1, "cuda": 5}


@dataclass(frozen=True)
class Costs:
    """`training_seconds` are of the epochs, without their warm-up and without validation.

    Of a run that was resumed, warm-up and peak are those of the last process.
    """

    warm_up_seconds: float
    training_seconds: float
    ranking_seconds: float
    peak_mib: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 3) for name, value in asdict(self).items()}


class WarmUp:
    """Times the first steps, and the first one of any other size, apart from those after them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._taken: Counter[int] = Counter()

    def take(self, step: Callable[[Tensor, float], Tensor], batch: Tensor, learning_rate: float) -> Tensor:
        """Take one step. On a GPU the host waits for the first ones, and never again."""
        first = next(iter(self._taken), len(batch))
        if self._taken[len(batch)] >= (STEPS_OF_WARM_UP[self.device.type] if len(batch) == first else 1):
            return step(batch, learning_rate)
        self._taken[len(batch)] += 1
        self._wait()
        started = time.perf_counter()
        objective = step(batch, learning_rate)
        self._wait()
        self.seconds += time.perf_counter() - started
        return objective

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Clock:
    """Seconds since it was made, without those of a warm-up."""

    def __init__(self, warm_up: WarmUp) -> None:
        self._warm_up = warm_up
        self._started = time.perf_counter() - warm_up.seconds

    def passed(self) -> float:
        return time.perf_counter() - self._started - self._warm_up.seconds


def reset_peak(device: torch.device) -> None:
    """Count a GPU's memory from here, without what earlier runs left; a process's own is counted from its start."""
    if device.type == "cuda":
        gc.collect()  # Python clears cycles by the number of objects, not by what they hold
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    """On a GPU what PyTorch had allocated at most, on a CPU what the process had; Windows does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


MOST_TOGETHER = 16  # answers of a question that stand together: more would leave a batch with few questions


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The numbers below `size` in an order that depends on seed and epoch alone, `(size,)`.

    Whole numbers are mixed and sorted, so the order needs no generator whose numbers differ between devices.
    """
    return torch.argsort(_drawn(torch.arange(size, device=device), seed=seed, epoch=epoch))


class GroupedByQuery:
    """Orders in which answers of the same question stand together, so that it need be scored only once.

    The answers of each question are shuffled and dealt into hands of at most `MOST_TOGETHER`; then the hands are.
    """

    def __init__(self, triples: Tensor) -> None:
        keys = triples[:, 0] * (triples[:, 1].max() + 1) + triples[:, 1]
        _, self.questions, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        hands = (counts + MOST_TOGETHER - 1) // MOST_TOGETHER
        self.starts, self.first_hands = counts.cumsum(0) - counts, hands.cumsum(0) - hands

    def shuffled(self, *, seed: int, epoch: int) -> Tensor:
        """As the function of that name."""
        size, device = len(self.questions), self.questions.device
        order = shuffled(size, seed=seed, epoch=epoch, device=device)
        order = order[torch.argsort(self.questions[order], stable=True)]
        questions, places = self.questions[order], torch.arange(size, device=device)
        hands = self.first_hands[questions] + (places - self.starts[questions]) // MOST_TOGETHER
        # Numbers from `size` on have not been drawn for the triples.
        return order[torch.argsort(_drawn(hands + size, seed=seed, epoch=epoch), stable=True)]


def one_of_each_query(triples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first triple of every head and relation, in the order of the triples."""
    _, first = np.unique(triples[:, :2], axis=0, return_index=True)
    return triples[np.sort(first)]


def most_queries(triples: Tensor, batch_size: int) -> int:
    """The most questions that a batch asks, where batches are cut from triples in this order."""
    again = asks_anew(triples[:, 0], triples[:, 1])
    again[::batch_size] = True
    batches = torch.arange(len(triples), device=triples.device) // batch_size
    return int(torch.bincount(batches[again]).max())


def _drawn(numbers: Tensor, *, seed: int, epoch: int) -> Tensor:
    start = int(splitmix64(splitmix64(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return splitmix64(numbers * STEP + start)


@contextmanager
def tiny_numbers_as_zero() -> Iterator[None]:
    """Take numbers below 10⁻³⁸ for zero: processors are slow with them, and early in training there are many."""
    before = _takes_tiny_numbers_as_zero()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _takes_tiny_numbers_as_zero() -> bool:
    return bool(torch.tensor([2.0**-126]).mul(0.5) == 0)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the one that kernels are started on, where there are several."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GracefulShutdown:
    """Whether someone has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the first Ctrl-C or TERM into a request; a second one is not waited for. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: object) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Seen(NamedTuple):
    """A sum, and of how many steps."""

    loss_sum: float
    step: int


class RunningLoss:
    """Sums losses where they are; what it held a while ago can be read without making the device wait."""

    def __init__(self, device: torch.device, start: float) -> None:
        self._sum = torch.tensor(start, dtype=torch.float64, device=device)
        self._waits = device.type == "cuda"
        self._copy = torch.empty((), dtype=torch.float64, pin_memory=self._waits)
        self._under_way: tuple[torch.cuda.Event, int] | None = None

    def add(self, loss: Tensor) -> None:
        self._sum += loss

    def glance(self, step: int) -> Seen | None:
        """The sum, if it is there; on a GPU that of an earlier glance, whose copy has arrived meanwhile."""
        if not self._waits:
            return Seen(self.total(), step)
        seen = None
        if self._under_way and self._under_way[0].query():  # type: ignore[no-untyped-call]
            seen = Seen(float(self._copy), self._under_way[1])
            self._under_way = None
        if not self._under_way:
            self._copy.copy_(self._sum, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._under_way = (event, step)
        return seen

    def total(self) -> float:
        """The sum of all that was added, waited for."""
        return float(self._sum)


STEPS_BETWEEN_CHECKS = 50  # on a GPU: a look costs a copy


class InterruptedRunError(DualkgError):
    """Training was stopped by its user; what was done is saved."""

    exit_code = 130


@dataclass(frozen=True)
class ProgressEvent:
    """What a progress display needs to know."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    mrr: float | None


class Trainer:
    """Trains a model by a recipe, from the start or from a checkpoint.

    Batches depend on seed and epoch alone, so a checkpoint need hold no random state, and a run that was
    killed ends with the same weights as one that was not.
    """

    def __init__(
        self,
        model: Model,
        graph: Graph,
        recipe: Recipe,
        regularizer: Regularizer,
        *,
        on_progress: Callable[[ProgressEvent], None] | None = None,
    ) -> None:
        model.check_shape(graph.shape)
        regularizer.check(model.embedding)
        self.model = model
        self.graph = graph
        self.recipe = recipe
        self.checkpoint_path: Path | None = None
        self.on_progress = on_progress or (lambda event: None)
        self.engine = choose_engine(recipe, model, regularizer)
        reset_peak(model.device)
        self.warm_up = WarmUp(model.device)
        examples = self._examples()
        check_memory(recipe, model, self.engine, num_examples=len(examples))
        self.examples = torch.from_numpy(examples).to(model.device)
        self.grouped_by_query = GroupedByQuery(self.examples) if recipe.training.order == "queries" else None
        self.optimizer = build_optimizer(
            recipe.optimizer,
            model.parameters(),
            one_pass=self.engine not in ("plain", "captured"),
            captured=self.engine == "captured",
        )
        self.regularizer = regularizer
        self.step = self._step()
        self.num_steps = math.ceil(len(self.examples) / recipe.training.batch_size)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.mean: dict[str, Tensor] = {}
        self._saved_at = time.monotonic()
        self.stop = GracefulShutdown()

    # -- what is trained on -------------------------------------------------------------------------------

    def _step(self) -> Step:
        """A step that sees the weights as they are now: a fused one may hold copies of the tables."""
        return build_step(
            self.engine, self.model, build_loss(self.recipe, self.model, self.graph), self.regularizer, self.optimizer
        )

    def _examples(self) -> npt.NDArray[np.int64]:
        triples = self.graph.train
        if not len(triples):
            raise RequestError(f"{self.graph.name} has no training triples.")
        if self.recipe.validation.every and not len(self.graph.valid):
            raise RequestError(f"{self.graph.name} has no valid triples, so validation.every should be 0.")
        if self.model.reciprocal:
            triples = with_reciprocals(triples, self.graph.shape.num_relations)
        examples = triples.astype(np.int64)
        return one_of_each_query(examples) if self.recipe.loss.kind == "all answers" else examples

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """The batches of one epoch, a new order each time."""
        device, size, seed = self.examples.device, self.recipe.training.batch_size, self.recipe.training.seed
        if self.grouped_by_query is None:
            order = shuffled(len(self.examples), seed=seed, epoch=epoch, device=device)
        else:
            order = self.grouped_by_query.shuffled(seed=seed, epoch=epoch)
        if device.type == "cuda":  # all at once, so that a step has one kernel less
            examples = self.examples[order]
            if self.grouped_by_query is not None and isinstance(self.step, CudaGraphStep):
                self.step.make_room(most_queries(examples, size))
            yield from examples.split(size)  # type: ignore[no-untyped-call]
        else:
            yield from (self.examples[chosen] for chosen in order.split(size))  # type: ignore[no-untyped-call]

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end. The model then holds the weights to keep."""
        precision = matmul_precision(self.recipe.training.precision)
        with self.stop.listening(), tiny_numbers_as_zero(), current(self.model.device), precision:
            while self.progress.epoch < self.recipe.training.epochs and not self.progress.stopped:
                self._run_epoch()
        self._refuse_divergence()
        if self.recipe.validation.keep == "best" and self.best:
            self.model.load_state_dict(self.best)
        if self.mean:
            self.model.load_state_dict(self.mean)
        if self.checkpoint_path:  # what comes after training may be interrupted too
            self.save_end(self.checkpoint_path)

    def _run_epoch(self) -> None:
        progress, epochs = self.progress, self.recipe.training.epochs
        clock = Clock(self.warm_up)
        tally = RunningLoss(self.model.device, progress.loss_sum)
        look_every = STEPS_BETWEEN_CHECKS if self.model.device.type == "cuda" else 1
        for number, batch in enumerate(self.batches(progress.epoch)):
            if number < progress.step:
                continue
            done = (progress.epoch * self.num_steps + number) / (epochs * self.num_steps)
            tally.add(self.warm_up.take(self.step, batch, learning_rate(self.recipe.optimizer, done)))
            progress.step = number + 1
            if progress.step % look_every == 0 and (seen := tally.glance(progress.step)) is not None:
                self._look(seen)
            if self._checkpoint_due():
                progress.loss_sum = self._look(Seen(tally.total(), progress.step))
                progress.seconds += clock.passed()
                self._pause()
                clock = Clock(self.warm_up)
        progress.loss_sum = self._look(Seen(tally.total(), progress.step))
        progress.seconds += clock.passed()
        self._end_epoch()

    def _look(self, seen: Seen) -> float:
        """Refuse to go on from a loss that is no number; otherwise report progress."""
        progress = self.progress
        if not math.isfinite(seen.loss_sum):
            raise DivergedError(self._divergence(f"the loss is {seen.loss_sum}"))
        mrr = progress.best_mrr if progress.best_mrr >= 0 else None
        mean = seen.loss_sum / seen.step
        self.on_progress(
            ProgressEvent(progress.epoch + 1, self.recipe.training.epochs, seen.step, self.num_steps, mean, mrr)
        )
        return seen.loss_sum

    def _refuse_divergence(self) -> None:
        """The last step may have gone wrong after its loss was seen to be good."""
        if not all(torch.isfinite(parameter).all() for parameter in self.model.parameters()):
            raise DivergedError(self._divergence("the weights hold NaN or infinity"))

    def _divergence(self, what: str) -> str:
        kept = ""
        if self.checkpoint_path and self.checkpoint_path.exists():
            kept = f" The last good state is kept in {self.checkpoint_path}."
        return (
            f"Training diverged in epoch {self.progress.epoch + 1}, step {self.progress.step}: {what}. "
            f"Lower the learning rate (now {self.recipe.optimizer.learning_rate:g}), for instance with "
            f"--set optimizer.learning_rate={self.recipe.optimizer.learning_rate / 10:g}, or use a smaller "
            f"init_scale.{kept}"
        )

    def _end_epoch(self) -> None:
        progress, choice = self.progress, self.recipe.validation
        entry: dict[str, float] = {
            "epoch": progress.epoch + 1,
            "loss": progress.loss_sum / self.num_steps,
            "seconds": round(progress.seconds, 4),
        }
        progress.epoch, progress.step, progress.loss_sum, progress.seconds = progress.epoch + 1, 0, 0.0, 0.0
        if progress.epoch > self.recipe.optimizer.average_from * self.recipe.training.epochs:
            self._average()
        if choice.every and (progress.epoch % choice.every == 0 or progress.epoch == self.recipe.training.epochs):
            entry["valid_mrr"] = self._validate()
        progress.history.append(entry)
        if self._checkpoint_due():
            self._pause()

    def _average(self) -> None:
        """Take the weights of this epoch into the mean of those before."""
        self.progress.averaged += 1
        for name, value in self.model.state_dict().items():
            if name in self.mean:
                self.mean[name].lerp_(value, 1 / self.progress.averaged)
            else:
                self.mean[name] = value.detach().clone()

    @contextmanager
    def _as_kept(self) -> Iterator[None]:
        """The model for a while with the mean of its weights, once there is one: that is what will be kept."""
        if not self.mean:
            yield
            return
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.mean)
        try:
            yield
        finally:
            self.model.load_state_dict(now)

    def _validate(self) -> float:
        progress, choice = self.progress, self.recipe.validation
        self._refuse_divergence()
        with self._as_kept():
            mrr = evaluate(self.model, self.graph, split="valid", known=self._known).mrr
        if mrr > progress.best_mrr:
            progress.best_mrr, progress.best_epoch, progress.since_best = mrr, progress.epoch, 0
            if choice.keep == "best":
                self.best = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        else:
            progress.since_best += 1
            progress.stopped = bool(choice.patience) and progress.since_best >= choice.patience
        return mrr

    @cached_property
    def _known(self) -> KnownAnswers:
        return KnownAnswers.of(self.graph)

    # -- checkpoints --------------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        if self.stop.asked:
            return True
        waited = time.monotonic() - self._saved_at
        return self.checkpoint_path is not None and waited >= self.recipe.training.checkpoint_seconds

    def _pause(self) -> None:
        """Save; and leave, if that was asked for."""
        if self.checkpoint_path:
            self.save(self.checkpoint_path)
        if self.stop.asked:
            where = f" Go on with: dualkg resume {self.checkpoint_path.parent}" if self.checkpoint_path else ""
            raise InterruptedRunError(
                f"Stopped in epoch {self.progress.epoch + 1} of {self.recipe.training.epochs}, all work saved.{where}"
                if self.checkpoint_path
                else f"Stopped in epoch {self.progress.epoch + 1}."
            )

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        groups = {"model": self.model.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}
        groups |= {name: kept for name, kept in (("best", self.best), ("mean", self.mean)) if kept}
        self._write(groups, path, when="between")

    def save_start(self, path: Path, *, by_seed: bool) -> None:
        """Write what is needed to begin: the model, unless the recipe's seed makes it again. No step is done yet."""
        self._write({} if by_seed else {"model": self.model.state_dict()}, path, when="start")

    def save_end(self, path: Path) -> None:
        """Write the weights to keep: no step is left."""
        self._write({"model": self.model.state_dict()}, path, when="end")

    def _write(self, groups: dict[str, dict[str, Tensor]], path: Path, *, when: str) -> None:
        about = {"when": when, "optimizer": self.recipe.optimizer.name, "progress": asdict(self.progress)}
        try:
            checkpoint.save_tensors(groups, path, about=about)
        except DivergedError:
            raise DivergedError(self._divergence("the weights hold NaN or infinity")) from None
        self._saved_at = time.monotonic()

    def restore(self, path: Path) -> None:
        """Go back to where a checkpoint was written."""
        groups, about = checkpoint.load_tensors(path)
        when = about.get("when", "between")
        if groups or when != "start":
            checkpoint.load_weights(self.model, groups.get("model", {}), source=path)
        if about.get("optimizer") != self.recipe.optimizer.name:
            raise RequestError(
                f"{path} was written with {about.get('optimizer')}; the recipe says {self.recipe.optimizer.name}. "
                f"A recipe is not changed half-way: begin again."
            )
        if when == "between":
            restore_optimizer(self.optimizer, groups.get("optimizer", {}))
        self.progress = Progress(**about["progress"])
        del self.step  # before another is made: together they might not fit
        self.step = self._step()
        self.best, self.mean = (
            {name: value.to(self.model.device) for name, value in groups.get(kept, {}).items()}
            for kept in ("best", "mean")
        )
