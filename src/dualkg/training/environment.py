"""What a run was made with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("dualkg", "torch", "numpy", "pyarrow", "safetensors", "pydantic")


def environment(device: torch.device, *, fingerprint: str, engine: str | None = None) -> dict[str, object]:
    """Versions, commit, device, threads, the engine that was chosen, and the hash of the data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": describe_device(device),
        "engine": engine,
        "data": fingerprint,
    }


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    if name == "torch":  # which also names the build, as in 2.13.0+cpu
        return str(torch.__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this source tree, marked where files differ from it; None outside of one.

    `DUALKG_COMMIT` says it where git cannot, as in a copy of the tree.
    """
    if said := os.environ.get("DUALKG_COMMIT"):
        return said
    here = Path(__file__).parent
    if "site-packages" in here.parts or sys.platform == "win32":
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
