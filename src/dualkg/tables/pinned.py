"""Memory of tables on the host that a GPU reads and writes itself."""

from __future__ import annotations

import ctypes
from functools import cache
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from dualkg.kernels.hardware import gpu_kernels_unavailable
from dualkg.logs import logger

# Flags of cuMemHostRegister: for all contexts, and mapped into the memory of the device.
PORTABLE = 1
MAPPED = 2


class PinnedTable:
    """A table whose memory is pinned, and mapped for the GPU, until this object is dropped."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.detach()
        # The end of the process unpins everything.
        finalize(self, _unpin, self.table).atexit = False


_pinned: WeakValueDictionary[int, PinnedTable] = WeakValueDictionary()


def pin(table: Tensor, device: torch.device) -> PinnedTable | None:
    """Pin the memory of a table for a GPU; None where that cannot be done.

    Several steps on one table, as of a training that goes on, share what is pinned.
    """
    if device.type != "cuda" or gpu_kernels_unavailable() or not table.numel():
        return None
    address = table.data_ptr()
    known = _pinned.get(address)
    if known is not None and known.table.nbytes == table.nbytes:
        return known
    torch.cuda.synchronize(device)  # It makes the context of the device, if there is none yet.
    status = _driver().cuMemHostRegister_v2(
        ctypes.c_void_p(address), ctypes.c_size_t(table.nbytes), PORTABLE | MAPPED
    )
    if status:
        logger.info(
            "%d MiB of host memory could not be pinned (CUDA error %d): threads copy the rows, "
            "which takes longer.",
            table.nbytes >> 20,
            status,
        )
        return None
    pinned = PinnedTable(table)
    _pinned[address] = pinned
    return pinned


def _unpin(table: Tensor) -> None:
    # What the GPU was asked to do with the table is done before.
    torch.cuda.synchronize()
    _driver().cuMemHostUnregister(ctypes.c_void_p(table.data_ptr()))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
