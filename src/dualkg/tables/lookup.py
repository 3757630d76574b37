"""Rows of a table by id, and the names of what has rows for entities."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Side = Literal["tail", "head"]
TABLE_NAMES = ("entities", "tails")  # parameters of a model that have a row for every entity


def lookup(table: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """Read rows of a table by id.

    An embedding look-up sums its gradient in a fixed order, which indexing does not. With `sparse`,
    the gradient of a table that is a parameter has only the rows that were read.
    """
    return F.embedding(ids, table, sparse=sparse and table.is_leaf)
