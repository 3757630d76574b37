"""Tables of one process, which has the rows of all entities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualkg.kernels.scores import RankTargets
from dualkg.tables.base import CountBetter, Draw, EntityScores, EntityTables
from dualkg.tables.lookup import Side

if TYPE_CHECKING:
    from dualkg.tables.bf16 import LocalBf16Tables, LocalSampledTables
    from dualkg.tables.gradients import LocalGradientTables
    from dualkg.tables.row_gradients import LocalRowGradientTables


def cross_entropy(
    scores: Tensor, targets: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
) -> Tensor:
    """Mean of −log softmax(scores)[target], weighted by w(target).

    It is divided by the summed weights of the batch. With `smoothing`, the weight is the target's
    too, where PyTorch would weight every candidate by its own.
    """
    if not smoothing:
        return F.cross_entropy(scores, targets, weight=weights)
    losses = F.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    return weighted_mean(losses, weights, targets)


def weighted_mean(losses: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """The mean of the losses of targets, `(batch,)`, with the weights of all entities."""
    if weights is None:
        return losses.mean()
    chosen = weights[targets]
    return (chosen * losses).sum() / chosen.sum()


def left_out(num_columns: int, rows: Tensor, columns: Tensor, *, but: Tensor) -> Tensor:
    """Which of `(batch, num_columns)` scores are left out: some, but not `but` of each row."""
    chosen = torch.zeros(len(but), num_columns, dtype=torch.bool, device=but.device)
    # A CUDA graph takes no values from the host.
    truth = torch.ones_like(chosen[:1, 0])
    chosen.index_put_((rows, columns), truth)
    all_rows = torch.arange(len(but), device=but.device)
    return chosen.index_put_((all_rows, but), ~truth)


class LocalScores(EntityScores):
    """Scores of all entities, `(batch, num_entities)`."""

    def all_entities(self) -> Tensor:
        return self.values

    def cross_entropy(
        self, answers: Tensor, weights: Tensor | None = None, *, smoothing: float = 0.0
    ) -> Tensor:
        return cross_entropy(self.values, answers, weights, smoothing=smoothing)

    def logsumexp(self) -> Tensor:
        return self.values.logsumexp(-1)

    def mean(self) -> Tensor:
        return self.values.mean(-1)

    def weighted_sum(self, rows: Tensor, entities: Tensor, weights: Tensor) -> Tensor:
        positions = rows * self.values.shape[1] + entities
        return (weights * self.values.flatten().gather(0, positions)).sum()

    def of(self, entities: Tensor) -> Tensor:
        return self.values.gather(1, entities[:, None])[:, 0]

    def without(self, rows: Tensor, entities: Tensor, *, but: Tensor) -> LocalScores:
        is_left_out = left_out(self.values.shape[1], rows, entities, but=but)
        return LocalScores(self.values.masked_fill(is_left_out, -torch.inf))


class LocalTables(EntityTables):
    """All rows, in the order of the entity ids."""

    @property
    def num_rows(self) -> int:
        return self.num_entities

    @property
    def has_all_entities(self) -> bool:
        return True

    def draw(self, width: int, draw: Draw) -> Tensor:
        table = torch.zeros(self.num_entities, width, device=self.device)
        if not self.initialize:
            return table
        if self.device is None:
            return draw(table)
        for ids, block in self._drawn_blocks(width, draw):
            table[ids.to(table.device)] = block.to(table.device)
        return table

    def take(self, table: Tensor) -> Tensor:
        return table

    @property
    def fetches_rows(self) -> bool:
        return False

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.own_rows(table, ids)

    def positions(self, ids: Tensor) -> Tensor:
        return ids

    def scores(self, values: Tensor) -> LocalScores:
        return LocalScores(values)

    def count_better(
        self,
        scores_of: Callable[[slice | None], Tensor],
        known: Tensor,
        targets: RankTargets,
        *,
        count: CountBetter,
    ) -> Tensor:
        return count(scores_of(None), known, targets)

    def gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter], *, squared: bool, bf16: bool
    ) -> LocalGradientTables:
        from dualkg.tables.gradients import LocalGradientTables

        return LocalGradientTables(parameters, squared=squared, bf16=bf16)

    def row_gradient_tables(
        self, parameters: Mapping[Side, nn.Parameter]
    ) -> LocalRowGradientTables:
        from dualkg.tables.row_gradients import LocalRowGradientTables

        return LocalRowGradientTables(parameters, self.positions)

    def bf16_tables(
        self, parameters: Mapping[str, nn.Parameter], *, sums: Mapping[str, Tensor], **options: Any
    ) -> LocalBf16Tables:
        from dualkg.tables.bf16 import LocalBf16Tables  # It imports Triton.

        return LocalBf16Tables(parameters, sums=sums, **options)

    def sampled_tables(self) -> LocalSampledTables:
        from dualkg.tables.bf16 import LocalSampledTables  # It imports Triton.

        return LocalSampledTables(self.positions)

    def released(self, model: nn.Module) -> None:
        """Nothing: the tables are on the device that computes."""

    def complete_updates(self) -> None:
        """Nothing: a step ends with its updates."""

    def synchronize(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing: there is one process."""
