"""The problems of many newcomers at once, for a GPU: each has its own objective, and one product serves them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualkg.answers.newcomers.problem import Bystander, Role, bystanders_of, roles_in, row_of
from dualkg.answers.newcomers.surroundings import Surroundings


@dataclass(frozen=True, eq=False)
class Crowd:
    """Newcomers of which none has a triple with another one; `bystanding` and `num_triples` are `(num_newcomers,)`."""

    around: Surroundings
    newcomers: Tensor
    places: Tensor  # of every entity among the newcomers
    roles: tuple[Role, ...]
    bystanders: tuple[Bystander, ...]
    bystanding: Tensor
    num_triples: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, newcomers: Tensor, triples: Tensor, placed: Tensor, around: Surroundings) -> Crowd:
        """Of newcomers by those of the triples `(num_triples, 3)` that join one of them to an entity with a row."""
        places = torch.full_like(placed, -1, dtype=torch.long)
        places[newcomers] = torch.arange(len(newcomers), device=places.device)
        heads, tails = triples[:, 0], triples[:, 2]
        as_head = (places[heads] >= 0) & placed[tails] & (heads != tails)
        as_tail = (places[tails] >= 0) & placed[heads] & (heads != tails)
        owners = torch.cat([heads[as_head], tails[as_tail], heads[(heads == tails) & placed[heads]]])
        counts = torch.bincount(owners, minlength=len(placed))[newcomers].to(around.newcomers)
        usual = around.usual_triples
        return cls(
            around=around,
            newcomers=newcomers,
            places=places,
            roles=roles_in(triples, as_head, as_tail, around, without=around.num_known),
            bystanders=bystanders_of(around.num_known, around),
            bystanding=(counts / usual).clamp(max=1.0) if usual else torch.ones_like(counts),
            num_triples=counts,
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """The objective of each by its rows `(num_newcomers, num_rows, width)`, over the number of its triples."""
        found = torch.zeros_like(self.num_triples)
        for role in self.roles:
            at = self.places[role.owners]
            losses = role.losses(row_of(rows, role.side)[at], self.around)
            found = found.index_add(0, at[role.groups], losses)
        for one in self.bystanders:
            found = found + self.bystanding * one.loss(row_of(rows, one.side))
        return found / self.num_triples.clamp(min=1)

    def slopes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives, and the gradient of each with respect to its own rows."""
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            values = self(rows)
            (gradient,) = torch.autograd.grad(values.sum(), rows)
        return values.detach(), gradient

    def start(self) -> Tensor:
        """Rows to begin with, as `Problem.start` has them."""
        rows = self.around.newcomers.new_zeros(len(self.newcomers), *self.around.newcomers.shape[1:])
        counts = rows.new_zeros(*rows.shape[:2], 1)
        for role in self.roles:
            at = self.places[role.owners][role.groups]
            row_of(rows, role.side).index_add_(0, at, role.vectors)
            row_of(counts, role.side).index_add_(0, at, torch.ones_like(role.vectors[:, :1]))
        return rows / counts.clamp(min=1)
