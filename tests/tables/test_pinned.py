"""Memory of tables that a GPU reads and writes: what is pinned, shared and given back."""

import ctypes
import gc

import pytest
import torch

from dualkg.tables import pinned

GPU = torch.device("cuda")


class FakeDriver:
    """Keeps the addresses that are pinned, and refuses some."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.addresses: set[int] = set()
        self.cuMemHostRegister_v2 = self.register
        self.cuMemHostUnregister = self.unregister

    def register(self, address: ctypes.c_void_p, num_bytes: ctypes.c_size_t, flags: int) -> int:
        assert address.value not in self.addresses
        assert flags == 3
        if not self.status:
            self.addresses.add(address.value)
            self.num_bytes = num_bytes.value
        return self.status

    def unregister(self, address: ctypes.c_void_p) -> None:
        self.addresses.remove(address.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(pinned, "_driver", lambda: fake)
    monkeypatch.setattr(pinned, "gpu_kernels_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return fake


def test_steps_on_one_table_share_its_pinned_memory(driver):
    table = torch.nn.Parameter(torch.zeros(7, 3))
    first = pinned.pin(table, GPU)
    second = pinned.pin(table.detach(), GPU)
    assert first is second
    assert driver.addresses == {table.data_ptr()}
    assert driver.num_bytes == 7 * 3 * 4

    del first
    gc.collect()
    assert driver.addresses == {table.data_ptr()}
    del second
    gc.collect()
    assert not driver.addresses
    assert pinned.pin(table, GPU) is not None


def test_memory_that_cannot_be_pinned_is_left_to_threads(driver, caplog):
    driver.status = 2
    with caplog.at_level("INFO", logger="dualkg"):
        assert pinned.pin(torch.zeros(2**18, 4), GPU) is None
    assert "4 MiB of host memory could not be pinned (CUDA error 2)" in caplog.text


@pytest.mark.parametrize(
    ("table", "device"), [(torch.zeros(0, 3), GPU), (torch.zeros(2, 3), torch.device("cpu"))]
)
def test_nothing_is_pinned_without_rows_or_without_a_gpu(driver, table, device):
    assert pinned.pin(table, device) is None
    assert not driver.addresses


def test_nothing_is_pinned_where_kernels_cannot_be_compiled(driver, monkeypatch):
    monkeypatch.setattr(pinned, "gpu_kernels_unavailable", lambda: "needs Triton")
    assert pinned.pin(torch.zeros(2, 3), GPU) is None
