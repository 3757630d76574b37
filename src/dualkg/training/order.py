"""The order in which an epoch sees its triples: the same on every device, made where it is used."""

from __future__ import annotations

import torch
from torch import Tensor

from dualkg.kernels.mixing import STEP, mixed


def shuffled(size: int, *, seed: int, epoch: int, device: torch.device) -> Tensor:
    """The numbers below `size` in an order that depends on seed and epoch alone, `(size,)`.

    Whole numbers are mixed and sorted, so the order needs no generator whose numbers differ between devices.
    """
    start = int(mixed(mixed(torch.tensor(seed) * STEP) + torch.tensor(epoch) * STEP))
    return torch.argsort(mixed(torch.arange(size, device=device) * STEP + start))
