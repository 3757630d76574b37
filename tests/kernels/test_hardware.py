"""Requirements of Triton kernels, and the error for a missing one."""

from types import ModuleType

import pytest
import torch

import dualkg as kg
from dualkg.kernels import hardware
from dualkg.training import engines


@pytest.fixture(autouse=True)
def _no_cached_result():
    hardware.gpu_kernels_unavailable.cache_clear()
    yield
    hardware.gpu_kernels_unavailable.cache_clear()


def pretend(monkeypatch, *, triton: bool, compiler: bool, headers: bool, tmp_path) -> None:
    monkeypatch.setattr(hardware, "find_spec", lambda name: ModuleType(name) if triton else None)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/bin/{name}" if compiler else None)
    monkeypatch.setattr(hardware.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if headers:
        (tmp_path / "Python.h").touch()


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (
            {"triton": False, "compiler": True, "headers": True},
            "needs Triton, which is not installed",
        ),
        ({"triton": True, "compiler": False, "headers": True}, "neither gcc nor clang is here"),
        ({"triton": True, "compiler": True, "headers": False}, "needs the headers of Python"),
    ],
)
def test_the_missing_requirement_is_named(monkeypatch, tmp_path, there, sentence):
    pretend(monkeypatch, **there, tmp_path=tmp_path)
    assert sentence in hardware.gpu_kernels_unavailable()


def test_gpu_kernels_are_available_if_nothing_is_missing(monkeypatch, tmp_path):
    pretend(monkeypatch, triton=True, compiler=True, headers=True, tmp_path=tmp_path)
    assert hardware.gpu_kernels_unavailable() is None


def test_bf16_on_a_gpu_is_refused_with_the_reason(monkeypatch, small_graph):
    """With a model that reports to be on a GPU."""

    class OnGPU(kg.ComplEx):
        @property
        def device(self):
            return engines.torch.device("cuda")

    monkeypatch.setattr(
        engines, "gpu_kernels_unavailable", lambda: "needs Triton, which is not installed"
    )
    model = OnGPU(small_graph.shape, dim=2)
    assert engines.choose_engine(kg.Recipe(), model, kg.DURA(0.1)).step == "fused"
    with pytest.raises(kg.RequestError, match="bf16 on a GPU needs Triton, which is not installed"):
        engines.choose_engine(
            kg.Recipe().with_changes({"training.precision": "bf16"}), model, kg.DURA(0.1)
        )


def test_matmul_precision_is_restored():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with hardware.matmul_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before
