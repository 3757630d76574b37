"""Scores and log-probabilities of all queries of a relation, in blocks of bounded memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from dualkg.inference.scoring import check_finite
from dualkg.models.base import Model
from dualkg.tables.lookup import Side

# Scores of a block: few enough for a CPU's cache, enough to keep a GPU busy.
MAX_SCORES = {"cpu": 2**22, "cuda": 2**26}
MIN_SCORES_FOR_NUMBA = 2**20  # for fewer scores it is not worth loading
# All scores of a relation of this many are kept, 256 MiB, if some of a query cost as much as all.
MAX_KEPT_SCORES = 2**26


def logsumexp(scores: Tensor, *, min_size: int = MIN_SCORES_FOR_NUMBA) -> Tensor:
    """`scores.logsumexp(-1)`; several times faster on a CPU with numba.

    Fewer scores than `min_size` are left to PyTorch.
    """
    is_float32_on_cpu = scores.dtype == torch.float32 and scores.device.type == "cpu"
    if is_float32_on_cpu and scores.numel() >= min_size:
        from dualkg.kernels import cpu

        if cpu.HAS_NUMBA:
            return cpu.logsumexp_rows(scores.contiguous())
    return scores.logsumexp(-1)


def warm_up_kernels() -> None:
    """Load numba, which takes a second."""
    logsumexp(torch.zeros(1, 1), min_size=1)


class RelationQueries:
    """All queries of a relation for one side.

    log p(answer | query) is a score minus the log-normalizer of the query. `cache`
    `(2, num_entities)` holds the log-normalizer of each query, and the largest log-probability of
    its answers; NaN and 0 before the query is scored. If the relation is `symmetric`, the scores
    are the mean of those of both sides, as in `scoring`. The scores of queries that were asked for
    some answers are kept where another answer would cost as much as all of them.
    """

    def __init__(
        self,
        model: Model,
        relation: int,
        target: Side,
        *,
        symmetric: bool = False,
        cache: Tensor | None = None,
        max_scores: int | None = None,
        on_block: Callable[[], None] | None = None,
    ) -> None:
        num_entities = model.shape.num_entities
        if cache is None:
            cache = torch.tensor([torch.nan, 0.0])[:, None].repeat(1, num_entities)
        if max_scores is None:
            max_scores = MAX_SCORES[model.device.type]
        self.model = model
        self.relation = relation
        self.target = target
        self.symmetric = symmetric
        self.cache = cache.to(model.device)
        self.normalizers, self.max_log_probabilities = self.cache
        self.max_scores = max_scores
        self._on_block = on_block  # after each block of the cache
        self.block_size = max(1, max_scores // num_entities)  # queries
        self._keeps = model.scores_all_at_once and num_entities**2 <= MAX_KEPT_SCORES
        self._kept: Tensor | None = None
        self._is_kept = torch.zeros(num_entities, dtype=torch.bool, device=model.device)

    def scores(self, given: Tensor) -> Tensor:
        """The scores of all entities as answers, `(batch, num_entities)`; fills the cache."""
        relations = torch.full_like(given, self.relation)
        if self.symmetric:
            scores = self.model.predict_tails(given, relations)
            scores = (scores + self.model.predict_heads(relations, given)) / 2
        elif self.target == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = logsumexp(scores)
        self.normalizers[given] = normalizers
        self.max_log_probabilities[given] = scores.amax(-1) - normalizers
        check_finite(normalizers)
        return scores

    def fill_cache(self, given: Tensor) -> None:
        """Score the queries that are not in the cache."""
        missing = given[self.normalizers[given].isnan()]
        for block in torch.split(missing, self.block_size):
            if len(block):
                self.scores(block)
                if self._on_block:
                    self._on_block()

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """The scores of some entities as answers, `(batch, num_answers)`."""
        if self._keeps:
            return self._kept_scores(given, answers)
        numbers_per_query = max(1, len(answers) * self.model.numbers_per_score)
        block_size = max(1, self.max_scores // numbers_per_query)

        blocks = []
        for block in torch.split(given, block_size):
            relations = torch.full_like(block, self.relation)
            sides: tuple[Side, ...] = ("tail", "head") if self.symmetric else (self.target,)
            of_sides = [
                self.model.predict_candidates(block, relations, answers, side) for side in sides
            ]
            blocks.append(of_sides[0] if len(of_sides) == 1 else (of_sides[0] + of_sides[1]) / 2)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _kept_scores(self, given: Tensor, answers: Tensor) -> Tensor:
        """`scores_of`, for which no query is scored twice."""
        for block in torch.split(given[~self._is_kept[given]], self.block_size):
            if not len(block):
                continue
            scores = self.scores(block)
            if self._kept is None:
                self._kept = scores.new_empty(scores.shape[1], scores.shape[1])
            self._kept[block] = scores
            self._is_kept[block] = True
            if self._on_block:
                self._on_block()
        assert self._kept is not None, "some query is given"
        return self._kept[given[:, None], answers]
