"""The exact index: every row is looked at, a block at a time, from memory or from a file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualkg.answers.index.base import Found, Index, Metric
from dualkg.answers.index.tables import Form, StoredTable
from dualkg.evaluation.ranking import full_precision

BLOCK_ELEMENTS = 2**22  # scores, and numbers of rows that are decoded, held at once: 16 MB of each
FILE = "table.safetensors"


class ExactIndex(Index):
    """Compares a query with every row of a table, which is searched in the form in which it is kept.

    Equal scores stand in the order of rows, whatever the blocks.
    """

    kind = "exact"

    def __init__(self, table: StoredTable, metric: Metric = "inner product") -> None:
        super().__init__(metric, table.shape)
        self.table = table

    @classmethod
    def build(cls, table: Tensor, metric: Metric = "inner product", *, form: Form = "float32") -> ExactIndex:
        """Keep a table in a form; one of float32 is not copied, so it may be a memory-mapped one."""
        return cls(StoredTable.of(table, form), metric)

    @property
    def choices(self) -> dict[str, Any]:
        return {"form": self.table.form}

    def save(self, folder: Path) -> None:
        save_file({name: part.contiguous() for name, part in self.table.parts.items()}, folder / FILE)

    @classmethod
    def load(
        cls, folder: Path, metric: Metric, shape: tuple[int, int], *, form: Form, in_memory: bool = True
    ) -> ExactIndex:
        """Read what `save` wrote. Unless `in_memory`, the file is memory-mapped: of it, only blocks are ever held."""
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        table = StoredTable(form, shape, {name: part.clone() for name, part in parts.items()} if in_memory else parts)
        table.check()
        return cls(table, metric)

    @cached_property
    def _norms(self) -> Tensor:
        """‖x‖² of every row."""
        size = max(1, BLOCK_ELEMENTS // self.shape[1])
        return torch.cat([block.square().sum(1) for _, block in self.table.blocks(size)])

    @torch.no_grad()
    def _search(self, queries: Tensor, k: int) -> Found:
        best = Found(queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64))
        decoded = 1 if self.table.form == "float32" else self.shape[1]
        size = max(1, BLOCK_ELEMENTS // max(len(queries), decoded))
        with full_precision():
            for start, block in self.table.blocks(size):
                scores = queries @ block.T
                if self.metric == "euclidean":
                    scores = scores.mul_(2).sub_(self._norms[start : start + len(block)])
                here = best_of(scores, k)
                best = _merged(best, Found(here.scores, here.ids + start), k)
        if self.metric == "euclidean":
            best = best._replace(scores=best.scores - queries.square().sum(1, keepdim=True))
        return best


def best_of(scores: Tensor, k: int) -> Found:
    """The best `k` of each row of scores, or all where there are fewer; of equal ones, those that stand first."""
    k = min(k, scores.shape[1])
    values, places = scores.topk(k)
    least = values[:, -1:]
    left_out = (scores == least).sum(1) > (values == least).sum(1)  # of those that tie with the last, topk takes any
    for row in left_out.nonzero()[:, 0].tolist():
        places[row] = scores[row].argsort(descending=True, stable=True)[:k]
    places = places.sort(1).values
    order = (values := scores.gather(1, places)).argsort(dim=1, descending=True, stable=True)
    return Found(values.gather(1, order), places.gather(1, order))


def _merged(one: Found, other: Found, k: int) -> Found:
    """The best `k` of two findings; rows of the first stand before those of the second."""
    scores, ids = torch.cat([one.scores, other.scores], 1), torch.cat([one.ids, other.ids], 1)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return Found(scores.gather(1, order), ids.gather(1, order))
