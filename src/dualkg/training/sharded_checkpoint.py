"""Checkpoints of several processes: each writes its own rows, and all agree which is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from dualkg.errors import DamagedFile, FolderMoved
from dualkg.files import (
    check_held,
    check_type,
    file_damage,
    file_record,
    is_held,
    make_folder,
    read_json,
    read_text,
    remove,
    sync,
    write_json,
)
from dualkg.logs import logger
from dualkg.models.base import Model
from dualkg.tables import Processes, Shard
from dualkg.tables.files import checkpoint_failures, load_checkpoint, shard_file, start_checkpoint
from dualkg.tables.lookup import TABLE_NAMES
from dualkg.training.checkpoint import CheckpointStore, Groups, Progress
from dualkg.training.recipe import checksum

T = TypeVar("T")
Records = dict[str, dict[str, Any]]  # size and checksum by the name of a file
WRITING_TIME = timedelta(hours=1)  # in which the slowest disk has to have a checkpoint
RECORD_NUMBERS = 1 + 32  # the size of a file, and the bytes of its sha256
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

    def start(self) -> None:
        """Before the first step there is nothing but the recipe."""
        make_folder(self.path)
        recipe = checksum(read_text(self.path.with_name("recipe.toml")))
        progress = asdict(Progress())
        write_json(
            self.pointer,
            {"when": "start", "optimizer": None, "progress": progress, "recipe": recipe},
        )

    def _folders(self) -> list[Path]:
        make_folder(self.path)
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
        count = self.group.count
        numbers = [0] * (count * RECORD_NUMBERS)
        if record is not None:
            start = self.group.index * RECORD_NUMBERS
            own_numbers = [record["bytes"], *bytes.fromhex(record["sha256"])]
            numbers[start : start + RECORD_NUMBERS] = own_numbers
        # Only the process that has a shard has other numbers than 0 in its place.
        gathered = [int(number) for number in self.group.largest(*numbers)]
        records: Records = {}
        for process in range(count):
            size, *digest = gathered[process * RECORD_NUMBERS : (process + 1) * RECORD_NUMBERS]
            if size:
                name = shard_file(folder, process).name
                records[name] = {"bytes": size, "sha256": bytes(digest).hex()}
        return records

    def check(self, about: dict[str, Any]) -> None:
        """Refuse a damaged checkpoint in all processes, each of which reads some of its shards.

        Earlier versions wrote no checksums.
        """
        folder = self.path / str(about["folder"])
        if "files" not in about:
            logger.warning("%s has no checksums: an earlier version wrote it", folder)
            return
        records = check_type(about["files"], Records, source=self.pointer)
        found = {file.name for file in folder.glob("*.safetensors")}
        names = sorted(found | records.keys())
        damaged = 0
        for number, name in enumerate(names[self.group.index :: self.group.count]):
            if name not in records or file_damage(folder / name, records[name]):
                damaged = max(damaged, 1 + self.group.index + number * self.group.count)
        damaged = int(self.group.largest(damaged)[0])
        if damaged:
            error = DamagedFile(folder / names[damaged - 1], DAMAGED_SHARD, advice=AFTER_DAMAGE)
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


def in_thread(function: Callable[[], T]) -> Future[T]:
    """The future result of a function in a thread for which the end of the process does not wait.

    The threads of a pool are waited for.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Writing(NamedTuple):
    """A checkpoint that is being written."""

    checkpoint: CheckpointFolder
    folder: Path
    about: dict[str, Any]
    shard: Future[_Shard]  # of this process


class _Shard(NamedTuple):
    """The file that a process has written, if it had something to write."""

    record: dict[str, Any] | None
    seconds: float


class FolderStore(CheckpointStore):
    """Checkpoints that all processes write, each its own rows, while training goes on.

    What is written is copied first. The number of processes may change between a checkpoint and
    the next start: batches, initial weights and negatives do not depend on it.
    """

    num_copies = 2  # The file is put together in memory, too.

    def __init__(self, group: Processes, shard: Shard, parameters: Sequence[str]) -> None:
        self.group = group
        self.shard = shard
        self.parameters = list(parameters)
        self._writing: _Writing | None = None

    @cached_property
    def _writers(self) -> dist.ProcessGroup | None:
        """The processes, for collectives of threads that write while others train."""
        if self.group.count == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=WRITING_TIME)
        return group

    def module(self, model: Model) -> nn.Module:
        return model.named

    def write(self, groups: Groups, path: Path, about: dict[str, Any]) -> None:
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        for group, members in groups.items():
            for name, value in members.items():
                tensors[f"{group}/{name}"] = value.detach().to("cpu", copy=True)
        divided = [key for key, value in tensors.items() if self._is_divided(key, value.shape)]
        check_folder(self.group, path)
        checkpoint = CheckpointFolder(path, self.group)
        folder = checkpoint.next_folder()
        written = start_checkpoint(
            tensors, folder, self.shard, divided=divided, group=self._writers
        )
        own = shard_file(folder, self.group.index)

        def finish_file() -> _Shard:
            self._wait(written, own)
            record = None
            if own.exists():
                sync(own)
                record = file_record(own)
            return _Shard(record, time.monotonic() - started)

        self._writing = _Writing(checkpoint, folder, about, in_thread(finish_file))

    def _wait(self, written: Future[Any], file: Path) -> None:
        """Wait for a thread that writes a file.

        The error of another process is that process's to report.
        """
        try:
            written.result()
        except BaseException as error:
            failures = checkpoint_failures(error)
            if failures is None:
                raise
            failure = failures.get(self.group.index)
            if isinstance(failure, OSError) and failure.filename is None:
                failure.filename = str(file)
            if failure is not None:
                raise failure from None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    @property
    def is_written(self) -> bool:
        return self._writing is None or self._writing.shard.done()

    def finish(self) -> float:
        if self._writing is None:
            return 0.0
        checkpoint, folder, about, future = self._writing
        self._writing = None

        def finished_shard() -> _Shard | None:
            """None if the folder was moved, which all processes have to know."""
            try:
                return future.result()
            except (OSError, FolderMoved):
                if is_held(checkpoint.path):
                    raise
                return None

        shard = self.group.together(finished_shard)
        check_folder(self.group, checkpoint.path, is_moved=shard is None)
        assert shard is not None
        records = checkpoint.gather_records(folder, shard.record)
        self.group.on_first(partial(checkpoint.point_to, folder, about, records))
        return shard.seconds

    def read(self, path: Path) -> tuple[Groups, dict[str, Any]]:
        checkpoint = CheckpointFolder(path, self.group)
        about = checkpoint.about()
        if about["when"] == "start":
            return {}, about
        checkpoint.check(about)
        folder = path / str(about["folder"])
        groups: Groups = {}
        tensors = load_checkpoint(folder, self.shard, is_divided=self._is_divided)
        for key, value in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = value
        return groups, about

    def _is_divided(self, key: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of a checkpoint has a row for every entity."""
        group, _, name = key.partition("/")
        if group == "optimizer":
            # The state of an optimizer is named by the number of its parameter.
            name = self.parameters[int(name.partition(".")[0])]
        return name in TABLE_NAMES and len(shape) > 0


def check_folder(group: Processes, path: Path, *, is_moved: bool = False) -> None:
    """Refuse in all processes to write a folder that was moved, if one of them sees it."""
    if group.any(is_moved or not is_held(path)):
        check_held(path)
        raise FolderMoved(path)
