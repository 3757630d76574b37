"""The interface of losses: validated settings, and `bind`, which makes the function that training
minimizes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from dualkg.data.graph import Graph, Triples
from dualkg.errors import RequestError
from dualkg.models.base import Factors, Model
from dualkg.registry import Registry
from dualkg.settings import Settings

__all__ = ["Loss"]

BoundLoss = Callable[[Model, Factors], Tensor]


class Loss(Settings, ABC):
    """Settings of a loss, validated and immutable.

    A loss of your own subclasses this, declares its settings as annotated fields and implements
    `bind`.

    Examples:
        >>> kg.OneVsAll(label_smoothing=2)
        Traceback (most recent call last):
        ...
        dualkg.errors.InvalidValue: loss.label_smoothing should be less than 1; 2 was given.
    """

    table: ClassVar[str] = "loss"
    # What an example of a batch is; a query has one of its tails.
    examples: ClassVar[Literal["triples", "queries"]] = "triples"
    # Values that automatic tuning tries, most important setting first.
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {}

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

    def check_model(self, model: Model) -> None:
        """Refuse a model that this loss cannot train.

        Only the triples of a batch are removed from the graph that a path network reads. Other
        answers of a query would be read from there. A loss of your own says this itself.
        """
        if model.reads_graph and type(self).__module__.startswith("dualkg."):
            raise RequestError(
                f"{type(self).__name__} would show {type(model).__name__} answers in the graph, "
                "from which only the triples of a batch are removed. Train it with OneVsAll."
            )

    @property
    def predicts_relations(self) -> bool:
        """Whether each triple is also scored with every relation."""
        return False

    def entity_weights(self, train: Triples, num_entities: int) -> Tensor | None:
        """The weight of each entity as an answer, `(num_entities,)`; None if all are equal."""
        return None

    def num_candidates(self, batch_size: int) -> int | None:
        """How many entities each triple is scored against, or None: all of them."""
        return None

    @property
    def fast_step_obstacle(self) -> str | None:
        """The setting that the fast step does not support, or None. A loss of your own is trained
        by autograd.
        """
        return f"loss.name = '{type(self).__name__}'"

    def has_fixed_shapes(self, *, reciprocal: bool) -> bool:
        """Whether tensors have the same shapes for all batches of one size, as a CUDA graph
        needs.
        """
        return False

    def rows_per_batch(self, model: Model, batch_size: int) -> int | None:
        """The most rows of an entity table that a batch reads, or None: all of them."""
        return None


LOSSES: Registry[type[Loss]] = Registry("loss", group="dualkg.losses")
"""Losses by name, as recipes write them: `LOSSES["KvsAll"]` is `kg.KvsAll`."""
