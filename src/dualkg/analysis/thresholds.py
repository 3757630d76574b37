"""λ-sparsity of tables: the share of entries that are smaller than λ, and the λ of a share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from torch import Tensor

from dualkg.errors import RequestError


def sparsity(tables: Iterable[Tensor], threshold: float) -> float:
    """The paper's s_λ: the share of all entries whose magnitude is below `threshold`."""
    tables = list(tables)
    return sum(int((table.abs() < threshold).sum()) for table in tables) / num_entries(tables)


def find_thresholds(tables: Iterable[Tensor], shares: Sequence[float]) -> list[float]:
    """The λ of each share wanted, one for all tables together.

    With N entries and k = ⌊share · N⌋, λ is the magnitude that k others precede in order. So exactly k entries lie
    below it; fewer where entries of the same magnitude as λ are among the k, which no threshold can tell apart.
    """
    tables = list(tables)
    # A share is meant as it is written: 0.07 of 100 is 7, though 0.07 * 100 is a little more and 0.29 * 100 less.
    places = [int(Fraction(str(float(check_share(share)))) * num_entries(tables)) for share in shares]
    magnitudes = np.concatenate([table.detach().abs().cpu().numpy().ravel() for table in tables])
    magnitudes.partition(sorted(set(places)))
    return [float(magnitudes[place]) for place in places]


def check_share(share: float) -> float:
    """The share, where it is one; at 1 nothing would be left."""
    if not 0 <= share < 1:
        raise RequestError(f"A share of zeros is at least 0 and below 1; {share:g} came. For 70 %, say 0.7.")
    return share


def num_entries(tables: Iterable[Tensor]) -> int:
    return sum(table.numel() for table in tables)
