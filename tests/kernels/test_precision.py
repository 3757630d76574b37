"""Products in TF32 for a while."""

from __future__ import annotations

import torch

from dualkg.kernels.hardware import matmul_precision


def test_precision_is_given_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with matmul_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before
