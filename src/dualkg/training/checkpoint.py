"""Checkpoints: everything that training needs to go on, in one file that is whole or not there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dualkg.errors import DivergedError, DualkgError, RequestError
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
        try:
            save_file(tensors, fresh, metadata={"about": json.dumps(about)})
        except SafetensorError as error:
            raise DualkgError(f"{path} could not be written: {error}.") from None


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


def load_weights(model: nn.Module, tensors: dict[str, Any], *, source: Path) -> None:
    """Fill a model; weights that are not this model's are refused in a sentence."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        raise RequestError(f"{source} does not fit the recipe: tables {expected} were expected, {found} came.")
    model.load_state_dict(tensors)
