"""Parametrized tests of which the ordinary run has some cases, and the slow one has all."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """All cases, in order; those that are not needed to cover each pair of values are marked
    slow.
    """
    cases = [tuple(case) for case in cases]
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [
        case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in cases
    ]


def every_nth(n: int, first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs of two lists of values; the ordinary run has every n-th pair, and each value if the
    lists are long.
    """
    cells = product(enumerate(first), enumerate(second))
    return [
        pytest.param(a, b, marks=[pytest.mark.slow] * ((i + j) % n > 0)) for (i, a), (j, b) in cells
    ]
