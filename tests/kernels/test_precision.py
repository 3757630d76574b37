"""Products in TF32 for a while."""

from __future__ import annotations

import torch

from dualkg.kernels.reference import products_in


def test_precision_is_given_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with products_in("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before
