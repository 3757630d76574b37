"""Hashes, sample values and comparisons of recorded results; independent of the code base under
test.
"""

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN = Path(__file__).with_name("golden.json")
NUM_SAMPLES = 8
NUM_THREADS = 1
RTOL = 1e-3
ATOL = 1e-5  # between different machines


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Results are recorded with one thread: with more, sums are taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- the machine -------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What results may depend on beyond the code: processor, libraries and number of threads."""
    packages = ("torch", "numpy", "numba", "llvmlite", "scipy", "faiss-cpu", "safetensors")
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "packages": {name: _version(name) for name in packages},
        "threads": NUM_THREADS,
    }


def same_machine() -> bool:
    return machine() == golden()["machine"]


def _processor() -> str:
    """The model of the processor: its name, or on ARM the numbers of its implementer and part; and
    its features.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip().lower(), value.strip())
    named = ("model name", "cpu implementer", "cpu part", "cpu variant", "cpu revision")
    features = hashlib.sha256(found.get("features", found.get("flags", "")).encode()).hexdigest()[
        :12
    ]
    return ", ".join(
        [*(f"{key}: {found[key]}" for key in named if key in found), f"features: {features}"]
    )


def _version(name: str) -> str | None:
    if name == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- arrays ------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def summary(array: np.ndarray) -> dict[str, Any]:
    """The hash of an array's bytes, and a few of its values at equal distances."""
    array = np.ascontiguousarray(array)
    flat = array.reshape(-1)
    places = np.linspace(0, len(flat) - 1, min(NUM_SAMPLES, len(flat))).astype(int)
    return {
        "sha256": sha256(array.tobytes()),
        "samples": [_shortest(value) for value in flat[places]],
    }


def _shortest(value: Any) -> float | int:
    """The number with the fewest digits that is read back as the same value of its type."""
    return float(str(value)) if isinstance(value, np.floating) else int(value)


def ranks_summary(ranks: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: sha256(np.ascontiguousarray(ranks[name], dtype=np.int64).tobytes())
        for name in _BOUNDS
    }
    return {**found, "mrr": ranks["mrr"]}


_BOUNDS = ("optimistic", "pessimistic")


# -- comparisons -------------------------------------------------------------


def _differences(expected: Any, found: Any, where: str, *, exact: bool) -> Iterator[str]:
    """Where two nested structures differ; if not `exact`, only floats are compared, with a
    tolerance.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        if exact and expected.keys() != found.keys():
            yield f"{where}: keys {sorted(expected)} were expected, {sorted(found)} were found"
        for key in (key for key in expected if key in found):
            yield from _differences(expected[key], found[key], f"{where}.{key}", exact=exact)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            if exact:
                yield f"{where}: {len(expected)} items were expected, {len(found)} were found"
            return
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(one, other, f"{where}[{place}]", exact=exact)
    elif exact:
        if repr(expected) != repr(
            found
        ):  # which tells 0.0 from -0.0 and 1 from 1.0, but not NaN from NaN
            yield f"{where}: {expected!r} was expected, {found!r} was found"
    elif isinstance(expected, float) and isinstance(found, float) and not _close(expected, found):
        yield f"{where}: {expected!r} was expected, {found!r} was found"


def _close(expected: float, found: float) -> bool:
    return math.isclose(expected, found, rel_tol=RTOL, abs_tol=ATOL)


def check(expected: Any, found: Any, *, exact: bool = True) -> None:
    """Fail with the first differences between what was recorded and what was found.

    On another machine only floats are compared: hashes differ there, and so may the order of nearly
    equal answers.
    """
    found = json.loads(json.dumps(found))
    wrong = list(_differences(expected, found, "", exact=exact and same_machine()))
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong[:10])
