"""What a run was made with: versions, commit, machine and device."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("dualkg", "torch", "numpy", "pyarrow", "safetensors", "pydantic")


def environment(
    device: torch.device, *, fingerprint: str, engine: str | None = None
) -> dict[str, object]:
    """What a run was made with: versions, commit, device, threads, engine, hash of the data."""
    packages = {name: installed_version(name) for name in PACKAGES}
    # The release has the same number for a CPU and for each version of CUDA.
    packages["torch"] = str(torch.__version__)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": packages,
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
    """The name of the processor from Linux, or else from Python."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        name = re.search(r"^model name.*?:(.*)", path.read_text(), re.IGNORECASE | re.MULTILINE)
        if name:
            return name[1].strip()
    return platform.processor() or platform.machine()


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this tree; the variable `DUALKG_COMMIT` names it for a copy."""
    return os.environ.get("DUALKG_COMMIT") or commit_of_checkout()


def commit_of_checkout() -> str | None:
    """The commit that git finds for this tree, `-dirty` if files differ; None outside git."""
    folder = Path(__file__).parent
    if "site-packages" in folder.parts:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        git = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None
