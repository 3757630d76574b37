"""A search kept beside its list, so that one that was stopped or killed goes on."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dualkg.answers.beliefs.calibration import Calibration
from dualkg.answers.completion.narrowing import Narrowing
from dualkg.answers.completion.pool import Found, Pool
from dualkg.answers.completion.search import State
from dualkg.errors import RequestError
from dualkg.files import replacing
from dualkg.models.base import Model

SECONDS = 5.0  # between two savings: what a kill may cost


def choices_of(model: Model, narrowing: Narrowing, pool: Pool) -> dict[str, Any]:
    """All that a list depends on; what is large by its digest."""
    graph, prospects = narrowing.graph, pool.prospects
    weights = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    return {
        "top": pool.top,
        "min_probability": pool.least,
        "types": narrowing.types,
        "loops": narrowing.loops,
        "relations": [graph.relations[id] for id in narrowing.relations.tolist()],
        "heads": None if narrowing.heads is None else [graph.entities[id] for id in narrowing.heads.tolist()],
        "known splits": list(narrowing.known),
        "graph": _digest({name: graph.split(name) for name in ("train", "valid", "test")}),
        "weights": _digest(weights),
        "calibration": _digest(_tables(prospects.calibration)) if prospects else None,
    }


def _tables(calibration: Calibration) -> dict[str, np.ndarray[Any, Any]]:
    tables = {name: getattr(calibration, name).numpy() for name in ("slopes", "offsets")}
    return {**tables, "ceiling": np.array(calibration.ceiling)}


def _digest(arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.shape} {array.dtype}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


@dataclass
class Keeper:
    """The file of a search that is under way; it is written at once or not at all."""

    path: Path
    choices: dict[str, Any]
    _saved: float = field(default_factory=time.monotonic)

    def keep(self, state: State) -> None:
        """Save a state where the last one is old."""
        if time.monotonic() - self._saved >= SECONDS:
            self.save(state)

    def save(self, state: State) -> None:
        tensors = {name: torch.from_numpy(column) for name, column in state.pool.found._asdict().items()}
        if state.asked is not None:
            tensors["asked"] = state.asked.cpu()
        with replacing(self.path) as fresh:
            about = {"num_done": str(state.num_done), "choices": json.dumps(self.choices)}
            save_file(tensors, fresh, metadata=about)
        self._saved = time.monotonic()

    def load(self, beginning: State) -> State:
        """The state to go on from; the beginning where none was kept."""
        if not self.path.exists():
            return beginning
        try:
            with safe_open(self.path, framework="pt") as file:
                about = file.metadata()
                self._check(json.loads(about["choices"]))
                found = Found(*(file.get_tensor(name).numpy() for name in Found._fields))
                asked = file.get_tensor("asked") if "asked" in file.keys() else None  # noqa: SIM118
                return State(replace(beginning.pool, found=found, known=None), int(about["num_done"]), asked)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise RequestError(f"{self.path} cannot be read ({error}). Remove it to begin anew.") from None

    def _check(self, found: dict[str, Any]) -> None:
        differing = [name for name, value in self.choices.items() if found.get(name) != value]
        if differing:
            told = " and ".join(_told(name, found.get(name), self.choices[name]) for name in differing)
            raise RequestError(
                f"{self.path} is a list that was begun with other choices: {told}. Give the same ones to go on, or "
                f"remove it to begin anew."
            )

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _told(name: str, before: Any, now: Any) -> str:
    if name in ("graph", "weights", "calibration"):
        return f"the {name} {'were' if name == 'weights' else 'was'} not the same"
    shown = [_shown(value) for value in (before, now)]
    return f"{name.replace('_', '-')} was {shown[0]} and is now {shown[1]}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value[:3]) + (f" and {len(value) - 3:,} more" if len(value) > 3 else "")
    if isinstance(value, bool):
        return "on" if value else "off"
    return "all" if value is None else f"{value:,}"
