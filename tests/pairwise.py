"""Pairwise cover of parametrized tests: each pair of values in the ordinary run, the full product in the slow one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """All cases, in order; those that are not needed to cover each pair of values are marked slow."""
    cases = [tuple(case) for case in cases]
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in cases]
