"""Checkpoints: everything that training needs to go on, in one file that is whole or not there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualkg.errors import DivergedError, RequestError
from dualkg.files import replacing


@dataclass
class Progress:
    """Where training stands: `epoch` epochs and `step` steps of the next are done."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    best_mrr: float = -1.0
    best_epoch: int = 0
    since_best: int = 0
    stopped: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


def save_tensors(groups: dict[str, dict[str, Tensor]], path: Path, *, about: dict[str, Any]) -> None:
    """Write named groups of tensors and a JSON note, atomically. Tables with NaN or infinity are refused."""
    tensors = {
        f"{group}/{name}": value.detach().cpu().contiguous()
        for group, members in groups.items()
        for name, value in members.items()
    }
    for name, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise DivergedError(f"{name} holds NaN or infinity, so it was not saved; {path.name} is as it was.")
    with replacing(path) as fresh:
        save_file(tensors, fresh, metadata={"about": json.dumps(about)})


def load_tensors(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read what `save_tensors` wrote."""
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                group, _, name = key.partition("/")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as a file of weights: {error}.") from None
    return groups, about


def progress_from(about: dict[str, Any]) -> Progress:
    return Progress(**about["progress"])


def about_progress(progress: Progress) -> dict[str, Any]:
    return {"progress": asdict(progress)}
