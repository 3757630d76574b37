"""Optimizers as recipes name them: validated settings, from which a step's optimizer is built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import nn

from dualkg.errors import RequestError
from dualkg.registry import Registry
from dualkg.settings import Settings
from dualkg.training.classes import find_class, name_of
from dualkg.training.updates import AnyOptimizer, OnePassAdagrad


class StepKind(NamedTuple):
    """What a step asks of its optimizer.

    It is to update tables in `one_pass`, or to be `captured` as a CUDA graph.
    """

    entity_tables: Collection[nn.Parameter] = ()
    one_pass: bool = False
    captured: bool = False


class Optimizer(Settings, ABC):
    """Learning rate and schedule of an optimizer; `Optimizer(name="Adam")` builds one by name.

    The learning rate may rise from zero in the share `warm_up` of training, and decay to zero from
    the share `decay_from` on. From the share `average_from` on, the weights at the end of each
    epoch are averaged, and the run keeps the mean.

    An optimizer of your own subclasses this, declares more settings as annotated fields, and
    implements `build`. `state_tables` is the number of copies of the weights in its state, by which
    memory is checked.

    Attributes:
        name: "Adagrad" (the default), "Adam", "SGD", or a class of your own.
        learning_rate: The initial learning rate.
        schedule: "constant", "linear" or "cosine".
        decay_from: Fraction of training after which the learning rate decays to zero.
        warm_up: Fraction of training in which the learning rate rises from zero.
        average_from: Fraction of training after which the weights at the end of each epoch are
            averaged; the run keeps the mean.

    Examples:
        >>> kg.Optimizer("Adam", learning_rate=0.01, schedule="cosine").learning_rate
        0.01
    """

    table: ClassVar[str] = "optimizer"
    state_tables: ClassVar[int] = 2

    learning_rate: float = Field(0.1, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_from: float = Field(0.0, ge=0, lt=1)
    warm_up: float = Field(0.0, ge=0, lt=1)
    average_from: float = Field(1.0, ge=0, le=1)

    def __new__(cls, name: str | None = None, **settings: Any) -> Optimizer:
        kind = cls
        if cls is Optimizer:
            kind = find_class(name or "Adagrad", OPTIMIZERS, Optimizer)
        return super().__new__(kind)

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        kind = type(self)
        if name is not None and find_class(name, OPTIMIZERS, Optimizer) is not kind:
            raise RequestError(f"optimizer: name = '{name}' is not {kind.__name__}.")
        super().__init__(**_own_settings(kind, settings))

    @property
    def name(self) -> str:
        """The name that recipes use: a short one, or `package.module:Class`."""
        return name_of(self, OPTIMIZERS)

    @property
    def sums_by_row(self) -> bool:
        """Whether its state has one number for each row of an entity table."""
        return False

    @abstractmethod
    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """PyTorch's optimizer of these settings."""

    def build_for_step(self, parameters: list[nn.Parameter], step: StepKind) -> AnyOptimizer:
        """The optimizer for one kind of step: as fast as possible, or captured as a CUDA graph."""
        return self.build(parameters)


MIN_WARM_UP = 0.01  # of the learning rate
OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", group="dualkg.optimizers")


def _own_settings(kind: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those of other optimizers that have their default value.

    Saved recipes have all of them. Another value is refused, with the optimizers that take it.
    """
    own = {}
    for key, value in settings.items():
        owners = [
            name
            for name, optimizer in OPTIMIZERS.items()
            if key in optimizer.model_fields and key not in kind.model_fields
        ]
        if not owners:
            own[key] = value
            continue
        default = OPTIMIZERS[owners[0]].model_fields[key].default
        if value != default:
            name = next((name for name in OPTIMIZERS if OPTIMIZERS[name] is kind), kind.__name__)
            raise RequestError(
                f"`optimizer.{key}` is a setting of {' and '.join(owners)}, and optimizer.name is "
                f"'{name}'. Leave {key} out."
            )
    return own


@OPTIMIZERS.register
class Adagrad(Optimizer):
    """Adagrad, whose steps shrink with the sum of squared gradients.

    `sums` are kept for single `elements`, or for whole `rows` of the entity tables, which take less
    memory. `epsilon` is 1e-10 if it is left out.
    """

    state_tables = 1

    epsilon: float | None = Field(None, gt=0)
    sums: Literal["elements", "rows"] = "elements"

    @property
    def sums_by_row(self) -> bool:
        return self.sums == "rows"

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, **_keywords(self.learning_rate, self.epsilon))

    def build_for_step(self, parameters: list[nn.Parameter], step: StepKind) -> AnyOptimizer:
        if not (step.one_pass or self.sums_by_row):
            return self.build(parameters)
        row_sums = step.entity_tables if self.sums_by_row else ()
        keywords = _keywords(self.learning_rate, self.epsilon)
        return OnePassAdagrad(parameters, row_sums=row_sums, **keywords)


@OPTIMIZERS.register
class Adam(Optimizer):
    """Adam, with means of gradients and of their squares; `epsilon` is 1e-8 if it is left out."""

    state_tables = 2

    epsilon: float | None = Field(None, gt=0)

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, **_keywords(self.learning_rate, self.epsilon))

    def build_for_step(self, parameters: list[nn.Parameter], step: StepKind) -> AnyOptimizer:
        if not step.captured:
            return self.build(parameters)
        # A CUDA graph reads the learning rate from memory of the device.
        keywords = _keywords(self.learning_rate, self.epsilon)
        keywords["lr"] = torch.tensor(self.learning_rate, device=parameters[0].device)
        return torch.optim.Adam(parameters, capturable=True, fused=True, **keywords)


@OPTIMIZERS.register
class SGD(Optimizer):
    """Plain gradient descent."""

    state_tables = 0

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate)


def _keywords(learning_rate: float, epsilon: float | None) -> dict[str, Any]:
    if epsilon is None:
        return {"lr": learning_rate}
    return {"lr": learning_rate, "eps": epsilon}


def build_optimizer(
    choice: Optimizer,
    parameters: Iterable[nn.Parameter],
    *,
    entity_tables: Collection[nn.Parameter] = (),
    one_pass: bool = False,
    captured: bool = False,
) -> AnyOptimizer:
    """The optimizer of a step, see `Optimizer.build_for_step`."""
    kind = StepKind(entity_tables, one_pass=one_pass, captured=captured)
    return choice.build_for_step(list(parameters), kind)


def learning_rate(choice: Optimizer, progress: float) -> float:
    """The learning rate of the step that begins at the share `progress` of all steps."""
    if progress < choice.warm_up:
        # The first step is taken at a hundredth, not at zero.
        return choice.learning_rate * max(progress / choice.warm_up, MIN_WARM_UP)
    if choice.schedule == "constant" or progress <= choice.decay_from:
        return choice.learning_rate
    decayed = (progress - choice.decay_from) / (1 - choice.decay_from)
    if choice.schedule == "linear":
        return choice.learning_rate * (1 - decayed)
    return choice.learning_rate * (1 + math.cos(math.pi * decayed)) / 2
