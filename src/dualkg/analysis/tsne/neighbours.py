"""The nearest others of every point, exactly, a block of points at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 2**25  # distances, or coordinates of neighbours, that are held at once
GROUP = 16  # distances that are first looked at by their least


class Neighbours(NamedTuple):
    """Ids `(n, k)`, and the squares of their Euclidean distances."""

    ids: Tensor
    squares: Tensor


def nearest(points: Tensor, k: int) -> Neighbours:
    """The k nearest others of each of the points `(n, width)`, in no order; k is below n.

    They are chosen by ‖y‖² − 2⟨x, y⟩, one matrix product, and their distances are then taken from the differences, so
    that a point and its copy are at distance 0.
    """
    num, width = points.shape
    num_groups = math.ceil(num / GROUP)
    table = points.new_zeros(num_groups * GROUP, width + 1)
    table[:num, :-1] = points
    table[:, -1] = math.inf  # of rows that only fill up the last groups: never near
    table[:num, -1] = points.square().sum(1)
    found = [_of_block(points, table, ids, k) for ids in _blocks(points, k)]
    return Neighbours(torch.cat([ids for ids, _ in found]), torch.cat([squares for _, squares in found]))


def _of_block(points: Tensor, table: Tensor, own: Tensor, k: int) -> Neighbours:
    """Of the points `own`; a row of the table is y and ‖y‖², and is multiplied by −2x and 1."""
    block = points[own]
    distances = torch.cat([-2 * block, block.new_ones(len(own), 1)], 1) @ table.T
    distances[torch.arange(len(own), device=own.device), own] = math.inf
    ids = _least(distances, k)
    others = points.index_select(0, ids.flatten()).view(*ids.shape, -1)
    return Neighbours(ids, others.sub_(block[:, None]).square_().sum(2))


def _least(values: Tensor, k: int) -> Tensor:
    """Columns of the k least of each row, `(rows, k)`.

    Each is in one of the k groups whose least value is least: were it not, k others would be as small. A group is
    every so manieth column, for then the least of all groups are found by passing along the rows.
    """
    num_groups = values.shape[1] // GROUP
    if num_groups <= k:
        return values.topk(k, 1, largest=False, sorted=False).indices
    groups = values.view(-1, GROUP, num_groups).amin(1).topk(k, 1, largest=False, sorted=False).indices
    columns = (groups[:, None] + num_groups * torch.arange(GROUP, device=values.device)[:, None]).flatten(1)
    return columns.gather(1, values.gather(1, columns).topk(k, 1, largest=False, sorted=False).indices)


def _blocks(points: Tensor, k: int) -> Iterator[Tensor]:
    num, width = points.shape
    size = max(1, NUMBERS // max(num, k * width))
    for first in range(0, num, size):
        yield torch.arange(first, min(first + size, num), device=points.device)
