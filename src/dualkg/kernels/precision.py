"""Matrix products of float32 in fewer digits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """With "tf32", products of float32 on a GPU are for a while in TF32; with anything else, as they were."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if precision == "tf32":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
