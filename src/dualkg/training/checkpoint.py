"""Checkpoints and weights as safetensors files, written atomically."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dualkg.errors import DamagedFile, DivergedError, RequestError
from dualkg.files import atomic_write, check_type, regular_file, writing
from dualkg.models.base import Model
from dualkg.tables.files import join_weights


@dataclass
class Progress:
    """The progress of training: `epoch` epochs and `step` steps of the next are done."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    best_mrr: float = -1.0
    since_best: int = 0
    stopped: bool = False
    averaged: int = 0  # number of epochs in the mean of the weights
    history: list[dict[str, Any]] = field(default_factory=list)


def unreadable(path: Path, reason: str) -> RequestError:
    """The error of a file that has no weights, or damaged ones."""
    return RequestError(f"{path} cannot be read as a file of weights: {reason}.")


def check_history(value: Any, *, source: object) -> list[dict[str, Any]]:
    """The epochs of a training from a file."""
    history: list[dict[str, Any]] = check_type(value, list[dict[str, int | float]], source=source)
    if any(not {"epoch", "loss", "seconds"} <= entry.keys() for entry in history):
        raise DamagedFile(source, "an epoch of its history has no number, loss or seconds")
    return history


def save_tensors(
    groups: dict[str, dict[str, Tensor]], path: Path, *, about: dict[str, Any]
) -> None:
    """Write named groups of tensors and JSON metadata, atomically.

    Tensors with NaN or infinity are refused.
    """
    named = {
        f"{group}/{name}": value.detach()
        for group, members in groups.items()
        for name, value in members.items()
    }
    # They are checked on their device, which is faster.
    for name, value in named.items():
        if not all_finite(value):
            raise DivergedError(
                f"{name} contains NaN or infinity, so it was not saved; {path.name} is unchanged."
            )
    tensors = {name: value.cpu().contiguous() for name, value in named.items()}
    about = {**about, "sha256": _checksum(tensors, about)}
    with atomic_write(path) as fresh, writing(fresh, SafetensorError):
        save_file(tensors, fresh, metadata={"about": json.dumps(about)})


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    if not tensor.is_floating_point():
        return True
    # A sum shows it without copies of the tensor, unless the sum overflows.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _checksum(tensors: Mapping[str, Tensor], about: dict[str, Any]) -> str:
    """The hash of all that a file of tensors holds."""
    checksum = hashlib.sha256(json.dumps(about).encode())
    for name in sorted(tensors):
        checksum.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        checksum.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def load_tensors(
    path: Path, *, check: bool = False
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    NaN and infinity are refused, and with `check` any other change.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(regular_file(path), framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("about", "{}"))
            about = check_type(metadata, dict[str, Any], source=path)
            # The file is not a mapping.
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            saved = about.pop("sha256", None)
        if check and saved is None:
            raise ValueError("it has no checksum")
        if check and saved != _checksum(tensors, about):
            raise ValueError("its checksum is not that of its content")
        for key, tensor in tensors.items():
            if not all_finite(tensor):
                raise ValueError(f"{key} has NaN or infinity")
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise unreadable(path, str(error)) from None
    return groups, about


def read_about(path: Path) -> dict[str, Any]:
    """The metadata of a file that `save_tensors` wrote; empty if there are none to be read."""
    try:
        with safe_open(regular_file(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def load_weights(model: nn.Module, tensors: dict[str, Any], *, source: object) -> None:
    """Load the parameters of a model; tensors of other names or shapes are refused."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes != expected:
        raise RequestError(
            f"{source} does not fit the model: tables {expected} were expected, {shapes} were "
            "found."
        )
    model.load_state_dict(tensors)


def save_weights(tables: Mapping[str, Tensor], path: Path, *, sparse: Collection[str] = ()) -> None:
    """Write the tables of a model, those named in `sparse` as CSR, without their zeros."""
    dense = {name: table for name, table in tables.items() if name not in sparse}
    parts = {}
    for name in sparse:
        for part, array in compress(tables[name]).items():
            parts[f"{name}/{part}"] = array
    about = {"shapes": {name: list(tables[name].shape) for name in sparse}} if sparse else {}
    save_tensors({"model": dense, "csr": parts}, path, about=about)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tables of a model, those written as CSR as dense tables."""
    groups, about = load_tensors(path)
    tables = dict(groups.get("model", {}))
    shapes = check_type(about.get("shapes", {}), dict[str, tuple[int, int]], source=path)
    for name, shape in shapes.items():
        try:
            parts = [groups["csr"][f"{name}/{part}"] for part in ("values", "columns", "starts")]
            tables[name] = expand(*parts, shape=shape)
        except (KeyError, IndexError, RuntimeError, TypeError):
            # A part is missing or has another size.
            raise unreadable(path, f"its CSR of {name} is damaged") from None
    return tables


def read_weight_files(
    files: Sequence[Path], num_entities: int, *, check: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tables of a model from the files of several processes, and the last metadata.

    The files are in the order of the processes.
    """
    about: dict[str, Any] = {}

    def parts() -> Iterator[tuple[Path, dict[str, Tensor]]]:
        nonlocal about
        for file in files:
            groups, about = load_tensors(file, check=check)
            yield file, groups.get("model", {})

    tables = join_weights(parts(), len(files), num_entities)
    return tables, about


def compress(table: Tensor) -> dict[str, Tensor]:
    """A table `(rows, columns)` as CSR.

    It has its `values`, their `columns`, and where each row `starts`, then the end.
    """
    table = table.detach().cpu()
    rows, columns = table.nonzero(as_tuple=True)
    starts = nn.functional.pad(rows.bincount(minlength=len(table)).cumsum(0), (1, 0))
    return {
        "values": table[rows, columns],
        "columns": columns.to(smallest_integer(table.shape[1] - 1)),
        "starts": starts.to(smallest_integer(len(columns))),
    }


def expand(values: Tensor, columns: Tensor, starts: Tensor, *, shape: Sequence[int]) -> Tensor:
    """The inverse of `compress`; arrays that do not fit each other or the shape raise."""
    rows = torch.arange(len(starts) - 1).repeat_interleave(starts.long().diff())
    sizes = f"{len(values)} values, {len(columns)} columns and {len(starts)} starts"
    if len(starts) != shape[0] + 1 or not len(rows) == len(columns) == len(values):
        raise IndexError(f"{sizes} do not fit {shape}")
    table = values.new_zeros(shape)
    table[rows, columns.long()] = values
    return table


def smallest_integer(largest: int) -> torch.dtype:
    """The narrowest type for whole numbers from 0 to `largest`."""
    for dtype in (torch.uint8, torch.uint16, torch.uint32):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


# -- checkpoints of a training ------------------------------------------------

Groups = dict[str, dict[str, Tensor]]  # tensors of a checkpoint: model, optimizer, best and mean


MAX_SHARE = 0.05  # of the time of a training that its checkpoints take


@dataclass
class CheckpointSchedule:
    """When a checkpoint is due: `least` seconds after the one before, and later if that took long.

    A checkpoint that takes `cost` seconds is repeated after so many that it is at most `MAX_SHARE`
    of the time. With `least` 0, one is always due.
    """

    least: float
    saved_at: float
    cost: float = 0.0

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        return max(self.least, self.cost / MAX_SHARE) if self.least else 0.0

    def is_due(self, now: float) -> bool:
        return now - self.saved_at >= self.interval

    def saved(self, now: float, *, cost: float) -> None:
        """A checkpoint was saved, for which training waited `cost` seconds."""
        self.saved_at = now
        self.cost = cost


class CheckpointStore(ABC):
    """How a trainer writes and reads its checkpoints."""

    @abstractmethod
    def module(self, model: Model) -> nn.Module:
        """The module whose parameters a checkpoint names."""

    @abstractmethod
    def write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        """Write a checkpoint, or start to; the one before may be gone when it is written."""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint was started, for which all processes have to call `finish`."""
        return False

    @property
    def is_written(self) -> bool:
        """Whether `finish` would not wait for this process."""
        return True

    def finish(self) -> float:
        """Wait for the checkpoint that was started; return the seconds that it took."""
        return 0.0

    @abstractmethod
    def read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        """The last checkpoint, and what was said about it."""


class FileStore(CheckpointStore):
    """A checkpoint is one safetensors file."""

    def module(self, model: Model) -> nn.Module:
        return model

    def write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        save_tensors(groups, path, about=about)

    def read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        return load_tensors(path, check=True)
