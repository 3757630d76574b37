"""The training loop: epochs, validation, checkpoints, and an end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.data.known import KnownAnswers, with_reciprocals
from dualkg.errors import DivergedError, DualkgError, RequestError
from dualkg.evaluation import evaluate
from dualkg.kernels.precision import products_in
from dualkg.models.base import Model
from dualkg.regularizers import Regularizer
from dualkg.training import checkpoint
from dualkg.training.checkpoint import Progress
from dualkg.training.costs import Clock, WarmUp, reset_peak
from dualkg.training.engines import Step, build_step, choose_engine
from dualkg.training.gpu.graphed import GraphedStep
from dualkg.training.memory import check_memory
from dualkg.training.objective import build_loss
from dualkg.training.optimizers import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
from dualkg.training.order import ByQuestion, most_questions, one_of_each_question, shuffled
from dualkg.training.processor import current, tiny_numbers_as_zero
from dualkg.training.recipe import Recipe
from dualkg.training.stopping import GentleStop
from dualkg.training.tally import Seen, Tally

STEPS_BETWEEN_LOOKS = 50  # on a GPU: a look costs a copy


class InterruptedRunError(DualkgError):
    """Training was stopped by its user; what was done is saved."""

    exit_code = 130


@dataclass(frozen=True)
class Moment:
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
        watch: Callable[[Moment], None] | None = None,
    ) -> None:
        model.check_shape(graph.shape)
        regularizer.check(model.embedding)
        self.model = model
        self.graph = graph
        self.recipe = recipe
        self.checkpoint_path: Path | None = None
        self.watch = watch or (lambda moment: None)
        self.engine = choose_engine(recipe, model, regularizer)
        reset_peak(model.device)
        self.warm_up = WarmUp(model.device)
        examples = self._examples()
        check_memory(recipe, model, self.engine, num_examples=len(examples))
        self.examples = torch.from_numpy(examples).to(model.device)
        self.by_question = ByQuestion(self.examples) if recipe.training.order == "questions" else None
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
        self.stop = GentleStop()

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
        return one_of_each_question(examples) if self.recipe.loss.kind == "all answers" else examples

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """The batches of one epoch, a new order each time."""
        device, size, seed = self.examples.device, self.recipe.training.batch_size, self.recipe.training.seed
        if self.by_question is None:
            order = shuffled(len(self.examples), seed=seed, epoch=epoch, device=device)
        else:
            order = self.by_question.shuffled(seed=seed, epoch=epoch)
        if device.type == "cuda":  # all at once, so that a step has one kernel less
            examples = self.examples[order]
            if self.by_question is not None and isinstance(self.step, GraphedStep):
                self.step.make_room(most_questions(examples, size))
            yield from examples.split(size)  # type: ignore[no-untyped-call]
        else:
            yield from (self.examples[chosen] for chosen in order.split(size))  # type: ignore[no-untyped-call]

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end. The model then holds the weights to keep."""
        precision = products_in(self.recipe.training.precision)
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
        tally = Tally(self.model.device, progress.loss_sum)
        look_every = STEPS_BETWEEN_LOOKS if self.model.device.type == "cuda" else 1
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
        """Refuse to go on from a loss that is no number; otherwise tell the watcher."""
        progress = self.progress
        if not math.isfinite(seen.loss_sum):
            raise DivergedError(self._divergence(f"the loss is {seen.loss_sum}"))
        mrr = progress.best_mrr if progress.best_mrr >= 0 else None
        mean = seen.loss_sum / seen.step
        self.watch(Moment(progress.epoch + 1, self.recipe.training.epochs, seen.step, self.num_steps, mean, mrr))
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
                f"A recipe is not changed half-way: begin anew."
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
