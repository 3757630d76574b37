"""Checkpoints and weights as safetensors files, written atomically."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dualkg.errors import DivergedError, RequestError
from dualkg.files import atomic_write, check_type, writing
from dualkg.models.sharded import TABLES, Shard


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


def check_history(found: Any, *, source: object) -> list[dict[str, Any]]:
    """The epochs of a training from a file."""
    history: list[dict[str, Any]] = check_type(found, list[dict[str, int | float]], source=source)
    if any(not {"epoch", "loss", "seconds"} <= entry.keys() for entry in history):
        raise RequestError(
            f"{source} is damaged: an epoch of its history has no number, loss or seconds."
        )
    return history


def save_tensors(
    groups: dict[str, dict[str, Tensor]], path: Path, *, about: dict[str, Any]
) -> None:
    """Write named groups of tensors and JSON metadata, atomically. Tensors with NaN or infinity are
    refused.
    """
    found = {
        f"{group}/{name}": value.detach()
        for group, members in groups.items()
        for name, value in members.items()
    }
    for name, value in found.items():  # on their device, which is faster
        if not all_finite(value):
            raise DivergedError(
                f"{name} contains NaN or infinity, so it was not saved; {path.name} is unchanged."
            )
    tensors = {name: value.cpu().contiguous() for name, value in found.items()}
    about = {**about, "sha256": _checksum(tensors, about)}
    with atomic_write(path) as fresh, writing(fresh, SafetensorError):
        save_file(tensors, fresh, metadata={"about": json.dumps(about)})


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. A sum shows it without copies of the tensor, unless the
    sum overflows.
    """
    return (
        not tensor.is_floating_point()
        or bool(tensor.sum().isfinite())
        or bool(tensor.isfinite().all())
    )


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
    """Read what `save_tensors` wrote; NaN, infinity and, with `check`, any other change are
    refused.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = check_type(
                json.loads((file.metadata() or {}).get("about", "{}")), dict[str, Any], source=path
            )
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a mapping
            saved = about.pop("sha256", None)
        if check and saved != _checksum(tensors, about):
            raise ValueError(
                "its checksum is not that of its content" if saved else "it has no checksum"
            )
        for key, tensor in tensors.items():
            if not all_finite(tensor):
                raise ValueError(f"{key} has NaN or infinity")
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read as a file of weights: {error}.") from None
    return groups, about


def load_weights(model: nn.Module, tensors: dict[str, Any], *, source: object) -> None:
    """Load the parameters of a model; tensors of other names or shapes are refused."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if expected != found:
        raise RequestError(
            f"{source} does not fit the model: tables {expected} were expected, {found} were found."
        )
    model.load_state_dict(tensors)


def save_weights(tables: Mapping[str, Tensor], path: Path, *, sparse: Collection[str] = ()) -> None:
    """Write the tables of a model, those named in `sparse` as CSR, without their zeros."""
    dense = {name: table for name, table in tables.items() if name not in sparse}
    parts = {
        f"{name}/{part}": array for name in sparse for part, array in compress(tables[name]).items()
    }
    about = {"shapes": {name: list(tables[name].shape) for name in sparse}} if sparse else {}
    save_tensors({"model": dense, "csr": parts}, path, about=about)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tables of a model, those written as CSR as dense tables."""
    groups, about = load_tensors(path)
    tables = dict(groups.get("model", {}))
    for name, shape in check_type(
        about.get("shapes", {}), dict[str, tuple[int, int]], source=path
    ).items():
        try:
            parts = [groups["csr"][f"{name}/{part}"] for part in ("values", "columns", "starts")]
            tables[name] = expand(*parts, shape=shape)
        except (
            KeyError,
            IndexError,
            RuntimeError,
            TypeError,
        ):  # a part is missing or has another size
            raise RequestError(
                f"{path} cannot be read as a file of weights: its CSR of {name} is damaged."
            ) from None
    return tables


def is_split(name: str) -> bool:
    """Whether a table, by its name in a model, has a row for every entity."""
    return name.rpartition(".")[2] in TABLES


def read_weight_shards(
    files: Sequence[Path], num_entities: int, *, check: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tables of a model from the files of all processes, in the order of the processes, and the
    last metadata.
    """
    tables: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for rank, file in enumerate(files):
        shard, (groups, about) = (
            Shard(num_entities, rank, len(files)),
            load_tensors(file, check=check),
        )
        for name, rows in groups.get("model", {}).items():
            if not is_split(name):
                tables[name] = rows
                continue
            whole = tables.setdefault(name, rows.new_zeros(num_entities, *rows.shape[1:]))
            if rows.shape != (shard.size, *whole.shape[1:]):
                raise RequestError(
                    f"{file} is damaged: it has {len(rows):,} rows of {name}, not {shard.size:,}."
                )
            whole[shard.ids] = rows
    return tables, about


def compress(table: Tensor) -> dict[str, Tensor]:
    """A table `(rows, columns)` as CSR: its `values`, their `columns`, and where each row `starts`,
    then the end.
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
    if len(starts) != shape[0] + 1 or not len(rows) == len(columns) == len(values):
        raise IndexError(
            f"{len(values)} values, {len(columns)} columns and {len(starts)} starts do not fit "
            f"{shape}"
        )
    table = values.new_zeros(shape)
    table[rows, columns.long()] = values
    return table


def smallest_integer(largest: int) -> torch.dtype:
    """The narrowest type for whole numbers from 0 to `largest`."""
    kinds = (torch.uint8, torch.uint16, torch.uint32, torch.int64)
    return next(kind for kind in kinds if largest <= torch.iinfo(kind).max)
