"""Files of tables that several processes divide: checkpoints, and weights of each process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualkg.errors import DamagedFile
from dualkg.files import regular_file
from dualkg.tables.lookup import TABLE_NAMES
from dualkg.tables.shard import Shard

ROWS_AT_ONCE = 1 << 16  # rows of a file in memory, of which a process takes its own


def is_divided(name: str) -> bool:
    """Whether a tensor, by its name in a model, has a row for every entity."""
    return name.rpartition(".")[2] in TABLE_NAMES


def shard_file(folder: Path, process: int) -> Path:
    """The file of a checkpoint that a process writes, if it has something to write."""
    return folder / f"shard-{process + 1:05d}-model-00001-of-00001.safetensors"


def start_checkpoint(
    tensors: Mapping[str, Tensor],
    folder: Path,
    shard: Shard,
    *,
    divided: Iterable[str],
    group: dist.ProcessGroup | None,
) -> Future[Any]:
    """Start to write tensors on the host; of those that are divided, the own rows.

    They must not change until the result is there. `torch.distributed.checkpoint` writes them in a
    thread, whose collectives need a `group` of their own; a single process has none, and waits.
    """
    from torch.distributed.checkpoint import hf_storage, state_dict_saver  # It takes a second.
    from torch.distributed.checkpoint.api import CheckpointException

    as_part = _parts_of_tables(shard)
    names = set(divided)
    state = {name: as_part(tensor) if name in names else tensor for name, tensor in tensors.items()}
    writer = hf_storage.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    if group is None:
        written: Future[Any] = Future()
        # It warns that there is no process group, which cannot be ignored in one thread alone.
        with warnings.catch_warnings(action="ignore"):
            try:
                result = state_dict_saver.save(state, storage_writer=writer, no_dist=True)
                written.set_result(result)
            except CheckpointException as error:  # which is no Exception
                written.set_exception(error)
        return written
    response = state_dict_saver.async_save(
        state, storage_writer=writer, async_stager=_Copied(), process_group=group
    )
    assert isinstance(response, Future)  # A stager that returned a future would get another.
    return response


def checkpoint_failures(error: BaseException) -> dict[int, BaseException] | None:
    """What failed in which processes while a checkpoint was written; None is another error."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return None
    return {process: failure for process, (failure, _) in error.failures.items()}


class _Copied:
    """In the place of what copies tensors before a thread writes them: they are copies already."""

    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def synchronize_staging(self) -> None:
        """Nothing is copied in the background."""

    def close(self) -> None:
        """There is nothing to close."""


def load_checkpoint(
    folder: Path, shard: Shard, *, is_divided: Callable[[str, Sequence[int]], bool]
) -> dict[str, Tensor]:
    """Read what `start_checkpoint` wrote, with any number of processes."""
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


def join_weights(
    parts: Iterable[tuple[Path, Mapping[str, Tensor]]], num_parts: int, num_entities: int
) -> dict[str, Tensor]:
    """The whole tables of a model from the files of all processes, in the order of these."""
    tables: dict[str, Tensor] = {}
    for process, (path, tensors) in enumerate(parts):
        shard = Shard(num_entities, process, num_parts)
        for name, rows in tensors.items():
            if not is_divided(name):
                tables[name] = rows
                continue
            whole = tables.setdefault(name, rows.new_zeros(num_entities, *rows.shape[1:]))
            if rows.shape != (shard.size, *whole.shape[1:]):
                reason = f"it has {len(rows):,} rows of {name}, not {shard.size:,}"
                raise DamagedFile(path, reason)
            whole[shard.ids] = rows
    return tables


def read_own_rows(files: Sequence[Path], shard: Shard) -> dict[str, Tensor]:
    """The tables of a model of which this process has its rows, from files of several processes.

    A single file has the rows of all entities in the order of their ids. Not more than the own rows
    and a block of others are in memory.
    """
    tables: dict[str, Tensor] = {}
    for process, path in enumerate(files):
        part = Shard(shard.num_entities, process, len(files))
        try:
            with safe_open(regular_file(path), framework="pt") as file:
                # The file is not a mapping.
                for key in file.keys():  # noqa: SIM118
                    name = key.partition("/")[2]
                    if not is_divided(name):
                        tables[name] = file.get_tensor(key)
                        continue
                    rows = file.get_slice(key)
                    width = rows.get_shape()[1:]
                    if name not in tables:
                        dtype = rows[0:1].dtype
                        tables[name] = torch.zeros(shard.size, *width, dtype=dtype)
                    if len(files) == 1:
                        _copy_by_id(rows, tables[name], shard)
                    else:
                        _copy_part(rows, part, tables[name], shard)
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedFile(path, str(error)) from None
    return tables


def _copy_part(rows: Any, part: Shard, own: Tensor, shard: Shard) -> None:
    """Copy what the shard of a file and that of this process have in common."""
    first = max(part.first, shard.first)
    last = min(part.first + part.size, shard.first + shard.size)
    if first < last:
        found = rows[first - part.first : last - part.first]
        own[first - shard.first : last - shard.first] = found


def _copy_by_id(rows: Any, own: Tensor, shard: Shard) -> None:
    for start in range(0, shard.num_entities, ROWS_AT_ONCE):
        ids = torch.arange(start, min(start + ROWS_AT_ONCE, shard.num_entities))
        positions = shard.positions(ids)
        is_own = positions >= 0
        block = rows[start : start + len(ids)]
        own[positions[is_own]] = block[is_own]
