"""The interface of losses: validated settings, and `bind`, which makes the function that training
minimizes.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from dualkg.data.graph import Graph
from dualkg.errors import RequestError, close_settings, one_of
from dualkg.models.base import Factors, Model
from dualkg.registry import Registry

__all__ = ["Loss"]

BoundLoss = Callable[[Model, Factors], Tensor]


class Loss(BaseModel, ABC):
    """Settings of a loss, validated and immutable.

    A loss of your own subclasses this, declares its settings as annotated fields and implements
    `bind`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # What a batch holds: training triples, or queries with one of their tails.
    examples: ClassVar[Literal["triples", "queries"]] = "triples"

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise RequestError(
                validation_sentence(error, type(self).model_fields, prefix="loss.")
            ) from None

    @abstractmethod
    def bind(
        self,
        model: Model,
        graph: Graph,
        *,
        batch_size: int,
        seed: int,
        grouped_by_query: bool = False,
    ) -> BoundLoss:
        """The function of a model and the factors of a batch that returns the mean loss, a scalar.

        With `grouped_by_query`, neighbours in a batch that share head and relation are answers of
        one query.
        """

    def check_training(self, *, reciprocal: bool, batch_size: int) -> None:
        """Raise ValueError for a training that this loss cannot be used in."""

    @property
    def fast_step_obstacle(self) -> str | None:
        """The setting that the fast step does not support, or None.

        A loss of your own is trained by autograd.
        """
        return f"loss.name = '{type(self).__name__}'"

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        """Whether all batches of one size have tensors of the same shapes, as CUDA graphs need."""
        return False

    def numbers_per_example(self, model: Model, batch_size: int) -> int:
        """An upper bound of the numbers that autograd stores for an example: all scores.

        It predicts the memory of a run.
        """
        num_sides = 1 if model.reciprocal else 2
        return num_sides * model.score_arrays * model.tables.num_rows

    def rows_per_batch(self, model: Model, batch_size: int) -> int | None:
        """The most rows of an entity table that a batch reads, or None: all of them."""
        return None


LOSSES: Registry[type[Loss]] = Registry("loss", group="dualkg.losses")


def validation_sentence(
    error: ValidationError, known: Iterable[str], *, prefix: str = "", elsewhere: Iterable[str] = ()
) -> str:
    """The first problem of a validation, as a sentence.

    `known` are the keys to choose from, `elsewhere` those of other tables.
    """
    first = error.errors()[0]
    name = (prefix + ".".join(str(part) for part in first["loc"])).removesuffix(".")
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        near = one_of(close_settings(key, known) or elsewhere) or f" There are: {', '.join(known)}."
        return f"{name} is not a setting of {error.title}.{near}"
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return f"{name}: {message}." if first["loc"] else f"{message}."
    given = json.dumps(first["input"], ensure_ascii=False, default=str)
    return f"{name} should be {first['msg'].removeprefix('Input should be ')}; {given} was given."
