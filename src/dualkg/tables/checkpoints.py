"""Checkpoints of several processes: each writes its rows, and all agree which one is complete."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from dualkg.errors import DamagedFile
from dualkg.files import check_type, file_damage, read_json, regular_file, remove, sync, write_json
from dualkg.tables.processes import Processes
from dualkg.tables.shard import Shard

Records = dict[str, dict[str, Any]]  # size and checksum by the name of a file
DAMAGED_SHARD = "its size or its sha256 is not the one in latest.json"
AFTER_DAMAGE = "Restore it from a copy, or train the run again."


class CheckpointFolder:
    """A folder with the last checkpoints; `pointer` names the last that is complete."""

    def __init__(self, path: Path, group: Processes) -> None:
        self.path = path
        self.group = group
        self.pointer = path / "latest.json"

    def about(self) -> dict[str, Any]:
        return dict(read_json(self.pointer, dict[str, Any], checksum=True))

    def start(self, about: dict[str, Any]) -> None:
        """Before the first step there are no tensors."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.pointer, {"when": "start", **about})

    def _folders(self) -> list[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        return [folder for folder in self.path.iterdir() if folder.name.isdigit()]

    def next_folder(self) -> Path:
        """The folder of the next checkpoint, on which all processes agree."""
        last = 0
        if self.group.first:
            last = max((int(folder.name) for folder in self._folders()), default=0)
        number = int(self.group.largest(last + 1)[0])
        return self.path / f"{number:06d}"

    def gather_records(self, folder: Path, record: dict[str, Any] | None) -> Records:
        """Size and checksum of each shard of a checkpoint; each process has its own, or none."""
        gathered = [json.loads(text) for text in self.group.gather(json.dumps(record))]
        return {
            shard_file(folder, process).name: record
            for process, record in enumerate(gathered)
            if record is not None
        }

    def check(self, about: dict[str, Any]) -> None:
        """Refuse a damaged checkpoint in all processes, each of which reads some of its shards."""
        folder = self.path / str(about["folder"])
        records = check_type(about["files"], Records, source=self.pointer)
        found = {file.name for file in folder.glob("*.safetensors")}
        names = sorted(found | records.keys())
        damaged = [
            name
            for name in names[self.group.index :: self.group.count]
            if name not in records or file_damage(folder / name, records[name])
        ]
        all_damaged = sorted(filter(None, self.group.gather(damaged[0] if damaged else "")))
        if all_damaged:
            error = DamagedFile(folder / all_damaged[0], DAMAGED_SHARD, advice=AFTER_DAMAGE)
            error.silent = not self.group.first
            raise error

    def point_to(self, folder: Path, about: dict[str, Any], records: Records) -> None:
        """Make a folder the last checkpoint; the one before it is kept."""
        for file in (*folder.iterdir(), folder):
            sync(file)
        before = self.about().get("folder") if self.pointer.exists() else None
        write_json(self.pointer, {**about, "folder": folder.name, "files": records})
        for old in self._folders():
            if old.name not in (folder.name, before):
                remove(old)


# -- files of torch.distributed.checkpoint ----------------------------------------


def shard_file(folder: Path, process: int) -> Path:
    """The file of a checkpoint that a process writes, if it has something to write."""
    return folder / f"shard-{process + 1:05d}-model-00001-of-00001.safetensors"


def checkpoint_writer(
    tensors: Mapping[str, Tensor],
    folder: Path,
    shard: Shard,
    *,
    divided: Iterable[str],
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """A function that writes tensors on the host; of those that are divided, the own rows.

    They must not change until it returns. Where it is called in a thread, its collectives need a
    `group` of their own; a single process has none.
    """
    from torch.distributed.checkpoint import hf_storage, state_dict_saver  # It takes a second.

    as_part = _parts_of_tables(shard)
    names = set(divided)
    state = {name: as_part(tensor) if name in names else tensor for name, tensor in tensors.items()}
    writer = hf_storage.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)

    def write() -> None:
        if group is not None:
            state_dict_saver.save(state, storage_writer=writer, process_group=group)
            return
        # It warns that there is no process group.
        with warnings.catch_warnings(action="ignore"):
            state_dict_saver.save(state, storage_writer=writer, no_dist=True)

    return write


def checkpoint_failures(error: BaseException) -> dict[int, BaseException] | None:
    """What failed in which processes while a checkpoint was written; None is another error."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return None
    return {process: failure for process, (failure, _) in error.failures.items()}


def load_checkpoint(
    folder: Path, shard: Shard, *, is_divided: Callable[[str, Sequence[int]], bool]
) -> dict[str, Tensor]:
    """Read what `checkpoint_writer` wrote, with any number of processes."""
    from torch.distributed.checkpoint import hf_storage, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    as_part = _parts_of_tables(shard)
    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    state: dict[str, Any] = {}
    try:
        for file in folder.iterdir():
            regular_file(file)
        for name, facts in reader.read_metadata().state_dict_metadata.items():
            shape = tuple(facts.size)  # type: ignore[union-attr]
            dtype = facts.properties.dtype  # type: ignore[union-attr]
            if is_divided(name, shape):
                own = torch.zeros((shard.size, *shape[1:]), dtype=dtype)
                state[name] = as_part(own)
            else:
                state[name] = torch.zeros(shape, dtype=dtype)
        with warnings.catch_warnings(action="ignore"):
            state_dict_loader.load(state, storage_reader=reader, no_dist=shard.num_processes == 1)
    except (OSError, ValueError, KeyError, SafetensorError, CheckpointException) as error:
        raise DamagedFile(folder, str(error).splitlines()[0][:300]) from None
    return {
        name: value.to_local() if hasattr(value, "to_local") else value
        for name, value in state.items()
    }


def _parts_of_tables(shard: Shard) -> Callable[[Tensor], Any]:
    """A function that makes the rows of this process a part of the whole table."""
    if shard.num_processes == 1:
        return lambda part: part
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (shard.num_processes,))

    def as_part(part: Tensor) -> Any:
        shape = torch.Size((shard.num_entities, *part.shape[1:]))
        return tensor.DTensor.from_local(
            part.contiguous(),
            mesh,
            [tensor.Shard(0)],
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
            run_check=False,
        )

    return as_part
