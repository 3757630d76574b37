"""How much of the best an index finds, how fast, and with how much effort it finds enough."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dualkg.answers.index.approximate import KINDS, FaissIndex, FaissKind, threads
from dualkg.answers.index.base import Index, Metric
from dualkg.answers.index.exact import ExactIndex
from dualkg.errors import RequestError

DEPTHS = (1, 10, 100)  # how many answers recall is measured at
TUNED = (10, 100)  # at these it must be enough: known answers are asked for too, and left out afterwards
MARGIN = 0.2  # of what recall may miss; effort is found on some questions, and must be enough for others
SECONDS = 1.0  # that a speed is measured for
PILOT = 50_000  # rows that tell whether products are better searched by distances


def recalls(index: Index, queries: Tensor, best: Tensor, depths: Sequence[int] = DEPTHS) -> dict[int, float]:
    """For each k, the share of the best k rows that an index has among its own k; `best` are ids, best first."""
    found = {}
    for k in depths:
        true = best[:, :k]
        ours = index.search(queries, k).ids
        found[k] = float((true[:, :, None] == ours[:, None, :]).any(-1).float().mean())
    return found


def queries_per_second(index: Index, queries: Tensor, *, k: int = 10, seconds: float | None = None) -> float:
    """Questions answered a second, one at a time and by one thread; the first one is not counted."""
    done, seconds = 0, SECONDS if seconds is None else seconds
    with threads(1):
        index.search(queries[:1], k)
        started = time.perf_counter()
        while done < 3 or time.perf_counter() - started < seconds:
            place = done % len(queries)
            index.search(queries[place : place + 1], k)
            done += 1
        return done / (time.perf_counter() - started)


def least_effort(index: FaissIndex, queries: Tensor, best: Tensor, *, recall: float) -> int | None:
    """The least effort that finds enough, or none: doubled until it does, then halved in between."""
    wanted = recall + MARGIN * (1 - recall)

    def enough(effort: int) -> bool:
        index.effort = effort
        return min(recalls(index, queries, best, TUNED).values()) >= wanted

    low, high = 0, 1
    while not enough(high):
        if high == index.most_effort:
            return None
        low, high = high, min(2 * high, index.most_effort)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def tuned(
    table: Tensor, metric: Metric, *, kind: FaissKind, queries: Tensor, best: Tensor, recall: float
) -> FaissIndex:
    """A FAISS index with the least effort that finds enough of the best of these queries.

    For inner products, FAISS searches for them, or for distances in the reduced table: whichever takes less effort
    for some of the rows.
    """
    if not 0 < recall < 1:
        raise RequestError(f"A recall is above 0 and below 1; {recall:g} was asked for. For 95 %, say 0.95.")
    if kind not in KINDS:
        raise RequestError(f"FAISS has the indexes {', '.join(KINDS)}; '{kind}' was asked for.")
    reduced = metric == "inner product" and _better_reduced(table, kind, queries, recall)
    index = FaissIndex.build(table, metric, kind=kind, reduced=reduced)
    effort = least_effort(index, queries, best, recall=recall)
    if effort is None:
        reached = min(recalls(index, queries, best, TUNED).values())
        raise RequestError(
            f"A recall of {recall:g} with some room was asked for; the index {kind} reaches {reached:.3f} with all its "
            f"effort. Ask for less, or for another kind."
        )
    index.effort = effort
    return index


def _better_reduced(table: Tensor, kind: FaissKind, queries: Tensor, recall: float) -> bool:
    chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:PILOT]
    rows = table[chosen]
    best = ExactIndex.build(rows).search(queries, max(TUNED)).ids
    efforts = [
        least_effort(FaissIndex.build(rows, kind=kind, reduced=reduced), queries, best, recall=recall)
        for reduced in (False, True)
    ]
    plain, reduced = (float("inf") if effort is None else effort for effort in efforts)
    return reduced < plain
