"""Dropout of the embeddings that queries are scored with: before the relation is applied, and after."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64
from dualkg.losses.grouping import QueryGroups
from dualkg.models.base import Factors, Model


class Dropout:
    """Sets a share of each query's vector to zero while it is scored, and scales up the rest.

    The mask follows from the seed, the entities of the triple and its position in the batch, which changes from epoch
    to epoch: it is the same on every device and for every engine, and a resumed run needs no random state. A triple
    has as many masks as a batch has positions. A query with several answers has the mask of the first.
    """

    DIGITS = 24  # binary digits in which a random number is compared with the share

    def __init__(self, share: float, *, seed: int = 0) -> None:
        self.share = share
        self.seed = seed

    def mask(self, f: Factors, like: Tensor, *, backward: bool = False, groups: QueryGroups | None = None) -> Tensor:
        """Factors 0 or 1 / (1 − share) for vectors `like` these, `(batch, width)`; `backward` for head prediction.

        With `groups`, the vectors are those of queries, `(queries, width)`.
        """
        positions = torch.arange(len(f.heads), device=like.device) if groups is None else groups.first
        start = hash_columns(2 * self.seed + backward, positions, f.heads[positions], f.tails[positions])
        drawn = splitmix64(start[:, None] + torch.arange(like.shape[1], device=like.device) * STEP)
        kept: Tensor = shift_right(drawn, 64 - self.DIGITS) >= round(self.share * 2**self.DIGITS)
        return kept.to(like.dtype) / (1 - self.share)

    def __call__(
        self, vectors: Tensor, f: Factors, *, backward: bool = False, groups: QueryGroups | None = None
    ) -> Tensor:
        """The vectors of all triples, `(batch, width)`, with some coordinates dropped."""
        mask = self.mask(f, vectors, backward=backward, groups=groups)
        return vectors * (mask if groups is None else mask[groups.rows])


class Dropouts:
    """What a loss drops: coordinates of mapped vectors, and of the given entities before they are mapped."""

    def __init__(self, *, mapped: float = 0.0, given: float = 0.0, seed: int = 0) -> None:
        self.mapped = Dropout(mapped, seed=seed) if mapped else None
        self.given = Dropout(given, seed=-1 - seed) if given else None  # a seed that no mapped vector is dropped by

    @classmethod
    def of(cls, model: Model, *, dropout: float, head_dropout: float, seed: int) -> Dropouts:
        """The dropouts of a loss, refused for models whose parameters are not coordinates."""
        for key, share in {"dropout": dropout, "head_dropout": head_dropout}.items():
            if share and not model.embedding.euclidean:
                raise RequestError(
                    f"Dropout sets coordinates to zero, and the numbers of {type(model).__name__} are not coordinates "
                    f"of a vector space. Set loss.{key} to 0."
                )
        return cls(mapped=dropout, given=head_dropout, seed=seed)

    def __call__(self, f: Factors, *, both: bool = False, grouped_by_query: bool = False) -> Factors:
        """The same factors with dropout for tail prediction; with `both`, for head prediction too.

        With `grouped_by_query`, neighbours that share head and relation share the mask.
        """
        if self.mapped is None and self.given is None:
            return f
        found = Factors(f.model, f.heads, f.relations, f.tails)
        groups = QueryGroups.of(f.heads, f.relations) if grouped_by_query else None
        if self.given is not None:
            found.head = self.given(f.head, f, groups=groups)
        mapped = f.mapped_head if self.given is None else found.mapped_head  # f's may have been computed already
        found.mapped_head = mapped if self.mapped is None else self.mapped(mapped, f, groups=groups)
        if both:
            if self.given is not None:
                found.tail = self.given(f.tail, f, backward=True)
            mapped = f.mapped_tail if self.given is None else found.mapped_tail
            found.mapped_tail = mapped if self.mapped is None else self.mapped(mapped, f, backward=True)
        return found
