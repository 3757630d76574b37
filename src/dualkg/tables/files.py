"""Files of tables that several processes divide: the weights of each process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualkg.errors import DamagedFile
from dualkg.files import regular_file
from dualkg.tables.base import TABLE_NAMES
from dualkg.tables.shard import Shard

ROWS_AT_ONCE = 1 << 16  # rows of a file in memory, of which a process takes its own


def is_divided(name: str) -> bool:
    """Whether a tensor, by its name in a model, has a row for every entity."""
    return name.rpartition(".")[2] in TABLE_NAMES


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
